"""A memory whose rows the ranks share is the one that a process alone has: rows, log, checkpoints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small import make_recipe, make_store, without_draws

from semel import EventSchema, HistoryStore
from semel.comm.processes import join, spawn
from semel.examples import build_examples, rows_to_table
from semel.features import Feature, FeatureSpec, Task
from semel.memory import DeltaPublisher, DeltaSubscriber, Fenced, ItemMemory, memory_at
from semel.memory.sharded import owners
from semel.models import load_model
from semel.training import Follower, Interrupted, Trainer, follow, override, trainer
from semel.training.memory_shards import shard_capacity

pytestmark = pytest.mark.timeout(400)
ITEMS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    store = make_store(folder / "store")
    with HistoryStore.create(f"{store}/catalogue", EventSchema({"genre": pa.string()}, key="item_id"),
                             shards=1) as catalogue:
        ids = np.arange(1, ITEMS)
        catalogue.append(pa.table({"item_id": ids, "event_time": np.zeros(len(ids), np.int64),
                                   "genre": np.where(ids % 2 == 0, "drama", "war").tolist()}))
    recipe = recipe_of(store, folder)
    rows = build_examples(store, "sessions", recipe.features, validation_fraction=0.2).rows("train")
    rows = rows.select(np.argsort(rows.pointers.as_of, kind="stable"))
    (folder / "rows").mkdir()
    for number, (a, b) in enumerate(((0, 30), (30, 90))):
        pq.write_table(rows_to_table(rows.select(np.arange(a, b))), folder / "rows" / f"{number:04d}.parquet")
    return folder


def recipe_of(store, out, **changes):
    """The pool computes three items a step: which ones depends on all rows."""
    features = FeatureSpec((Feature("item_id"), Feature("rating")), candidate=(Feature("genre"),),
                           tasks=(Task("like"),), history_last=10)
    base = dataclasses.replace(make_recipe(store, out, "early_ranker", epochs=1), features=features)
    return without_draws(override(base, {"memory.pool": 3, "keep_versions": 20, **changes}))


def stopped_and_resumed(make: Any, fit: dict[str, Any]) -> str:
    first = make()
    first.on_progress = lambda progress: first.stop() if progress.step >= 4 else None
    try:
        first.fit(**fit)
    except Interrupted as error:
        path = str(error).split("resume ")[1].removesuffix(" to go on")
    return str(make().fit(resume=path, **fit).path)


def train_all(folder, out):
    """On every rank."""
    trainer.LOG_EVERY = follow.LOG_EVERY = 1
    join()
    store = f"{folder}/store"
    loops: list[Any] = []
    go = trainer._Loop.go
    trainer._Loop.go = lambda self, resume: (loops.append(self), go(self, resume))[1]
    found: dict[str, Any] = {"trained": str(Trainer(recipe_of(store, out)).fit().path)}
    shard = loops[0].memory.shards.memory
    found["keys"], found["capacity"] = shard.rows().keys.tolist(), shard.capacity
    found["cached"] = str(Trainer(recipe_of(store, out, **{"model.reads": "cached"})).fit().path)
    found["resumed"] = stopped_and_resumed(lambda: Trainer(recipe_of(store, out)), {})
    often = {"memory.interval": 0.001, "version_seconds": 0.01, "memory.snapshot_every": 5}

    def following():
        return Follower(recipe_of(store, out, **often), folder / "rows")

    idle = {"until_idle": 0}
    found["followed"] = str(following().fit(**idle).path)
    found["followed after a stop"] = stopped_and_resumed(following, idle)
    fenced = following()
    fenced.on_progress = lambda now: DeltaPublisher(ItemMemory(100, 8), f"{newest(out)}/memory") \
        if now.step == 3 else None  # on rank 0 alone
    try:
        fenced.fit(**idle)
    except Fenced as error:
        found["fenced"] = str(error)
    return found


def newest(out):
    return max(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    return spawn(train_all, 2, data, tmp_path_factory.mktemp("two"))


def rows_of(run):
    subscriber = DeltaSubscriber(f"{run}/memory")
    subscriber.poll()
    return subscriber


def same_rows(run, other):
    one, two = rows_of(run).memory.rows(), rows_of(other).memory.rows()
    assert one.keys.tolist() == list(range(1, ITEMS))
    for name in ("keys", "vectors", "step", "tower"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.slow
def test_two_ranks_have_the_rows_of_one_each_its_own(data, two, tmp_path):
    alone = Trainer(recipe_of(f"{data}/store", tmp_path)).fit()
    run = two[0]["trained"]
    assert load_model(run).version == load_model(alone.path).version
    same_rows(run, alone.path)
    assert rows_of(run).position.shards == 2
    parts = [set(found["keys"]) for found in two]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(range(1, ITEMS))
    for rank, part in enumerate(parts):
        assert part and set(owners(np.array(sorted(part)), 2).tolist()) == {rank}
    assert all(found["capacity"] < recipe_of(f"{data}/store", tmp_path).model.memory_rows for found in two)


@pytest.mark.slow
def test_reading_rows_of_other_ranks_in_training_gives_the_bits_of_one(data, two, tmp_path):
    alone = Trainer(recipe_of(f"{data}/store", tmp_path, **{"model.reads": "cached"})).fit()
    run = two[0]["cached"]
    assert load_model(run).version == load_model(alone.path).version != load_model(two[0]["trained"]).version
    same_rows(run, alone.path)


@pytest.mark.slow
def test_stopped_and_resumed_they_come_to_the_same(two, data, tmp_path):
    run = two[0]["resumed"]
    assert load_model(run).version == load_model(two[0]["trained"]).version
    same_rows(run, two[0]["trained"])
    state = sorted((trainer.Path(run) / "checkpoints").glob("step-*"))[-1]
    assert sorted(file.name for file in (state / "memory").glob("rows-*")) == [
        f"rows-{n:04d}.safetensors" for n in (0, 1)]
    # One process goes on with what two had saved, to the end that was reached: nothing is left to train.
    again = Trainer(recipe_of(f"{data}/store", two_out(run))).fit(resume=run)
    assert load_model(again.path).version == load_model(two[0]["trained"]).version


def two_out(run):
    return trainer.Path(run).parent


@pytest.mark.slow
def test_following_on_two_ranks_publishes_every_step_as_one_state(data, two, tmp_path):
    alone = Follower(recipe_of(f"{data}/store", tmp_path, **{"version_seconds": 0.01}), data / "rows")
    alone = alone.fit(until_idle=0)
    for way in ("followed", "followed after a stop"):
        run = two[0][way]
        assert load_model(run).version == load_model(alone.path).version
        same_rows(run, alone.path)
    reader = rows_of(two[0]["followed"])
    assert reader.position.shards == 2 and reader.position.sequence > 5
    end = reader.position.sequence
    at = memory_at(f"{two[0]['followed']}/memory", reader.position.epoch, end - 1)
    assert len(at) == ITEMS - 1
    # What an earlier sequence number shows is of one step: no row of a later one from either shard.
    steps = [int(memory_at(f"{two[0]['followed']}/memory", reader.position.epoch, number).rows().step.max())
             for number in (end - 2, end - 1, end)]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_all_ranks_stop_where_another_trainer_has_taken_over(two):
    assert all("only one trainer may publish" in found["fenced"] for found in two)


def test_a_shard_has_room_for_more_than_its_share():
    assert shard_capacity(100, 1) == 100 and shard_capacity(4, 3) == 4
    for ranks in (2, 8):
        most = np.bincount(owners(np.arange(10_000), ranks)).max()
        room = shard_capacity(10_000, ranks)
        assert most <= room <= 10_000 / ranks + 6 * math.sqrt(10_000 / ranks) + 1

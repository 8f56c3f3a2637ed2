"""Sharded tables where training follows a growing folder, and of an early ranker: the bits of one process, whichever
schedule and however often a version is written for who serves; resumed where it was, on any number of ranks."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small import make_recipe, make_store, without_draws

from semel.comm.processes import join, spawn
from semel.examples import build_examples, rows_to_table
from semel.models import load_model
from semel.training import Follower, Interrupted, Run, Trainer, follow, override, trainer

pytestmark = pytest.mark.timeout(300)
SHARDED = {"sharding.tables": "item_id,rating"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("sharded") / "store", users=12)


@pytest.fixture(scope="module")
def folder(store, tmp_path_factory):
    """Four files of request rows, one of them empty."""
    recipe = make_recipe(store, tmp_path_factory.mktemp("rows"))
    rows = build_examples(store, "sessions", recipe.features, validation_fraction=0.2).rows("train")
    rows = rows.select(np.argsort(rows.pointers.as_of, kind="stable"))
    path = tmp_path_factory.mktemp("followed")
    for number, (a, b) in enumerate(pairwise((0, 30, 31, 31, 70))):
        pq.write_table(rows_to_table(rows.select(np.arange(a, b))), path / f".{number}.part")
        os.replace(path / f".{number}.part", path / f"{number}.parquet")
    return path


def small(store, out, kind="sequence_ranker", **changes):
    return override(make_recipe(store, out, kind), {**SHARDED, **changes})


def curve(run: Run) -> list[dict[str, Any]]:
    return [{name: line[name] for name in ("step", "loss", "rows", "ne", "window_ne", "file")}
            for line in run.metrics if line["kind"] == "train"]


def every_step() -> None:
    follow.LOG_EVERY = trainer.LOG_EVERY = 1


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(follow, "LOG_EVERY", 1)
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)


def test_following_with_rows_in_shards_scores_and_learns_as_with_whole_tables(store, folder, tmp_path):
    """Both schedules and loops come to the same bits, also where a version is written after every step; and where
    nothing is learned, to the scores and losses of whole tables (learning: ``test_sharded_training.py``)."""
    recipe = without_draws(small(store, tmp_path, **{"sharding.optimizer": "sgd", "sharding.learning_rate": 0.5}))
    start = Trainer(recipe).fit().path
    runs = [Follower(override(recipe, {"sharding.schedule": schedule, "overlap": overlap, "version_seconds": 1e-9}),
                     folder, start=start).fit(until_idle=0)
            for schedule, overlap in (("blocking", False), ("prioritized", True))]
    assert curve(runs[0]) == curve(runs[1]) and len(curve(runs[0])) == 4 + 1 + 5
    assert load_model(runs[0].path).version == load_model(runs[1].path).version
    before, after = load_model(start).model.tables.tables, load_model(runs[0].path).model.tables.tables
    for name, table in after.items():
        assert table.weight.shape == before[name].weight.shape and not table.weight.equal(before[name].weight), name
    still = Follower(override(recipe, {"sharding.learning_rate": 1e-30, "optimizer.learning_rate": 1e-30}), folder,
                     start=start).fit(until_idle=0)
    whole = Follower(override(recipe, {"sharding.tables": "", "optimizer.learning_rate": 1e-30}), folder,
                     start=start).fit(until_idle=0)
    assert [line["loss"] for line in curve(still)] == pytest.approx([line["loss"] for line in curve(whole)], rel=1e-6)
    assert still.summary["prequential"] == pytest.approx(whole.summary["prequential"], rel=1e-6)


def follow_all(store, folder, out):
    """On every rank: to the end, and to step 5 with a checkpoint."""
    every_step()
    join()
    way = {"version_seconds": 1e-9, "checkpoint_steps": 3}
    whole = Follower(small(store, out / "whole", **way), folder).fit(until_idle=0)
    stopped = Follower(small(store, out / "stopped", **way), folder)
    stopped.on_progress = lambda now: stopped.stop() if now.step >= 5 else None
    with pytest.raises(Interrupted) as error:
        stopped.fit(until_idle=0)
    early = {"sharding.tables": "rating", "epochs": 1}
    ranked = Trainer(small(store, out / "early", "early_ranker", **early)).fit()
    return str(whole.path), str(error.value).split("resume ")[1].removesuffix(" to go on"), str(ranked.path)


@pytest.fixture(scope="module")
def two(store, folder, tmp_path_factory):
    return spawn(follow_all, 2, store, folder, tmp_path_factory.mktemp("two"))


def test_two_ranks_follow_with_a_part_each_as_one_process_does(store, folder, two, tmp_path):
    assert two[0] == two[1]
    alone, together = Follower(small(store, tmp_path), folder).fit(until_idle=0), Run.open(two[0][0])
    assert [line["file"] for line in curve(together)] == [line["file"] for line in curve(alone)]
    for name in ("step", "loss", "rows", "ne", "window_ne"):
        assert [line[name] for line in curve(together)] == pytest.approx([line[name] for line in curve(alone)],
                                                                         rel=1e-9), name
    assert load_model(together.path).version == load_model(alone.path).version
    assert any(line.get("embedding_bytes", 0) > 0 for line in together.metrics)
    assert len(list(Path(two[0][0]).glob("model-*.json"))) == 10  # written after every step, by both ranks together


def test_one_process_goes_on_with_what_two_saved_in_the_middle_of_a_file(store, folder, two):
    stopped = two[0][1]
    resumed = Follower(small(store, Path(stopped).parent), folder).fit(resume=stopped, until_idle=0)
    assert resumed.summary["prequential"] == pytest.approx(Run.open(two[0][0]).summary["prequential"], rel=1e-9)
    assert load_model(resumed.path).version == load_model(two[0][0]).version


def test_an_early_ranker_shares_the_tables_of_its_request_side(store, two, tmp_path):
    alone = Trainer(small(store, tmp_path, "early_ranker", **{"sharding.tables": "rating", "epochs": 1})).fit()
    assert [line["loss"] for line in Run.open(two[0][2]).metrics if line["kind"] == "train"] == pytest.approx(
        [line["loss"] for line in alone.metrics if line["kind"] == "train"], rel=1e-6)
    assert load_model(alone.path).version == load_model(two[0][2]).version


def test_what_an_early_ranker_makes_items_of_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'item_id', from which an early_ranker's tower"):
        small("nowhere", tmp_path, "early_ranker")

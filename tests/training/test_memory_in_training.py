"""A model with an item memory in the trainer: rows written once an item, the pool beside them, deltas and weights."""

import dataclasses
import threading
import time
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small import make_recipe, make_store, without_draws

from semel import EventSchema, HistoryStore
from semel.comm.processes import join, spawn
from semel.examples import build_examples, rows_to_table
from semel.examples.predictions import read_predictions
from semel.features import Feature, FeatureSpec, Task
from semel.memory import DeltaPublisher, DeltaSubscriber, Fenced, ItemMemory
from semel.models import current_version, exported, install, load_model, model_versions
from semel.training import Follower, Interrupted, Trainer
from semel.training.memory import CandidatePool
from semel.training.recipe import MemoryConfig, override

ITEMS = np.arange(1, 30)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = make_store(tmp_path_factory.mktemp("memory") / "store")
    schema = EventSchema({"genre": pa.string()}, key="item_id")
    with HistoryStore.create(f"{path}/catalogue", schema, shards=1) as catalogue:
        catalogue.append(items(np.arange(1, 40)))  # ten more than anybody has met
    return path


def items(ids):
    return pa.table({"item_id": ids, "event_time": np.zeros(len(ids), np.int64),
                     "genre": np.where(ids % 2 == 0, "drama", "war").tolist()})


def recipe_of(store, out, **changes):
    base = make_recipe(store, out, "early_ranker")
    features = FeatureSpec((Feature("item_id"), Feature("rating")), candidate=(Feature("genre"),),
                           tasks=(Task("like"),), history_last=10)
    return dataclasses.replace(base, features=features, **changes)


def rows_of(url):
    subscriber = DeltaSubscriber(url)
    subscriber.poll()
    return subscriber.memory


def tower_of(model, ids):
    candidate = {"item_id": torch.from_numpy(ids)}
    candidate["genre"] = torch.from_numpy(genre_ids(ids))
    with torch.no_grad():
        return model.item.item_tower(model.item_fields(candidate)[0])


def genre_ids(ids):
    from semel.features import stable_id

    return stable_id(np.where(ids % 2 == 0, "drama", "war").astype(object))


def test_every_item_of_the_catalogue_has_a_row_and_the_log_is_what_the_best_model_wrote(store, tmp_path):
    run = Trainer(recipe_of(store, tmp_path / "runs")).fit()
    memory = rows_of(run.path / "memory")
    assert sorted(memory.rows().keys.tolist()) == list(range(1, 40))
    model = load_model(run.path).model
    assert len(model.item.memory) == 0  # rows travel as deltas, not with the weights
    written = memory.read(np.arange(1, 40))[0]
    # A pool of 64 computes all 39 items anew behind each step: the rows are those of the weights that were kept.
    torch.testing.assert_close(written, tower_of(model, np.arange(1, 40)), rtol=1e-5, atol=1e-6)
    first = tower_of(untrained(store, tmp_path), np.arange(1, 40))
    assert not torch.allclose(written, first, rtol=1e-3, atol=1e-3)


def test_into_a_log_elsewhere_weights_go_behind_their_rows(store, tmp_path):
    run = Trainer(override(recipe_of(store, tmp_path / "runs", epochs=1), {"memory.url": str(tmp_path / "log")})).fit()
    reader = DeltaSubscriber(tmp_path / "log")
    reader.poll()
    found = reader.model()
    assert (found.description, found.weights) == exported(run.path, current_version(run.path))
    install(tmp_path / "server", found.description, found.weights)
    model = load_model(tmp_path / "server").model
    torch.testing.assert_close(reader.memory.read(np.arange(1, 40))[0], tower_of(model, np.arange(1, 40)), rtol=1e-5,
                               atol=1e-6)
    assert not (run.path / "memory").exists()


def untrained(store, tmp_path):
    """The model before it was trained."""
    from semel.training.objectives import RankingObjective

    recipe = recipe_of(store, tmp_path / "runs")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        objective = RankingObjective(recipe)
        model = objective.make_model()
        objective.close()
    return model


@pytest.mark.parametrize("reads", ["live", "cached"])
def test_threads_and_loops_change_no_bit_of_weights_or_rows(store, tmp_path, reads):
    recipe = override(recipe_of(store, tmp_path / "runs", pieces=3, epochs=1), {"model.reads": reads})
    found = []
    before = torch.get_num_threads()
    try:
        for threads, overlap in ((1, True), (3, True), (3, False)):
            torch.set_num_threads(threads)
            run = Trainer(dataclasses.replace(recipe, overlap=overlap)).fit()
            rows = rows_of(run.path / "memory").rows()
            found.append((load_model(run.path).version, rows.vectors, rows.step))
    finally:
        torch.set_num_threads(before)
    for version, vectors, step in found[1:]:
        assert version == found[0][0] and torch.equal(vectors, found[0][1]) and torch.equal(step, found[0][2])


def on_ranks(recipe):
    return join().rank, str(Trainer(recipe).fit().path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_write_what_one_writes(store, tmp_path):
    recipe = without_draws(recipe_of(store, tmp_path / "runs", epochs=1))
    alone = Trainer(recipe).fit()
    (_, path), (_, same) = spawn(on_ranks, 2, recipe)
    assert path == same and load_model(path).version == load_model(alone.path).version
    one, two = rows_of(alone.path / "memory").rows(), rows_of(f"{path}/memory").rows()
    assert torch.equal(one.keys, two.keys) and torch.equal(one.vectors, two.vectors)


def fill(folder, rows, cuts):
    folder.mkdir(exist_ok=True)
    for number, (a, b) in enumerate(pairwise(cuts)):
        pq.write_table(rows_to_table(rows.select(np.arange(a, b))), folder / f".{number:04d}.part")
        (folder / f".{number:04d}.part").rename(folder / f"{number:04d}.parquet")
    return folder


@pytest.fixture(scope="module")
def rows(store, tmp_path_factory):
    recipe = recipe_of(store, tmp_path_factory.mktemp("rows"))
    rows = build_examples(store, "sessions", recipe.features, validation_fraction=0.2).rows("train")
    return rows.select(np.argsort(rows.pointers.as_of, kind="stable"))


def test_following_publishes_rows_weights_and_what_it_predicted(store, rows, tmp_path):
    recipe = recipe_of(store, tmp_path / "runs", version_seconds=0.01, keep_versions=4)
    run = Follower(recipe, fill(tmp_path / "rows", rows, (0, 30, 90))).fit(until_idle=0)
    versions = model_versions(run.path)
    assert len(versions) == 4 and versions[-1].number > 4
    assert load_model(run.path).version == run.summary["model_version"] == versions[-1].version
    assert sorted(rows_of(run.path / "memory").rows().keys.tolist()) == list(range(1, 40))
    seen = read_predictions(run.path / "predictions")
    assert sorted(seen["request_id"].to_pylist()) == sorted(map(str, rows.request_id[:90]))
    assert sum(map(len, seen["logits"].to_pylist())) == run.summary["rows"]
    logits = dict(zip(seen["request_id"].to_pylist(), seen["logits"].to_pylist(), strict=True))
    label = {str(name): rows.label["like"][slice(*rows.candidates.offsets[i : i + 2])]
             for i, name in enumerate(rows.request_id[:90])}
    from semel.metrics import NormalizedEntropy

    ne = NormalizedEntropy()
    for name, values in logits.items():
        ne.update_logits(label[name], np.array(values))
    assert ne.ne == pytest.approx(run.summary["prequential"]["ne"], rel=1e-6)


def test_stopped_and_resumed_it_has_the_rows_the_weights_and_the_predictions(store, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("semel.training.follow.LOG_EVERY", 2)
    recipe, folder = recipe_of(store, tmp_path / "runs"), fill(tmp_path / "rows", rows, (0, 30, 90))
    whole = Follower(recipe, folder).fit(until_idle=0)
    follower = Follower(recipe, folder)
    follower.on_progress = lambda now: follower.stop() if now.step >= 4 else None
    with pytest.raises(Interrupted):
        follower.fit(until_idle=0)
    (stopped,) = [path for path in (tmp_path / "runs").iterdir() if not (path / "run.json").exists()]
    before = rows_of(stopped / "memory").rows()
    resumed = Follower(recipe, folder).fit(resume=stopped, until_idle=0)
    assert load_model(resumed.path).version == load_model(whole.path).version
    one, two = rows_of(resumed.path / "memory").rows(), rows_of(whole.path / "memory").rows()
    assert torch.equal(one.keys, two.keys) and torch.equal(one.vectors, two.vectors)
    assert torch.equal(one.step, two.step) and not torch.equal(before.vectors, one.vectors)
    a, b = (read_predictions(run.path / "predictions").sort_by("request_id") for run in (resumed, whole))
    assert a["logits"].to_pylist() == b["logits"].to_pylist()
    started = Follower(recipe, fill(tmp_path / "more", rows, (90, 100)), start=whole.path).fit(until_idle=0)
    assert int(rows_of(started.path / "memory").rows().step.min()) > 0


def test_an_item_that_nobody_was_shown_has_a_row_while_training_waits(store, rows, tmp_path):
    follower = Follower(recipe_of(store, tmp_path / "runs"), fill(tmp_path / "rows", rows, (0, 10)))

    def follow():
        with pytest.raises(Interrupted):
            follower.fit()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not (logs := list((tmp_path / "runs").glob("*/memory"))) or rows_of(logs[0]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with HistoryStore.open(f"{store}/catalogue", mode="a") as catalogue:
            catalogue.append(items(np.array([77])))
        while not bool(rows_of(logs[0]).read([77])[1][0]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        follower.stop()
        thread.join(60)


def test_a_trainer_that_was_taken_over_stops_and_saves_nothing_more(store, rows, tmp_path):
    follower = Follower(recipe_of(store, tmp_path / "runs", version_seconds=0.01),
                        fill(tmp_path / "rows", rows, (0, 30, 90)))

    def other(now):
        if not other.published:
            (run,) = (tmp_path / "runs").iterdir()
            other.version = load_model(run).version
            other.published = DeltaPublisher(ItemMemory(100, 8), run / "memory")

    other.published = None
    follower.on_progress = other
    import semel.training.follow as module

    old, module.LOG_EVERY = module.LOG_EVERY, 2
    try:
        with pytest.raises(Fenced, match="only one trainer"):
            follower.fit(until_idle=0)
    finally:
        module.LOG_EVERY = old


def test_the_pool_takes_new_items_first_then_the_oldest_rows(store):
    memory = ItemMemory(100, 2)
    pool = CandidatePool(memory, None, FeatureSpec(), torch.arange(10))
    memory.write(torch.arange(8), torch.zeros(8, 2), now=1)
    memory.write(torch.tensor([3]), torch.zeros(1, 2), now=5)
    taken = pool.take(4)
    assert pool.ids[taken].tolist() == [8, 9, 0, 1]
    memory.write(pool.ids[taken], torch.zeros(4, 2), now=9)
    assert pool.ids[pool.take(4)].tolist() == [2, 4, 5, 6]
    assert pool.ids[pool.take(0)].tolist() == [] and len(pool.take(100)) == 10
    resumed = CandidatePool(memory, None, FeatureSpec(), torch.arange(10))
    pool.take(3)
    resumed.restore(torch.cat([pool.queue, torch.tensor([99])]))  # one that is there no more is left out
    assert torch.equal(resumed.queue, pool.queue) and resumed.take(4).tolist() == pool.take(4).tolist()
    small = CandidatePool(ItemMemory(3, 2), None, FeatureSpec(), torch.arange(10))
    assert len(small.new(100)) == len(small.take(100)) == 3
    small.memory.write([7, 8, 9], torch.zeros(3, 2))
    assert sorted(small.take(100).tolist()) == [7, 8, 9]  # full: no row leaves for an item that nobody asked for


def test_bad_settings():
    for changes in ({"pool": -1}, {"interval": 0}, {"keep": 0}, {"snapshot_every": 0}):
        (name, _), = changes.items()
        with pytest.raises(ValueError, match=f"memory.{name}"):
            MemoryConfig(**changes)

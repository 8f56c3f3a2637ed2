"""Promise 5, the trainer's tables: shared by ranks, fetched ahead, under either schedule, training comes to what one
plain process with whole tables comes to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_recipe, make_store, without_draws

from semel.comm.processes import join, spawn
from semel.models import load_model
from semel.training import Interrupted, Run, Trainer, evaluate, override, trainer
from semel.training.reference import plain_training
from semel.training.sharded import FetchedRows

pytestmark = pytest.mark.timeout(400)
SHARDED = {"sharding.tables": "item_id,rating"}
WAYS = [{"sharding.schedule": "blocking"}, {"sharding.schedule": "prioritized"}]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("sharded") / "store", users=12)


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)


def small(store, out, **changes):
    return override(make_recipe(store, out), {**SHARDED, **changes})


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics if line["kind"] == "train"]


def figures(run: Run) -> list[float]:
    return [line[name] for line in run.metrics for name in ("ne", "auc") if name in line]


def same_weights(run: Run, model: Any, tolerance: float) -> None:
    expected, found = model.state_dict(), load_model(run.path).model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["adam", "row_wise_adagrad", "sgd"])
def test_one_process_comes_to_the_plain_loop(store, tmp_path, optimizer):
    recipe = without_draws(small(store, tmp_path, **{"sharding.optimizer": optimizer, "pieces": 1, "epochs": 1,
                                                     "sharding.learning_rate": 0.02}))
    run = Trainer(recipe).fit()
    expected, model = plain_training(recipe)
    assert len(expected) > 10 and losses(run) == pytest.approx(expected, rel=2e-6)
    same_weights(run, model, 1e-5)


def test_both_loops_and_schedules_give_the_same_bits(store, tmp_path):
    runs = [Trainer(small(store, tmp_path, epochs=1, overlap=overlap, **way)).fit() for way in WAYS
            for overlap in (True, False)]
    assert all(losses(run) == losses(runs[0]) for run in runs)
    assert len({load_model(run.path).version for run in runs}) == 1


def train_all(store, out, ways):
    """On every rank."""
    trainer.LOG_EVERY = 1
    join()
    found: dict[Any, Any] = {}
    for number, way in enumerate(ways):
        found[number] = str(Trainer(small(store, out, **way)).fit().path)
    stopped = Trainer(small(store, out, checkpoint_steps=7))
    stopped.on_progress = lambda progress: stopped.stop() if progress.step >= 10 else None  # on rank 0 alone
    loops: list[Any] = []
    go = trainer._Loop.go
    trainer._Loop.go = lambda self, resume: (loops.append(self), go(self, resume))[1]
    try:
        stopped.fit()
    except Interrupted as error:
        found["stopped"] = str(error).split("resume ")[1].removesuffix(" to go on")
    finally:
        trainer._Loop.go = go
    found["rows"] = {name: len(table) for name, table in loops[0].tables.tables.items()}
    try:
        Trainer(small(store, out, **{"sharding.tables": "item_id,genre"})).fit()
    except ValueError as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def two(store, tmp_path_factory):
    return spawn(train_all, 2, store, tmp_path_factory.mktemp("two"), WAYS)


def test_two_ranks_with_a_piece_each_give_the_bits_of_one_with_two(store, two, tmp_path):
    alone = Trainer(small(store, tmp_path)).fit()
    for number in range(len(WAYS)):
        together = Run.open(two[0][number])
        assert losses(together) == losses(alone) and len(losses(alone)) > 20
        assert figures(together) == pytest.approx(figures(alone), rel=1e-6)
        assert load_model(together.path).version == load_model(alone.path).version


def test_each_rank_keeps_its_part_of_the_rows_and_the_run_says_what_was_exchanged(two):
    run = Run.open(two[0][1])
    whole = load_model(run.path).model.tables.tables
    for name, table in whole.items():
        parts = [found["rows"][name] for found in two]
        assert sum(parts) == table.num_embeddings and max(parts) - min(parts) <= 1
    line = [line for line in run.metrics if line["kind"] == "train"][-2]
    assert line["embedding_bytes"] > 0 and 0 < line["collision_rate"] <= 1 and line["seconds"]["exposed_embedding"] > 0
    assert {event["name"] for event in run.timeline if event["pid"] == 1} >= {"embed", "exposed_embedding"}


def test_what_two_ranks_saved_one_process_goes_on_with_and_what_they_trained_it_evaluates(store, two, tmp_path):
    assert two[0]["stopped"] == two[1]["stopped"]
    recipe = small(store, tmp_path, checkpoint_steps=7)
    resumed, whole = Trainer(recipe).fit(resume=two[0]["stopped"]), Trainer(recipe).fit()
    assert losses(resumed) == losses(whole)
    assert load_model(resumed.path).version == load_model(whole.path).version
    one, other = (evaluate(run.path).tasks["like"].overall.figures["ne"].value for run in (resumed, whole))
    assert one == other > 0


def test_a_name_that_is_no_table_is_refused_on_all_ranks(two):
    assert two[0]["refused"] == two[1]["refused"] and "'genre'" in two[0]["refused"] and "rating" in two[0]["refused"]


@pytest.mark.parametrize(("kind", "changes", "said"), [
    ("sequence_ranker", {"accumulate_tokens": 99}, "accumulate_tokens to none"),
    ("next_item", {"model.negatives": 0}, "the full softmax, which compares with every item"),
    ("early_ranker", {}, "from which an early_ranker's tower computes"),
    ("sequence_ranker", {"sharding.tables": "item_id,item_id"}, "one twice"),
    ("sequence_ranker", {"sharding.schedule": "eager"}, "prioritized, blocking"),
    ("sequence_ranker", {"sharding.learning_rate": 0.0}, "above 0"),
])
def test_what_cannot_be_sharded_is_refused_before_anything_is_made(tmp_path, kind, changes, said):
    with pytest.raises(ValueError, match=said):
        override(make_recipe("nowhere", tmp_path, kind), {**SHARDED, **changes})


def test_no_tables_is_what_an_empty_setting_says(tmp_path):
    assert override(small("nowhere", tmp_path), {"sharding.tables": ""}).sharding.tables == ()


def test_a_row_that_was_not_fetched_is_an_error_and_not_another_row():
    rows = FetchedRows("item_id", 2)
    rows.keys, rows.vectors = torch.tensor([2, 5, 9]), torch.arange(6.0).view(3, 2)
    assert rows(torch.tensor([[9, 2]])).tolist() == [[[4.0, 5.0], [0.0, 1.0]]]
    for index in (3, 10, 0):
        with pytest.raises(KeyError, match=r"take .item_id. out of sharding\.tables"):
            rows(torch.tensor([5, index]))


def train_plain(store, out, ways):
    trainer.LOG_EVERY = 1
    join()
    return [str(Trainer(without_draws(small(store, out, **way))).fit().path) for way in ways]


def train_four_pieces(store, out, resume=None):
    """To step 10, or from there on; as many pieces as the most ranks, so that all draw alike."""
    trainer.LOG_EVERY = 1
    join()
    stopped = Trainer(small(store, out, checkpoint_steps=7, pieces=4))
    if resume is not None:
        return str(stopped.fit(resume).path)
    stopped.on_progress = lambda progress: stopped.stop() if progress.step >= 10 else None
    with pytest.raises(Interrupted) as error:
        stopped.fit()
    return str(error.value).split("resume ")[1].removesuffix(" to go on")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks_comes_to_the_plain_loop(store, tmp_path, world_size):
    """With both schedules and all optimizers, in unequal and in balanced pieces."""
    ways = [{**way, "sharding.optimizer": optimizer, "balance": balance, "quadratic": 0.1} for way in WAYS
            for optimizer, balance in (("adam", "equal_cost"), ("row_wise_adagrad", "none"), ("sgd", "zigzag"))]
    found = spawn(train_plain, world_size, store, tmp_path, ways)
    for number, way in enumerate(ways):
        expected, _ = plain_training(without_draws(small(store, tmp_path, **way)))
        assert losses(Run.open(found[0][number])) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_what_four_ranks_saved_any_number_goes_on_with(store, tmp_path):
    stopped = spawn(train_four_pieces, 4, store, tmp_path)[0]
    assert len(list((next((Path(stopped) / "checkpoints").glob("step-*")) / "tables" / "item_id").glob("rank-*"))) == 4
    whole = losses(Trainer(small(store, tmp_path, checkpoint_steps=7, pieces=4)).fit())
    for world_size in (1, 2, 3):
        copy = shutil.copytree(stopped, tmp_path / f"on-{world_size}")
        resumed = Run.open(spawn(train_four_pieces, world_size, store, tmp_path, copy)[0])
        assert losses(resumed) == pytest.approx(whole, rel=1e-5) and len(whole) > 20

"""Promise 5, next-item models with shared tables: histories, targets and the step's negatives are looked up through
them, and training comes to what one plain process with whole tables comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import make_recipe, make_store, without_draws

from semel.comm.processes import join, spawn
from semel.models import load_model
from semel.training import Interrupted, Run, Trainer, evaluate, override, trainer
from semel.training.objectives import make_objective
from semel.training.reference import plain_training
from semel.training.sharded import ShardedTables

pytestmark = pytest.mark.timeout(400)
WAYS = [{"sharding.schedule": "blocking"}, {"sharding.schedule": "prioritized"}]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("sharded") / "store", users=12)


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    monkeypatch.setattr(trainer, "LOG_EVERY", 1)


def small(store, out, **changes):
    """Of 29 items; three users a step, of whom one is alone in the last."""
    return override(make_recipe(store, out, "next_item", batch=3), {
        "sharding.tables": "item_id,rating", "optimizer.learning_rate": 0.02, "epochs": 3, **changes})


def still(store, out, **changes):
    """With nothing drawn but negatives, and the last weights kept."""
    return without_draws(small(store, out, **{"examples.validate": False, **changes}))


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics if line["kind"] == "train"]


def figures(run: Run) -> list[float]:
    return [line["ndcg@10"] for line in run.metrics if line["kind"] == "validation"]


def same_weights(run: Run, model: Any, tolerance: float) -> None:
    expected, found = model.state_dict(), load_model(run.path).model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("changes", [
    {}, {"sharding.optimizer": "row_wise_adagrad", "model.popularity": 0.75, "sharding.schedule": "blocking"},
    {"sharding.optimizer": "sgd", "model.similarity": "cosine", "model.temperature": 0.2},
    {"sharding.tables": "rating"}, {"sharding.tables": "rating", "model.negatives": 0}, {"model.negatives": 1000}])
def test_one_process_comes_to_the_plain_loop(store, tmp_path, changes):
    recipe = still(store, tmp_path, **changes)
    run = Trainer(recipe).fit()  # in two pieces
    expected, model = plain_training(recipe)
    assert len(expected) == 12 and losses(run) == pytest.approx(expected, rel=2e-6)
    same_weights(run, model, 2e-5)


def test_a_step_draws_its_negatives_once_and_each_step_others(store, tmp_path):
    objective = make_objective(small(store, tmp_path))
    try:
        objective.make_model()
        rows = objective.loader.read(objective.loader.upcoming()[0])
        drawn = [objective.materialize(rows, None, step).negatives[0] for step in (0, 1, 0)]
    finally:
        objective.close()
    assert drawn[0].tolist() == drawn[2].tolist() != drawn[1].tolist()
    assert len(drawn[0].unique()) == 8


def test_both_loops_and_schedules_give_the_same_bits(store, tmp_path):
    runs = [Trainer(small(store, tmp_path, overlap=overlap, **way)).fit() for way in WAYS for overlap in (True, False)]
    assert all(losses(run) == losses(runs[0]) for run in runs)
    assert len({load_model(run.path).version for run in runs}) == 1


def train_all(store, out, ways):
    """On every rank."""
    trainer.LOG_EVERY = 1
    join()
    found: dict[Any, Any] = {"plain": str(Trainer(still(store, out)).fit().path)}
    asked: list[int] = []
    wanted = ShardedTables.wanted
    ShardedTables.wanted = lambda self, batch: (rows := wanted(self, batch), asked.append(len(rows["item_id"])))[0]
    try:
        found["drawn"] = [str(Trainer(small(store, out, **way)).fit().path) for way in ways]
    finally:
        ShardedTables.wanted = wanted
    found["asked"] = asked
    stopped = Trainer(small(store, out, checkpoint_steps=4))
    stopped.on_progress = lambda progress: stopped.stop() if progress.step >= 6 else None  # on rank 0 alone
    try:
        stopped.fit()
    except Interrupted as error:
        found["stopped"] = str(error).split("resume ")[1].removesuffix(" to go on")
    return found


@pytest.fixture(scope="module")
def two(store, tmp_path_factory):
    return spawn(train_all, 2, store, tmp_path_factory.mktemp("two"), WAYS)


def test_two_ranks_come_to_the_plain_loop_of_one_process(store, two, tmp_path):
    expected, model = plain_training(still(store, tmp_path))
    run = Run.open(two[0]["plain"])
    assert losses(run) == pytest.approx(expected, rel=2e-6) and len(expected) == 12
    same_weights(run, model, 2e-5)


def test_two_ranks_with_a_piece_each_give_the_bits_of_one_with_two(store, two, tmp_path):
    alone = Trainer(small(store, tmp_path)).fit()
    for number in range(len(WAYS)):
        together = Run.open(two[0]["drawn"][number])
        assert losses(together) == losses(alone)
        assert figures(together) == pytest.approx(figures(alone), rel=1e-6) and len(figures(alone)) == 3
        assert load_model(together.path).version == load_model(alone.path).version
    said = [line for line in together.metrics if "collision_rate" in line]
    assert all(line["embedding_bytes"] > 0 for line in said) and 0 < max(line["collision_rate"] for line in said) <= 1


def test_each_distinct_row_is_asked_for_once_and_the_catalogue_never(two):
    """Three users have up to 30 events of 29 items, and 8 negatives: duplicates are gone before the wire."""
    asked = [count for found in two for count in found["asked"]]
    assert min(asked) >= 8 and max(asked) < 29


def test_what_two_ranks_saved_one_process_goes_on_with_and_what_they_trained_it_evaluates(store, two, tmp_path):
    assert two[0]["stopped"] == two[1]["stopped"]
    recipe = small(store, tmp_path, checkpoint_steps=4)
    resumed, whole = Trainer(recipe).fit(resume=two[0]["stopped"]), Trainer(recipe).fit()
    assert losses(resumed) == losses(whole) and figures(resumed) == pytest.approx(figures(whole), rel=1e-6)
    assert load_model(resumed.path).version == load_model(whole.path).version
    one, other = (evaluate(run.path).catalogue.overall.figures["ndcg@10"].value for run in (resumed, whole))
    assert one == other > 0

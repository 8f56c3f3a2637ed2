"""What partitions go by is learned from step times, written down, used again after a resume, and repeats a run."""

import itertools
import json
import shutil

import numpy as np
import pytest
from small import make_recipe, make_store

from semel.comm.processes import spawn
from semel.models import load_model
from semel.training import Interrupted, Ranks, Run, Trainer
from semel.training.cost import CostModel
from semel.training.tuning import FILE, Tuning, read

pytestmark = pytest.mark.timeout(300)
BALANCED = {"balance": "equal_cost", "epochs": 3}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("tuning") / "store")


def losses(run):
    return [(line["step"], line["loss"]) for line in run.metrics if line["kind"] == "train"]


def lines(run):
    return [line for line in run.metrics if line["kind"] == "balance"]


def write(folder, epochs):
    folder.mkdir()
    (folder / FILE).write_text(json.dumps({"format": 1, "epochs": epochs}))
    return str(folder)


def test_a_fitted_run_writes_what_it_went_by_and_is_repeated_by_it(store, tmp_path):
    fitted = Trainer(make_recipe(store, tmp_path, costs="fit", **BALANCED)).fit()
    epochs = read(fitted.path)
    assert len(epochs) == 4 and epochs[0]["cost"] == CostModel().to_json()
    # These times are the machine's: where they make all requests free, an epoch goes on by what the one before had.
    for before, one in itertools.pairwise(epochs):
        model = CostModel.from_json(one["cost"])
        assert one["cost"] == before["cost"] or (model.error is not None and model.predict([1, 9]).max() > 0)
    assert [line["used"] for line in lines(fitted)] == [
        CostModel.from_json(one["cost"]).describe() for one in epochs[1:]]
    again = Trainer(make_recipe(store, tmp_path, costs=str(fitted.path), **BALANCED)).fit()
    assert losses(again) == losses(fitted) and load_model(again.path).version == load_model(fitted.path).version


def test_costs_decide_who_computes_what(store, tmp_path):
    other = write(tmp_path / "other", [{"cost": CostModel(linear=0, quadratic=1).to_json(), "shares": None}])
    runs = [Trainer(make_recipe(store, tmp_path, costs=costs, pieces=4, **BALANCED)).fit()
            for costs in ("given", other)]
    assert losses(runs[0]) != losses(runs[1])  # what a piece draws belongs to it


def test_segments_come_with_their_alpha(store, tmp_path):
    run = Trainer(make_recipe(store, tmp_path, costs="fit", balance="segments")).fit()
    assert all(0 <= line["alpha"] <= 3 for line in lines(run)) and len(lines(run)) == 2


def test_a_resumed_run_goes_on_by_what_it_had_fitted(store, tmp_path):
    recipe = make_recipe(store, tmp_path, costs="fit", checkpoint_steps=7, **BALANCED)
    trainer = Trainer(recipe)
    trainer.on_progress = lambda progress: trainer.stop() if progress.epoch == 1 else None
    with pytest.raises(Interrupted) as stopped:
        trainer.fit()
    folder = tmp_path / str(stopped.value).split("resume ")[1].removesuffix(" to go on")
    before = read(folder)
    assert len(before) == 2
    resumed = Trainer(recipe).fit(resume=folder)
    assert read(resumed.path)[:2] == before and len(read(resumed.path)) == 4
    again = Trainer(make_recipe(store, tmp_path, costs=str(resumed.path), **BALANCED)).fit()
    assert load_model(again.path).version == load_model(resumed.path).version


def test_what_is_no_run_with_costs_is_refused_and_no_run_is_begun(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="costs must be 'given', 'fit' or the folder"):
        Trainer(make_recipe(store, tmp_path / "out", costs=str(tmp_path))).fit()
    for text in ("{", '{"format": 2, "epochs": []}', '{"format": 1, "epochs": []}',
                 '{"format": 1, "epochs": [{"cost": "{}", "shares": null}]}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ValueError, match=f"{FILE} is damaged"):
            Trainer(make_recipe(store, tmp_path / "out", costs=str(tmp_path))).fit()
    assert not (tmp_path / "out").exists()


def two_ranks(store, out, shares):
    ranks = Ranks()
    recipe = make_recipe(store, out, costs="fit")
    out.mkdir(exist_ok=True)
    tuning = Tuning(recipe, out, ranks)
    random = np.random.default_rng(ranks.rank)
    observed = []
    for _ in range(20):  # rank 1 is half as fast
        lengths = random.integers(1, 1000, 8)
        observed.append([*CostModel.features(lengths), (1 + ranks.rank) * CostModel(1e-6, 1e-9).predict(lengths).sum()])
    figures = tuning.learn(0, observed, np.empty(0, np.int64))
    run = Trainer(make_recipe(store, out, costs=shares, pieces=4)).fit()
    fitted = Trainer(make_recipe(store, out, costs="fit", balance="equal_count")).fit()
    return figures, tuning.shares.values.tolist(), tuning.cost.to_json(), str(run.path), str(fitted.path)


def test_a_slow_rank_gets_a_smaller_share_of_the_pieces(store, tmp_path):
    shares = write(tmp_path / "shares", [{"cost": CostModel().to_json(), "shares": [0.75, 0.25]}])
    found = spawn(two_ranks, 2, store, tmp_path / "two", shares)
    assert found[0] == found[1]
    figures, values, cost, path, fitted = found[0]
    assert values[0] > 0.55 and sum(values) == pytest.approx(1) and figures["shares"] == pytest.approx(values, abs=1e-4)
    assert CostModel.from_json(cost).quadratic > 0 and read(tmp_path / "two")[1]["shares"] == values
    alone, together = Trainer(make_recipe(store, tmp_path, pieces=4)).fit(), Run.open(path)
    assert losses(together) == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in losses(alone)]
    idle = [line["idle_tokens"] for line in lines(together)]
    assert all(0.2 < value < 0.45 for value in idle)  # three pieces of four: a third
    assert len(read(Run.open(fitted).path)) == 3 and len(lines(Run.open(fitted))) == 2
    shutil.rmtree(tmp_path / "two")

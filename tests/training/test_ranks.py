"""Several processes that train together: the losses of one, one folder, one end."""

import dataclasses
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
from small import make_recipe, make_store
from torch import nn

from semel import metrics
from semel.comm.processes import ProcessDied, join, spawn
from semel.models import load_model
from semel.training import Interrupted, Ranks, Run, Trainer, parallelize

pytestmark = pytest.mark.timeout(400)  # of what all of them wait for: processes that start
KINDS = ("sequence_ranker", "next_item")
OTHER = {"pieces": 4, "batch": 3, "accumulate_tokens": 150}
BALANCED = {"balance": "equal_cost", "quadratic": 0.1}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("ranks") / "store")


def curve(run):
    return [(line["kind"], line["step"], line.get("loss")) for line in run.metrics]


def figures(run):
    return [line[name] for line in run.metrics for name in ("ne", "auc", "ndcg@10") if name in line]


def train_all(store, out):
    """On every rank: what the tests below compare with one process."""
    rank = join().rank
    found = {"rank": rank}
    for kind in KINDS:
        found[kind] = str(Trainer(make_recipe(store, out, kind)).fit().path)
    found["other"] = str(Trainer(make_recipe(store, out, **OTHER)).fit().path)
    found["balanced"] = str(Trainer(make_recipe(store, out, **BALANCED)).fit().path)

    trainer = Trainer(make_recipe(store, out, checkpoint_steps=7))
    trainer.on_progress = lambda progress: trainer.stop() if progress.step >= 20 else None  # on rank 0 alone
    try:
        trainer.fit()
    except Interrupted as error:
        found["interrupted"] = str(error)

    huge = make_recipe(store, out)
    optimizer = dataclasses.replace(huge.optimizer, learning_rate=1e30, warmup_steps=0, clip_norm=0.0)
    try:
        Trainer(dataclasses.replace(huge, optimizer=optimizer, epochs=5)).fit()
    except FloatingPointError as error:
        found["not finite"] = str(error)
    found |= sums() | unequal_parts()
    return found


def sums():
    ranks = Ranks()
    whole = metrics.NormalizedEntropy()
    whole.update_logits(np.array([0.0, 1.0]) if ranks.rank else np.array([1.0]), np.full(1 + ranks.rank, 0.3))
    parts = [torch.full((2,), 1.0 + ranks.rank), torch.tensor(0.5, dtype=torch.float64)]
    ranks.sum_in_place(parts)
    return {"ne": ranks.sum_metric(whole).to_json(), "tensors": [part.tolist() for part in parts],
            "gather": ranks.gather({"of": ["é", ranks.rank]}), "first": ranks.first(lambda: f"made by {ranks.rank}"),
            "any": [ranks.any(False), ranks.any(ranks.rank == 1)]}


def model_and_rows():
    torch.manual_seed(0)
    return nn.Linear(3, 1), torch.randn(7, 3), torch.randn(7, 1)


def unequal_parts():
    """One and six of seven rows: the gradient by ``parallelize``."""
    rank = join().rank
    model, x, y = model_and_rows()
    if rank:
        nn.init.zeros_(model.weight)  # rank 0's weights count
    mine = slice(0, 1) if rank == 0 else slice(1, 7)
    count = Ranks().sum([len(x[mine])])[0]
    parallel = parallelize(model)
    (((parallel(x[mine]) - y[mine]) ** 2).sum() / count).backward()
    return {"gradient": model.weight.grad.tolist(), "wrapped": type(parallel).__name__}


@pytest.fixture(scope="module")
def two(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    return spawn(train_all, 2, store, out)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_a_piece_each_give_the_bits_of_one_with_two(store, two, tmp_path, kind):
    alone, together = Trainer(make_recipe(store, tmp_path, kind)).fit(), Run.open(two[0][kind])
    assert two[1][kind] == two[0][kind]
    assert [line for line in curve(together) if line[0] != "balance"] == curve(alone)
    assert figures(together) == pytest.approx(figures(alone), rel=1e-6)
    assert load_model(together.path).version == load_model(alone.path).version
    assert together.summary["ranks"] == 2 and len(list((together.path / "tensorboard").iterdir())) == 1


def test_balanced_ranks_give_the_bits_of_balanced_pieces(store, two, tmp_path):
    alone, together = Trainer(make_recipe(store, tmp_path, **BALANCED)).fit(), Run.open(two[0]["balanced"])
    assert [line for line in curve(together) if line[0] != "balance"] == curve(alone)
    assert load_model(together.path).version == load_model(alone.path).version
    lines = {path: [line for line in Run.open(two[0][path]).metrics if line["kind"] == "balance"]
             for path in ("balanced", "sequence_ranker")}
    for found in lines.values():
        assert len(found) == 2 and all(0 <= line[f"idle_{name}"] < 1 for line in found
                                       for name in ("tokens", "cost", "time"))
        assert found[0]["cost"].startswith("cost model")


def test_more_pieces_and_accumulated_batches_agree_within_float_order(store, two, tmp_path):
    alone, together = Trainer(make_recipe(store, tmp_path, **OTHER)).fit(), Run.open(two[0]["other"])
    assert [line[:2] for line in curve(alone)] == [line[:2] for line in curve(together) if line[0] != "balance"]
    assert [line[2] for line in curve(together) if line[2]] == pytest.approx(
        [line[2] for line in curve(alone) if line[2]], rel=1e-5)


def train_until_killed(store, out, note):
    def die(progress):
        if progress.step >= 20:
            note.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer(make_recipe(store, out, checkpoint_steps=7), on_progress=die).fit()


def test_a_killed_rank_ends_the_job_in_time_and_a_resumed_run_has_the_same_curve(store, tmp_path):
    (tmp_path / "killed").mkdir()
    note = tmp_path / "killed-at"
    with pytest.raises(ProcessDied, match="rank 0 of 2 was ended by SIGKILL"):
        spawn(train_until_killed, 2, store, tmp_path / "killed", note)
    assert time.time() - float(note.read_text()) < 60
    (folder,) = (tmp_path / "killed").iterdir()
    same = make_recipe(store, tmp_path, checkpoint_steps=7)
    resumed, whole = Trainer(same).fit(resume=folder), Trainer(same).fit()
    assert load_model(resumed.path).version == load_model(whole.path).version
    assert figures(resumed) == pytest.approx(figures(whole), rel=1e-6)


def test_stopped_on_one_rank_all_stop_at_the_same_step_and_one_process_goes_on(store, two, tmp_path):
    assert two[0]["interrupted"] == two[1]["interrupted"]
    folder = two[0]["interrupted"].split("resume ")[1].removesuffix(" to go on")
    same = make_recipe(store, tmp_path, checkpoint_steps=7)
    resumed, whole = Trainer(same).fit(resume=folder), Trainer(same).fit()
    assert load_model(resumed.path).version == load_model(whole.path).version


def test_a_loss_that_is_not_finite_is_the_same_error_on_all_ranks_and_names_requests(two):
    assert two[0]["not finite"] == two[1]["not finite"]
    assert "at step" in two[0]["not finite"] and "on rank" in two[0]["not finite"]


def test_the_timeline_has_both_ranks_and_names_their_waits(two):
    events = json.loads((Run.open(two[0]["sequence_ranker"]).path / "timeline.json").read_text())["traceEvents"]
    for rank in (0, 1):
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"forward", "backward", "update", "straggler", "exposed_gradient", "input"} <= names


def test_sums_and_messages(two):
    whole = metrics.NormalizedEntropy().update_logits(np.array([1.0, 0.0, 1.0]), np.full(3, 0.3))
    for found in two:
        assert found["ne"] == pytest.approx(whole.to_json()) and found["tensors"] == [[3.0, 3.0], 1.0]
        assert found["gather"] == [{"of": ["é", 0]}, {"of": ["é", 1]}] and found["first"] == "made by 0"
        assert found["any"] == [False, True]
    alone = Ranks()
    assert (alone.rank, alone.world_size, alone.gather(3), alone.any(True)) == (0, 1, [3], True)


def test_parallelize_is_right_for_unequal_parts(two):
    model, x, y = model_and_rows()
    ((model(x) - y) ** 2).mean().backward()
    for found in two:
        assert found["wrapped"] == "DistributedDataParallel"
        np.testing.assert_allclose(found["gradient"], model.weight.grad.numpy(), rtol=1e-6)
    assert parallelize(model) is model

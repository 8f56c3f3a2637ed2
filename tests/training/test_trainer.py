"""Training: same seed same losses, resumed equals uninterrupted, early stopping, curves, and clear refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
import torch

from semel import EventSchema, HistoryStore
from semel.features import Feature, FeatureSpec, Task
from semel.models import EncoderConfig, ModelConfig, load_model
from semel.training import ExampleConfig, Interrupted, Recipe, Run, Trainer, evaluate, override
from semel.training.objectives import make_objective
from semel.training.recipe import OptimizerConfig
from semel.training.schedule import rate_at
from semel.training.stages import updates

HOUR = 3_600_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """24 users who like even items, in sessions an hour apart."""
    path = tmp_path_factory.mktemp("data") / "store"
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(24), 30)
    session = np.tile(np.repeat(np.arange(10), 3), 24)
    time = session * HOUR + np.tile(np.arange(30), 24) * 1_000_000 + user
    item = rng.integers(1, 30, len(user))
    handle = HistoryStore.create(str(path), EventSchema({"item_id": pa.int64(), "rating": pa.float32()}), shards=2)
    handle.append(pa.table({"user_id": user, "event_time": time, "item_id": item,
                            "rating": pa.array(np.where(item % 2 == 0, 5, 2), pa.float32())}))
    handle.close()
    return str(path)


def recipe(store, out, kind="sequence_ranker", **changes):
    features = FeatureSpec((Feature("item_id"), Feature("rating")), tasks=(Task("like"),), history_last=10)
    model = ModelConfig(kind=kind, dim=8, hidden=(16,), negatives=8,
                        encoder=EncoderConfig(dim=8, layers=1, heads=1, head_dim=8, positions=11))
    base = Recipe("tiny", features, model, ExampleConfig(validation_fraction=0.2), epochs=3, batch=8, store=store,
                  out=str(out))
    return dataclasses.replace(base, **changes)


def without_draws(recipe):
    """The recipe with nothing random in a step."""
    return override(recipe, {f"model.{name}": 0.0 for name in ("dropout", "embedding_dropout", "unknown_rate",
                                                               "encoder.dropout")})


def losses(run):
    return [line["loss"] for line in run.metrics if line["kind"] == "train"]


def validations(run):
    return [line for line in run.metrics if line["kind"] == "validation"]


@pytest.mark.parametrize("kind", ["sequence_ranker", "dcnv2", "rdcn", "isolated_wukong", "isolated_final_mlp",
                                  "isolated_dhen", "deep_cross_attention", "next_item"])
def test_the_same_seed_gives_the_same_losses_and_model(store, tmp_path, kind):
    epochs = 2 if kind in ("sequence_ranker", "next_item") else 1  # of each kind of data once in another order
    first, second, other = (Trainer(recipe(store, tmp_path, kind, seed=seed, epochs=epochs)).fit()
                            for seed in (0, 0, 1))
    assert losses(first) == losses(second) != losses(other)
    assert load_model(first.path).version == load_model(second.path).version != load_model(other.path).version


@pytest.mark.parametrize("kind", ["sequence_ranker", "dcnv2", "isolated_wukong", "deep_cross_attention",
                                  "sequence_dcnv2", "next_item"])
def test_one_thread_gives_the_losses_of_two(store, tmp_path, kind):
    examples = ExampleConfig(validation_fraction=0.2, earlier_windows=0.5)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(Trainer(recipe(store, tmp_path, kind, examples=examples, epochs=1)).fit())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert losses(runs[0]) == losses(runs[1])
    assert load_model(runs[0].path).version == load_model(runs[1].path).version


@pytest.mark.parametrize(("kind", "at"), [("sequence_ranker", 3), ("sequence_ranker", 40), ("next_item", 3),
                                          ("next_item", 8)])
def test_a_resumed_run_equals_one_without_interruption(store, tmp_path, kind, at):
    same = recipe(store, tmp_path, kind, checkpoint_steps=7)
    whole = Trainer(same).fit()
    trainer = Trainer(same)

    def stop_at(progress):
        if progress.step >= at:
            trainer.stop()

    trainer.on_progress = stop_at
    with pytest.raises(Interrupted, match="resume"):
        trainer.fit()
    folder = max((p for p in tmp_path.iterdir()), key=lambda p: p.stat().st_mtime)
    run = Run.open(folder)
    assert not run.summary
    run = Trainer(same).fit(resume=folder)
    assert load_model(run.path).version == load_model(whole.path).version
    assert validations(run) == validations(whole)


def test_it_learns_stops_early_and_keeps_the_best(store, tmp_path):
    run = Trainer(recipe(store, tmp_path, epochs=40, patience=2)).fit()
    best = min(line["ne"] for line in validations(run))
    assert best < 0.5
    assert run.summary["best"]["ne"] == best
    assert run.summary["epochs"] == len(validations(run)) <= 40
    assert (run.path / "tensorboard").is_dir() and list((run.path / "tensorboard").iterdir())
    assert len(list((run.path / "checkpoints").iterdir())) <= 2
    assert Run.open(run.path).recipe == run.recipe


def test_without_validation_the_last_weights_are_kept_and_one_event_more_is_trained_on(store, tmp_path):
    run = Trainer(recipe(store, tmp_path, "next_item", examples=ExampleConfig(validate=False), patience=1)).fit()
    assert run.summary["epochs"] == 3 and run.summary["best"] == {"ndcg@10": None} and not validations(run)
    wide = dataclasses.replace(recipe(store, tmp_path).features, history_last=100)
    events = {}
    for validate in (False, True):
        objective = make_objective(recipe(store, tmp_path, "next_item", features=wide,
                                          examples=ExampleConfig(validate=validate)))
        events[validate] = sum(objective.samples(objective.materialize(rows, None)) for rows in objective.loader)
        objective.close()
    assert events == {False: 24 * 29, True: 24 * 28}
    assert evaluate(run).catalogue.overall.figures["hr@10"].value >= 0
    with pytest.raises(ValueError, match="trained on the validation events"):
        evaluate(run, split="validation")


def test_refusals(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run"):
        Run.open(tmp_path)
    run = Trainer(recipe(store, tmp_path, epochs=1)).fit()
    with pytest.raises(ValueError, match="another 'seed'"):
        Trainer(recipe(store, tmp_path, epochs=1, seed=5)).fit(resume=run.path)
    with pytest.raises(ValueError, match="no column 'rating'"):
        empty = tmp_path / "no-rating"
        handle = HistoryStore.create(str(empty), EventSchema({"item_id": pa.int64()}))
        handle.append(pa.table({"user_id": [1, 1], "event_time": [1, 2], "item_id": [3, 4]}))
        handle.close()
        Trainer(recipe(str(empty), tmp_path)).fit()
    with pytest.raises(FloatingPointError, match=r"the loss is .* at step"):
        huge = recipe(store, tmp_path, epochs=5)
        optimizer = dataclasses.replace(huge.optimizer, learning_rate=1e30, warmup_steps=0, clip_norm=0.0)
        Trainer(dataclasses.replace(huge, optimizer=optimizer)).fit()


def test_training_leaves_the_callers_random_state_alone(store, tmp_path):
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    Trainer(recipe(store, tmp_path, epochs=1)).fit()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.timeout(90)
def test_sigterm_saves_and_a_resumed_run_finishes(store, tmp_path):
    script = textwrap.dedent(f"""
        import json, sys
        from semel.training import Recipe, Trainer
        recipe = Recipe.from_json(json.loads({json.dumps(json.dumps(recipe(store, tmp_path, epochs=500).to_json()))}))
        import dataclasses
        recipe = dataclasses.replace(recipe, patience=500)
        Trainer(recipe, on_progress=lambda p: print(p.step, flush=True)).fit()
    """)
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline().strip().isdigit()
        os.kill(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Interrupted: stopped at step" in errors
    folder = next(tmp_path.iterdir())
    interrupted = Run.open(folder)
    assert list((folder / "checkpoints").iterdir())
    shorter = dataclasses.replace(interrupted.recipe, epochs=max(1, interrupted.metrics[-1]["epoch"] + 1))
    assert Trainer(shorter).fit(resume=folder).summary["epochs"] == shorter.epochs


@pytest.mark.parametrize("kind", ["sequence_ranker", "next_item"])
def test_the_plain_loop_gives_the_losses_of_the_overlapped_one(store, tmp_path, kind):
    runs = [Trainer(recipe(store, tmp_path, kind, overlap=overlap)).fit() for overlap in (True, False)]
    assert losses(runs[0]) == losses(runs[1])
    assert load_model(runs[0].path).version == load_model(runs[1].path).version


@pytest.mark.parametrize("kind", ["sequence_ranker", "next_item"])
def test_balanced_pieces_give_the_losses_of_unbalanced_ones(store, tmp_path, kind):
    plain = without_draws(recipe(store, tmp_path, kind, epochs=1, pieces=3))
    if kind == "next_item":  # its negatives are drawn piece by piece: all items are the same whatever the pieces
        plain = override(plain, {"model.negatives": 0})
    alone = Trainer(plain).fit()
    for balance in ("equal_count", "equal_cost", "zigzag", "segments", "karmarkar_karp", "lpt"):
        balanced = Trainer(dataclasses.replace(plain, balance=balance, quadratic=0.01)).fit()
        assert losses(balanced) == pytest.approx(losses(alone), rel=1e-5), balance


def test_a_run_says_where_its_time_went(store, tmp_path):
    seen = []
    run = Trainer(recipe(store, tmp_path, epochs=1), on_progress=seen.append).fit()
    line = next(line for line in run.metrics if line["kind"] == "train")
    stages = {"read", "materialize", "forward", "backward", "update", "metrics"}
    assert stages < set(line["seconds"]) and seen[0].seconds == line["seconds"]
    assert 0 < sum(line["seconds"][name] for name in ("forward", "backward", "update")) <= line["seconds"]["step"]
    events = json.loads((run.path / "timeline.json").read_text())["traceEvents"]
    assert stages <= {event["name"] for event in events if event["ph"] == "X"}


def test_accumulated_batches_give_the_updates_of_larger_ones(store, tmp_path):
    """Sums of parts are the sums of the whole: batches of 4, all of them one update, against one large batch."""
    still = without_draws(recipe(store, tmp_path, epochs=2))
    small = Trainer(dataclasses.replace(still, batch=4, pieces=1, accumulate_tokens=10**9)).fit()
    whole = Trainer(dataclasses.replace(still, batch=10**6)).fit()
    assert small.summary["steps"] == whole.summary["steps"] == 2
    assert losses(small) == pytest.approx(losses(whole), rel=1e-5)
    assert [line["ne"] for line in validations(small)] == pytest.approx([v["ne"] for v in validations(whole)], rel=1e-4)


@pytest.mark.parametrize("kind", ["sequence_ranker", "isolated_wukong", "next_item"])
def test_bfloat16_computes_in_fewer_bits_and_keeps_weights_in_float32(store, tmp_path, kind):
    runs = [Trainer(recipe(store, tmp_path, kind, epochs=2, precision=precision)).fit()
            for precision in ("float32", "bfloat16")]
    assert losses(runs[1]) != losses(runs[0]) and losses(runs[1]) == pytest.approx(losses(runs[0]), rel=0.02)
    for run in runs:
        model = load_model(run.path).model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_accumulation_cuts_by_tokens_and_resumes_in_the_middle(store, tmp_path):
    same = recipe(store, tmp_path, batch=4, accumulate_tokens=100, checkpoint_steps=3, epochs=2)
    objective = make_objective(same)
    tokens = [int(objective.loader.costs(batch).sum()) for batch in objective.loader.upcoming()]
    found = updates(objective.loader, 100, 0, 2 * len(tokens))
    objective.close()
    sums = [sum(int(tokens.pop(0)) for _ in update.batches) for update in found]
    assert not tokens and max(sums) <= 100 and sum(sums) / len(sums) > 60
    whole = Trainer(same).fit()
    assert whole.summary["steps"] < 2 * sum(len(update.batches) for update in found)
    trainer = Trainer(same)
    trainer.on_progress = lambda progress: trainer.stop() if progress.step >= 20 else None
    with pytest.raises(Interrupted):
        trainer.fit()
    folder = max((p for p in tmp_path.iterdir()), key=lambda p: p.stat().st_mtime)
    resumed = Trainer(same).fit(resume=folder)
    assert load_model(resumed.path).version == load_model(whole.path).version


def test_the_cosine_schedule_ends_at_zero_and_warms_up():
    config = OptimizerConfig(warmup_steps=4, schedule="cosine")
    assert rate_at(config, 0, 0.0) == 0.25 and rate_at(config, 10, 0.5) == pytest.approx(0.5)
    assert rate_at(config, 100, 1.0) == pytest.approx(0.0) and rate_at(config, 10, 0.25) > 0.75
    linear = dataclasses.replace(config, schedule="linear")
    assert [rate_at(linear, 9, done) for done in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]

"""Online training: one pass over files that appear, scored before learned from, resumed where it was."""

import os
import threading
import time
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from small import make_recipe, make_store, without_draws

from semel import metrics
from semel.batch import Jagged, RequestBatch
from semel.comm.processes import join, spawn
from semel.examples import build_examples, rows_to_table
from semel.examples.predictions import read_predictions
from semel.models import load_model
from semel.training import Follower, Interrupted, Run, Trainer
from semel.training.objectives import RequestObjective


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("follow") / "store")


@pytest.fixture(scope="module")
def rows(store, tmp_path_factory):
    recipe = make_recipe(store, tmp_path_factory.mktemp("rows"))
    rows = build_examples(store, "sessions", recipe.features, validation_fraction=0.2).rows("train")
    return rows.select(np.argsort(rows.pointers.as_of, kind="stable"))


def add(folder, name, rows):
    folder.mkdir(exist_ok=True)
    pq.write_table(rows_to_table(rows), folder / f".{name}.part")
    os.replace(folder / f".{name}.part", folder / f"{name}.parquet")


def fill(folder, rows, cuts=(0, 30, 31, 31, 90)):
    """Files of so many rows, one of them empty, each in another order than that of time."""
    for number, (a, b) in enumerate(pairwise(cuts)):
        add(folder, f"{number:04d}", rows.select(np.arange(a, b)[::-1]))
    return folder


def curve(run):
    return [{name: line[name] for name in ("step", "loss", "rows", "ne", "auc", "window_ne", "file")}
            for line in run.metrics]


def test_each_row_is_scored_before_it_is_learned_from_and_learned_from_once(store, rows, tmp_path):
    """Against a plain loop: score a batch, then step on it."""
    recipe = without_draws(make_recipe(store, tmp_path / "runs", pieces=1))
    folder = fill(tmp_path / "rows", rows)
    start = Trainer(without_draws(make_recipe(store, tmp_path / "runs", epochs=1))).fit()
    run = Follower(recipe, folder, start=start.path).fit(until_idle=0)
    assert (run.path / "alive").exists()  # by which a supervisor knows a trainer that hangs

    model, objective = load_model(start.path).model, RequestObjective(recipe)
    config = recipe.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2))
    ne, step = metrics.NormalizedEntropy(), 0
    for a, b in ((0, 8), (8, 16), (16, 24), (24, 30), (30, 31), *((i, min(i + 8, 90)) for i in range(31, 90, 8))):
        part = rows.select(np.arange(a, b))
        batch = objective.materialize(part, objective.histories(part))
        with torch.no_grad():
            ne.update_logits(*objective.labelled(model.eval(), batch))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model.train()(batch)[:, 0], batch.label["like"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warmup_steps)
        optimizer.step()
        step += 1
    objective.close()
    assert run.summary["steps"] == step == 13 and run.summary["files"] == 4
    assert run.summary["rows"] == ne.rows == len(rows.select(np.arange(90)).candidates.values)
    assert run.summary["prequential"]["ne"] == pytest.approx(ne.ne, rel=1e-5)
    for name, value in load_model(run.path).model.state_dict().items():
        np.testing.assert_allclose(value.numpy(), model.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6)


def test_when_files_appear_changes_nothing(store, rows, tmp_path):
    recipe = make_recipe(store, tmp_path / "runs")
    at_once = Follower(recipe, fill(tmp_path / "whole", rows)).fit(until_idle=0)
    growing = tmp_path / "growing"
    add(growing, "0000", rows.select(np.arange(0, 30)))
    writer = threading.Thread(target=lambda: (time.sleep(1.5), fill(growing, rows)))
    writer.start()
    later = Follower(recipe, growing).fit(until_idle=5)
    writer.join()
    assert curve(later) == curve(at_once) and later.summary["files"] == 4
    assert load_model(later.path).version == load_model(at_once.path).version


@pytest.mark.parametrize("files", [1, 2])
def test_stopped_in_the_middle_of_a_file_it_resumes_exactly_there(store, rows, tmp_path, monkeypatch, files):
    monkeypatch.setattr("semel.training.follow.LOG_EVERY", 4)
    recipe, folder = make_recipe(store, tmp_path / "runs"), fill(tmp_path / "rows", rows)
    whole = Follower(recipe, folder).fit(until_idle=0)
    follower = Follower(recipe, folder)
    follower.on_progress = lambda now: follower.stop() if now.step >= 4 * files else None
    with pytest.raises(Interrupted, match="resume"):
        follower.fit(until_idle=0)
    (stopped,) = [path for path in (tmp_path / "runs").iterdir() if not (path / "run.json").exists()]
    if files == 2:
        (folder / "0000.parquet").unlink()  # it was trained on
    resumed = Follower(recipe, folder).fit(resume=stopped, until_idle=0)
    assert curve(resumed) == curve(whole) and len(curve(whole)) >= 3
    assert resumed.summary["prequential"] == whole.summary["prequential"]
    assert load_model(resumed.path).version == load_model(whole.path).version


def follow_on_ranks(recipe, folder):
    run = Follower(recipe, folder).fit(until_idle=0)
    return join().rank, str(run.path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_follow_as_one_process_does(store, rows, tmp_path):
    recipe, folder = make_recipe(store, tmp_path / "runs"), fill(tmp_path / "rows", rows)
    alone = Follower(recipe, folder).fit(until_idle=0)
    (_, path), (_, same) = spawn(follow_on_ranks, 2, recipe, folder)
    assert path == same
    assert load_model(path).version == load_model(alone.path).version
    assert Run.open(path).summary["prequential"] == pytest.approx(alone.summary["prequential"], rel=1e-9)


def test_refusals(store, rows, tmp_path):
    recipe = make_recipe(store, tmp_path / "runs")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        Follower(recipe, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="ranking recipes"):
        Follower(make_recipe(store, tmp_path, "next_item"), tmp_path)
    log = tmp_path / "log"
    log.mkdir()
    (log / "log.json").write_text("{}")
    with pytest.raises(ValueError, match="join it with its outcomes"):
        Follower(recipe, log)
    run = Trainer(make_recipe(store, tmp_path / "runs", epochs=1)).fit()
    folder = fill(tmp_path / "rows", rows)
    with pytest.raises(ValueError, match="another model"):
        Follower(make_recipe(store, tmp_path, "dcnv2"), folder, start=run.path).fit(until_idle=0)
    with pytest.raises(ValueError, match="trained in epochs"):
        Follower(recipe, folder).fit(resume=run.path, until_idle=0)
    (folder / "0009.parquet").write_bytes(b"not Parquet")
    with pytest.raises(ValueError, match=r"0009\.parquet"):
        Follower(recipe, folder).fit(until_idle=0)


def with_catalogue(rows, items):
    """The same requests, of ``items`` more candidates each that were never shown."""
    import dataclasses

    def longer(values, fill):
        offsets = rows.candidates.offsets
        parts = [np.concatenate([values[a:b], fill]) for a, b in pairwise(offsets.tolist())]
        return np.concatenate(parts)

    rest = np.arange(1000, 1000 + items)
    lengths = rows.candidates.lengths + items
    return dataclasses.replace(
        rows, candidates=Jagged(longer(rows.candidates.values, rest), np.concatenate([[0], np.cumsum(lengths)])),
        label={"like": longer(rows.label["like"], np.zeros(items, np.float32))},
        label_mask={"like": longer(rows.label_mask["like"], np.zeros(items, bool))})


def test_memory_does_not_grow_with_candidates_that_have_no_label(store, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("semel.training.follow.SCORED_TOGETHER", 1000)
    shown = rows.select(np.arange(20))
    recipe = without_draws(make_recipe(store, tmp_path / "runs"))
    alone = Follower(recipe, fill(tmp_path / "shown", shown, (0, 20))).fit(until_idle=0)
    at_once = {True: 0, False: 0}  # the most candidates that a model was given, in training and not

    def note(module, inputs):
        if inputs and isinstance(inputs[0], RequestBatch):
            at_once[module.training] = max(at_once[module.training], inputs[0].candidates)

    add(tmp_path / "all", "0000", with_catalogue(shown, 600))
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        run = Follower(recipe, tmp_path / "all").fit(until_idle=0)
    finally:
        hook.remove()
    assert at_once[True] <= recipe.batch * shown.candidates.lengths.max() < at_once[False] <= 1000
    assert run.summary["steps"] == alone.summary["steps"] == 3
    assert run.summary["prequential"] == pytest.approx(alone.summary["prequential"], rel=1e-6)
    for name, value in load_model(run.path).model.state_dict().items():
        np.testing.assert_allclose(value, load_model(alone.path).model.state_dict()[name], rtol=1e-4, atol=1e-6)
    found = read_predictions(run.path / "predictions")  # of all, shown or not
    assert sum(map(len, found["items"].to_pylist())) == len(shown.candidates.values) + 20 * 600


def test_rows_without_labels_and_without_candidates_are_taken(store, rows, tmp_path):
    import dataclasses

    empty = dataclasses.replace(rows.select(np.arange(2)), candidates=Jagged.from_rows([[], []]),
                                label={"like": np.empty(0, np.float32)}, label_mask={"like": np.empty(0, bool)})
    unlabelled = rows.select(np.arange(2, 6))
    unlabelled = dataclasses.replace(unlabelled, label_mask={"like": np.zeros(len(unlabelled.candidates.values), bool)})
    for number, part in enumerate((empty, unlabelled, rows.select(np.arange(6, 20)))):
        add(tmp_path / "rows", f"{number}", part)
    run = Follower(make_recipe(store, tmp_path / "runs"), tmp_path / "rows").fit(until_idle=0)
    assert run.summary["rows"] == len(rows.select(np.arange(6, 20)).candidates.values) and run.summary["steps"] == 4

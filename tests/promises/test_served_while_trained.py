"""Promise 8 while training goes on: rows and weights change under the server, and what it served is computed again to
the bit; what it lost of what training knew is told apart by cause."""

import dataclasses
import os
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from serving.stand_ins import SPEC, make_store
from typer.testing import CliRunner

from semel.cli import app
from semel.examples import ExposureLog, OutcomeLog, join, rows_to_table
from semel.examples.predictions import read_predictions
from semel.features import Feature
from semel.models import EncoderConfig, ModelConfig, current_version
from semel.serving import Predictor, replay, skew
from semel.training import ExampleConfig, Follower, Interrupted, OptimizerConfig, Recipe

HOUR = 3_600_000_000
ROUNDS, REQUESTS = 4, 20


def recipe_of(folder):
    features = dataclasses.replace(SPEC, request=(), history=(Feature("item_id"), Feature("rating")), history_last=20)
    model = ModelConfig(kind="early_ranker", dim=8, hidden=(8,), memory_rows=200, warm_start=0,
                        encoder=EncoderConfig(dim=8, layers=1, heads=1, head_dim=8, positions=21))
    return Recipe("loop", features, model, ExampleConfig(validation_fraction=0.2), batch=8, pieces=1,
                  optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1), store=str(folder / "store"),
                  out=str(folder / "runs"), version_seconds=0.01, keep_versions=100)


class Site:
    """A follower in a thread, a predictor on its run, and users who like even items."""

    def __init__(self, folder):
        self.folder, self.rows = folder, folder / "rows"
        self.rows.mkdir()
        self.follower = Follower(recipe_of(folder), self.rows)
        self.thread = threading.Thread(target=self._follow)
        self.joined, self.error = 0, None

    def _follow(self):
        try:
            self.follower.fit()
        except Interrupted:
            pass
        except Exception as error:
            self.error = error

    def run(self):
        deadline = time.monotonic() + 120
        while not (found := list((self.folder / "runs").glob("*/model.json"))):
            assert time.monotonic() < deadline and self.thread.is_alive(), self.error
            time.sleep(0.1)
        return found[0].parent

    def learned(self):
        try:
            return len(read_predictions(self.run() / "predictions"))
        except FileNotFoundError:
            return 0

    def learn_from(self, predictor, outcomes):
        """Outcomes of what was served since the last time, joined and trained on; waits until it is."""
        assert predictor.flush(30)
        served = ExposureLog(self.folder / "store" / "exposures").read()
        new = served.slice(self.joined)
        self.joined = len(served)
        labels = [(row["request_id"], item) for row in new.to_pylist() for item in row["candidates"][::2]]
        outcomes.append(pa.table({
            "request_id": [name for name, _ in labels], "item_id": [item for _, item in labels],
            "task": ["like"] * len(labels),
            "value": pa.array([float(item % 2 == 0) for _, item in labels], pa.float32()),
            "received_at": [time.time_ns() // 1000] * len(labels),
            "outcome_key": pa.nulls(len(labels), pa.string())}))
        recipe = self.follower.recipe
        rows = join(new, outcomes.read(), HOUR, recipe.features.tasks, time.time_ns() // 1000 + 2 * HOUR,
                    recipe.features.request).rows
        pq.write_table(rows_to_table(rows), self.rows / ".part")
        os.replace(self.rows / ".part", self.rows / f"{self.joined:06d}.parquet")
        deadline = time.monotonic() + 60
        while self.learned() < self.joined or predictor.model_version != current_version(self.run()):
            assert time.monotonic() < deadline and self.thread.is_alive(), self.error
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for handle in make_store(folder / "store"):
        handle.close()
    site = Site(folder)
    site.thread.start()
    try:
        run = site.run()
        random = np.random.default_rng(0)
        outcomes = OutcomeLog(folder / "store" / "outcomes")
        with Predictor.load(run, folder / "store") as predictor:
            for _ in range(ROUNDS):
                for _ in range(REQUESTS):
                    user = int(random.integers(0, 20))
                    candidates = random.permutation(60)[:12].tolist()
                    result = predictor.rank(user, candidates)
                    assert len(result.results) == 12  # coverage, whatever has no row
                site.learn_from(predictor, outcomes)
            predictor.rank(1, [1, 2, 3])
        outcomes.close()
    finally:
        site.follower.stop()
        site.thread.join(60)
    assert not site.thread.is_alive()
    return run, folder / "store"


def test_all_is_replayed_to_the_bit_whatever_was_swapped_meanwhile(served):
    report = replay(*served)
    assert report.exact and report.bit_equal == report.requests == ROUNDS * REQUESTS + 1
    assert report.memory_gone == 0 and report.other_versions == 0 and report.max_difference == 0
    assert len(report.by_version) >= ROUNDS
    positions = {tuple(row[0].values()) for row in ExposureLog(served[1] / "exposures").read()["memory"].to_pylist()}
    assert len(positions) >= ROUNDS


def test_skew_is_staleness_and_its_causes_are_named(served):
    report = skew(*served)
    assert report.exact and report.requests == ROUNDS * REQUESTS and report.unmatched == 1
    assert report.coverage == 1.0 and 0 < report.found < 1  # items that the catalogue does not have miss
    assert report.labelled == ROUNDS * REQUESTS * 6
    for split, parts in report.tasks["like"].items():
        assert parts, split
        assert sum(part.rows for part in parts) == (report.labelled if split != "row age" else parts_of(report, "hit"))
        for part in parts:
            if part.skew is not None:
                assert part.inexact == 0 and part.skew == pytest.approx(part.staleness)
    (whole,) = report.tasks["like"]["all"]
    assert whole.skew != 0 and whole.gap == pytest.approx(whole.served / whole.trained - 1)
    assert report.tasks["rating"]["all"] == ()  # nobody rated anything
    assert report.worst and {"memory", "weights"} <= {name for one in report.worst for name in one.differs}
    assert not {"history", "features", "replay"} & {name for one in report.worst for name in one.differs}
    for one in report.worst:
        assert one.difference <= one.inexact + one.memory + one.weights + 1e-6


def parts_of(report, name):
    return sum(part.rows for part in report.tasks["like"]["memory"] if part.name == name)


def test_what_differs_is_found(served, tmp_path):
    """A prediction of training from another history or other features, and a score that was not given, are told."""
    import shutil

    run, store = tmp_path / "run", tmp_path / "store"
    shutil.copytree(served[0], run)
    shutil.copytree(served[1], store)
    before = skew(run, store)
    worst = before.worst[0].request_id
    for path in (run / "predictions").glob("*.parquet"):
        table = pq.read_table(path)
        for name in ("history_checksum", "features_checksum"):
            values = [value ^ (request == worst) for value, request in zip(
                table[name].to_pylist(), table["request_id"].to_pylist(), strict=True)]
            table = table.set_column(table.column_names.index(name), name, pa.array(values, pa.uint64()))
        pq.write_table(table, path)
    assert skew(run, store).worst[0].differs[:2] == ("history", "features")
    log = ExposureLog(store / "exposures").read()
    changed = [[value + 0.25 * (row == 3) for value in values]
               for row, values in enumerate(log["task_scores"].to_pylist())]
    log = log.set_column(log.column_names.index("task_scores"), log.schema.field("task_scores"),
                         pa.array(changed, log.schema.field("task_scores").type))
    for segment in (store / "exposures").glob("*.log"):
        segment.unlink()
    with_change = ExposureLog(store / "exposures")
    with_change.append(log)
    with_change.close()
    report = skew(run, store)
    assert not report.exact and report.largest == pytest.approx(0.25, abs=1e-3)
    assert any("replay" in one.differs for one in report.worst)
    assert CliRunner().invoke(app, ["skew", str(run), "--store", str(store)]).exit_code == 1


def test_the_command_prints_a_table_or_an_object_and_one_line_for_bad_input(served, tmp_path):
    import json

    run, store = map(str, served)
    shown = CliRunner().invoke(app, ["skew", run, "--store", store])
    assert shown.exit_code == 0 and "history length: 0" in shown.output and "weights" in shown.output
    found = json.loads(CliRunner().invoke(app, ["skew", run, "--store", store, "--json", "--limit", "30"]).stdout)
    assert found["exact"] and found["requests"] == 30
    assert {"skew", "inexact", "staleness", "gap"} <= set(found["tasks"]["like"]["all"][0])
    for arguments, message in ((["nowhere", "--store", store], "no run at nowhere"),
                               ([run, "--store", "nowhere"], "no store at nowhere"),
                               ([run, "--store", store, "--limit", "0"], "limit must be at least 1")):
        result = CliRunner().invoke(app, ["skew", *arguments])
        assert result.exit_code == 2 and message in result.output and len(result.output.splitlines()) == 1

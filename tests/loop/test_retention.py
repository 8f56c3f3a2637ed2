"""What a loop no longer needs goes, and nothing that a retained exposure names does."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest

from semel.examples import ExposureLog, OutcomeLog
from semel.examples.exposures import EXPOSURE_SCHEMA, OUTCOME_SCHEMA
from semel.features import Task
from semel.loop import LoopConfig, LoopFolder
from semel.loop.joiner import Joiner
from semel.loop.ledger import Answer, Ledger
from semel.loop.retention import SLACK_S, Broom
from semel.memory.delta import Place

NOW = 1_000_000.0
HOUR = 3600.0


def exposure(number, at, version, memory=None):
    base = {
        "request_id": f"r{number}", "user_id": 1, "as_of": 1, "version": 1, "catalogue_version": 1, "context": "{}",
        "candidates": [1, 2], "scored": [True] * 2, "returned": [True] * 2, "position": [0, 1], "scores": [0.5, 0.5],
        "model_version": version, "history_checksum": 1, "history_length": 0, "history_status": 0,
        "batch_requests": 1, "batch_candidates": 2, "device": "cpu", "path": "p", "served_at": round(1e6 * at),
        "memory": None if memory is None else [{"epoch": memory[0], "shard": 0, "sequence": memory[1]}]}
    return pa.Table.from_pylist([base], schema=EXPOSURE_SCHEMA)


def outcome(number, at):
    return pa.Table.from_pylist([{"request_id": f"r{number}", "item_id": 1, "task": "click", "value": 1.0,
                                  "received_at": round(1e6 * at), "outcome_key": f"k{number}"}], schema=OUTCOME_SCHEMA)


@pytest.fixture
def loop(tmp_path):
    """A loop of ten hours: an exposure, an outcome and a version an hour, a segment each."""
    folder = LoopFolder(tmp_path / "loop")
    folder.settle(LoopConfig())
    run = folder.runs / "run"
    (run / "checkpoints" / "step-000000009").mkdir(parents=True)
    exposures = ExposureLog(folder.store / "exposures", segment_bytes=1)
    outcomes = OutcomeLog(folder.store / "outcomes", segment_bytes=1)
    joiner = Joiner(folder.store, folder.rows, (Task("click"),), (), 1000)
    for hour in range(10):
        at = NOW - (9.5 - hour) * HOUR
        joiner.step(round(1e6 * at))
        # Hour 9 was served by a version as old as any: somebody went back to it.
        version = "v2" if hour == 9 else f"v{hour}"
        exposures.append(exposure(hour, at, version, (1, 10 * hour)))
        outcomes.append(outcome(hour, at + 1))
        kept = {"format_version": 1, "version": f"v{hour}", "number": hour, "saved_at": round(1e6 * (at - 60))}
        (run / f"model-{hour}.json").write_text(json.dumps(kept))
        (run / f"model-{hour}.safetensors").write_bytes(b"w")
    (run / "model.json").write_text(json.dumps(kept))
    exposures.close(), outcomes.close()
    joiner.step(round(1e6 * NOW))
    for number in range(10):
        path = folder.rows / f"{number:012d}-{number:012d}.parquet"
        path.write_bytes(b"")
        os.utime(path, (NOW - (9.5 - number) * HOUR,) * 2)
    (run / "checkpoints" / "step-000000009" / "state.json").write_text(json.dumps(
        {"file": f"{8:012d}-{8:012d}.parquet", "done": []}))
    return folder, run


def versions(run):
    return sorted(int(path.stem.removeprefix("model-")) for path in run.glob("model-*.json"))


def test_what_is_older_and_named_by_nobody_goes(loop):
    folder, run = loop
    broom = Broom(folder, run, 3 * HOUR, 1.0)
    swept = broom.sweep(NOW)
    known = ExposureLog(folder.store / "exposures").read()
    oldest = NOW - 3 * HOUR - SLACK_S
    assert known["request_id"].to_pylist() == ["r7", "r8", "r9"] and known["served_at"][0].as_py() / 1e6 >= oldest
    assert OutcomeLog(folder.store / "outcomes").read()["request_id"].to_pylist() == ["r7", "r8", "r9"]
    # The latest five, what retained exposures name, what was saved since.
    assert versions(run) == [2, 5, 6, 7, 8, 9]
    assert all((run / f"model-{one}.safetensors").exists() for one in versions(run))
    assert not (run / "model-0.safetensors").exists()
    rows = sorted(path.name for path in folder.rows.glob("*.parquet"))
    assert rows[0].startswith(f"{7:012d}") and (swept.exposures, swept.outcomes, swept.versions) == (7, 7, 4)
    assert folder.read_status("retention")["kept_since"] == NOW - 3 * HOUR
    again = broom.sweep(NOW)
    assert (again.exposures, again.versions, again.rows) == (7, 4, 7)  # nothing more


def test_a_long_retention_removes_nothing(loop):
    folder, run = loop
    swept = Broom(folder, run, 100 * HOUR, 1.0).sweep(NOW)
    assert not any((swept.exposures, swept.outcomes, swept.versions, swept.rows))
    assert versions(run) == list(range(10))


def test_rows_stay_that_the_trainer_may_begin_again_at(loop):
    folder, run = loop
    state = run / "checkpoints" / "step-000000009" / "state.json"
    state.write_text(json.dumps({"file": f"{3:012d}-{3:012d}.parquet", "done": []}))
    Broom(folder, run, HOUR, 1.0).sweep(NOW)
    assert len(list(folder.rows.glob("*.parquet"))) >= 7  # 3 and later
    state.unlink()
    before = len(list(folder.rows.glob("*.parquet")))
    Broom(folder, run, HOUR, 1.0).sweep(NOW)
    assert len(list(folder.rows.glob("*.parquet"))) == before  # nobody knows


def test_what_was_not_joined_stays(loop):
    folder, run = loop
    (folder.rows / "joined.json").unlink()
    Broom(folder, run, HOUR, 1.0).sweep(NOW)
    assert len(ExposureLog(folder.store / "exposures").read()) == 10


def test_memory_is_kept_from_the_snapshot_below_the_first_position_that_is_named(loop):
    folder, run = loop
    for sequence in range(0, 100):
        for kind in ("delta", "snapshot") if sequence % 20 == 0 else ("delta",):
            path = run / "memory" / Place(kind, 1, 0, sequence).name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    Broom(folder, run, 3 * HOUR, 1.0).sweep(NOW)
    left = sorted(path.name for path in (run / "memory").rglob("*-*"))
    sequences = [int(name.split("-")[2]) for name in left]
    assert min(sequences) == 60 and len(left) == 39 + 2  # snapshots 60 and 80, deltas 61 to 99: hour 7 names 70


def answer(number, at):
    return Answer(number, f"r{number}", 1, at, "v", [(1, 0.5, 1.0, None)], [{"event": number}], [{"outcome": number}])


def test_a_ledger_lets_go_of_what_was_acknowledged_and_counts_it_on(tmp_path):
    with Ledger(tmp_path / "ledger") as ledger:
        for number in [0, 1, 2, 4, 5]:
            ledger.add(answer(number, 100.0 * number))
        for kind in ("events", "outcomes"):
            ledger.acknowledge(kind, [0, 1, 4], 1.0)
        assert ledger.forget(1000.0) == 2  # 2 was not acknowledged, 3 not answered
        assert ledger.counts() == {"answers": 5, "events": 3, "outcomes": 3} and ledger.first_unanswered() == 3
        assert ledger.answered(0) and ledger.answered(2) and not ledger.answered(3)
        ledger.acknowledge("events", [2], 1.0), ledger.acknowledge("outcomes", [2], 1.0)
        assert ledger.forget(150.0) == 0 and ledger.forget(1000.0) == 1
        ledger.add(answer(3, 600.0))
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.first_unanswered() == 6 and [one.number for one in ledger.answers()] == [4, 5, 3]
        assert ledger.counts()["answers"] == 6 and ledger.forget(0.0) == 0


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="at least 60 seconds"):
        LoopConfig(retention=5.0)
    with pytest.raises(ValueError, match="at least 60 seconds"):
        LoopConfig(retention=float("nan"))
    assert LoopConfig(retention=0.0).retention == 0 and np.isfinite(LoopConfig().retention)

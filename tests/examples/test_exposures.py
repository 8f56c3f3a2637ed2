import multiprocessing
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from semel.examples import EXPOSURE_SCHEMA, OUTCOME_SCHEMA, ExposureLog, OutcomeLog
from semel.history.log.segments import SegmentWriter

LATER = ("surface", "shown", "position", "task_scores", "memory", "batch_id", "batch_index")


def exposure(request_id="r1", user_id=7, candidates=(1, 2, 3), **other):
    n = len(candidates)
    row = {
        "request_id": request_id, "user_id": user_id, "as_of": 1000, "version": 4, "catalogue_version": 2,
        "context": '{"age": "25"}', "candidates": list(candidates), "scored": [True] * n, "returned": [True] * n,
        "scores": [0.5] * n, "model_version": "m1", "history_checksum": 2**64 - 1, "history_length": 3,
        "history_status": 0, "batch_requests": 1, "batch_candidates": n, "device": "cpu", "path": "eager",
        "served_at": 1000, **other,
    }
    free = ("candidates", "user_id")  # integers or strings
    return pa.table({name: pa.array([value], None if name in free else EXPOSURE_SCHEMA.field(name).type)
                     for name, value in row.items()})


def outcome(request_id="r1", item_id=1, task="like", value=1.0, received_at=1001, **other):
    return pa.table({"request_id": [request_id], "item_id": [item_id], "task": [task], "value": [value],
                     "received_at": [received_at], **{name: [v] for name, v in other.items()}})


def test_exposures_come_back_in_order_with_fields_of_later_parts_null(tmp_path):
    log = ExposureLog(tmp_path / "exposures")
    assert log.read().schema == EXPOSURE_SCHEMA and len(log.read()) == 0
    log.append(exposure("r1"))
    log.append(exposure("r2", memory=[{"epoch": 1, "shard": 0, "sequence": 5}], shown=[True, None, False]))
    table = log.read()
    assert table.schema == EXPOSURE_SCHEMA
    assert table["request_id"].to_pylist() == ["r1", "r2"]
    assert all(table[name][0].as_py() is None for name in LATER)
    assert table["history_checksum"].to_pylist() == [2**64 - 1] * 2
    assert table["memory"][1].as_py() == [{"epoch": 1, "shard": 0, "sequence": 5}]
    assert table["shown"][1].as_py() == [True, None, False]


def test_string_ids_are_the_logs_own_from_the_first_append_on(tmp_path):
    log = ExposureLog(tmp_path / "exposures")
    log.append(exposure(user_id="ü", candidates=["фильм", "b"]))
    again = ExposureLog(tmp_path / "exposures")
    assert again.read()["candidates"].to_pylist() == [["фильм", "b"]]
    assert again.read().schema.field("user_id").type == pa.string()


def test_segments_roll_over_and_a_restart_opens_a_new_one(tmp_path):
    log = ExposureLog(tmp_path / "exposures", segment_bytes=1)
    for number in range(3):
        log.append(exposure(f"r{number}"))
    log.close()
    again = ExposureLog(tmp_path / "exposures")
    again.append(exposure("r3"))
    names = sorted(path.name for path in (tmp_path / "exposures").glob("*.log"))
    assert names == ["00000001.log", "00000002.log", "00000003.log", "00000004.log"]
    assert again.read()["request_id"].to_pylist() == ["r0", "r1", "r2", "r3"]


def test_a_torn_last_record_is_not_read_and_the_next_process_goes_on(tmp_path):
    log = ExposureLog(tmp_path / "exposures")
    log.append(exposure("r1"))
    log.append(exposure("r2"))
    log.close()
    segment = tmp_path / "exposures" / "00000001.log"
    segment.write_bytes(segment.read_bytes()[:-20])
    again = ExposureLog(tmp_path / "exposures")
    again.append(exposure("r3"))
    assert again.read()["request_id"].to_pylist() == ["r1", "r3"]


@pytest.mark.parametrize("after_writing", [False, True])
def test_a_failed_append_is_told_and_the_next_one_goes_on(tmp_path, monkeypatch, after_writing):
    log, outcomes = ExposureLog(tmp_path / "exposures"), OutcomeLog(tmp_path / "outcomes")
    log.append(exposure("r1"))
    whole = SegmentWriter.append

    def full(self, batch, metadata=None):
        if after_writing:  # the record is there, but nobody could say so
            whole(self, batch, metadata)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentWriter, "append", full)
    with pytest.raises(OSError, match="No space"):
        log.append(exposure("r2"))
    with pytest.raises(OSError, match="No space"):
        outcomes.append(outcome(outcome_key="k"))
    monkeypatch.undo()
    log.append(exposure("r2"))
    assert log.read()["request_id"].to_pylist() == ["r1", *["r2"] * (1 + after_writing)]
    assert outcomes.append(outcome(outcome_key="k")) == 1  # not taken for a retry: it never was acknowledged


def test_exposures_that_do_not_fit_are_refused_whole(tmp_path):
    log = ExposureLog(tmp_path / "exposures")
    with pytest.raises(ValueError, match="scores has 2 values for 3 candidates"):
        log.append(exposure(scores=[0.1, 0.2]))
    with pytest.raises(ValueError, match="column as_of is missing"):
        log.append(exposure().drop_columns("as_of"))
    with pytest.raises(ValueError, match="no column colour"):
        log.append(exposure().append_column("colour", pa.array(["red"])))
    log.append(exposure())
    with pytest.raises(ValueError, match="user_id must be int64"):
        log.append(exposure(user_id="x"))
    assert len(log.read()) == 1


def test_an_outcome_with_a_known_key_is_a_retry(tmp_path):
    log = OutcomeLog(tmp_path / "outcomes")
    both = pa.concat_tables([outcome(outcome_key="k1"), outcome(outcome_key="k1", value=0.0)])
    assert log.append(both) == 1
    assert log.append(outcome(outcome_key="k1")) == 0
    assert log.append(outcome(outcome_key=None, value=0.5).cast(OUTCOME_SCHEMA)) == 1
    log.close()
    again = OutcomeLog(tmp_path / "outcomes")
    assert again.append(outcome(outcome_key="k1")) == 0
    assert again.append(outcome(outcome_key="k2")) == 1
    assert again.read()["value"].to_pylist() == [1.0, 0.5, 1.0]
    assert again.read().schema == OUTCOME_SCHEMA


def test_only_so_many_keys_are_remembered(tmp_path):
    log = OutcomeLog(tmp_path / "outcomes", remember=2)
    for key in ("a", "b", "c", "a"):
        log.append(outcome(outcome_key=key))
    assert log.read()["outcome_key"].to_pylist() == ["a", "b", "c", "a"]


def test_outcomes_must_be_finite_numbers(tmp_path):
    log = OutcomeLog(tmp_path / "outcomes")
    with pytest.raises(ValueError, match="finite"):
        log.append(outcome(value=float("nan")))
    assert len(log.read()) == 0


def test_a_log_of_another_kind_or_format_is_refused(tmp_path):
    ExposureLog(tmp_path / "log").append(exposure())
    with pytest.raises(ValueError, match="reads 'outcomes' in format 1"):
        OutcomeLog(tmp_path / "log").read()
    meta = tmp_path / "log" / "log.json"
    meta.write_text(meta.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(ValueError, match="format 9"):
        ExposureLog(tmp_path / "log").read()


def _read_until(path, count, out):
    seen = 0
    deadline = time.monotonic() + 30
    while seen < count and time.monotonic() < deadline:
        ids = ExposureLog(path).read()["request_id"].to_pylist()
        assert ids == [f"r{i}" for i in range(len(ids))] and len(ids) >= seen
        seen = len(ids)
    out.put(seen)


@pytest.mark.timeout(60)
def test_another_process_reads_whole_records_while_the_log_grows(tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    reader = context.Process(target=_read_until, args=(tmp_path / "log", 40, out))
    reader.start()
    try:
        log = ExposureLog(tmp_path / "log", segment_bytes=20_000)
        for number in range(40):
            log.append(exposure(f"r{number}", candidates=np.arange(100)))
        assert out.get(timeout=40) == 40
    finally:
        reader.join(5)
        if reader.is_alive():
            reader.kill()


def test_reading_logs_needs_no_torch():
    code = ("import sys; from semel.examples import ExposureLog, OutcomeLog, join, sessions; "
            "assert 'torch' not in sys.modules, 'torch was imported'")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

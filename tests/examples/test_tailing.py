"""Reading a log as it grows gives each record once, over segments and restarts."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import OutcomeLog
from semel.examples.tailing import LogPosition, LogTail
from semel.history.erasure import erase_rows


def rows(first, count):
    return pa.table({"request_id": [f"r{n}" for n in range(first, first + count)],
                     "item_id": list(range(first, first + count)),
                     "task": ["click"] * count, "value": pa.array([1.0] * count, pa.float32()),
                     "received_at": list(range(first, first + count)),
                     "outcome_key": [f"k{n}" for n in range(first, first + count)]})


def read(tail):
    return [key for table, _ in tail.read() for key in table["outcome_key"].to_pylist()]


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.sampled_from(["append", "restart writer", "read", "restart reader"]), max_size=25))
def test_each_record_once_whatever_comes_between(steps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    log, tail = OutcomeLog(folder, segment_bytes=3000), LogTail(OutcomeLog(folder))
    written, seen = 0, []
    for step in steps:
        if step == "append":
            log.append(rows(written, 3))
            written += 3
        elif step == "restart writer":
            log.close()
            log = OutcomeLog(folder, segment_bytes=3000)
        elif step == "read":
            seen += read(tail)
        else:
            tail = LogTail(OutcomeLog(folder), tail.position)
    log.close()
    assert seen + read(tail) == [f"k{n}" for n in range(written)]


def test_positions_are_behind_records(tmp_path):
    log = OutcomeLog(tmp_path)
    assert read(LogTail(log)) == []
    for first in (0, 2, 4):
        log.append(rows(first, 2))
    positions = [after for _, after in LogTail(log).read()]
    assert read(LogTail(log, positions[0])) == ["k2", "k3", "k4", "k5"]
    assert read(LogTail(log, positions[-1])) == []
    log.close()


def test_a_log_that_somebody_was_erased_from_is_read_on(tmp_path):
    log = OutcomeLog(tmp_path)
    for first in (0, 2, 4):
        log.append(rows(first, 2))
    positions = [after for _, after in LogTail(log).read()]
    log.close()
    erase_rows([tmp_path / "00000001.log"], "item_id", np.array([0, 3]))
    assert [read(LogTail(log, after)) for after in positions] == [["k2", "k4", "k5"], ["k4", "k5"], []]


def test_a_torn_record_is_left_for_later(tmp_path):
    log = OutcomeLog(tmp_path)
    log.append(rows(0, 2))
    log.append(rows(2, 2))
    log.close()
    path = tmp_path / "00000001.log"
    whole = path.read_bytes()
    tail = LogTail(log)
    path.write_bytes(whole[:-20])
    assert read(tail) == ["k0", "k1"]
    path.write_bytes(whole)
    assert read(tail) == ["k2", "k3"]
    assert isinstance(tail.position, LogPosition)

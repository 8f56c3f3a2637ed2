"""The two loops over the same stages, and what the timeline says of them."""

import json
import threading
import time

import pytest

from semel.training.loops import Stage, overlapped, plain
from semel.training.timeline import Timeline, short, write_trace


class Work(dict):
    pass


def stages(log, delay=0.0):
    def stage(name):
        def run(work):
            time.sleep(delay)
            work[name] = work["number"]
            log.append((name, work["number"], threading.current_thread().name))
        return run

    return [Stage("read", stage("read"), ahead=True), Stage("materialize", stage("materialize"), ahead=True),
            Stage("forward", stage("forward")), Stage("update", stage("update"))]


@pytest.mark.parametrize("loop", [plain, overlapped])
def test_every_batch_goes_through_every_stage_in_order(loop):
    log = []
    done = list(loop(stages(log), (Work(number=i) for i in range(9)), Timeline()))
    assert [work["number"] for work in done] == list(range(9))
    for name in ("read", "materialize", "forward", "update"):
        assert [number for stage, number, _ in log if stage == name] == list(range(9))
    for number in range(9):
        assert [name for name, n, _ in log if n == number] == ["read", "materialize", "forward", "update"]


def test_only_stages_that_may_run_ahead_do_and_as_far_as_allowed():
    log = []
    seen = []
    for work in overlapped(stages(log), (Work(number=i) for i in range(12)), Timeline(), ahead=3):
        time.sleep(0.01)
        seen.append((work["number"], max(n for name, n, _ in log if name == "materialize")))
        assert max(n for name, n, _ in log if name == "forward") == work["number"]
    assert all(min(number + 3, 11) >= ahead >= number for number, ahead in seen)
    assert any(ahead > number for number, ahead in seen)
    threads = {name: {thread for stage, _, thread in log if stage == name} for name in ("read", "forward")}
    assert threads["forward"] == {threading.current_thread().name} and len(threads["read"]) == 1
    assert not threads["read"] & threads["forward"]


def test_what_was_begun_is_finished_when_the_consumer_stops():
    log = []
    loop = overlapped(stages(log, delay=0.005), (Work(number=i) for i in range(50)), Timeline(), ahead=4)
    next(loop)
    next(loop)
    loop.close()
    for name in ("read", "materialize"):
        assert [n for stage, n, _ in log if stage == name] == list(range(6))  # 2 computed, 4 more begun
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("semel-stage-")]


@pytest.mark.parametrize("loop", [plain, overlapped])
def test_an_error_comes_out_at_its_batch(loop):
    def fail(work):
        if work["number"] == 3:
            raise ValueError("batch 3 is bad")

    done = []
    with pytest.raises(ValueError, match="batch 3 is bad"):
        done.extend(work["number"] for work in loop(
            [Stage("read", fail, ahead=True), Stage("forward", lambda work: None)], (Work(number=i) for i in range(9)),
            Timeline()))
    assert done == [0, 1, 2]


def test_the_timeline_counts_a_wait_once_and_names_it(tmp_path):
    timeline = Timeline(rank=3)
    for _ in range(2):
        with timeline.span("update"):
            time.sleep(0.01)
            with timeline.span("straggler"):
                time.sleep(0.03)
        timeline.end_step()
    means = timeline.means()
    assert 0.03 <= means["straggler"] < 0.06 and 0.01 <= means["update"] < 0.03
    assert means["step"] >= means["straggler"] + means["update"]
    assert timeline.totals["straggler"] == pytest.approx(2 * means["straggler"])
    assert short(means).startswith("step ") and "straggler" in short(means) and "input" not in short(means)
    write_trace(tmp_path / "t.json", timeline.events())
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert {(e["name"], e["cat"], e["pid"], e["args"]["step"]) for e in spans} == {
        (name, cat, 3, step) for name, cat in (("update", "stage"), ("straggler", "bubble")) for step in (0, 1)}
    assert abs(spans[0]["ts"] / 1e6 - time.time()) < 60 and spans[0]["dur"] >= 30_000
    assert {"name": "rank 3"} in [event["args"] for event in trace if event["ph"] == "M"]
    assert timeline.means().keys() == {"step"}


def test_a_slow_reader_shows_as_a_wait_for_input():
    slow = [Stage("read", lambda work: time.sleep(0.01), ahead=True), Stage("forward", lambda work: None)]
    timeline = Timeline()
    list(overlapped(slow, range(10), timeline))
    assert timeline.totals["input"] > 0.05 > timeline.totals["forward"]

"""The joiner writes each request once, with the labels that one join at the end would give, however it is stopped."""

import inspect
import json
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import ExposureLog, OutcomeLog, concat_rows, join, read_rows
from semel.features import Task
from semel.loop.joiner import GRACE_US, STATE, Joiner
from semel.metrics import NormalizedEntropy

SECOND = 1_000_000
WINDOW = 10 * SECOND
TASKS = (Task("click", unobserved=0.0),)
ITEMS = 4


def exposure(number, now):
    random = np.random.default_rng(number)
    return {
        "request_id": f"r{number}", "user_id": number % 3, "as_of": now, "version": 1, "catalogue_version": 0,
        "context": "{}", "candidates": list(range(ITEMS)), "scored": [True] * ITEMS, "returned": [True] * ITEMS,
        "scores": random.random(ITEMS).tolist(), "model_version": "m", "history_checksum": 1, "history_length": 0,
        "history_status": 0, "batch_requests": 1, "batch_candidates": ITEMS, "device": "cpu", "path": "p",
        "served_at": now,
    }


def outcome(number, item, now, value, key):
    return {"request_id": f"r{number}", "item_id": item, "task": "click", "value": value, "received_at": now,
            "outcome_key": key}


class Site:
    """Logs of a server whose clock is ``now``."""

    def __init__(self, folder):
        self.folder, self.now, self.number, self.key = folder, 1_000 * SECOND, 0, 0
        self.exposures, self.outcomes = ExposureLog(folder / "exposures"), OutcomeLog(folder / "outcomes")
        (folder / "rows").mkdir()

    def joiner(self):
        return Joiner(self.folder, self.folder / "rows", TASKS, (), WINDOW)

    def serve(self, requests):
        rows = [exposure(self.number + n, self.now) for n in range(requests)]
        self.exposures.append(pa.Table.from_pylist(rows))
        self.number += requests

    def report(self, back, item, value):
        if self.number > back:
            self.outcomes.append(pa.Table.from_pylist(
                [outcome(self.number - 1 - back, item, self.now, value, f"k{self.key}")]))
            self.key += 1

    def files(self):
        return sorted((self.folder / "rows").glob("*.parquet"))


STEPS = st.one_of(
    st.tuples(st.just("serve"), st.integers(1, 4)),
    st.tuples(st.just("report"), st.integers(0, 6), st.integers(0, ITEMS - 1), st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("wait"), st.integers(1, 9)),
    st.tuples(st.just("step")), st.tuples(st.just("restart")), st.tuples(st.just("crash")))


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(STEPS, max_size=30))
def test_files_hold_what_one_join_would_give(steps, tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("joined"))
    joiner = site.joiner()
    for name, *values in steps:
        if name == "serve":
            site.serve(*values)
        elif name == "report":
            site.report(*values)
        elif name == "wait":
            site.now += values[0] * SECOND
        elif name == "step":
            joiner.step(site.now)
        elif name == "restart":
            joiner = site.joiner()
        else:  # the file is there, what was known of it is not
            saved = site.folder / "rows" / STATE
            before = saved.read_bytes() if saved.exists() else None
            joiner.step(site.now)
            saved.unlink(missing_ok=True)
            if before is not None:
                saved.write_bytes(before)
            joiner = site.joiner()
    site.now += WINDOW + GRACE_US + SECOND
    joiner.step(site.now)
    if not site.number:
        assert not site.files()
        return
    whole = join(site.exposures.read(), site.outcomes.read(), WINDOW, TASKS, site.now).rows
    mask = whole.label_mask["click"].reshape(-1, ITEMS)
    expected = whole.select(np.flatnonzero(mask.any(1)))
    assert joiner.pending == 0 and joiner.state.joined == site.number
    if not len(expected):
        assert not site.files()
        return
    found = concat_rows([read_rows(path) for path in site.files()])
    assert found.request_id.tolist() == expected.request_id.tolist()
    assert np.array_equal(found.label["click"], expected.label["click"])
    assert np.array_equal(found.label_mask["click"], expected.label_mask["click"])
    assert [path.stem for path in site.files()] == sorted(path.stem for path in site.files())


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(STEPS.filter(lambda step: step[0] != "crash"), max_size=30))
def test_each_outcome_is_counted_once_over_restarts(steps, tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("counted"))
    site.now = time.time_ns() // 1000  # files remember when they were written
    joiner = site.joiner()
    for name, *values in steps:
        if name == "serve":
            site.serve(*values)
        elif name == "report":
            site.report(*values)
        elif name == "wait":
            site.now += values[0] * SECOND
        elif name == "step":
            joiner.step(site.now)
        else:
            joiner = site.joiner()
    for _ in range(4):
        site.now += WINDOW + GRACE_US + SECOND
        joiner.step(site.now)
        joiner = site.joiner() if len(steps) % 2 else joiner
    counts = joiner.state.counts
    assert sum(counts.values()) == site.key, counts


def test_the_window_holds_requests_back_and_late_outcomes_out(tmp_path):
    site = Site(tmp_path)
    site.serve(1)
    site.report(0, 2, 1.0)
    joiner = site.joiner()
    site.now += WINDOW
    assert joiner.step(site.now) == [] and joiner.pending == 1  # an outcome may still be on its way to the disk
    site.now += GRACE_US
    [path] = joiner.step(site.now)
    assert path.name == "000000000000-000000000000.parquet"
    site.report(0, 1, 1.0)
    joiner.step(site.now)
    assert joiner.state.counts["late"] == 1 and joiner.state.counts["used"] == 1
    assert pq.read_table(path)["label.click"].to_pylist() == [[None, None, 1.0, None]]


def test_served_entropy_is_of_the_labels_in_the_files(tmp_path):
    site = Site(tmp_path)
    expected = NormalizedEntropy()
    for number in range(20):
        site.serve(1)
        scores = np.float32(exposure(number, 0)["scores"])
        site.report(0, number % ITEMS, float(number % 2))
        expected.update(np.array([float(number % 2)]), scores[[number % ITEMS]])
    joiner = site.joiner()
    site.now += WINDOW + GRACE_US
    joiner.step(site.now)
    assert joiner.status()["served_ne"] == pytest.approx(expected.ne, rel=1e-6)
    assert joiner.status()["labelled"] == 20


def test_any_number_of_requests_in_a_row_may_have_no_label(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.loop.joiner.MOST_A_FILE", 1)
    limit = len(inspect.stack(0)) + 100
    empty = limit + 20
    site = Site(tmp_path)
    site.serve(empty)
    site.serve(1)
    site.report(0, 2, 1.0)
    joiner = site.joiner()
    site.now += WINDOW + GRACE_US
    monkeypatch.setattr(joiner, "_save", lambda: None)  # not what this is about, and slow
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        [path] = joiner.step(site.now)
    finally:
        sys.setrecursionlimit(usual)
    assert path.name == f"{empty:012d}-{empty:012d}.parquet"
    assert joiner.pending == 0 and joiner.state.joined == empty + 1 and joiner.state.files == 1


def test_an_outcome_of_nobody_is_counted_and_let_go(tmp_path):
    site = Site(tmp_path)
    site.serve(1)
    site.outcomes.append(pa.Table.from_pylist([outcome(99, 0, site.now, 1.0, "lost")]))
    joiner = site.joiner()
    joiner.step(site.now)
    site.now += 3 * (WINDOW + GRACE_US)
    joiner.step(site.now)
    assert joiner.state.counts["unmatched_requests"] == 1 and not joiner._held


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        Joiner(tmp_path, tmp_path / "none", TASKS, (), WINDOW)
    with pytest.raises(ValueError, match="negative"):
        Joiner(tmp_path, tmp_path, TASKS, (), -1)
    (tmp_path / STATE).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        Joiner(tmp_path, tmp_path, TASKS, (), WINDOW)
    (tmp_path / STATE).write_text(json.dumps({"format": 9}))
    with pytest.raises(ValueError, match="unknown format"):
        Joiner(tmp_path, tmp_path, TASKS, (), WINDOW)

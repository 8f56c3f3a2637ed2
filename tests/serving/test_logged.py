"""A log of exposures in parts: each wanted exposure once, batches whole, and a replay that does not notice."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import ExposureLog, OutcomeLog
from semel.serving import Predictor, replay, replays
from semel.serving.logged import parts, survey
from serving.stand_ins import make_store, save_tiny_model


def exposure(number, version, batch, items):
    return {
        "request_id": f"r{number}", "user_id": 1, "as_of": 1, "version": 1, "catalogue_version": 0, "context": "{}",
        "candidates": list(range(items)), "scored": [True] * items, "returned": [True] * items,
        "scores": [0.5] * items, "model_version": version, "history_checksum": 1, "history_length": 0,
        "history_status": 0, "batch_id": batch, "batch_index": 0, "batch_requests": 1, "batch_candidates": items,
        "device": "cpu", "path": "p", "served_at": 1000 + number}


ROWS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abc"), st.none() | st.integers(0, 6), st.integers(0, 9)),
                min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, cuts=st.lists(st.integers(1, 7), min_size=40, max_size=40), candidates=st.integers(1, 60),
       limit=st.none() | st.integers(1, 20))
def test_each_wanted_exposure_is_in_one_part_with_its_batch(rows, cuts, candidates, limit, tmp_path_factory):
    log = ExposureLog(tmp_path_factory.mktemp("log") / "exposures")
    rows = [exposure(number, version, None if batch is None else f"{version}{batch}", items)
            for number, version, batch, items in rows]
    left = list(rows)
    for cut in cuts:
        if left:
            log.append(pa.Table.from_pylist(left[:cut]))
            left = left[cut:]
    log.close()
    first = {}  # of the wanted versions, each request once
    for place, row in enumerate(rows):
        if row["model_version"] != "c":
            first.setdefault(row["request_id"], place)
    wanted = sorted(first.values())[-(limit or 1000):]
    found = survey(log, {"a", "b", "x"}, limit)
    assert found.places.tolist() == wanted and found.total == len(rows)
    assert found.others == sum(row["model_version"] == "c" for row in rows)
    assert found.versions == sorted({rows[place]["model_version"] for place in wanted})
    seen, part_of = [], {}
    for number, (table, places) in enumerate(parts(log, found, candidates)):
        assert [row["request_id"] for row in table.to_pylist()] == [rows[place]["request_id"] for place in places]
        assert (np.diff(places) > 0).all()
        seen += places.tolist()
        for place in places.tolist():
            batch = rows[place]["batch_id"]
            assert batch is None or part_of.setdefault(batch, number) == number
    assert sorted(seen) == wanted


@pytest.mark.parametrize("candidates", [1, 100])
def test_a_replay_in_many_parts_is_one_replay(tmp_path, monkeypatch, candidates):
    for store in make_store(tmp_path / "store"):
        store.close()
    run, store = tmp_path / "run", tmp_path / "store"
    outcomes = OutcomeLog(store / "outcomes")
    for seed in range(3):
        save_tiny_model(run, seed=seed)
        with Predictor.load(run, store) as predictor:
            for user in range(8):
                ranked = predictor.rank(user, list(range(user, user + 9)), as_of=10**15)
                outcomes.append(pa.table({
                    "request_id": [ranked.request_id] * 3, "item_id": [item for item, _ in ranked.results[:3]],
                    "task": ["like"] * 3, "value": pa.array([1.0, 0.0, user % 2], pa.float32()),
                    "received_at": [ranked.pointer.as_of] * 3}))
    outcomes.close()
    whole = replay(run, store)
    assert whole.exact and whole.bit_equal == whole.requests == 24 and len(whole.by_version) == 3
    assert whole.labelled == 72 and whole.served_ne == whole.replayed_ne
    used = []

    def few(log, found):
        for part in parts(log, found, candidates):
            used.append(len(part[0]))
            yield part

    monkeypatch.setattr(replays, "parts", few)
    assert replace(replay(run, store), seconds=0.0) == replace(whole, seconds=0.0) and len(used) > 1

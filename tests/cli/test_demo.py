"""The demo's parts: its folder, its requests, its bytes, and what it ends with. CI runs the whole of it."""

import json

import numpy as np
import pytest

from semel.batch import Jagged, Pointers, RequestRows, offsets_of
from semel.cli.demo import closing, ingesting, serving, storage
from semel.cli.demo.evaluating import OURS
from semel.cli.demo.folder import MARK, fresh
from semel.cli.demo.state import Demo


def rows_of(candidates, users=None):
    """Requests of one user each, a second apart, with ``candidates`` and a label for each."""
    count = len(candidates)
    values = np.concatenate([np.asarray(row) for row in candidates])
    return RequestRows(
        np.array([f"r{n}" for n in range(count)], dtype=object),
        Pointers(np.arange(count) if users is None else users, 1_000_000 * np.arange(1, count + 1), np.array(1)),
        np.zeros(count, np.int64), {"age": np.array([None, "25"] * count, dtype=object)[:count]},
        Jagged(values, offsets_of([len(row) for row in candidates])),
        {"like": np.ones(len(values), np.float32)}, {"like": np.arange(len(values)) % 2 == 0})


# The folder


def test_a_demo_replaces_only_a_demo(tmp_path):
    folder = tmp_path / "demo"
    assert fresh(folder) is False
    (folder / "left-over").write_text("old")
    assert fresh(folder) is True
    assert [path.name for path in folder.iterdir()] == [MARK]


def test_a_demo_leaves_what_it_did_not_make(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="--dir"):
        fresh(tmp_path)
    with pytest.raises(ValueError, match="--dir"):
        fresh(tmp_path / "mine")


def test_an_empty_folder_will_do(tmp_path):
    assert fresh(tmp_path) is False


# Requests


def test_every_request_has_500_distinct_candidates_its_own_among_them():
    rows = rows_of([[1, 2], [3], list(range(700))])
    asks = list(serving.draw(rows, np.arange(900), 6))
    assert len(asks) == 6
    for ask in asks:
        assert len(ask.candidates) == len(set(ask.candidates)) == serving.CANDIDATES
        assert set(ask.labels) <= set(ask.candidates)
    assert asks == list(serving.draw(rows, np.arange(900), 6))
    contexts = {ask.user_id: ask.context for ask in asks}
    assert contexts[0] == {} and contexts[1] == {"age": "25"}


def test_labels_are_those_that_were_given():
    (ask,) = serving.draw(rows_of([[7, 8, 9]]), np.arange(600), 1)
    assert ask.labels == {7: {"like": 1.0}, 8: {}, 9: {"like": 1.0}}


# Bytes


@pytest.fixture
def histories(tmp_path):
    import pyarrow as pa

    from semel.history import EventSchema, HistoryStore

    draw = np.random.default_rng(0)
    schema = EventSchema({"item_id": pa.int64(), "note": pa.string()})
    with HistoryStore.create(tmp_path / "store", schema, shards=2) as store:
        store.append(pa.table({
            "user_id": np.repeat(np.arange(256), 400), "event_time": np.tile(np.arange(400), 256),
            "item_id": draw.integers(0, 3000, 256 * 400), "note": pa.array(["a", None] * 128 * 400)}))
        yield store


@pytest.mark.parametrize("layout", storage.LAYOUTS)
def test_fat_rows_grow_with_the_history_and_with_the_copies(histories, tmp_path, layout):
    from semel.history import Projection

    rows = rows_of([[1, 2, 3]] * 64, users=np.arange(64) % 8)
    size = {}
    for last in (10, 400):
        lengths, _ = histories.lengths(rows.pointers, Projection(("item_id",), last=last))
        assert lengths.min() == last
        size[last] = storage.fat_bytes(histories, rows, lengths, ("item_id", "note"), last, layout, tmp_path)
    assert size[400] > 1.5 * size[10]
    assert not (tmp_path / "fat.parquet").exists()


def test_a_sample_is_scaled_to_the_whole(histories, tmp_path):
    from semel.history import Projection

    rows = rows_of([[1]] * 256, users=np.arange(256))
    lengths, _ = histories.lengths(rows.pointers, Projection(("item_id",), last=400))
    whole, part = (storage.fat_bytes(histories, rows, lengths, ("item_id",), 400, "request", tmp_path, events)
                   for events in (10**9, 1))
    assert part == pytest.approx(whole, rel=0.1)  # half of the rows, and all of what a file costs by itself


def test_blocks_keep_neighbours_together():
    order, weight = np.arange(1000)[::-1], np.ones(1000, np.int64)
    chosen = storage.blocks(order, weight, enough=200, seed=1)
    assert len(chosen) >= 200 and len(np.unique(chosen)) == len(chosen)
    assert np.all(np.diff(chosen[: storage.BLOCK]) == -1)
    assert len(storage.blocks(order, weight, enough=10**9, seed=1)) == 1000


def test_a_sample_of_users_keeps_all_their_events(small_data):
    from semel.datasets import read

    dataset = read(small_data)
    part = ingesting.sample(dataset, 5)
    users = np.unique(part.events["user_id"].to_numpy())
    assert len(users) == 5
    assert part.events.num_rows == np.isin(dataset.events["user_id"].to_numpy(), users).sum()


# The end


def figure(value):
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


@pytest.fixture
def done(tmp_path):
    """A demo whose steps are over, with made-up numbers."""
    demo = Demo(tmp_path, True, None, 0.0)
    rank = {name: {"ne": figure(ne), "auc": figure(0.7)} for name, ne in
            (("popularity", 0.99), ("item-kNN", 0.9), (OURS["rank"], 0.88))}
    following = {name: {"hr@10": figure(0.2), "ndcg@10": figure(0.1)} for name in ("popularity", OURS["next"])}
    judged = {"tasks": {"like": {"reliability": [{"low": 0.5, "high": 0.55, "prediction": 0.52, "label": 0.5,
                                                  "weight": 10.0}], "calibration": figure(1.0)}}}
    curve = [{"kind": "train", "step": step, "epoch": 0, "loss": 1 / step} for step in (1, 2)]
    curve.append({"kind": "validation", "step": 2, "epoch": 1, "ne": 0.9})
    training = {"seconds": 3.0}
    demo.facts |= {
        "data": {"name": "ml-1m", "source": "nowhere", "licence": "none", "events": 10, "users": 2},
        "stored": {"events": 10, "requests": 4, "bytes": 10, "store_bytes": 8, "rows_bytes": 2, "fat_rows_bytes": 30,
                   "ratio": 3.0, "fat_rows_by_layout": {"a row a request, last 100": 12, "a row a candidate": 30}},
        "quality": {"ranking": {"models": rank}, "next_item": {"models": following}},
        "ranking": {OURS["rank"]: judged}, "history_lengths": np.array([0, 3, 200]),
        "rank_metrics": curve, "next_metrics": [], "rank_training": training, "next_training": training,
        "served": {"requests": 3, "candidates": 500, "p50_ms": 1.0, "p99_ms": 2.0, "event_to_seen_ms": 5.0},
        "computed": {"requests": 3, "candidates": 500, "once_ms": 7.5, "kept_ms": 4.0, "per_candidate_ms": 900.0,
                     "ratio": 120.0, "max_difference": 1e-7},
        "waited": {"ranks": 2, "requests": 4, "batches": 1, "idle": {"as they come": 0.25, "balanced": 0.01},
                   "loads": {"as they come": [4.0, 2.0], "balanced": [3.0, 3.0]}},
        "embedded": {"items": 40, "requests": 3, "coverage": 1.0, "found": 0.98, "fresh_p50_s": 0.8, "fresh_p99_s": 1.4,
                     "trained_ne": 0.9123, "served_ne": 0.9234, "skew": 0.0111, "inexact": 0.0, "staleness": 0.0111,
                     "largest": 0.0, "seconds": 9.0},
        "latencies_ms": [1.0, 1.5, 2.0], "inside_ms": {"queue": 0.1, "history": 0.2, "features": 0.1, "model": 0.4},
        "replay": {"requests": 3, "histories_equal": 3, "bit_equal": 3, "max_difference": 0.0, "served_ne": 0.9,
                   "replayed_ne": 0.9, "labelled": 6},
    }
    return demo


def test_the_result_has_the_promised_keys(done):
    result = closing.result(done)
    assert result["planned"] is None
    assert {"coverage", "fresh_p50_s", "skew"} <= set(result["embedded"])
    assert {"ranks", "idle", "loads"} <= set(result["waited"])
    assert {"stored", "computed", "quality", "served", "replay", "seconds"} <= set(result)
    assert {"once_ms", "per_candidate_ms", "max_difference"} <= set(result["computed"])
    assert {"p50_ms", "p99_ms"} <= set(result["served"])
    assert {"requests", "histories_equal", "max_difference"} <= set(result["replay"])


def test_the_page_and_the_object_are_written(done):
    closing.write_files(done, closing.result(done))
    assert json.loads((done.folder / "result.json").read_text())["stored"]["ratio"] == 3.0
    page = (done.folder / "report.html").read_text()
    for section in ("Stored once", "Histories", "Learning", "Quality", "Calibration", "Latency", "Replay"):
        assert f"<h2>{section}</h2>" in page


def test_the_table_shows_ours_beside_the_others(done, capsys):
    closing.show(done, closing.result(done))
    text = capsys.readouterr().out
    for word in ("fat rows", "popularity", "0.8800", "p50 1.0 ms", "7.5 ms a request", "900 ms", "3 of 3 histories",
                 "100% of candidates scored", "0.9234",
                 "report.html"):
        assert word in text

"""``ingest``: everything of the data set in the store, in file order; whole or not at all."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_files import kuairand

from semel.datasets import Dataset, ingest, read
from semel.history import HistoryStore, Projection


def small(events=None, items=None, **more):
    events = events or {"user_id": [1, 2, 1, 1, 1], "item_id": [5, 5, 6, 7, 7], "event_time": [9, 9, 4, 9, 9],
                        "rating": pa.array([1, 2, 3, None, 5], pa.float32())}
    items = None if items is None else pa.table(items)
    return Dataset("small", pa.table(events), items, None, "none", "here", **more)


def test_histories_and_catalogue(tmp_path):
    data = small(items={"item_id": [5, 6, 8], "title": ["five", "six", "ünseen"]}, action="rating")
    seen = []
    report = ingest(data, tmp_path / "store", progress=lambda *step: seen.append(step), shards=3)
    assert (report.events, report.users, report.items, report.version) == (5, 2, 4, 1)
    assert report.events_per_second > 0 and report.bytes > 0
    assert ("append events", 5, 5) in seen and ("append items", 4, 4) in seen
    with HistoryStore.open(tmp_path / "store") as store:
        history = store.read(store.point([1, 2], as_of=10), Projection(("item_id", "event_time", "rating")))
        assert history["item_id"][0].tolist() == [6, 5, 7, 7], "by time, ties in file order, repeated rows kept"
        assert history["rating"][0].tolist()[:2] == [3, 1] and not history.validity["rating"][2]
    with HistoryStore.open(tmp_path / "store" / "catalogue") as catalogue:
        assert catalogue.keys().tolist() == [5, 6, 7, 8] and catalogue.schema.key == "item_id"
        features = catalogue.read(catalogue.point([5, 7, 8], as_of=1), Projection(("title",), last=1))
        assert features.lengths.tolist() == [1, 1, 1], "visible to every request"
        assert features.strings("title").tolist() == ["five", None, "ünseen"]
    note = json.loads((tmp_path / "store" / "dataset.json").read_text())
    assert (note["name"], note["licence"], note["source"], note["action"]) == ("small", "none", "here", "rating")
    assert (note["events"], note["users"], note["items"], note["users_file"]) == (5, 2, 4, None)
    assert (note["first_event_time"], note["last_event_time"]) == (4, 9)


def test_string_ids_and_no_items(tmp_path):
    data = small({"user_id": ["zoë", "bob"], "item_id": ["x", "ÿ"], "event_time": [1, 2]})
    report = ingest(data, tmp_path / "a" / "store")
    assert report.items == 2
    with HistoryStore.open(tmp_path / "a" / "store") as store:
        history = store.read(store.point(["zoë", "eve"], as_of=5), Projection(("item_id",)))
        assert history.strings("item_id").tolist() == ["x"] and history.lengths.tolist() == [1, 0]
    with HistoryStore.open(tmp_path / "a" / "store" / "catalogue") as catalogue:
        assert list(catalogue.keys()) == ["x", "ÿ"]


def test_items_with_a_time_of_their_own(tmp_path):
    data = read(kuairand(tmp_path / "raw"))
    report = ingest(data, tmp_path / "store")
    assert report.items == 4
    uploaded = 1648742400_000000
    with HistoryStore.open(tmp_path / "store" / "catalogue") as catalogue:
        before = catalogue.read(catalogue.point([5, 6, 8], as_of=uploaded), Projection(("author_id",), last=1))
        assert before.lengths.tolist() == [0, 1, 1]
    assert pq.read_table(tmp_path / "store" / "users.parquet").num_rows == 2
    assert pq.read_table(tmp_path / "store" / "impressions.parquet").num_rows == 4


def test_chunks_keep_the_order_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.datasets.ingestion.CHUNK_ROWS", 7)
    count = 50
    data = small({"user_id": np.zeros(count, np.int64), "item_id": np.arange(count), "event_time": np.full(count, 3)})
    assert ingest(data, tmp_path / "store").version == 8
    with HistoryStore.open(tmp_path / "store") as store:
        assert store.read(store.point([0], as_of=4), Projection(("item_id",)))["item_id"][0].tolist() == list(range(50))


def test_an_existing_store_is_refused(tmp_path):
    (tmp_path / "store").mkdir()
    ingest(small(), tmp_path / "store")  # an empty folder is nobody's
    with pytest.raises(FileExistsError, match=r"exists already; remove it \(rm -r .*\) or choose another"):
        ingest(small(), tmp_path / "store")


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def fail(what, done, total):
        if what == "append items":
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ingest(small(), tmp_path / "store", progress=fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="items have string ids, events int64"):
        ingest(small(items={"item_id": ["5"]}), tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_real_latest_small(tmp_path, shared_data):
    data = read(shared_data / "ml-latest-small")
    report = ingest(data, tmp_path / "store")
    assert (report.events, report.users, report.items) == (100_836, 610, 9_742)
    with HistoryStore.open(tmp_path / "store") as store:
        users = store.keys()
        history = store.read(store.point(users, as_of=2**62), Projection(("item_id", "event_time", "rating")))
        assert int(history.lengths.sum()) == 100_836 and int(history.lengths.max()) == 2_698
        order = np.lexsort((np.arange(100_836), data.events["event_time"], data.events["user_id"]))
        assert np.array_equal(history.columns["item_id"], data.events["item_id"].to_numpy()[order])
        assert np.array_equal(history.columns["rating"], data.events["rating"].to_numpy()[order])

"""Deletion, erasure, retention and added columns: what the promises do not draw."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.batch import Pointers
from semel.history import (
    EventSchema,
    HistoryStore,
    NotCompacted,
    Projection,
    SegmentWriter,
    Status,
    StoreError,
    StoreLocked,
    read_segments,
)
from semel.history import erasure as erasure_module

SCHEMA = EventSchema({"item_id": pa.int64(), "action": pa.string()}, pa.string(), group="action")
ALL = Projection(("item_id", "action"))
NEEDLE = "needle-5c1d"


def events(*rows):
    users, times, items, actions = zip(*rows, strict=True)
    return pa.table({"user_id": users, "event_time": times, "item_id": items, "action": actions}, schema=SCHEMA.arrow)


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        store.append(events((NEEDLE, 10, 1, f"only {NEEDLE}"), ("b", 11, 2, "like"), ("c", 5, 3, "click")))
        store.compact()
        store.append(events((NEEDLE, 12, 4, "like"), ("b", 15, 5, "click")))
        yield store


def items(store, pointers):
    table = store.read(pointers, ALL)
    return [table.row(i)["item_id"].tolist() for i in range(len(table))], [Status(s).name for s in table.status]


def files_with(folder: Path, needle: bytes) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
            and needle in path.read_bytes()]


def test_a_deleted_user_is_gone_at_once_and_starts_anew(store):
    before = store.point([NEEDLE, "b"], 100)
    version = store.delete(user_ids=[NEEDLE, "nobody"])
    assert version == before.version[0] + 1
    assert items(store, before) == ([[], [2, 5]], ["SCRUBBED", "OK"])
    assert items(store, store.point([NEEDLE], 100)) == ([[]], ["UNKNOWN_USER"])
    store.append(events((NEEDLE, 3, 9, None)))
    for _ in range(2):
        assert items(store, store.point([NEEDLE], 100)) == ([[9]], ["OK"])
        assert items(store, before) == ([[], [2, 5]], ["SCRUBBED", "OK"])
        store.compact()
    # before its first event the user was unknown, and is so through that pointer for ever
    assert items(store, Pointers([NEEDLE], 100, 0)) == ([[]], ["UNKNOWN_USER"])
    # the deleted events came after this moment: the request saw the same
    assert items(store, Pointers([NEEDLE], 10, before.version[0])) == ([[]], ["OK"])


def test_nothing_to_delete_is_no_version(store):
    version = store.version
    assert store.delete(user_ids=["nobody"]) == version == store.delete(user_ids=[])
    absent = events(("b", 11, 2, "click")).select(["user_id", "event_time", "action"])
    assert store.delete(events=absent) == version


def test_deletions_survive_reopening_and_are_checked_like_events(store):
    before = store.point(["b"], 100)
    store.delete(events=pa.table({"user_id": ["b"], "event_time": [11], "action": ["like"]}))
    store.close()
    with HistoryStore.open(store.path) as reader:
        assert items(reader, before) == ([[5]], ["SCRUBBED"])
        assert reader.verify()["files"] > 0


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "either user_ids or events"),
    ({"user_ids": ["b"], "events": events(("b", 1, 1, None))}, "either user_ids or events"),
    ({"user_ids": [1, 2]}, "user_ids are strings in this store, got integers"),
    ({"events": pa.table({"user_id": ["b"]})}, r"missing \['event_time'\]"),
    ({"events": pa.table({"user_id": ["b"], "event_time": [1], "colour": ["red"]})}, r"unknown \['colour'\]"),
    ({"events": pa.table({"user_id": ["b"], "event_time": [1], "item_id": ["x"]})}, "'item_id' has type string"),
    ({"events": pa.table({"user_id": ["b"], "event_time": pa.array([None], pa.int64())})}, "1 nulls"),
    ({"events": [1]}, "append takes an Arrow table"),
])
def test_bad_deletions_change_nothing(store, arguments, message):
    version = store.version
    with pytest.raises(ValueError, match=message):
        store.delete(**arguments)
    assert store.version == version and store.keys().tolist() == ["b", "c", NEEDLE]


def test_reading_handles_do_not_delete(store):
    with HistoryStore.open(store.path) as reader:
        for call in (lambda: reader.delete(user_ids=["b"]), lambda: reader.erase(["b"]),
                     lambda: reader.add_column("x", pa.int8())):
            with pytest.raises(StoreError, match='open it with mode="a"'):
                call()


def test_a_reader_on_the_old_generation_learns_of_it_when_it_refreshes(store):
    with HistoryStore.open(store.path) as reader:
        pointers = reader.point([NEEDLE, "b"], 100)
        assert items(reader, pointers) == ([[1, 4], [2, 5]], ["OK", "OK"])
        store.delete(user_ids=[NEEDLE])
        store.compact()
        reader.refresh()
        assert items(reader, pointers) == ([[], [2, 5]], ["SCRUBBED", "OK"])


def test_deletion_of_events_during_a_compaction_counts(store, monkeypatch):
    """What is deleted while a generation is written is not in it, and gone all the same."""
    before = store.point(["b", NEEDLE], 100)
    done = []

    def meanwhile(shards, of):
        if not done:
            done.append(store.delete(events=pa.table({"user_id": ["b"], "event_time": [15]})))
            done.append(store.delete(user_ids=[NEEDLE]))

    store.compact(progress=meanwhile)
    assert len(done) == 2 and store.stats()["events"]["total"] == 5
    for _ in range(2):
        assert items(store, before) == ([[2], []], ["SCRUBBED", "SCRUBBED"])
        store.compact()
    assert store.stats()["events"]["total"] == 2


def test_erased_means_that_no_byte_is_left(store, tmp_path):
    examples, outcomes, log = tmp_path / "examples", tmp_path / "outcomes.parquet", store.path / "exposures"
    examples.mkdir()
    log.mkdir()
    pq.write_table(pa.table({"user_id": [NEEDLE, "b"], "request_id": ["r-needle", "r2"]}), examples / "a.parquet")
    pq.write_table(pa.table({"request_id": ["r-needle", "r2", "r-needle"]}), outcomes)
    pq.write_table(pa.table({"item_id": [1]}), examples / "items.parquet")
    with SegmentWriter(log / "00000001.log") as writer:
        writer.append(pa.table({"user_id": [NEEDLE, "b", NEEDLE], "request_id": ["r-needle", "r2", "r-needle"]}))
        writer.append(pa.table({"user_id": ["c"], "request_id": ["r3"]}), {"kept": True})
    untouched = (examples / "items.parquet").read_bytes()
    reader = HistoryStore.open(store.path)
    before = reader.point([NEEDLE, "b"], 100)
    store.drop_generations(keep=1)
    assert files_with(tmp_path, b"needle")

    report = store.erase([NEEDLE], also=[examples, outcomes])

    assert files_with(tmp_path, b"needle") == []
    assert {Path(path).name: rows for path, rows in report["rows"].items()} == {
        "00000001.log": 2, "a.parquet": 1, "outcomes.parquet": 2}
    assert report["version"] == store.version and report["generation"] == store.generation
    assert [(m, b.num_rows) for m, b in read_segments(log)] == [({}, 1), ({"kept": True}, 1)]
    assert pq.read_table(outcomes)["request_id"].to_pylist() == ["r2"]
    assert (examples / "items.parquet").read_bytes() == untouched
    reader.refresh()  # its lease did not keep the old generation
    for handle in (store, reader):
        assert items(handle, before) == ([[], [2, 5]], ["UNKNOWN_USER", "OK"])
        assert handle.keys().tolist() == ["b", "c"]
        assert handle.read(before, ALL).strings("action").tolist() == ["like", "click"]
    # a string that went may come again
    store.append(events(("b", 20, 7, f"only {NEEDLE}")))
    reader.refresh()
    for handle in (store, reader):
        assert handle.read(handle.point(["b"], 100), ALL).strings("action").tolist() == ["like", "click",
                                                                                        f"only {NEEDLE}"]
    store.compact()
    store.verify()
    reader.close()


def test_an_erasure_that_broke_off_is_finished_by_the_next(store, tmp_path, monkeypatch):
    """Requests of erased users are known from the files that name the users, so those are rewritten last."""
    exposures, outcomes = tmp_path / "a-exposures.parquet", tmp_path / "b-outcomes.parquet"
    pq.write_table(pa.table({"user_id": [NEEDLE, "b", NEEDLE], "request_id": [7, 8, None]}), exposures)
    pq.write_table(pa.table({"request_id": [7, 8, 7]}), outcomes)
    with SegmentWriter(tmp_path / "c.log") as writer:
        writer.append(pa.table({"user_id": [NEEDLE, "b"], "n": [1, 2]}))
        writer.append(pa.table({"user_id": ["c"], "n": [3]}))
    (tmp_path / "server.log").write_text("not a log of ours\n")
    replace, left = erasure_module._replace, 0

    def breaks(source, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        replace(source, target)

    for whole in (0, 1, 1):  # before the first file, the second, the third
        left = whole
        with monkeypatch.context() as patch:
            patch.setattr(erasure_module, "_replace", breaks)
            with pytest.raises(KeyboardInterrupt):
                store.erase([NEEDLE], also=[exposures, outcomes, tmp_path / "c.log", tmp_path / "server.log"])
    with SegmentWriter(tmp_path / ".c.log.erasing") as writer:  # of one that was killed
        writer.append(pa.table({"user_id": ["left"], "n": [9]}))
    store.erase([NEEDLE], also=[exposures, outcomes, tmp_path / "c.log", tmp_path / "server.log"])
    assert pq.read_table(exposures)["request_id"].to_pylist() == [8]
    assert pq.read_table(outcomes)["request_id"].to_pylist() == [8]
    assert [batch["n"].to_pylist() for _, batch in read_segments(tmp_path / "c.log")] == [[2], [3]]
    assert files_with(tmp_path, b"needle") == [] and store.keys().tolist() == ["b", "c"]


def test_a_file_that_cannot_be_read_is_named_before_anything_is_erased(store, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(StoreError, match=r"broken\.parquet cannot be read"):
        store.erase([NEEDLE], also=str(tmp_path / "broken.parquet"))
    assert store.keys().tolist() == ["b", "c", NEEDLE]
    store.erase([])
    assert store.keys().tolist() == ["b", "c", NEEDLE]


def test_many_deletions_of_single_events_stay_quick(tmp_path):
    """What was looked for is not looked for again: without that a hundred of them took half a minute."""
    count = 300_000
    with HistoryStore.create(tmp_path / "s", EventSchema({"item_id": pa.int64()}), shards=4) as store:
        store.append(pa.table({"user_id": np.arange(count) % 5000, "event_time": np.arange(count),
                               "item_id": np.arange(count)}))
        store.compact()
        began = time.process_time()
        for user in range(60):
            store.delete(events=pa.table({"user_id": [user], "event_time": [user]}))
        pointers = store.point(np.arange(5000), count)
        assert store.read(pointers, Projection(("item_id",))).lengths.sum() == count - 60
        assert time.process_time() - began < 8


def test_integer_users_are_erased_too(tmp_path):
    user = 0x6E6565646C6521  # "needle!" as bytes
    schema = EventSchema({"item_id": pa.int64()})
    with HistoryStore.create(tmp_path / "s", schema, shards=1) as store:
        store.append(pa.table({"user_id": [user, 2], "event_time": [1, 2], "item_id": [3, 4]}))
        needle = user.to_bytes(8, "little")
        assert files_with(tmp_path, needle)
        store.delete(user_ids=[user])
        store.compact()
        assert files_with(tmp_path, needle)  # a deletion remembers whom, so that old pointers say SCRUBBED
        store.erase([user])
        assert files_with(tmp_path, needle) == []
        assert store.keys().tolist() == [2]


def test_erasing_beside_a_server_changes_nothing(store, tmp_path):
    (store.path / "exposures").mkdir()
    with SegmentWriter(store.path / "exposures" / "00000001.log") as writer:
        writer.append(pa.table({"user_id": [NEEDLE], "request_id": ["r"]}))
        with pytest.raises(StoreLocked, match=r"00000001\.log is being written to"):
            store.erase([NEEDLE])
        with pytest.raises(StoreError, match="nowhere is not there"):
            store.erase([NEEDLE], also=[tmp_path / "nowhere"])
        assert store.keys().tolist() == ["b", "c", NEEDLE]
        store.erase(["c"])  # of whom the log has nothing
    assert store.keys().tolist() == ["b", NEEDLE]


def test_retention_says_expired_only_where_something_may_be_missing(store, monkeypatch):
    monkeypatch.setattr("semel.history.store.now", lambda: 1_000_011)
    before = store.point([NEEDLE, "b", "c", "d"], 100)
    store.compact(retention=timedelta(seconds=1))  # events before 11 go
    assert items(store, before) == ([[4], [2, 5], [], []], ["EXPIRED", "OK", "EXPIRED", "UNKNOWN_USER"])
    short = store.read(before, Projection(("item_id",), last=1))
    assert [Status(s).name for s in short.status] == ["OK", "OK", "EXPIRED", "UNKNOWN_USER"]
    recent = store.read(before, Projection(("item_id",), since=11))
    assert [Status(s).name for s in recent.status] == ["OK", "OK", "OK", "UNKNOWN_USER"]
    assert store.expired_before == 11
    generation = store.generation
    assert store.compact(retention="1s") == generation, "nothing is older: nothing to write"
    store.delete(user_ids=["c"])
    assert items(store, before)[1] == ["EXPIRED", "OK", "SCRUBBED", "UNKNOWN_USER"]
    store.compact()
    assert items(store, before)[1] == ["EXPIRED", "OK", "SCRUBBED", "UNKNOWN_USER"]
    assert items(store, store.point(["c"], 100)) == ([[]], ["UNKNOWN_USER"])


@pytest.mark.parametrize("retention", ["", "90", "-1d", "1y", timedelta(0), timedelta(days=-1), 5, "0d"])
def test_bad_retention(store, retention):
    generation = store.generation
    with pytest.raises(ValueError, match="retention must be a length of time"):
        store.compact(retention=retention)
    assert store.generation == generation


def test_a_column_is_not_part_of_older_views(store):
    before = store.point(["b"], 100)
    since = store.add_column("author", pa.int32(), lambda table: [10 * item for item in table["item_id"].to_pylist()])
    assert since == store.version == before.version[0] + 1
    with HistoryStore.open(store.path) as reader:
        for handle in (store, reader):
            table = handle.read(before, Projection(("author",)))
            assert table.validity["author"].tolist() == [False, False] and table.columns["author"].tolist() == [0, 0]
            table = handle.read(before, Projection(("author",), allow_backfill=True))
            assert table.columns["author"].tolist() == [20, 50]
            assert handle.read(handle.point(["b"], 100), Projection(("author",))).columns["author"].tolist() == [20, 50]
        # producers that do not know the column go on
        store.append(events(("b", 30, 6, None)))
        store.append(pa.table({"user_id": ["b"], "event_time": [31], "item_id": [7], "action": ["like"],
                               "author": pa.array([70], pa.int32())}))
        reader.refresh()
        table = reader.read(reader.point(["b"], 100), Projection(("author",), last=2))
        assert table.validity["author"].tolist() == [False, True]


def test_a_reader_meets_a_new_column_without_being_told(store):
    with HistoryStore.open(store.path) as reader:
        store.add_column("colour", pa.string(), pa.table({"item_id": [2, 5], "colour": ["red", None]}))
        store.append(pa.table({"user_id": ["b"], "event_time": [31], "item_id": [7], "action": ["like"],
                               "colour": ["blue"]}))
        table = reader.read(store.point(["b"], 100), Projection(("colour",)))
        assert table.strings("colour").tolist() == ["red", None, "blue"]
        assert list(reader.schema.columns) == ["item_id", "action", "colour"]
    with pytest.raises(ValueError, match="has a column 'colour' already"):
        store.add_column("colour", pa.string())


@pytest.mark.parametrize(("kind", "backfill", "message"), [
    (pa.int32(), lambda table: [1], "returned 1 values for"),
    (pa.int32(), lambda table: ["x"] * table.num_rows, "values that are not int32"),
    (pa.int32(), lambda table: pa.array([1.5] * table.num_rows), "has type double"),
    (pa.int32(), 3, "must be a function, a pyarrow.Table or None"),
    (pa.int32(), pa.table({"new": [1]}), "needs the new column 'new' and one or more of"),
    (pa.int32(), pa.table({"new": [1, 2], "item_id": [2, 2]}), "several values of 'new' for one item_id"),
    (pa.int32(), pa.table({"new": [1], "item_id": ["x"]}), "must have the types of the store's"),
    (pa.list_(pa.int32()), None, "is not supported"),
])
def test_bad_columns_change_nothing(store, kind, backfill, message):
    version, generation = store.version, store.generation
    with pytest.raises(ValueError, match=message):
        store.add_column("new", kind, backfill)
    assert (store.version, store.generation, list(store.schema.columns)) == (version, generation, ["item_id", "action"])
    store.append(events(("b", 50, 1, None)))


def test_what_a_backfill_raises_comes_through_and_leaves_the_store_whole(store):
    def fails(table):
        raise ZeroDivisionError("of mine")

    with pytest.raises(ZeroDivisionError, match="of mine"):
        store.add_column("new", pa.int8(), fails)
    store.verify()
    assert store.add_column("new", pa.int8(), None) == store.version


KILLED = """
    import sys
    import pyarrow as pa
    from semel.history import EventSchema, HistoryStore
    with HistoryStore.open(sys.argv[1], "a") as store:
        for at in range(1000):
            row = {"user_id": [at % 7, 7], "event_time": [at, at], "item_id": [at, at]}
            print("appended", store.append(pa.table(row)), flush=True)
            print("deleted", store.delete(user_ids=[at % 7]), flush=True)
            print("deleted", store.delete(events=pa.table({"user_id": [7], "event_time": [at]})), flush=True)
            if at % 5 == 0:
                store.compact()
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.timeout(120)
def test_an_acknowledged_deletion_is_durable(tmp_path, seed):
    path = tmp_path / "s"
    HistoryStore.create(path, EventSchema({"item_id": pa.int64()}), shards=2).close()
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(path)], stdout=subprocess.PIPE,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(20 + 13 * seed)]
        time.sleep(0.01 * seed)
        process.send_signal(signal.SIGKILL)
        seen += process.stdout.readlines()
    finally:
        process.kill()
        process.wait(30)
    last = int([line for line in seen if line.endswith("\n")][-1].split()[1])
    with HistoryStore.open(path, "a") as store:
        assert store.version >= last
        everyone = store.read(Pointers(np.arange(8), np.full(8, 10**6), np.full(8, last)), Projection(("item_id",)))
        kind = [line.split()[0] for line in seen if line.strip()][-1]
        left = everyone.lengths.tolist()
        assert left[:7] == [0] * 7 or kind == "appended", "what was deleted is gone"
        assert sum(left) <= 2, "at most the last append, which nothing has deleted yet"
        store.compact()
        assert store.verify()["files"] > 0


def test_a_refresh_that_broke_off_leaves_a_reader_whole(store, monkeypatch):
    """The tail had the events and the view had not."""
    with HistoryStore.open(store.path) as reader:
        reader.read(reader.point(["b"], 100), ALL)
        store.append(events(("b", 30, 6, "like")))
        from semel.history.view import following

        with monkeypatch.context() as patch:
            patch.setattr(following, "replace", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                reader.refresh()
        reader.refresh()
        assert items(reader, reader.point(["b"], 100)) == ([[2, 5, 6]], ["OK"])


def test_ids_that_end_in_zero_bytes_are_other_users(store):
    store.append(events(("bob", 1, 1, None), ("bob\x00", 1, 2, None)))
    before = store.point(["bob", "bob\x00"], 10)
    assert items(store, before)[0] == [[1], [2]]
    store.delete(user_ids=["bob\x00"])
    assert items(store, before) == ([[1], []], ["OK", "SCRUBBED"])


def test_events_are_deleted_by_a_column_that_was_added(store):
    store.add_column("n", pa.float32(), lambda table: pa.array([float("nan")] * table.num_rows, pa.float32()))
    with HistoryStore.open(store.path) as reader:
        before = store.point(["b"], 100)
        store.delete(events=pa.table({"user_id": ["b"], "event_time": [11],
                                      "n": pa.array([float("nan")], pa.float32())}))
        reader.refresh()
        for handle in (store, reader):
            assert items(handle, before) == ([[5]], ["SCRUBBED"]) and "b" in handle.keys().tolist()


def test_a_string_that_looks_like_an_erased_one_is_a_string(store):
    code = int(store.read(store.point([NEEDLE], 100), ALL).columns["action"][0])  # of the string that will be erased
    likeness = f"\x00{code}"
    store.append(events(("b", 20, 6, likeness)))
    store.erase([NEEDLE])
    store.append(events(("b", 21, 7, "new")))
    store.close()
    with HistoryStore.open(store.path, "a") as store:
        assert store.read(store.point(["b"], 100), ALL).strings("action").tolist() == ["like", "click", likeness, "new"]
        store.append(events(("b", 22, 8, likeness)))
        store.compact()
        assert store.read(store.point(["b"], 100), ALL).strings("action").tolist()[2:] == [likeness, "new", likeness]


def test_a_frozen_view_learns_of_deletions_when_it_refreshes(store):
    version = store.version
    with HistoryStore.open(store.path, at_version=version) as view:
        pointers = view.point([NEEDLE, "b"], 100)
        store.append(events(("b", 50, 9, None)))
        store.erase([NEEDLE])
        assert view.refresh() == version
        assert items(view, pointers) == ([[], [2, 5]], ["UNKNOWN_USER", "OK"])


def test_the_version_of_an_added_column_is_nothing_to_compact(store):
    added = store.add_column("n", pa.int32())
    generation, path = store.generation, store.path
    assert store.version == added and store.compact() == generation
    pointers = store.point(["b"], 100)
    for handle in (store, HistoryStore.open(path)):
        read = handle.read(pointers, Projection(("item_id", "n")), require_compacted=True)
        assert read["item_id"][0].tolist() == [2, 5]
    store.append(events(("b", 20, 6, None)), token="t")
    assert store.read(pointers, ALL, require_compacted=True)["item_id"][0].tolist() == [2, 5]
    with pytest.raises(NotCompacted, match=f"versions {added} to {added + 1} "):
        store.read(store.point(["b"], 100), ALL, require_compacted=True)
    assert store.compact() == generation + 1
    assert store.append(SCHEMA.arrow.empty_table(), token="empty") == added + 2
    assert store.compact() == generation + 2 and store.compact() == generation + 2  # a token is to be kept
    assert store.append(events(("b", 1, 1, None)), token="empty") == added + 2


def test_a_column_is_added_once(store):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(store.add_column, "n", pa.string(), pa.table({"item_id": [2], "n": [f"{i}"]}))
                 for i in range(4)]
        errors = [str(call.exception()) for call in calls if call.exception() is not None]
    assert len(errors) == 3 and all("has a column 'n' already" in error for error in errors)
    table = store.read(store.point(["b"], 100), Projection(("n",)))
    assert table.validity["n"].tolist() == [True, False]


def test_a_time_that_no_pointer_can_reach_is_refused(store):
    with pytest.raises(ValueError, match=r"event_time 9223372036854775807 in row 0 is too large"):
        store.append(events(("b", 2**63 - 1, 1, None)))


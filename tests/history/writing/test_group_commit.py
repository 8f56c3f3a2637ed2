"""Group commit: appends that wait share one write, keep their own versions and errors, and are durable when they
return."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, Pointers, Projection, StoreError, read_segments
from semel.history.log.records import AppendedRows, appends_of, describe, versions_of

SCHEMA = EventSchema({"item_id": pa.int64(), "text": pa.string()})
PROJECTION = Projection(("item_id", "version", "text"))


def rows(item: int, count: int = 1, text: str | None = None) -> pa.Table:
    return pa.table({"user_id": [1] * count, "event_time": [5] * count, "item_id": [item] * count,
                     "text": [text or f"t{item % 7}"] * count})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "store", SCHEMA, shards=2) as store:
        yield store


def together(store: HistoryStore, monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> list[Any]:
    """Run the calls as one group (behind a first append that waits in its fsync for them); what each returned or
    raised."""
    syncing, go = threading.Event(), threading.Event()

    def wait(handle: int) -> None:
        syncing.set()
        assert go.wait(30)
        os.fsync(handle)

    def outcome(call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with monkeypatch.context() as patch, ThreadPoolExecutor(len(calls) + 1) as pool:
        patch.setattr("semel.history.log.segments.sync", wait)
        leader = pool.submit(store.append, rows(1000))
        assert syncing.wait(30)
        futures = []
        for call in calls:
            futures.append(pool.submit(outcome, call))
            while store._writer._group.waiting < len(futures):  # type: ignore[union-attr]
                assert not futures[-1].done(), futures[-1].result()
                time.sleep(0.001)
        go.set()
        leader.result()
        return [future.result() for future in futures]


def items(store: HistoryStore) -> list[tuple[int, int, str]]:
    table = store.read(store.point([1], 10), PROJECTION)
    return list(zip(*(column.tolist() for column in (table.columns["version"], table.columns["item_id"],
                                                      table.strings("text"))), strict=True))


def test_a_group_is_one_record_with_a_version_for_each(
        store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [lambda i=i: store.append(rows(i, i + 1), token=f"k{i}" if i % 2 else None) for i in range(5)]
    versions = together(store, monkeypatch, calls)
    assert versions == [2, 3, 4, 5, 6]
    records = list(read_segments(tmp_path / "store" / "log"))
    assert [batch.num_rows for _, batch in records] == [1, 15]
    assert records[1][0]["first_version"] == 2 and records[1][0]["tokens"] == {"1": "k1", "3": "k3"}
    expected = [(1, 1000, "t6")] + [(i + 2, i, f"t{i}") for i in range(5) for _ in range(i + 1)]
    reader = HistoryStore.open(tmp_path / "store")
    for handle in (store, reader):
        assert items(handle) == expected
        inside = Pointers(np.array([1]), 10, np.array([4]))  # a pointer may name a version inside a group
        assert handle.read(inside, PROJECTION).columns["item_id"].tolist() == [1000, 0, 1, 1, 2, 2, 2]
    store.close()
    with HistoryStore.open(tmp_path / "store", mode="a") as again:
        assert [again.append(rows(9), token=f"k{i}") for i in (1, 3)] == [3, 5]
        assert again.append(rows(9)) == 7
        again.compact()
        again.verify()
        assert items(again) == [*expected, (7, 9, "t2")]


def test_a_torn_group_is_not_there_at_all(
        store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was told of any of its appends, and the retry of each is one append. The lock file is as a kill in the
    middle of the write, or a power cut, leaves it."""
    together(store, monkeypatch, [lambda i=i: store.append(rows(i), token=f"k{i}") for i in range(3)])
    segment, lock = tmp_path / "store" / "log" / "00000001.log", tmp_path / "store" / "writer.lock"
    content = segment.read_bytes()
    group = content.rindex(b"SREC")
    store._writer.lock.mark(1, group)  # type: ignore[union-attr]
    before = lock.read_bytes()
    store.close()
    for cut in (*range(group + 1, len(content), 97), len(content) - 1):
        segment.write_bytes(content[:cut])
        for left in (before, before[:65].replace(before[29:64], b"0" * 35) + before[65:]):  # of this boot, of another
            lock.write_bytes(left)
            with HistoryStore.open(tmp_path / "store") as reader:
                assert reader.version == 1 and items(reader) == [(1, 1000, "t6")]
    with HistoryStore.open(tmp_path / "store", mode="a") as again:
        assert [again.append(rows(i), token=f"k{i}") for i in (2, 0, 2)] == [2, 3, 2]
        assert items(again) == [(1, 1000, "t6"), (2, 2, "t2"), (3, 0, "t0")]


def test_the_same_token_in_one_group_is_one_append(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = together(store, monkeypatch, [lambda: store.append(rows(3), token="x")] * 3 + [
        lambda: store.append(rows(4).slice(0, 0)), lambda: store.append(rows(4).slice(0, 0), token="empty")])
    assert versions[:3] == [2, 2, 2] and versions[4] == 3
    assert versions[3] <= 2  # no rows and no token: nothing to append
    assert [row[1] for row in items(store)] == [1000, 3]


def test_one_that_the_disk_refuses_fails_alone(
        store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite

    def small_only(handle: int, data: Any, offset: int) -> int:
        if len(data) > 20_000:
            whole(handle, bytes(data[:100]), offset)
            raise OSError(28, "No space left on device")
        return whole(handle, data, offset)

    monkeypatch.setattr("semel.history.log.segments.os.pwrite", small_only)
    small, large, wrong, other = together(store, monkeypatch, [
        lambda: store.append(rows(1)), lambda: store.append(rows(2, 5000, "never seen")),
        lambda: store.append(rows(4), token="t"), lambda: store.append(rows(5, text="new"))])
    assert small == 2 and wrong == 3 and other == 4
    assert isinstance(large, OSError) and large.errno == 28
    assert items(store) == [(1, 1000, "t6"), (2, 1, "t1"), (3, 4, "t4"), (4, 5, "new")]
    assert items(HistoryStore.open(tmp_path / "store")) == items(store)


def test_after_a_failed_fsync_nobody_is_told_that_it_worked(
        store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    store.append(rows(1))
    monkeypatch.setattr("semel.history.log.segments.sync", broken)
    with ThreadPoolExecutor(4) as pool:
        errors = [future.exception() for future in [pool.submit(store.append, rows(i)) for i in range(4)]]
    assert all(isinstance(error, OSError | StoreError) for error in errors)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="reopen"):
        store.append(rows(2))
    assert store.version == 1


@pytest.mark.timeout(90)
def test_many_threads_append_while_others_read_and_compact(tmp_path: Path) -> None:
    threads, each = 6, 40
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        acknowledged: list[dict[int, int]] = [{} for _ in range(threads)]
        store.append(rows(-1))
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for i in range(each):
                    item = number * each + i
                    version = store.append(rows(item, 1 + i % 3), token=str(item) if i % 2 else None)
                    acknowledged[number][version] = item
                    seen = store.read(Pointers(np.array([1]), 10, np.array([version])), PROJECTION).row(0)
                    assert (seen["item_id"][seen["version"] == version] == item).all()
                    assert sorted(set(seen["version"].tolist())) == list(range(1, version + 1))
            except BaseException as error:
                failures.append(error)

        def compact() -> None:
            for _ in range(6):
                store.compact()
                time.sleep(0.02)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        workers.append(threading.Thread(target=compact))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures, failures[0]
        all_versions = {version: item for part in acknowledged for version, item in part.items()}
        assert sorted(all_versions) == list(range(2, threads * each + 2))
        store.verify()
        for handle in (store, HistoryStore.open(tmp_path / "s")):
            assert {(v, i) for v, i, _ in items(handle)} == set(all_versions.items()) | {(1, -1)}


def test_what_a_record_says_is_read_back() -> None:
    for appends in ([AppendedRows(7, 3, None)], [AppendedRows(7, 0, "a")],
                    [AppendedRows(7, 2, "\u00fc"), AppendedRows(8, 0, "e"), AppendedRows(9, 1, None)]):
        described = describe(appends, {})
        assert appends_of(described, sum(append.rows for append in appends)) == appends
    assert versions_of(appends).tolist() == [7, 7, 9]
    with pytest.raises(ValueError, match="record of 4"):
        appends_of(described, 4)

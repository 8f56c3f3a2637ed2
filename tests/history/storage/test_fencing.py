"""A second writer, or one whose lock was taken over, cannot commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from semel.history import CorruptFile, EventSchema, HistoryStore, Projection, StoreError, StoreLocked, WriterFenced

SCHEMA = EventSchema({"item_id": pa.int64()})


def rows(item: int) -> pa.Table:
    return pa.table({"user_id": [1], "event_time": [item], "item_id": [item]})


def items(path: Path) -> list[int]:
    with HistoryStore.open(path) as store:
        store.verify()
        return store.read(store.point([1], 10**6), Projection(("item_id",))).columns["item_id"].tolist()


@pytest.fixture
def first(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        store.append(rows(1))
        yield store


def test_a_lock_file_that_was_removed_admits_no_second_writer(first: HistoryStore, tmp_path: Path) -> None:
    (tmp_path / "s" / "writer.lock").unlink()
    with pytest.raises(StoreLocked):  # the segment is locked too
        HistoryStore.open(tmp_path / "s", mode="a")
    for write in (lambda: first.append(rows(2)), first.compact, first.drop_generations):
        with pytest.raises(WriterFenced, match=r"writer\.lock"):
            write()
    first.close()
    assert items(tmp_path / "s") == [1]
    with HistoryStore.open(tmp_path / "s", mode="a") as second:
        assert second.append(rows(2)) == 2
    assert items(tmp_path / "s") == [1, 2]


@pytest.mark.parametrize("verb", ["append", "compact"])
def test_a_writer_whose_locks_were_lost_cannot_commit(
        first: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """As on a network file system that gives a sleeping process's locks to another."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    with HistoryStore.open(tmp_path / "s", mode="a") as second:
        second.append(rows(2))
        use = (lambda: first.append(rows(99))) if verb == "append" else first.compact
        for _ in range(2):
            with pytest.raises(WriterFenced, match=f"process {os.getpid()}"):
                use()
        assert second.append(rows(3)) == 3
        assert items(tmp_path / "s") == [1, 2, 3]
        first.close()  # must not release what is no longer its own
        assert second.append(rows(4)) == 4
        second.compact()
        assert items(tmp_path / "s") == [1, 2, 3, 4]


def test_a_write_that_was_under_way_is_not_acknowledged(
        first: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes over between the writer's check and its fsync: what it wrote lies behind the end of a sealed
    segment, and counts for nothing; it is told so."""
    second: list[HistoryStore] = []
    write = os.pwrite

    def take_over(handle: int, data: Any, offset: int) -> int:
        monkeypatch.setattr("os.pwrite", write)
        second.append(HistoryStore.open(tmp_path / "s", mode="a"))
        return write(handle, data, offset)

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr("os.pwrite", take_over)
    with pytest.raises(WriterFenced):
        first.append(rows(99))
    assert second[0].append(rows(2)) == 2
    with pytest.raises(StoreError):
        first.append(rows(98))
    assert items(tmp_path / "s") == [1, 2]
    second[0].compact()
    assert items(tmp_path / "s") == [1, 2]
    second[0].close()


def test_a_write_that_ends_during_the_takeover_is_kept_whole(
        first: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next writer has read the log, and has yet to look for the segment's end: both must name the same records."""
    from semel.history.log import segments

    look = segments.last_record_end

    def write_first(path: Path, sealed: int | None = None) -> int:
        monkeypatch.setattr(segments, "last_record_end", look)
        batch = pa.record_batch([column.chunk(0) for column in rows(99).columns], schema=SCHEMA.stored)
        first._writer._segment.append(batch, {"version": 2, "token": "t"})  # type: ignore[union-attr]
        return look(path, sealed)

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr(segments, "last_record_end", write_first)
    with HistoryStore.open(tmp_path / "s", mode="a") as second:
        assert second.append(rows(3)) == 3
        assert second.append(rows(99), token="t") == 2
        assert items(tmp_path / "s") == [1, 3, 99]


def test_readers_see_what_is_on_the_disk_only(
        first: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may take back what is written but not synced; no pointer may have named its version by then."""
    seen = []

    def look(handle: int) -> None:
        os.fsync(handle)
        seen.append((items(tmp_path / "s"), reader.refresh()))

    reader = HistoryStore.open(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr("semel.history.log.segments.sync", look)
        assert first.append(rows(2)) == 2
    assert seen == [([1], 1)]
    assert reader.refresh() == 2 and items(tmp_path / "s") == [1, 2]
    first.compact()
    first.append(rows(3))
    assert reader.refresh() == 3 and items(tmp_path / "s") == [1, 2, 3]


def test_a_record_that_nobody_synced_waits_for_the_next_writer(
        first: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.record_batch([column.chunk(0) for column in rows(2).columns], schema=SCHEMA.stored)
    first._writer._segment.append(batch, {"version": 2})  # type: ignore[union-attr]
    first._writer._segment.close()  # type: ignore[union-attr]
    first._writer.lock.release(in_order=False)  # type: ignore[union-attr]  # as if killed here
    assert items(tmp_path / "s") == [1]
    with monkeypatch.context() as patch:  # after a new start of the computer what the disk has is on the disk
        patch.setattr("semel.history.storage.locking.boot", lambda: "another")
        assert items(tmp_path / "s") == [1, 2]
    with HistoryStore.open(tmp_path / "s", mode="a") as second:
        assert items(tmp_path / "s") == [1, 2]
        assert second.append(rows(3)) == 3
    assert items(tmp_path / "s") == [1, 2, 3]


def test_a_lock_file_of_another_time_or_with_damage(first: HistoryStore, tmp_path: Path) -> None:
    lock = tmp_path / "s" / "writer.lock"
    first.append(rows(2))
    content = lock.read_bytes()
    first.close()
    for text, expected in ((b"", [1, 2]), (b"1234\n", [1, 2]), (content[:65], [1, 2]), (content, [1, 2])):
        lock.write_bytes(text)
        assert items(tmp_path / "s") == expected
    lock.write_bytes(content[:-9] + b"00000000\n")
    with pytest.raises(CorruptFile, match=r"writer\.lock"):
        HistoryStore.open(tmp_path / "s")
    HistoryStore.open(tmp_path / "s", mode="a").close()
    assert items(tmp_path / "s") == [1, 2]


def test_after_a_kill_the_next_writer_begins_a_segment(tmp_path: Path) -> None:
    code = ("import os, sys, pyarrow as pa; from semel.history import EventSchema, HistoryStore\n"
            "store = HistoryStore.create(sys.argv[1], EventSchema({'item_id': pa.int64()}), shards=2)\n"
            "store.append(pa.table({'user_id': [1], 'event_time': [1], 'item_id': [1]})); os._exit(9)")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], timeout=60)
    for item in (2, 3):
        with HistoryStore.open(tmp_path / "s", mode="a") as store:
            store.append(rows(item))
        assert sorted(file.name for file in (tmp_path / "s" / "log").iterdir()) == ["00000001.log", "00000002.log"]
    assert items(tmp_path / "s") == [1, 2, 3]
    assert (tmp_path / "s" / "writer.lock").read_bytes()[:65] == b" " * 64 + b"\n"  # released in order


@pytest.mark.parametrize("killed", [False, True])
def test_what_was_acknowledged_is_never_taken_for_torn(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "s"
    code = ("import os, sys, pyarrow as pa; from semel.history import EventSchema, HistoryStore\n"
            "store = HistoryStore.create(sys.argv[1], EventSchema({'item_id': pa.int64()}), shards=2)\n"
            "rows = pa.table({'user_id': [1] * 2000, 'event_time': [0] * 2000, 'item_id': [0] * 2000})\n"
            "store.append(rows); store.append(rows)\n"
            + ("os._exit(9)" if killed else "store.close()"))
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    segment = path / "log" / "00000001.log"
    sound = segment.read_bytes()
    damaged = bytearray(sound)
    damaged[-100] ^= 1
    half = 16 + (len(sound) - 16) // 2  # where the second record begins
    for content in (damaged, sound[:-1], sound[:half], sound[:half + 20], sound[:half] + bytes(len(sound) - half)):
        segment.write_bytes(content)
        for mode in ("r", "a"):
            with pytest.raises(CorruptFile, match=segment.name):
                HistoryStore.open(path, mode)
            assert segment.read_bytes() == content
    segment.write_bytes(sound)
    with HistoryStore.open(path) as reader:
        assert reader.version == 2
        segment.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=segment.name):
            reader.verify()
    (path / "writer.lock").unlink()  # nobody can say what was acknowledged: a torn record, as after a power cut
    with HistoryStore.open(path) as reader:
        assert reader.version == 1


def test_what_a_failed_opening_leaves(tmp_path: Path) -> None:
    """It has looked at nothing, so it says nothing of the log: the lock file is as it was."""
    path = tmp_path / "s"
    HistoryStore.create(path, SCHEMA, shards=2).close()
    with HistoryStore.open(path, mode="a") as store:
        store.append(rows(1))
        store._writer.lock.release(in_order=False)  # type: ignore[union-attr]  # as if killed here
    lock, segment = path / "writer.lock", path / "log" / "00000001.log"
    before, content = lock.read_bytes(), segment.read_bytes()
    segment.write_bytes(content[:-1])
    with pytest.raises(CorruptFile):
        HistoryStore.open(path, mode="a")
    assert lock.read_bytes() == before
    segment.write_bytes(content)
    with HistoryStore.open(path, mode="a") as store:
        assert store.append(rows(2)) == 2
    assert sorted(file.name for file in (path / "log").iterdir()) == ["00000001.log", "00000002.log"]
    for at in range(0, 106, 7):  # damage of the lock file itself changes nothing that is read
        flipped = bytearray(lock.read_bytes())
        flipped[at] ^= 1
        lock.write_bytes(flipped)
        assert items(path) == [1, 2]
        flipped[at] ^= 1
        lock.write_bytes(flipped)

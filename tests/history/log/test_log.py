"""Segments: durable, torn at the end at most, damage elsewhere is an error."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from semel.history import CorruptFile, SegmentWriter, StoreError, StoreLocked, read_segments


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64()), "text": pa.array([str(v) for v in values])})


def write(path: Path, count: int = 3) -> list[int]:
    """A segment with ``count`` records; the offset after each."""
    ends = []
    with SegmentWriter(path) as writer:
        for i in range(count):
            writer.append(batch(i, i + 1), {"n": i, "name": "\u00e4"})
            ends.append(writer.size)
    return ends


def values(path: Path) -> list[int]:
    return [metadata["n"] for metadata, _ in read_segments(path)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    write(path)
    records = list(read_segments(path))
    assert [m for m, _ in records] == [{"n": i, "name": "\u00e4"} for i in range(3)]
    assert [b.column("x").to_pylist() for _, b in records] == [[0, 1], [1, 2], [2, 3]]


def test_tables_nested_types_and_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    table = pa.table({"a": pa.chunked_array([[1], [2, 3]]), "l": pa.chunked_array([[[1.0]], [[], None]])})
    with SegmentWriter(path) as writer:
        writer.append(table)
        writer.append(table.slice(0, 0))
    got = list(read_segments(path))
    assert got[0][1].to_pylist() == table.to_pylist()
    assert got[1][1].num_rows == 0 and got[1][1].schema == table.schema and got[1][0] == {}


def test_a_folder_is_read_in_order_of_names_and_nothing_is_nothing(tmp_path: Path) -> None:
    write(tmp_path / "1.log", 2)
    write(tmp_path / "2.log", 1)
    assert values(tmp_path) == [0, 1, 0]
    assert values(tmp_path / "none.log") == []


@pytest.mark.parametrize("cut", [1, 7, 20, 31, 40, 200])
def test_a_torn_tail_is_ignored_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "1.log"
    ends = write(path)
    with open(path, "r+b") as file:
        file.truncate(ends[1] + cut)
    assert values(path) == [0, 1]
    with SegmentWriter(path) as writer:
        writer.append(batch(9), {"n": 9})
    assert values(path) == [0, 1, 9]


@pytest.mark.parametrize("zeros_from", [0, 10, 100])
def test_a_tail_that_never_reached_the_disk_is_torn(tmp_path: Path, zeros_from: int) -> None:
    """After a power cut a file may be longer than what was written: the rest reads as zeros."""
    path = tmp_path / "1.log"
    ends = write(path)
    content = path.read_bytes()
    keep = ends[1] if zeros_from < 32 else ends[1] + zeros_from
    path.write_bytes(content[:keep] + bytes(len(content) - keep))
    assert values(path) == [0, 1]


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    write(path, 2)
    content = path.read_bytes()
    for at in chain(range(100), range(100, len(content), 7)):
        damaged = bytearray(content)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        with pytest.raises((CorruptFile, StoreError), match=r"1\.log"):
            list(read_segments(path))
            pytest.fail(f"byte {at}")


def test_what_a_killed_writer_left_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died between write and fsync; whoever continues the segment counts the record as there."""
    path = tmp_path / "1.log"
    write(path, 1)
    synced = []
    monkeypatch.setattr("semel.history.log.segments.sync", synced.append)
    SegmentWriter(path).close()
    assert len(synced) == 1


def test_damage_stops_a_writer_too(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    ends = write(path)
    content = bytearray(path.read_bytes())
    content[ends[0] + 60] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"1\.log: record at byte"):
        SegmentWriter(path)
    assert path.read_bytes() == content


def test_one_writer(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "1.log"), pytest.raises(StoreLocked):
        SegmentWriter(tmp_path / "1.log")
    SegmentWriter(tmp_path / "1.log").close()


def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "1.log")
    writer.close()
    with pytest.raises(StoreError):
        writer.append(batch(1))


def test_large_records(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    data = np.arange(300_000)
    with SegmentWriter(path) as writer:
        writer.append(pa.record_batch({"x": data}))
    assert (next(iter(read_segments(path)))[1].column("x").to_numpy() == data).all()

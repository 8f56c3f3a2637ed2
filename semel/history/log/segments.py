"""Append-only segments: length + CRC + Arrow IPC for each batch, durable before ``append`` returns.

A segment is a 16-byte header and records. A record is a 32-byte header (magic, lengths, CRC of the payload, CRC of
the header itself), a JSON object, an Arrow IPC stream with one batch, and an 8-byte end mark. A writer that dies
leaves at most one torn record, at the end: it is ignored and overwritten. Anything else that does not match its CRC is
damage, and an error. ``docs/formats/history.md`` gives the bytes.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from semel.history.durable import naming, sync, sync_folder
from semel.history.errors import CorruptFile, StoreError, StoreLocked

MAGIC = b"SEMELLOG"
FORMAT = 1
_SEGMENT = struct.Struct("<8sII")
SEGMENT_HEADER = _SEGMENT.size
_RECORD = struct.Struct("<4sIQII8x")  # "SREC", metadata bytes, Arrow bytes, CRC of both, CRC of the 20 bytes before
_HEAD = struct.Struct("<4sIQI")
_END = b"SEMELEND"
_PAGE = 4096


class SegmentWriter:
    """The only writer of one segment file; creates it, or continues it after the last whole record.

    Raises StoreLocked when another writer has the file open, CorruptFile when its records are damaged. After a failed
    ``append`` (disk full) the file is as before; after a failed fsync the writer refuses to go on, since nobody can
    know what the disk holds.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        existed = self.path.exists()
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._broken = False
        try:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreLocked(f"{self.path} is open in another writer") from None
            if os.fstat(self._handle).st_size < SEGMENT_HEADER:
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, _SEGMENT.pack(MAGIC, FORMAT, 0), 0)
                sync(self._handle)
            self.size = last_record_end(self.path)
            if os.fstat(self._handle).st_size > self.size:
                os.ftruncate(self._handle, self.size)
            sync(self._handle)  # a writer that was killed may have left whole records that only memory holds
            if not existed:
                sync_folder(self.path.parent)
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any] | None = None) -> None:
        """Add one record; it is on disk when this returns. ``metadata`` is any JSON object."""
        if self._broken:
            raise StoreError(f"{self.path}: an earlier write could not be made durable; reopen the log")
        record = encode_record(batch, metadata or {})
        self._broken = True  # until the record is known to be there, or to be gone
        try:
            written = 0
            with naming(self.path):
                while written < len(record):
                    written += os.pwrite(self._handle, memoryview(record)[written:], self.size + written)
        except OSError:
            os.ftruncate(self._handle, self.size)
            self._broken = False
            raise
        sync(self._handle)
        self.size += len(record)
        self._broken = False

    @property
    def usable(self) -> bool:
        """False when a failed write left it unknown what the disk holds."""
        return not self._broken

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._broken = True

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_segments(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], pa.RecordBatch]]:
    """The (metadata, batch) of every whole record of a segment, or of all ``*.log`` segments of a folder by name.

    A torn last record is left out; damage anywhere else raises CorruptFile. A missing path yields nothing.
    """
    path = Path(path)
    if path.is_dir():
        for segment in sorted(path.glob("*.log")):
            yield from read_segments(segment)
    elif path.exists() and path.stat().st_size >= SEGMENT_HEADER:
        for metadata, batch, _ in read_records(path):
            yield metadata, batch


def last_record_end(path: Path, sealed: int | None = None, sound: int = 0) -> int:
    """The bytes up to the end of the last whole record, all of them checked; see ``read_records``."""
    end = SEGMENT_HEADER
    for record in read_records(path, sealed=sealed, sound=sound):
        end = record[2]
    return end


def encode_record(batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any]) -> bytes:
    if isinstance(batch, pa.Table):
        batch = single_batch(batch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the Arrow bytes are aligned
    body = sink.getvalue()
    payload = zlib.crc32(body, zlib.crc32(text))
    head = _HEAD.pack(b"SREC", len(text), len(body), payload)
    return b"".join((_RECORD.pack(b"SREC", len(text), len(body), payload, zlib.crc32(head)), text, body, _END))


def encode_object(batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any]) -> bytes:
    """A whole segment of one record: what object storage keeps of a commit."""
    return _SEGMENT.pack(MAGIC, FORMAT, 0) + encode_record(batch, metadata)


def decode_object(content: bytes, where: Path | str) -> tuple[dict[str, Any], pa.RecordBatch]:
    """(metadata, batch) of such a segment. Raises CorruptFile."""
    _check_segment(content[:SEGMENT_HEADER], where)
    record = _read_record(io.BytesIO(content), where, SEGMENT_HEADER, len(content))
    if record is None or record[2] != len(content):
        raise CorruptFile(f"{where}: does not hold one whole record")
    return record[0], record[1]


def single_batch(table: pa.Table) -> pa.RecordBatch:
    """A table as one batch."""
    table = table.combine_chunks()
    batches = table.to_batches()
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)
    arrays = [pa.concat_arrays(column.chunks) for column in table.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def read_records(path: Path, offset: int = SEGMENT_HEADER, sealed: int | None = None,
                 most: int | None = None, sound: int = 0) -> Iterator[tuple[dict[str, Any], pa.RecordBatch, int]]:
    """(metadata, batch, offset after it) of the records from byte ``offset`` on. ``sealed``: the number of bytes that
    the segment must have; without it the end of the file may be torn, but not before byte ``sound``. ``most``: stop
    there. Raises CorruptFile, FileNotFoundError."""
    with open(path, "rb") as file:
        _check_segment(file.read(SEGMENT_HEADER), path)
        while offset != sealed and (most is None or offset < most):  # what lies behind does not count
            record = None
            for wait in (0.0, 0.003):  # a reader may look at a record while its writer takes it back
                if wait:  # also a sleep of 0 gives the core away
                    time.sleep(wait)
                size = os.fstat(file.fileno()).st_size if sealed is None else sealed
                size = size if most is None else min(size, most)
                try:
                    record = _read_record(file, path, offset, size)
                    break
                except CorruptFile:
                    if wait:
                        raise
            if record is None:
                if sealed is not None:
                    raise CorruptFile(f"{path}: ends at byte {offset}, its manifest says {sealed}")
                if offset < sound:
                    raise CorruptFile(f"{path}: {sound} bytes of it were acknowledged, what begins at byte {offset} is "
                                      "damaged or missing (in a copy that was made while the store was written to, "
                                      "remove writer.lock to read what was copied)")
                return
            metadata, batch, offset = record
            yield metadata, batch, offset


def _check_segment(head: bytes, path: Path | str) -> None:
    if len(head) < SEGMENT_HEADER:
        raise CorruptFile(f"{path}: shorter than a segment's header")
    magic, version, reserved = _SEGMENT.unpack(head)
    if magic != MAGIC or reserved:
        raise CorruptFile(f"{path}: not a log segment (starts with {magic!r})")
    if version != FORMAT:
        raise StoreError(f"{path}: log format {version}, this Semel reads {FORMAT}")


def _read_record(file: Any, path: Path | str, offset: int, size: int,
                 ) -> tuple[dict[str, Any], pa.RecordBatch, int] | None:
    """The record at ``offset``, or None where the file ends or its last record is torn."""
    file.seek(offset)
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    magic, text_bytes, body_bytes, payload_crc, head_crc = _RECORD.unpack(head)
    if magic != b"SREC" or zlib.crc32(head[: _HEAD.size]) != head_crc or any(head[_HEAD.size + 4 :]):
        rest = head + file.read(1 << 20)
        if _never_written(rest) or (offset % _PAGE > _PAGE - _RECORD.size and _never_written(rest[-offset % _PAGE :])):
            return None
        raise CorruptFile(f"{path}: damaged record header at byte {offset}")
    end = offset + _RECORD.size + text_bytes + body_bytes + len(_END)
    if end > size:
        return None
    text, body, mark = file.read(text_bytes), file.read(body_bytes), file.read(len(_END))
    if len(mark) < len(_END):
        return None
    if zlib.crc32(body, zlib.crc32(text)) != payload_crc or mark != _END:
        if end == size and (mark == bytes(len(_END)) or _has_hole(text + body, offset + _RECORD.size)):
            return None
        raise CorruptFile(f"{path}: record at byte {offset} does not match its checksum")
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        batch = reader.read_next_batch()
    return json.loads(text), batch, end


def _never_written(data: bytes) -> bool:
    """A power cut can leave a longer file whose new bytes never reached the disk: they read as zeros."""
    return not any(data)


def _has_hole(data: bytes, offset: int) -> bool:
    """Whether a whole page of the file, inside ``data`` (which starts at byte ``offset`` of it), is zero."""
    first = -offset % _PAGE
    return any(not any(data[at : at + _PAGE]) for at in range(first, len(data) - _PAGE + 1, _PAGE))

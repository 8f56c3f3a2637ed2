"""Erasing users from the files that a store does not know: tables and logs beside it that name users."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semel.history.durable import sync_folder
from semel.history.errors import StoreError, StoreLocked
from semel.history.log.segments import MAGIC, SegmentWriter, read_segments
from semel.history.storage.manifest import NAME as MANIFEST

REQUEST = "request_id"
SUFFIXES = (".parquet", ".log")


def files_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The Parquet files and logs in ``folders`` (or themselves files), without those of stores."""
    for folder in folders:
        found = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        stores = [path.parent / part for path in found if path.name == MANIFEST for part in ("log", "generations")]
        for path in found:
            if path.name.startswith(".") and path.suffix == ".erasing":  # of one that was killed
                path.unlink(missing_ok=True)
            if path.suffix in SUFFIXES and path.is_file() and not any(path.is_relative_to(part) for part in stores):
                yield path


def erase_rows(files: Iterable[Path], key: str, users: np.ndarray) -> dict[str, int]:
    """Rewrite every file that has rows of ``users`` in its column ``key``, without them, and before that those without
    such a column that have rows of the requests (``request_id``) which go; path -> rows removed. A file is replaced in
    one step, durable on return; where it breaks off, the same again finds what is left. Raises StoreLocked for a log
    that is being written to, StoreError for a file that cannot be read."""
    files = list(files)
    if not len(users):
        return {}
    ids = pa.array(users)
    requests: set[str] = set()
    named = [path for path in files if any([_noted(batch, key, ids, requests) for batch in _batches(path)])]
    removed: dict[str, int] = {}
    if requests:
        values = pa.array(sorted(requests), pa.string())
        for path in files:
            if path not in named:
                _rewrite(path, REQUEST, values, removed)
    for path in named:  # last, since they tell which requests are meant
        _rewrite(path, key, ids, removed)
    return removed


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """A file's rows. StoreError naming the file where it cannot be read; nothing for a ``.log`` of somebody else's."""
    try:
        if path.suffix == ".log":
            with open(path, "rb") as file:
                ours = file.read(len(MAGIC)) == MAGIC
            if ours:
                yield from (batch for _, batch in read_segments(path))
        else:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    yield from file.read_row_group(group).to_batches()
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"{path} cannot be read, so nobody can be erased from it: {error}") from None


def _noted(batch: pa.RecordBatch, key: str, ids: pa.Array, requests: set[str]) -> bool:
    """Whether a batch has a column ``key``; the requests of its rows of ``ids`` are added to ``requests``."""
    if not _fits(batch.schema, key, ids):
        return False
    if REQUEST in batch.schema.names:
        gone = batch.filter(_is_in(batch, key, ids)).column(REQUEST)
        requests.update(gone.cast(pa.string()).drop_null().to_pylist())
    return True


def _is_in(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.Array:
    return pc.is_in(batch.column(column).cast(values.type), value_set=values)


def _rewrite(path: Path, column: str, values: pa.Array, removed: dict[str, int]) -> None:
    found = any(_fits(batch.schema, column, values) and pc.any(_is_in(batch, column, values)).as_py()
                for batch in _batches(path))
    if found:
        scratch = path.with_name(f".{path.name}.erasing")
        scratch.unlink(missing_ok=True)  # of one that was killed
        try:
            rewrite = _rewrite_log if path.suffix == ".log" else _rewrite_parquet
            removed[str(path)] = removed.get(str(path), 0) + rewrite(path, scratch, column, values)
        finally:
            scratch.unlink(missing_ok=True)


def _kept(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.RecordBatch:
    return batch.filter(pc.invert(_is_in(batch, column, values)))


def _fits(schema: pa.Schema, column: str, values: pa.Array) -> bool:
    """Whether a table has the column, with ids of this kind."""
    if column not in schema.names:
        return False
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if column == REQUEST:
        return text or pa.types.is_integer(kind)
    return pa.types.is_integer(kind) if pa.types.is_integer(values.type) else text


def _rewrite_parquet(path: Path, scratch: Path, column: str, values: pa.Array) -> int:
    rows = 0
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        with pq.ParquetWriter(scratch, schema, compression="zstd") as writer:
            for group in range(file.num_row_groups):  # which readers are made for
                table = file.read_row_group(group)
                kept = pa.Table.from_batches([_kept(batch, column, values) for batch in table.to_batches()], schema)
                rows += table.num_rows - kept.num_rows
                if kept.num_rows:
                    writer.write_table(kept, row_group_size=kept.num_rows)
    _replace(scratch, path)
    return rows


def _rewrite_log(path: Path, scratch: Path, column: str, values: pa.Array) -> int:
    rows = 0
    with _held(path):
        with SegmentWriter(scratch) as writer:
            for metadata, batch in read_segments(path):
                kept = _kept(batch, column, values) if _fits(batch.schema, column, values) else batch
                rows += batch.num_rows - kept.num_rows
                writer.append(kept, metadata)
        _replace(scratch, path)
    return rows


def _held(path: Path) -> SegmentWriter:
    """So that nobody else writes to the log meanwhile."""
    try:
        return SegmentWriter(path)
    except StoreLocked:
        raise StoreLocked(f"{path} is being written to; stop what writes there (a server), then erase again") from None


def _replace(scratch: Path, path: Path) -> None:
    sync_folder(scratch)
    os.replace(scratch, path)
    sync_folder(path.parent)


def traces(places: Iterable[Path], key: str, users: np.ndarray) -> list[str]:
    """The files in ``places`` that still name one of ``users``: every file's bytes are searched, and those of Parquet
    files and logs once more as they are unpacked, where also the column ``key`` is compared.

    Searched for are ids of at least 6 bytes as text, and integers from 2^24 on as 8 bytes: what is shorter turns up by
    chance, and is found by column only. An id that is part of another's is found there too.
    """
    texts = [str(user).encode() for user in users.tolist()]
    words = [re.escape(text) for text in texts if len(text) >= 6]
    if users.dtype != object:
        words += [re.escape(int(user).to_bytes(8, "little", signed=True)) for user in users if abs(int(user)) >> 24]
    named = re.compile(b"|".join(words)).search if words else None
    ids = pa.array(users)
    found = (path for place in places for path in (sorted(place.rglob("*")) if place.is_dir() else [place]))
    return [str(path) for path in found if path.is_file() and _names(path, key, ids, named)]


def _names(path: Path, key: str, ids: pa.Array, named: Callable[[Any], Any] | None) -> bool:
    try:
        if named is not None and path.stat().st_size:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if named(content):
                    return True
        if path.suffix not in SUFFIXES:
            return False
        for batch in _batches(path):
            if _fits(batch.schema, key, ids) and pc.any(_is_in(batch, key, ids)).as_py():
                return True
            if named is not None and any(
                    buffer is not None and buffer.size and named(memoryview(buffer))
                    for column in batch.columns for buffer in column.buffers()):
                return True
    except FileNotFoundError:  # somebody else's temporary file
        pass
    return False


def check_places(also: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Paths as they are; StoreError for one that is not there."""
    paths = [Path(path) for path in ([also] if isinstance(also, str | os.PathLike) else also)]
    for path in paths:
        if not path.exists():
            raise StoreError(f"{path} is not there, so nothing can be erased from it")
    return paths

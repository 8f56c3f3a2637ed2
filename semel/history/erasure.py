"""Erasing users from the files that a store does not know: tables and logs beside it that name users."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semel.history.errors import StoreError, StoreLocked
from semel.history.files import sync_folder
from semel.history.log import SegmentWriter, read_segments
from semel.history.manifest import NAME as MANIFEST

REQUEST = "request_id"
SUFFIXES = (".parquet", ".log")


def files_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The Parquet files and logs in ``folders`` (or themselves files), without those of stores."""
    for folder in folders:
        found = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        stores = [path.parent / part for path in found if path.name == MANIFEST for part in ("log", "generations")]
        for path in found:
            if path.suffix in SUFFIXES and path.is_file() and not any(path.is_relative_to(part) for part in stores):
                yield path


def erase_rows(files: Iterable[Path], key: str, users: np.ndarray) -> dict[str, int]:
    """Rewrite every file that has rows of ``users`` in its column ``key``, without them, and then those that have rows
    of the requests (``request_id``) which went; path -> rows removed. A file is replaced in one step, durable on
    return. Raises StoreLocked for a log that is being written to."""
    files = list(files)
    removed: dict[str, int] = {}
    requests: set[str] = set()
    ids = pa.array(users)
    for path in files:
        _rewrite(path, key, ids, removed, requests)
    if requests:
        for path in files:
            _rewrite(path, REQUEST, pa.array(sorted(requests), pa.string()), removed, set())
    return removed


def _rewrite(path: Path, column: str, values: pa.Array, removed: dict[str, int], requests: set[str]) -> None:
    rewrite = _rewrite_log if path.suffix == ".log" else _rewrite_parquet
    count = rewrite(path, column, values, requests)
    if count:
        removed[str(path)] = removed.get(str(path), 0) + count


def _kept(batch: pa.RecordBatch, column: str, values: pa.Array, requests: set[str]) -> pa.RecordBatch:
    gone = pc.is_in(batch.column(column).cast(values.type), value_set=values)
    if REQUEST in batch.schema.names:
        requests.update(batch.filter(gone).column(REQUEST).to_pylist())
    return batch.filter(pc.invert(gone))


def _fits(schema: pa.Schema, column: str, values: pa.Array) -> bool:
    """Whether a table has the column, with ids of this kind."""
    if column not in schema.names:
        return False
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_integer(kind) if pa.types.is_integer(values.type) else (
        pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _rewrite_parquet(path: Path, column: str, values: pa.Array, requests: set[str]) -> int:
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        if not _fits(schema, column, values):
            return 0
        scratch = path.with_name(f".{path.name}.erasing")
        rows = 0
        try:
            with pq.ParquetWriter(scratch, schema, compression="zstd") as writer:
                for group in range(file.num_row_groups):  # which readers are made for
                    table = file.read_row_group(group)
                    kept = pa.Table.from_batches([_kept(batch, column, values, requests)
                                                  for batch in table.to_batches()], schema)
                    rows += table.num_rows - kept.num_rows
                    if kept.num_rows:
                        writer.write_table(kept, row_group_size=kept.num_rows)
            if rows:
                _replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    return rows


def _rewrite_log(path: Path, column: str, values: pa.Array, requests: set[str]) -> int:
    if not any(_fits(batch.schema, column, values) and pc.any(pc.is_in(
        batch.column(column).cast(values.type), value_set=values)).as_py() for _, batch in read_segments(path)
    ):
        return 0
    scratch = path.with_name(f".{path.name}.erasing")
    rows = 0
    try:
        with _held(path):
            with SegmentWriter(scratch) as writer:
                for metadata, batch in read_segments(path):
                    if _fits(batch.schema, column, values):
                        kept = _kept(batch, column, values, requests)
                        rows += batch.num_rows - kept.num_rows
                        batch = kept
                    writer.append(batch, metadata)
            if rows:
                _replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
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


def check_places(also: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Paths as they are; StoreError for one that is not there."""
    paths = [Path(path) for path in also]
    for path in paths:
        if not path.exists():
            raise StoreError(f"{path} is not there, so nothing can be erased from it")
    return paths

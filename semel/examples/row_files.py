"""Request rows in Parquet files that need not fit into memory: read by row group, when a batch asks for them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.batch import Pointers, RequestRows
from semel.examples.rows import CONTEXT, column_to_numpy, concat_rows, list_values, rows_from_table

HELD_BYTES = 512 << 20
"""Row groups are let go of, the one that was not used for longest first, when all take more than this."""


class RowFiles:
    """The rows of ``paths``, one file after the other, as ``concat_rows`` of them would have them; ``select`` gives the
    same. Held in memory: the pointers and the number of candidates of each request (some 32 bytes, once they are asked
    for), and row groups: up to ``HELD_BYTES``, but always those of the ``near`` rows that were used last.

    Raises FileNotFoundError, ValueError for a file that is no Parquet file of request rows or whose context columns are
    not those of the others; what is wrong inside a row group is raised, with the file's name, when it is read.
    """

    def __init__(self, paths: Sequence[Path], near: int) -> None:
        if not paths:
            raise ValueError("no files of request rows")
        self.paths = [Path(path) for path in paths]
        self._metadata: list[pq.FileMetaData] = []
        self._stamps: list[tuple[int, ...]] = []
        blanks: list[RequestRows] = []
        self._place: list[tuple[int, int]] = []  # of each row group: its file, its number there
        counts: list[int] = []
        for number, path in enumerate(self.paths):
            metadata, stamp = _look(path)
            self._metadata.append(metadata)
            self._stamps.append(stamp)
            blanks.append(_named(path, lambda m=metadata: _blank(m)))  # type: ignore[misc]
            self._place += [(number, group) for group in range(metadata.num_row_groups)]
            counts += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            other = set(blanks[0].context) ^ set(blanks[-1].context)
            if other:
                raise ValueError(f"{path}: its request features are not those of {self.paths[0]}: "
                                 f"{', '.join(sorted(other))}")
        self.blank = concat_rows(blanks)
        """No rows; the tasks and types of all files."""
        self._begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._near = near + 2 * max(counts, default=0)  # a window begins and ends within row groups
        self._held: OrderedDict[int, tuple[RequestRows, int]] = OrderedDict()  # row group -> rows, bytes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._begin[-1])

    @cached_property
    def pointers(self) -> Pointers:
        columns = [[column_to_numpy(table[name]) for name in ("user_id", "as_of", "version")]
                   for table in self._tables(["user_id", "as_of", "version"])]
        empty = self.blank.pointers
        return Pointers(*(np.concatenate([whole, *parts]) for whole, *parts in zip(
            (empty.user_id, empty.as_of, empty.version), *columns, strict=True)))

    @cached_property
    def candidate_counts(self) -> np.ndarray:
        """[R] int64."""
        return np.concatenate([np.empty(0, np.int64), *(np.diff(list_values(table["candidates"], "candidates")[1])
                                                        for table in self._tables(["candidates"]))])

    def request_ids(self) -> Iterator[np.ndarray]:
        """All of them, in parts."""
        for table in self._tables(["request_id"]):
            yield column_to_numpy(table["request_id"])

    @property
    def held_rows(self) -> int:
        """Rows that are in memory now."""
        return sum(len(rows) for rows, _ in self._held.values())

    def select(self, rows: np.ndarray) -> RequestRows:
        """The requests at ``rows`` (index array), in that order. Any number of threads may ask."""
        group_of = np.searchsorted(self._begin, rows, side="right") - 1
        parts, places = [self.blank], [np.empty(0, np.int64)]
        for group in np.unique(group_of).tolist():
            place = np.flatnonzero(group_of == group)
            places.append(place)
            parts.append(self._group(group).select(rows[place] - self._begin[group]))
        together = concat_rows(parts)
        return together if len(parts) <= 2 else together.select(np.argsort(np.concatenate(places)))

    def _group(self, group: int) -> RequestRows:
        with self._lock:
            held = self._held.get(group)
            if held is None:
                table = self._read(group, None)
                held = _named(self.paths[self._place[group][0]], lambda: rows_from_table(table)), table.nbytes
                self._held[group] = held
                self._let_go()
            self._held.move_to_end(group)
            return held[0]

    def _let_go(self) -> None:
        size, rows = sum(size for _, size in self._held.values()), self.held_rows
        for group, (oldest, its_size) in list(self._held.items()):
            if size <= HELD_BYTES or rows - len(oldest) < self._near:
                return
            del self._held[group]
            size, rows = size - its_size, rows - len(oldest)

    def _tables(self, columns: list[str]) -> Iterator[pa.Table]:
        for group in range(len(self._place)):
            yield self._read(group, columns)

    def _read(self, group: int, columns: list[str] | None) -> pa.Table:
        number, own = self._place[group]
        path = self.paths[number]
        if _stamp(path) != self._stamps[number]:
            raise ValueError(f"{path} has changed since it was opened; make the loader anew")
        metadata = self._metadata[number]
        return _named(path, lambda: pq.ParquetFile(path, metadata=metadata).read_row_group(own, columns))


def _look(path: Path) -> tuple[pq.FileMetaData, tuple[int, ...]]:
    if not path.exists():
        raise FileNotFoundError(f"no examples at {path}; build them first (semel.examples.build_examples)")
    stamp = _stamp(path)
    return _named(path, lambda: pq.read_metadata(path)), stamp


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when the file is written or replaced."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _named(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None


def _blank(metadata: pq.FileMetaData) -> RequestRows:
    """The file's columns without rows. What is null somewhere in the file is an object, unless a float, as where the
    whole file is read."""
    schema = metadata.schema.to_arrow_schema()
    rows = rows_from_table(schema.empty_table())
    context = dict(rows.context)
    for name, values in context.items():
        if values.dtype.kind not in "fO" and _has_nulls(metadata, CONTEXT + name):
            context[name] = values.astype(object)
    return RequestRows(rows.request_id, rows.pointers, rows.catalogue_version, context, rows.candidates, rows.label,
                       rows.label_mask, rows.weight)


def _has_nulls(metadata: pq.FileMetaData, name: str) -> bool:
    """Whether a column may have nulls: what its statistics say, True where they say nothing."""
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for i in range(chunks.num_columns):
            if chunks.column(i).path_in_schema == name:
                statistics = chunks.column(i).statistics
                if statistics is None or not statistics.has_null_count or statistics.null_count:
                    return True
    return False

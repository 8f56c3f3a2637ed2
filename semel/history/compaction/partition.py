"""The log's events by shard, for a compaction: in memory while they fit, then in one file without a name.

Batches are collected into an arena; when it is full it is sorted by shard, column by column (``Chunk``). A shard's new
rows are its part of every chunk, put together one column at a time (``ShardRows``).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from semel.history.arrays import bits, frozen
from semel.history.compaction.distinct import Distinct
from semel.history.durable import naming
from semel.history.errors import StoreError
from semel.history.generation.array_files import split_strings
from semel.history.generation.generation import NO_VALIDITY, Shard, piece_rows
from semel.history.kernels import grouping
from semel.history.kernels.sharding import packed, shards_of
from semel.history.log.tail import Arena
from semel.history.schema import EventSchema

IN_MEMORY, CHUNK = 4, 16  # this part of the limit may hold chunks, and this part is the size of one
LEAST_ROWS = 64  # of a chunk, however small the limit
_A_ROW = 36  # bytes a row, while sorting: its code, key, time, place in the order, reference
_KEPT = 26  # of them while columns are written: reference, time, version, validity
_PACKING = 48  # bytes a value of a piece: before, after, as a 64-bit number, packed
_STRING = 450  # bytes a user: its name as an object, in lists and tables


class Spill:
    """A file without a name in ``folder``: it is gone with the process, however that ends. Any number of threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[Any] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self.size = 0

    def write(self, array: np.ndarray) -> int:
        """Where it lies. Raises OSError where the disk is full."""
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        with self._lock:
            start, self.size = self.size, self.size + len(data)
        done = 0
        with naming(self._folder):
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], start + done)
        return start

    def read(self, out: np.ndarray, start: int) -> None:
        data = memoryview(out.reshape(-1).view(np.uint8).data)
        done = 0
        while done < len(data):
            count = os.preadv(self._file.fileno(), [data[done:]], start + done)
            if not count:
                raise OSError(f"a temporary file of a compaction ends at byte {start + done} of {self.size}")
            done += count

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Parts:
    """An array of which the rows ``offsets[s]`` to ``offsets[s + 1]`` are shard s's: in memory, or in ``spill`` from
    byte ``start`` on."""

    offsets: np.ndarray
    array: np.ndarray  # where it is spilled, without rows
    spill: Spill | None = None
    start: int = 0

    @classmethod
    def of(cls, offsets: np.ndarray, array: np.ndarray, spill: Spill | None) -> Parts:
        return cls(offsets, array) if spill is None else cls(offsets, array[:0].copy(), spill, spill.write(array))

    def rows(self, shard: int) -> int:
        return int(self.offsets[shard + 1] - self.offsets[shard])

    def read(self, shard: int, out: np.ndarray) -> None:
        if self.spill is None:
            out[:] = self.array[self.offsets[shard] : self.offsets[shard + 1]]
        elif len(out):
            row_bytes = out.nbytes // len(out)
            self.spill.read(out, self.start + int(self.offsets[shard]) * row_bytes)


@dataclass(frozen=True)
class Chunk:
    """An arena's rows by shard, in arrival order within one. ``keys``: ids, or places among the shard's strings here,
    of which ``name_sizes`` and ``name_bytes`` are there for string keys."""

    keys: Parts
    columns: dict[str, Parts]
    valid: dict[str, Parts]
    name_sizes: Parts | None = None
    name_bytes: Parts | None = None

    @classmethod
    def of(cls, arena: Arena, shards: int, spill: Spill | None = None, users: Distinct | None = None) -> Chunk:
        """Takes the arena's arrays away, one after the other. Counts string keys in ``users``."""
        rows = arena.rows
        keys = arena.arrays.pop("")[:rows]
        names: tuple[Parts, Parts] | tuple[()] = ()
        if arena.schema.string_keys:
            slots = [text.encode() for text in arena.slots]
            arena.slots.clear()
            if users is not None:
                users.add(*packed(slots))
            of_row, keys, names = _by_shard_and_slot(slots, keys, shards, spill)
            del slots
        else:
            of_row = shards_of(keys, shards)
        offsets, place = np.empty(shards + 1, np.int64), np.empty(rows, np.int64)
        grouping.place_rows(of_row, offsets, place)
        del of_row

        def parts(array: np.ndarray) -> Parts:
            out = np.empty((rows, *array.shape[1:]), array.dtype)
            grouping.scatter_rows(place, int(np.prod(array.shape[1:])), bits(frozen(array[:rows])), bits(out))
            return Parts.of(offsets, out, spill)

        by_shard = parts(keys)
        del keys
        return cls(by_shard, {name: parts(arena.arrays.pop(name)) for name in list(arena.arrays)},
                   {name: parts(arena.valid.pop(name)) for name in list(arena.valid)}, *names)

    def names(self, shard: int) -> list[bytes]:
        assert self.name_sizes is not None and self.name_bytes is not None
        sizes = np.empty(self.name_sizes.rows(shard), np.int64)
        data = np.empty(self.name_bytes.rows(shard), np.uint8)
        self.name_sizes.read(shard, sizes)
        self.name_bytes.read(shard, data)
        return split_strings(np.concatenate([[0], np.cumsum(sizes)]), data)


def _by_shard_and_slot(slots: list[bytes], keys: np.ndarray, shards: int, spill: Spill | None,
                       ) -> tuple[np.ndarray, np.ndarray, tuple[Parts, Parts]]:
    """(shard of each row, its place among the shard's strings, the strings' sizes and bytes by shard)."""
    of_slot = shards_of(slots, shards)
    order = np.argsort(of_slot, kind="stable")
    starts = np.searchsorted(of_slot[order], np.arange(shards + 1))
    local = np.empty(len(slots), np.int64)
    local[order] = np.arange(len(slots)) - starts[of_slot[order]]
    ends, data = packed([slots[slot] for slot in order.tolist()])
    return of_slot[keys], local[keys], (Parts.of(starts, np.diff(ends), spill), Parts.of(ends[starts], data, spill))


@dataclass(frozen=True)
class ShardRows:
    """A shard's part of all ``chunks``: see ``shards.NewRows``. ``names``: about how many different strings its
    users are."""

    schema: EventSchema
    shard: int
    chunks: Sequence[Chunk]
    names: int = 0

    @property
    def rows(self) -> int:
        return sum(chunk.keys.rows(self.shard) for chunk in self.chunks)

    def _joined(self, parts: Sequence[Parts | None]) -> np.ndarray:
        """None: nothing is null."""
        template = next(part.array for part in parts if part is not None)
        out = np.empty((self.rows, *template.shape[1:]), template.dtype)
        at = 0
        for chunk, part in zip(self.chunks, parts, strict=True):
            end = at + chunk.keys.rows(self.shard)
            if part is None:
                out[at:end] = True
            else:
                part.read(self.shard, out[at:end])
            at = end
        return frozen(out)

    def users(self) -> tuple[np.ndarray | list[bytes], np.ndarray]:
        keys = self._joined([chunk.keys for chunk in self.chunks]) if self.chunks else np.empty(0, np.int64)
        codes = np.empty(len(keys), np.int32)
        if not self.schema.string_keys:
            return grouping.number_users(keys, codes), codes
        number: dict[bytes, int] = {}
        at = 0
        for chunk in self.chunks:
            end = at + chunk.keys.rows(self.shard)
            here = [number.setdefault(name, len(number)) for name in chunk.names(self.shard)]
            codes[at:end] = np.array(here, np.int32)[keys[at:end]]
            at = end
        return list(number), codes

    def column(self, name: str) -> np.ndarray:
        if not self.chunks:
            column = self.schema.layout.get(name)
            return frozen(np.empty(0, np.int64) if column is None else np.empty((0, *column.shape), column.dtype))
        return self._joined([chunk.columns[name] for chunk in self.chunks])

    def validity(self, name: str) -> np.ndarray:
        if not any(name in chunk.valid for chunk in self.chunks):
            return NO_VALIDITY
        return self._joined([chunk.valid.get(name) for chunk in self.chunks])


class Partition:
    """Takes the log's batches in order, then gives each shard its rows. Holds no more than about half of ``limit``
    bytes while it takes, a quarter (``nbytes``) from then on; files go into ``folder``. A context manager."""

    def __init__(self, folder: Path, schema: EventSchema, shards: int, rows: int, limit: int, workers: int) -> None:
        self._schema, self._shards, self._folder, self._limit = schema, shards, folder, limit
        in_arena = row_bytes(schema) + (_STRING if schema.string_keys else 0)  # each row may be another user's
        self.chunk_rows = min(max(limit // CHUNK // in_arena, LEAST_ROWS), max(rows, 1))
        self._arena = Arena(schema, self.chunk_rows)
        self._chunks: list[Future[Chunk]] = []
        self._spill: Spill | None = None
        self._users = Distinct(shards) if schema.string_keys else None
        self.nbytes = 0
        # One thread sorts and writes while this one reads and checks the log.
        self._pool = ThreadPoolExecutor(1) if workers > 1 and rows > self.chunk_rows else None

    def __enter__(self) -> Partition:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._spill is not None:  # now that no thread writes to it
            self._spill.close()

    def add(self, batch: pa.RecordBatch, versions: int | np.ndarray) -> None:
        at = 0
        while at < batch.num_rows:
            count = min(batch.num_rows - at, self.chunk_rows - self._arena.rows)
            self._arena.append(batch.slice(at, count),
                               versions[at : at + count] if isinstance(versions, np.ndarray) else versions)
            at += count
            if self._arena.rows == self.chunk_rows:
                self._sort()

    def _sort(self) -> None:
        arena, self._arena = self._arena, Arena(self._schema, self.chunk_rows)
        size = arena.rows * row_bytes(self._schema) + sum(8 + len(text) for text in arena.slots)
        if self.nbytes + size <= self._limit // IN_MEMORY:
            self.nbytes += size
            spill = None
        else:
            if self._spill is None:
                self._spill = Spill(self._folder)
            spill = self._spill
        if self._pool is None:
            done: Future[Chunk] = Future()
            done.set_result(Chunk.of(arena, self._shards, spill, self._users))
        else:
            if self._chunks:
                self._chunks[-1].result()  # no more than one full arena waits
            done = self._pool.submit(Chunk.of, arena, self._shards, spill, self._users)
        self._chunks.append(done)

    def shards(self) -> list[ShardRows]:
        """Each shard's rows, after the last batch."""
        if self._arena.rows:
            self._sort()
        del self._arena
        chunks = [chunk.result() for chunk in self._chunks]
        names = [0] * self._shards if self._users is None else self._users.counts().tolist()
        return [ShardRows(self._schema, shard, chunks, names[shard]) for shard in range(self._shards)]


def row_bytes(schema: EventSchema) -> int:
    """Of an event in memory, key, times and version included."""
    return 24 + sum(schema.widths)


def check_fits(old: Shard, new: ShardRows, free: int, also: int = 0) -> int:
    """About how many bytes ``shards.compact_shard`` allocates at a time, ``also`` of them for each row by what it
    does beside moving rows (``Change.row_bytes``). Raises StoreError for more than ``free`` ones."""
    widest = pieces = 0
    for column in new.schema.layout.values():
        values = int(np.prod(column.shape))
        widest = max(widest, values * column.dtype.itemsize)
        pieces = max(pieces, values * min(old.rows + new.rows, piece_rows(column.shape)))
    need = old.rows * _A_ROW + new.rows * max(_A_ROW, _KEPT + widest) + pieces * _PACKING + old.nbytes
    need += (old.rows + new.rows) * also
    if new.schema.string_keys:
        need += _STRING * (old.user_count + new.names)
    if need > free:
        raise StoreError(f"shard {new.shard} takes about {need:,} bytes of memory to compact, the memory limit leaves "
                         f"{free:,}: raise memory_limit, or copy the store into one of more shards")
    return need

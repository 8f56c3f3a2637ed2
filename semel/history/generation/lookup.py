"""A generation as kernels take it: the users of all its shards in a few arrays, and where its columns lie.

Filled a shard at a time, when a read first needs the shard: mapping a file checks every byte of it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semel.batch import offsets_of

if TYPE_CHECKING:
    from semel.history.generation.generation import Generation, Shard
    from semel.history.kernels.packing import Packed

TIME_STEP = 128
"""Rows between two times of a shard's ``time_index``: those of a packed block."""


class Addresses:
    """``table`` [shards, 2] uint64: of each shard's part of a column the address of its values and 0, or, packed, of
    its bytes and of its blocks' starts; two zeros where it has none. They hold as long as this object does."""

    def __init__(self, shards: list[Shard], column: Callable[[Shard], np.ndarray | Packed]) -> None:
        self.table = np.zeros((len(shards), 2), np.uint64)
        self._shards, self._column = shards, column
        self._missing = {shard.index for shard in shards if shard.rows}
        self._kept: list[np.ndarray | Packed] = []  # two threads may map the same file, and the shard keeps one

    def of(self, shard_of: np.ndarray) -> np.ndarray:
        """``table``, with the shards ``shard_of`` [P] in it. (Threads may fill in one together: either's will do.)"""
        for shard in _needed(self._missing, shard_of):
            column = self._column(self._shards[shard])
            self._kept.append(column)
            if isinstance(column, tuple):
                self.table[shard] = column[0].ctypes.data, column[1].ctypes.data
            elif len(column):
                self.table[shard, 0] = column.ctypes.data
            self._missing.discard(shard)
        return self.table


@dataclass(frozen=True)
class ColumnPlace:
    """A column: ``width`` values of ``dtype`` a row, as unsigned numbers ``bits``. ``valid``: None where no shard has
    nulls."""

    dtype: np.dtype
    shape: tuple[int, ...]
    width: int
    bits: np.dtype
    values: Addresses
    valid: Addresses | None

    def empty(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """([rows, *shape], the same memory flat as ``bits``)."""
        flat = np.empty(rows * self.width, self.bits)
        column = flat.view(self.dtype)
        return (column.reshape(rows, *self.shape) if self.shape else column), flat


class Lookup:
    """User u of shard s has the record ``records[first_user[s] + u]``: key (integer keys), first row, row after the
    last, first version, last version, last time. Where keys are integers the u of a shard lie in the hash table
    ``slots[first_slot[s]:first_slot[s + 1]]`` (-1: empty). ``time_index[first_step[s]:first_step[s + 1]]``: the time of
    every TIME_STEP-th row. In memory 72 to 80 bytes a user, and a byte for 16 events.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        users, rows = generation.info["users"], np.array(generation.info["rows"], np.int64)
        self.first_user, self.first_step = offsets_of(users), offsets_of(-(-rows // TIME_STEP))
        sizes = [0 if generation.schema.string_keys or not count else 1 << (2 * count - 1).bit_length()
                 for count in users]
        self.first_slot = offsets_of(sizes)
        self.slots = np.empty(self.first_slot[-1], np.int32)
        self.records = _cache_lines(int(self.first_user[-1]))
        self.time_index = np.empty(self.first_step[-1], np.int64)
        self._missing = {shard.index for shard in generation.shards if shard.rows}
        self._lock = threading.Lock()
        self._columns: dict[str, ColumnPlace] = {}

    def for_read(self, generation: Generation) -> Lookup:
        """The same users, read once for all; columns as ``generation``, which is for one read, has them."""
        one = copy.copy(self)
        one._generation, one._columns = generation, {}
        return one

    def missing(self, shard_of: np.ndarray) -> list[int]:
        """Those of the shards ``shard_of`` [P] that ``need`` would read."""
        return _needed(self._missing, shard_of)

    def need(self, shard_of: np.ndarray) -> None:
        """Have the users of these shards [P] ready."""
        if needed := _needed(self._missing, shard_of):
            with self._lock:
                for shard in needed:
                    if shard in self._missing:
                        self._fill(self._generation.shards[shard])
                        self._missing.discard(shard)

    def column(self, name: str) -> ColumnPlace:
        """Where a schema column, ``event_time`` or ``version`` lies."""
        place = self._columns.get(name)
        if place is None:
            shards = self._generation.shards
            _, dtype, shape = self._generation.place(name)
            valid = any(shard.has_nulls(name) for shard in shards)
            place = self._columns[name] = ColumnPlace(
                dtype, shape, math.prod(shape), np.dtype(f"u{dtype.itemsize}"),
                Addresses(shards, lambda shard: shard.column(name)),
                Addresses(shards, lambda shard: shard.valid(name)) if valid else None)
        return place

    def _fill(self, shard: Shard) -> None:
        from semel.history.kernels import cutting

        index = shard.index
        records = self.records[self.first_user[index] : self.first_user[index + 1]]
        records[:, cutting.FIRST_ROW], records[:, cutting.END_ROW] = shard.offsets[:-1], shard.offsets[1:]
        records[:, cutting.FIRST_VERSION], records[:, cutting.LAST_VERSION] = shard.first, shard.last
        records[:, cutting.LAST_TIME] = shard.last_time
        self.time_index[self.first_step[index] : self.first_step[index + 1]] = shard.time_index
        first, stop = int(self.first_slot[index]), int(self.first_slot[index + 1])
        if stop > first:
            records[:, cutting.KEY] = shard.users
            self.slots[first:stop] = -1
            cutting.fill_slots(shard.users, first, stop, self.slots)


def _cache_lines(count: int) -> np.ndarray:
    """[count, 8] int64, each row a cache line."""
    room = np.empty(8 * count + 7, np.int64)
    return room[-room.ctypes.data // 8 % 8 :][: 8 * count].reshape(count, 8)


def _needed(missing: set[int], shard_of: np.ndarray) -> list[int]:
    """Those of the shards ``shard_of`` that are missing."""
    return [s for s in np.flatnonzero(np.bincount(shard_of)).tolist() if s in missing] if missing else []

"""From ids to rows: which ids a table takes, which rank keeps a row, and what a row that is new starts with.

Three policies. ``dense``: ids are 0 .. rows - 1 and each has a row; others are refused. ``hashed``: any id, row
``mix(id) mod rows``; ids may share a row (collide) for ever. ``zero_collision``: any id, a row of its own from the
first time it is met, taken from the row that was used longest ago when there is none left.

Who owns a row depends on its key and the world size only, a new row's values on its key and the seed only. So a table
does not depend on the order in which ids came, nor on how many ranks share it.
"""

from __future__ import annotations

from typing import Protocol

import numba
import numpy as np
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Rows(Protocol):
    """One rank's part of a table's rows. Keys are what rows are known by: int64, distinct wherever rows are."""

    name: str
    slots: int
    """Rows that this rank has memory for."""

    def check(self, ids: Tensor) -> None:
        """Raises ValueError for an id that the policy refuses."""
        ...

    def keys(self, ids: Tensor) -> Tensor:
        """int64 ids -> their rows' keys."""
        ...

    def owner(self, keys: Tensor) -> Tensor:
        """The rank that keeps each row."""
        ...

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Distinct own keys -> slots, -1 where there is no row yet."""
        ...

    def admit(self, keys: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct own keys that batch number ``batch`` uses -> (slots, those of ``keys`` that have just got a row).
        Raises ValueError if one batch needs more rows than there are."""
        ...

    def held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(keys in ascending order, their slots, the batch that used each last) of the rows that there are."""
        ...

    def restore(self, keys: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Own keys and when they were used, into an empty part -> slots."""
        ...


def rows_policy(new_ids: str, rows: int, rank: int, world_size: int) -> Rows:
    """Raises ValueError for an unknown policy or a table without rows."""
    if rows < 1:
        raise ValueError(f"a table needs at least one row, got rows={rows}")
    if new_ids == "zero_collision":
        return ZeroCollisionRows(rows, rank, world_size)
    if new_ids == "dense":
        return DenseRows(rows, rank, world_size)
    if new_ids == "hashed":
        return HashedRows(rows, rank, world_size)
    raise ValueError(f'new_ids must be "dense", "hashed" or "zero_collision", got {new_ids!r}')


class DenseRows:
    """Key = id, dealt to ranks in turn: row k lies on rank ``k mod world_size``."""

    name = "dense"

    def __init__(self, rows: int, rank: int, world_size: int) -> None:
        self.rows, self.rank, self.world_size = rows, rank, world_size
        self.slots = len(range(rank, rows, world_size))

    def check(self, ids: Tensor) -> None:
        for end in ids.aminmax() if len(ids) else ():
            if not 0 <= int(end) < self.rows:
                raise ValueError(f"id {int(end)} is outside 0 .. {self.rows - 1} of a dense table; give it more rows, "
                                 f'or take new_ids="hashed" or "zero_collision"')

    def keys(self, ids: Tensor) -> Tensor:
        return ids

    def owner(self, keys: Tensor) -> Tensor:
        return keys % self.world_size

    def find(self, keys: np.ndarray) -> np.ndarray:
        return keys // self.world_size

    def admit(self, keys: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.find(keys), np.zeros(len(keys), bool)

    def held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = np.arange(self.rank, self.rows, self.world_size, dtype=np.int64)
        return keys, self.find(keys), np.zeros(len(keys), np.int64)

    def restore(self, keys: np.ndarray, used: np.ndarray) -> np.ndarray:
        return self.find(keys)


class HashedRows(DenseRows):
    """Key = ``mix(id) mod rows``; the rest is dense. Of n ids about ``n^2 / (2 rows)`` pairs share a row."""

    name = "hashed"

    def check(self, ids: Tensor) -> None:
        pass

    def keys(self, ids: Tensor) -> Tensor:
        mixed = mix(ids.cpu().numpy().astype(np.uint64))
        return torch.from_numpy((mixed % np.uint64(self.rows)).astype(np.int64)).to(ids.device)


class ZeroCollisionRows:
    """Key = id. Rows lie in partitions: of ``max(sqrt(rows), rows / 256)`` the largest power of two below. An id's
    partition is ``mix(id)``'s lowest bits, and partition p lies on rank ``p mod world_size``.

    In a full partition the row that was used longest ago goes (of equals the one with the smallest id), never one that
    the same batch uses. A partition is never split, so that what goes does not depend on the world size either; a
    table can be shared by at most as many ranks as it has partitions, others keep no rows.
    """

    name = "zero_collision"

    def __init__(self, rows: int, rank: int, world_size: int) -> None:
        self.rows, self.rank, self.world_size = rows, rank, world_size
        self.partitions = 1 << (max(int(rows**0.5), rows // 256).bit_length() - 1)  # small ones are searched fast
        self.capacity = -(-rows // self.partitions)
        mine = len(range(rank, self.partitions, world_size))
        self.slots = mine * self.capacity
        self._key = np.zeros(self.slots, np.int64)
        self._used = np.full(self.slots, -1, np.int64)  # -1: a free slot
        self._count = np.zeros(mine, np.int64)
        self._places = np.full(1 << (2 * self.slots).bit_length(), -1, np.int64)

    def check(self, ids: Tensor) -> None:
        pass

    def keys(self, ids: Tensor) -> Tensor:
        return ids

    def owner(self, keys: Tensor) -> Tensor:
        return torch.from_numpy(self._partition(keys.cpu().numpy()) % self.world_size).to(keys.device)

    def find(self, keys: np.ndarray) -> np.ndarray:
        return _find(keys, mix(keys.astype(np.uint64)), self._key, self._places)

    def admit(self, keys: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
        slots = self.find(keys)
        self._used[slots[slots >= 0]] = batch
        new = slots < 0
        if new.any():
            slots[new] = self._add(keys[new], np.full(int(new.sum()), batch), batch)
        return slots, new

    def held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slots = np.flatnonzero(self._used >= 0)
        slots = slots[np.argsort(self._key[slots])]
        return self._key[slots], slots, self._used[slots]

    def restore(self, keys: np.ndarray, used: np.ndarray) -> np.ndarray:
        return self._add(keys, used, -1)

    def _partition(self, keys: np.ndarray) -> np.ndarray:
        return (mix(keys.astype(np.uint64)) & np.uint64(self.partitions - 1)).astype(np.int64)

    def _add(self, keys: np.ndarray, used: np.ndarray, batch: int) -> np.ndarray:
        order = np.argsort(keys)  # whatever order they came in
        slots = np.empty(len(keys), np.int64)
        slots[order] = _add(keys[order], mix(keys[order].astype(np.uint64)), used[order], batch,
                            self._partition(keys[order]) // self.world_size, self.capacity, self._key, self._used,
                            self._count, self._places)
        if len(slots) and slots.min() < 0:
            raise ValueError(f"one batch uses more rows of a partition than its {self.capacity}; the table has rows="
                             f"{self.rows} in {self.partitions} partitions: give it more rows, or make batches smaller")
        return slots


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, one to one, every bit depending on every bit: the finalizer of SplitMix64 (Steele, Lea, Flood,
    OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values + _STEP
        values = (values ^ (values >> np.uint64(30))) * _FIRST
        values = (values ^ (values >> np.uint64(27))) * _SECOND
        return values ^ (values >> np.uint64(31))


def initial_rows(keys: np.ndarray, seed: int, dim: int, deviation: float) -> np.ndarray:
    """[N, dim] float32, uniform with mean 0 and the given standard deviation, a function of key, seed and column only.

    Only operations that are exact or rounded once are used, so that every machine and vector width gives the same bits.
    """
    start = mix(keys.astype(np.uint64) ^ mix(np.asarray([seed]).astype(np.uint64)))
    with np.errstate(over="ignore"):
        bits = mix(start[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _STEP)
    centred = (bits >> np.uint64(40)).astype(np.int32) - (1 << 23)  # 24 bits: all of them fit a float32
    return centred.astype(np.float32) * np.float32(deviation * 3**0.5 / (1 << 23))


@numba.njit(cache=True, nogil=True)
def _find(keys, mixed, key, places):
    """``places``: a hash table of slots (open addressing, linear probing, -1 empty); ``key``: the slots' keys."""
    mask = len(places) - 1
    out = np.full(len(keys), -1, np.int64)
    for i in range(len(keys)):
        place = np.int64(mixed[i] >> np.uint64(32)) & mask
        while places[place] >= 0:
            if key[places[place]] == keys[i]:
                out[i] = places[place]
                break
            place = (place + 1) & mask
    return out


@numba.njit(cache=True, nogil=True)
def _add(keys, mixed, when, batch, partition, capacity, key, used, count, places):
    """Slots for ascending ``keys`` that have none; -1 where all rows of the partition are in use by ``batch``."""
    mask = len(places) - 1
    out = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        first = partition[i] * capacity
        if count[partition[i]] < capacity:
            slot = first + count[partition[i]]
            count[partition[i]] += 1
        else:
            slot = first
            for other in range(first + 1, first + capacity):
                if used[other] < used[slot] or (used[other] == used[slot] and key[other] < key[slot]):
                    slot = other
            if used[slot] == batch:
                out[i] = -1
                continue
            _forget(slot, key, places)
        key[slot], used[slot], out[i] = keys[i], when[i], slot
        place = np.int64(mixed[i] >> np.uint64(32)) & mask
        while places[place] >= 0:
            place = (place + 1) & mask
        places[place] = slot
    return out


@numba.njit(cache=True, nogil=True)
def _forget(slot, key, places):
    """Takes a slot out of the hash table, and moves those behind it up, so that no search ends too early."""
    mask = len(places) - 1
    hole = _home(key[slot], mask)
    while places[hole] != slot:
        hole = (hole + 1) & mask
    place = hole
    while True:
        place = (place + 1) & mask
        if places[place] < 0:
            break
        if (place - _home(key[places[place]], mask)) & mask >= (place - hole) & mask:
            places[hole] = places[place]
            hole = place
    places[hole] = -1


@numba.njit(cache=True, nogil=True)
def _home(key, mask):
    value = np.uint64(key) + _STEP
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return np.int64((value ^ (value >> np.uint64(31))) >> np.uint64(32)) & mask

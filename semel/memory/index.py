"""Where a key's row is: open addressing with linear probes, compiled; every probe compares the whole key.

``slots`` [size, 2] int64, ``size`` a power of two, at most half full: (key, row + 1), 0 where nothing lies, so that a
key and its row are one cache line. Which slot a key lies in says nothing: only ``find`` does.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


def kernel(**more: Any) -> Any:
    """Compiled, without the interpreter's lock; kept on disk where there is a folder for it."""
    def make(function: Any) -> Any:
        how = {"nogil": True, "error_model": "numpy", **more}
        try:
            return numba.njit(cache=True, **how)(function)
        except RuntimeError:  # no folder to keep compiled code in: compile once a process
            return numba.njit(**how)(function)
    return make


def zeros(*shape: int, dtype: Any = np.int64) -> np.ndarray:
    """numpy asks the kernel for large pages under what it allocates, not under what it has zeroed by the system; random
    reads of a large table take half the time on them."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def new_slots(capacity: int) -> np.ndarray:
    """Empty slots for ``capacity`` keys."""
    return zeros(1 << max(3, (2 * capacity - 1).bit_length()), 2)


@kernel(inline="always")
def mixed(key):
    """The finalizer of MurmurHash3 (Appleby, public domain): every bit of the key moves every bit of the result."""
    x = np.uint64(key)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x


@kernel(inline="always")
def slot_of(slots, key):
    """The slot that holds ``key``, or the free one where it would lie."""
    mask = np.uint64(len(slots) - 1)
    at = mixed(key) & mask
    while slots[at, 1] != 0 and slots[at, 0] != key:
        at = (at + np.uint64(1)) & mask
    return np.int64(at)


@kernel()
def longest_probe(slots, keys):
    """The most slots that finding one of ``keys`` looks at."""
    worst = 0
    mask = len(slots) - 1
    for key in keys:
        start = np.int64(mixed(key) & np.uint64(mask))
        worst = max(worst, ((slot_of(slots, key) - start) & mask) + 1)
    return worst


@kernel()
def find(slots, keys, start, stop, rows):
    """``rows[i]``: the row of ``keys[i]``, -1 where it has none, for start <= i < stop."""
    for i in range(start, stop):
        at = slot_of(slots, keys[i])
        rows[i] = slots[at, 1] - 1


@kernel()
def insert(slots, key, row):
    at = slot_of(slots, key)
    slots[at, 0] = key
    slots[at, 1] = row + 1


@kernel()
def remove(slots, key):
    """Takes ``key`` out. What lies behind it moves up, so that no probe ends too early (Knuth, vol. 3, 6.4, R)."""
    mask = len(slots) - 1
    hole = slot_of(slots, key)
    if slots[hole, 1] == 0:
        return
    at = hole
    while True:
        at = (at + 1) & mask
        if slots[at, 1] == 0:
            break
        home = np.int64(mixed(slots[at, 0]) & np.uint64(mask))
        if ((at - home) & mask) >= ((at - hole) & mask):
            slots[hole, 0] = slots[at, 0]
            slots[hole, 1] = slots[at, 1]
            hole = at
    slots[hole, 0] = 0
    slots[hole, 1] = 0

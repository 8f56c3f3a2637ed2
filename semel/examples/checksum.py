"""Eight bytes that say what a history was: served and rebuilt histories are equal where these are.

Not cryptographic; it detects error, not malice. The definition is in ``docs/formats/exposures.md``, so that another
language can compute it.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from semel.batch import JaggedTable
from semel.features import stable_id

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)


@numba.njit(cache=True, nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    # The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection, so that one changed word changes the result.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def _start(offsets: np.ndarray) -> np.ndarray:
    out = np.empty(len(offsets) - 1, dtype=np.uint64)
    for row in range(len(out)):
        out[row] = _mix(np.uint64(offsets[row + 1] - offsets[row]) + _GOLDEN)
    return out


@numba.njit(cache=True, nogil=True)
def _fold(state: np.ndarray, offsets: np.ndarray, name: np.uint64, words: np.ndarray, valid: np.ndarray) -> None:
    width = words.shape[1]
    for row in range(len(state)):
        h = _mix(state[row] ^ name)
        for i in range(offsets[row], offsets[row + 1]):
            if len(valid) and not valid[i]:
                h = _mix(h + _NULL)
            else:
                for k in range(width):
                    h = _mix(h ^ words[i, k]) + _GOLDEN
        state[row] = h


def history_checksum(
    histories: JaggedTable, dictionary_ids: Callable[[str, np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """[R] uint64, one for each history: over its length and, by column name, its values in order, nulls included.

    Strings count by value (their ``stable_id``), integers by value whatever their width, floats by their bits; what
    lies under a null does not count. ``dictionary_ids(column, dictionary)`` may give the stable ids of a dictionary,
    where a caller keeps them.
    """
    histories = histories.numpy()
    offsets = np.ascontiguousarray(histories.offsets, dtype=np.int64)
    state = _start(offsets)
    always = np.empty(0, dtype=bool)
    for name in sorted(histories.columns):
        column = histories.columns[name]
        dictionary = (histories.dictionaries or {}).get(name)
        if dictionary is not None:
            ids = dictionary_ids(name, dictionary) if dictionary_ids else stable_id(dictionary)
            column = ids[np.clip(column, 0, len(ids) - 1)] if len(ids) else np.zeros(len(column), np.int64)
        valid = (histories.validity or {}).get(name)
        _fold(state, offsets, np.uint64(int(stable_id(np.array([name], dtype=object))[0])), _words(column),
              always if valid is None else np.ascontiguousarray(valid, dtype=bool))
    return state


def _words(column: np.ndarray) -> np.ndarray:
    """[n, k] uint64 words of a column of n values (k > 1 for vectors)."""
    column = np.ascontiguousarray(column)
    if column.dtype.kind == "f":
        column = column.view(f"u{column.dtype.itemsize}")
    if column.dtype.kind not in "iub":
        raise TypeError(f"no checksum for a column of dtype {column.dtype}")
    wide = column.astype(np.int64).view(np.uint64) if column.dtype != np.uint64 else column
    return wide.reshape(len(column), -1) if len(column) else wide.reshape(0, 1)

"""The compiled loops of a compaction: rows by shard, rows by user, then their values in that order. Linear in the rows,
except where a user's events did not arrive in order.

Values are copied one by one: for an array that is assigned to a slice numba compiles its message about lengths too,
with all that makes strings of numbers, which takes eight times as long as the copy."""

from __future__ import annotations

import numpy as np

from semel.history.kernels import kernel
from semel.history.kernels.gather import mix
from semel.history.kernels.packing import copy_range

_32 = np.uint64(32)


@kernel
def place_rows(of_row, offsets, place):
    """Stable counting sort: ``place`` [n] where each row goes so that those of shard s lie at ``offsets[s]`` to
    ``offsets[s + 1]`` (written here) in their order."""
    shards = len(offsets) - 1
    offsets[:] = 0
    for i in range(len(of_row)):
        offsets[of_row[i] + 1] += 1
    for s in range(shards):
        offsets[s + 1] += offsets[s]
    at = offsets.copy()
    for i in range(len(of_row)):
        place[i] = at[of_row[i]]
        at[of_row[i]] += 1


@kernel
def scatter_rows(place, width, values, out):
    """Row i of ``values`` becomes row ``place[i]`` of ``out``; rows of ``width`` values each, flat."""
    for i in range(len(place)):
        for k in range(width):
            out[place[i] * width + k] = values[i * width + k]


@kernel
def number_users(keys, codes):
    """``codes`` [n]: the number of each row's user. Returns the users by number: [U] in order of arrival."""
    size, count = 1 << 10, 0
    table = np.full(size, -1, np.int32)
    users = np.empty(size >> 1, np.int64)
    for i in range(len(keys)):
        if count == len(users):
            more = np.empty(size, np.int64)
            for code in range(count):
                more[code] = users[code]
            users = more
            size <<= 1
            table = np.full(size, -1, np.int32)
            for code in range(count):
                table[_slot(table, users, users[code])] = code
        at = _slot(table, users, keys[i])
        if table[at] < 0:
            table[at] = count
            users[count] = keys[i]
            count += 1
        codes[i] = table[at]
    return users[:count].copy()


@kernel
def _slot(table, users, key):
    # The upper half of the hash: in a shard, what the lower bits say is the same for all.
    mask = len(table) - 1
    at = np.int64(mix(np.uint64(key)) >> _32) & mask
    while table[at] >= 0 and users[table[at]] != key:
        at = (at + 1) & mask
    return at


@kernel
def order_rows(codes, offsets, number, times, order):
    """``order`` [n]: the rows by user, time, arrival. ``offsets`` [U + 1]: where the events of the u-th user go;
    ``number`` [U]: its code."""
    at = np.empty(len(number), np.int64)
    for u in range(len(number)):
        at[number[u]] = offsets[u]
    for i in range(len(codes)):
        order[at[codes[i]]] = i
        at[codes[i]] += 1
    for u in range(len(number)):
        a, b = offsets[u], offsets[u + 1]
        for i in range(a + 1, b):
            if times[order[i]] < times[order[i - 1]]:
                rows = order[a:b].copy()
                by_time = np.argsort(times[rows], kind="mergesort")  # stable
                for k in range(b - a):
                    order[a + k] = rows[by_time[k]]
                break


@kernel
def take_rows(refs, first, width, old_values, new_values, out):
    """The rows that ``refs`` name, of ``width`` values each, flat; ``old_values`` begin with row ``first``."""
    for i in range(len(refs)):
        for k in range(width):
            if refs[i] >= 0:
                out[i * width + k] = old_values[(refs[i] - first) * width + k]
            else:
                out[i * width + k] = new_values[~refs[i] * width + k]


@kernel
def copy_values(column, first, count, out):
    """Values ``first`` to ``first + count`` of a column, plain or packed."""
    copy_range(column, first, count, out, 0)

"""The compiled loops that find a pointer's user and cut the history at its bounds, for pointers of all shards at once.

They take a generation's ``Lookup`` and work on the pointers ``start`` to ``stop``, so that threads may share a batch.
Nearly all of their time is waiting for memory: so they ask for what several pointers need before they look at any of
it.
"""

from __future__ import annotations

import numpy as np

from semel.history.kernels import kernel
from semel.history.kernels.gather import mix
from semel.history.kernels.loads import load32, load64, prefetch
from semel.history.kernels.packing import block_header, lane_value
from semel.history.schema import Status

KEY, FIRST_ROW, END_ROW, FIRST_VERSION, LAST_VERSION, LAST_TIME = range(6)
"""The fields of a user's record in a ``Lookup``, of eight: a cache line."""
GROUP = 16
"""Pointers whose memory is asked for together."""
_1, _3, _31 = np.uint64(1), np.uint64(3), np.uint64(31)
_UNKNOWN_USER = Status.UNKNOWN_USER.value


@kernel
def find_strings(user_offsets, user_bytes, key_offsets, key_bytes, index, user):
    """``user`` [P] of the pointers ``index``, all of one shard: each string's place among the shard's users, which are
    sorted by their bytes, -1 where it is not there."""
    for j in range(len(index)):
        p = index[j]
        start = key_offsets[p]
        size = key_offsets[p + 1] - start
        low, high, found = 0, len(user_offsets) - 1, -1
        while low < high:
            middle = (low + high) >> 1
            at = user_offsets[middle]
            have = user_offsets[middle + 1] - at
            order = 0
            for i in range(min(size, have)):
                a, b = user_bytes[at + i], key_bytes[start + i]
                if a != b:
                    order = -1 if a < b else 1
                    break
            if order == 0:
                order = -1 if have < size else (1 if have > size else 0)
            if order == 0:
                found = middle
                break
            if order < 0:
                low = middle + 1
            else:
                high = middle
        user[p] = found


@kernel
def _slot(key, first, stop):
    """Where the search for a key begins in the slots first ... stop, a power of two of them: by the upper bits of what
    the shard is the remainder of."""
    return first + (np.int64(mix(np.uint64(key)) >> _31) & (stop - first - 1))


@kernel
def fill_slots(users, first, stop, slots):
    """Put the numbers of a shard's users into its empty (-1) slots, each where the search for it ends."""
    for u in range(len(users)):
        at = _slot(users[u], first, stop)
        while slots[at] >= 0:
            at = at + 1 if at + 1 < stop else first
        slots[at] = u


@kernel
def find_integers(start, stop, keys, shard_of, first_user, records, first_slot, slots, user):
    """``user`` [P]: each key's place among its shard's users, -1 where it is not there."""
    of_slots, of_records = np.uint64(slots.ctypes.data), np.uint64(records.ctypes.data)
    begin = np.empty(GROUP, np.int64)
    for group in range(start, stop, GROUP):
        last = min(group + GROUP, stop)
        for p in range(group, last):
            first, end = first_slot[shard_of[p]], first_slot[shard_of[p] + 1]
            at = _slot(keys[p], first, end) if end > first else -1
            begin[p - group] = at
            prefetch(of_slots + np.uint64(at << 2))
        for p in range(group, last):
            at = begin[p - group]
            user[p] = slots[at] if at >= 0 else -1
            prefetch(of_records + np.uint64((first_user[shard_of[p]] + user[p]) << 6))
        for p in range(group, last):
            u, at, shard = user[p], begin[p - group], shard_of[p]
            while u >= 0 and records[first_user[shard] + u, KEY] != keys[p]:
                at = at + 1 if at + 1 < first_slot[shard + 1] else first_slot[shard]
                u = slots[at]
            user[p] = u


@kernel
def _time_at(data, row):
    return np.int64(load64(data + (np.uint64(row) << _3)))


@kernel
def _prefetch_middles(array, low, high):
    """Ask for what a binary search between ``low`` and ``high`` looks at first."""
    quarter = (high - low) >> 2
    middle = np.uint64(array.ctypes.data) + np.uint64((low + 2 * quarter) << 3)
    prefetch(middle)
    if quarter > 4:  # else it is in a cache line beside
        prefetch(middle - np.uint64(quarter << 3))
        prefetch(middle + np.uint64(quarter << 3))


@kernel
def _step_of(index, a, b, bound):
    """The step of 128 rows in which the first of the rows [a, b), not none, lies whose time is at least ``bound``, or
    at whose end if none of it is. ``index``: the time of every 128th row."""
    low = (a >> 7) + 1
    size = ((b - 1) >> 7) + 1 - low
    while size > 0:
        half = size >> 1
        before = index[low + half] < bound
        low += half + 1 if before else 0
        size = size - half - 1 if before else half
    return low - 1


@kernel
def _rows_of_step(step, a, b):
    """Those of the rows [a, b) that are in the step."""
    return max(a, step << 7), min(b, (step + 1) << 7)


@kernel
def _ask_for_middle(data, starts, step):
    """Have the head and the middle of a step of times brought in."""
    if starts == 0:
        prefetch(data + (np.uint64((step << 7) + 64) << _3))
    else:
        at = starts + np.uint64(step << 2)
        first, end = load32(at), load32(at + np.uint64(4))
        prefetch(data + first)
        prefetch(data + first + (end - first >> _1))


@kernel
def _half_of_step(data, starts, step, a, b, bound):
    """The half of the rows [a, b) of a step in which the first lies whose time is at least ``bound``, or at whose end
    if none of it is; it is asked for."""
    if a >= b:
        return a, b
    middle = a + ((b - a) >> 1)
    if starts == 0:
        values, width = data + (np.uint64(step << 7) << _3), np.uint64(64)
        before = _time_at(data, middle) < bound
    else:
        values, width, base, scale = block_header(data, starts, np.uint64(step))
        before = np.int64(base + scale * lane_value(values, width, np.uint64(middle & 127))) < bound
    a, b = (middle + 1, b) if before else (a, middle)
    if a < b:
        line = values + (np.uint64(a & 127) * width >> _3)
        end = values + (np.uint64(((b - 1) & 127) + 1) * width >> _3)
        while line < end:
            prefetch(line)
            line += np.uint64(64)
        prefetch(end)
    return a, b


@kernel
def _first_of(data, starts, step, a, b, bound):
    """The first of the rows [a, b) of a step whose time is at least ``bound``; b if none is."""
    first, size = a, b - a
    if starts == 0:
        while size > 0:
            half = size >> 1
            before = _time_at(data, first + half) < bound
            first += half + 1 if before else 0
            size = size - half - 1 if before else half
        return first
    lanes, width, base, scale = block_header(data, starts, np.uint64(step))
    while size > 0:
        half = size >> 1
        inside = np.uint64((first + half) & 127)
        before = np.int64(base + scale * lane_value(lanes, width, inside)) < bound
        first += half + 1 if before else 0
        size = size - half - 1 if before else half
    return first


@kernel
def cut(start, stop, shard_of, user, first_user, records, first_step, time_index, times, as_of, version, since, most,
        enough, low, high, plain, begin, count, status):
    """The rows [low, high) of user[p] (-1: not here) with ``since <= event_time < as_of``, whether all rows of the user
    are of visible versions (plain), and if so the newest ``most``: begin, count. Returns whether all are plain. Where a
    plain pointer has ``enough`` rows for sure ``high`` may be too low by less than a step: it has as many."""
    all_plain = True
    step, first, end = np.empty((3, GROUP), np.int64)
    for group in range(start, stop, GROUP):  # a group's memory is asked for before any of it is waited for
        last = min(group + GROUP, stop)
        for p in range(group, last):
            if user[p] >= 0:
                record = records[first_user[shard_of[p]] + user[p]]
                if record[LAST_TIME] >= as_of[p]:
                    index = first_step[shard_of[p]]
                    _prefetch_middles(time_index, index + (record[FIRST_ROW] >> 7), index + (record[END_ROW] >> 7))
        for p in range(group, last):
            low[p] = 0
            high[p] = 0
            plain[p] = True
            status[p] = _UNKNOWN_USER
            step[p - group] = -1
            if user[p] < 0:
                continue
            shard = shard_of[p]
            record = records[first_user[shard] + user[p]]
            if record[FIRST_VERSION] > version[p]:
                continue
            low[p] = record[FIRST_ROW]
            high[p] = record[END_ROW]
            plain[p] = record[LAST_VERSION] <= version[p]
            all_plain &= plain[p]
            status[p] = 0  # OK
            if record[LAST_TIME] >= as_of[p]:
                at = _step_of(time_index[first_step[shard] :], low[p], high[p], as_of[p])
                if plain[p] and (at << 7) - low[p] >= enough:
                    high[p] = at << 7
                    continue
                step[p - group] = at
                prefetch(times[shard, 1] + np.uint64(at << 2))
        for p in range(group, last):
            if step[p - group] >= 0:
                _ask_for_middle(times[shard_of[p], 0], times[shard_of[p], 1], step[p - group])
        for p in range(group, last):
            at = step[p - group]
            if at >= 0:
                a, b = _rows_of_step(at, low[p], high[p])
                first[p - group], end[p - group] = _half_of_step(times[shard_of[p], 0], times[shard_of[p], 1], at, a, b,
                                                                 as_of[p])
        for p in range(group, last):
            at = step[p - group]
            data, starts = times[shard_of[p], 0], times[shard_of[p], 1]
            if at >= 0:
                high[p] = _first_of(data, starts, at, first[p - group], end[p - group], as_of[p])
            if since > 0 and low[p] < high[p]:
                at = _step_of(time_index[first_step[shard_of[p]] :], low[p], high[p], since)
                a, b = _rows_of_step(at, low[p], high[p])
                low[p] = _first_of(data, starts, at, a, b, since)
            begin[p] = max(low[p], high[p] - most)
            count[p] = high[p] - begin[p]
    return all_plain


@kernel
def cut_integers(start, stop, keys, first_slot, slots, shard_of, user, first_user, records, first_step,
                 time_index, times, as_of, version, since, most, enough, low, high, plain, begin, count, status):
    """``cut``, with the users found first."""
    find_integers(start, stop, keys, shard_of, first_user, records, first_slot, slots, user)
    return cut(start, stop, shard_of, user, first_user, records, first_step, time_index, times, as_of, version, since,
               most, enough, low, high, plain, begin, count, status)

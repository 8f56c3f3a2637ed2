"""The compiled inner loops: find a user, cut a history at its pointer, copy its rows out. All release the GIL.

Input arrays are read-only (mapped files and ``tail.frozen`` views), so that each kernel is compiled once a dtype. A
generation's columns may be plain or packed (``packing``); ``value_at`` and ``copy_range`` read both.
Row references: ``>= 0`` is a row of the generation's shard, ``~row`` (negative) a row of the tail.

``cut`` and ``copy_ranges`` serve pointers of all shards in one call: they take a generation's ``Lookup`` (users,
records, time index of all shards, one after the other) and, of a column, the addresses of each shard's part. They work
on the pointers ``start`` to ``stop``, so that several threads may share a batch.
"""

from __future__ import annotations

import numpy as np

from semel.history.kernels import kernel
from semel.history.loads import copy_values, load32, load64, prefetch
from semel.history.packing import block_header, copy_range, lane_value, unpack_range, value_at
from semel.history.schema import Status

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_FNV_START = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_3, _30, _27, _31, _32 = (np.uint64(n) for n in (3, 30, 27, 31, 32))
_UNKNOWN_USER = Status.UNKNOWN_USER.value
KEY, FIRST_ROW, END_ROW, FIRST_VERSION, LAST_VERSION, LAST_TIME = range(6)
"""The fields of a user's record in a ``Lookup``, of eight: a cache line."""
GROUP = 8
"""Pointers whose memory is asked for together: while one line comes, others do too."""
LINES = 10
"""Cache lines of a block of times of 40 bits."""
AHEAD = 12
"""Cache lines of the next pointer's values that are asked for while one is copied."""

_NO_SINCE = np.iinfo(np.int64).min


@kernel
def mix(x):
    # The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX1
    x = (x ^ (x >> _27)) * _MIX2
    return x ^ (x >> _31)


@kernel
def shards_of_integers(keys, shards, out):
    for i in range(len(keys)):
        out[i] = np.int64(mix(np.uint64(keys[i])) % np.uint64(shards))


@kernel
def hash_string(data, start, stop):
    h = _FNV_START
    for at in range(start, stop):
        h = (h ^ np.uint64(data[at])) * _FNV_PRIME
    return mix(h)


@kernel
def shards_of_strings(offsets, data, shards, out):
    for i in range(len(offsets) - 1):
        out[i] = np.int64(hash_string(data, offsets[i], offsets[i + 1]) % np.uint64(shards))


@kernel
def _lower_bound(array, low, high, value):
    while low < high:
        middle = (low + high) >> 1
        if np.int64(value_at(array, middle)) < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def find_strings(user_offsets, user_bytes, key_offsets, key_bytes, index, out):
    """The same for UTF-8 strings sorted by their bytes."""
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
        out[p] = found


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
def _first_in_step(data, starts, step, a, b, bound):
    """The first of the rows [a, b) of a step whose time is at least ``bound``; the end if none is."""
    first = max(a, step << 7)
    size = min(b, (step + 1) << 7) - first
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
        low, high, plain, begin, count, status):
    """The rows [low, high) of user[p] (-1: not here) with ``since <= event_time < as_of``, whether all rows of the user
    are of visible versions (plain), and if so the newest ``most``: begin, count. Returns whether all are plain."""
    all_plain = True
    step = np.empty(GROUP, np.int64)
    for group in range(start, stop, GROUP):  # a group's memory is asked for before any of it is waited for
        last = min(group + GROUP, stop)
        for p in range(group, last):
            if user[p] >= 0:
                record = records[first_user[shard_of[p]] + user[p]]
                if record[LAST_TIME] >= as_of[p]:
                    first = first_step[shard_of[p]]
                    _prefetch_middles(time_index, first + (record[FIRST_ROW] >> 7), first + (record[END_ROW] >> 7))
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
                step[p - group] = at
                prefetch(times[shard, 1] + np.uint64(at << 2))
        for p in range(group, last):
            at = step[p - group]
            if at >= 0:
                data, starts = times[shard_of[p], 0], times[shard_of[p], 1]
                if starts != 0:
                    block = data + load32(starts + np.uint64(at << 2))
                    for line in range(LINES):
                        prefetch(block + np.uint64(64 * line))
        for p in range(group, last):
            at = step[p - group]
            data, starts = times[shard_of[p], 0], times[shard_of[p], 1]
            if at >= 0:
                high[p] = _first_in_step(data, starts, at, low[p], high[p], as_of[p])
            if since > 0 and low[p] < high[p]:
                at = _step_of(time_index[first_step[shard_of[p]] :], low[p], high[p], since)
                low[p] = _first_in_step(data, starts, at, low[p], high[p], since)
            begin[p] = max(low[p], high[p] - most)
            count[p] = high[p] - begin[p]
    return all_plain


@kernel
def cut_integers(start, stop, keys, first_slot, slots, shard_of, user, first_user, records, first_step,
                 time_index, times, as_of, version, since, most, low, high, plain, begin, count, status):
    """``cut``, with the users found first."""
    find_integers(start, stop, keys, shard_of, first_user, records, first_slot, slots, user)
    return cut(start, stop, shard_of, user, first_user, records, first_step, time_index, times, as_of, version, since,
               most, low, high, plain, begin, count, status)


@kernel
def cut_runs(users, offsets, times, first, keys, as_of, version, since, most, low, high, room, status):
    """``cut`` in the runs of the tail (a tuple of arrays each, newest run first): low and high are [P, runs]. ``room``
    [P + 1]: offsets with place for each pointer's rows, at most ``most``."""
    room[0] = 0
    for p in range(len(keys)):
        total = 0
        for k in range(low.shape[1]):
            low[p, k] = 0
            high[p, k] = 0
            n = len(users[k])
            at = _lower_bound(users[k], 0, n, keys[p])
            if at == n or users[k][at] != keys[p] or first[k][at] > version[p]:
                continue
            status[p] = 0
            a = offsets[k][at]
            b = _lower_bound(times[k], a, offsets[k][at + 1], as_of[p])
            if since != _NO_SINCE:
                a = _lower_bound(times[k], a, b, since)
            low[p, k] = a
            high[p, k] = b
            total += b - a
        room[p + 1] = room[p] + min(total, most)
    return room[len(keys)]


@kernel
def _wanted(group, valid, row, groups):
    if len(valid) and not value_at(valid, row):
        return False
    value = np.int64(value_at(group, row))
    found = False
    for i in range(len(groups)):
        found |= value == groups[i]
    return found


@kernel
def _is_gone(row, row_version, before, p, gone):
    """Whether a row was deleted: with all of the user's up to a version, or by itself."""
    if len(before) and row_version <= before[p]:
        return True
    if len(gone):
        at = _lower_bound(gone, 0, len(gone), row)
        return at < len(gone) and gone[at] == row
    return False


@kernel
def select_tail(rows, times, low, high, versions, version, before, gone, group, valid, groups, filtered, most, room,
                out, begin):
    """Merge each pointer's ranges of the runs (``rows`` and ``times``: one array a level, newest level first) into
    out[begin[p]:room[p + 1]], ascending; newest ``most`` rows of the visible, wanted ones that are
    not gone: ``before`` [P] or empty, ``gone`` sorted rows."""
    levels = low.shape[1]
    heads = np.empty(levels, np.int64)
    for p in range(len(version)):
        at = room[p + 1]
        taken = 0
        for k in range(levels):
            heads[k] = high[p, k]
        while taken < most:
            best = -1
            for k in range(levels):  # newest level first: it holds the later arrivals, which come last in a tie
                if heads[k] > low[p, k] and (best < 0 or times[k][heads[k] - 1] > times[best][heads[best] - 1]):
                    best = k
            if best < 0:
                break
            heads[best] -= 1
            row = rows[best][heads[best]]
            if versions[row] <= version[p] and not _is_gone(row, versions[row], before, p, gone) and (
                not filtered or _wanted(group, valid, row, groups)
            ):
                at -= 1
                out[at] = row
                taken += 1
        begin[p] = at


@kernel
def reserve(low, high, plain, filtered, tail_begin, tail_end, most, room):
    """``room`` [P + 1]: offsets with place for the references of the pointers that need them (a filter by version or
    group, or rows in the tail), none for plain ranges."""
    room[0] = 0
    for p in range(len(low)):
        in_tail = tail_end[p] - tail_begin[p]
        slow = filtered or in_tail > 0 or not plain[p]
        room[p + 1] = room[p] + (min(high[p] - low[p] + in_tail, most) if slow else 0)
    return room[len(low)]


@kernel
def select(index, low, high, plain, times, versions, version, before, gone, group, valid, groups, filtered,
           tail_rows, tail_begin, tail_end, tail_times, most, room, refs, begin, count):
    """What ``cut`` does where a version or group must be tested or the tail has rows: references in
    refs[begin[p]:begin[p] + count[p]], ascending, the newest ``most`` that are not gone (``before`` [P] or empty,
    ``gone`` sorted rows; pointers with some are not plain). Where room[p] == room[p + 1] begin and count
    stay a range of the generation. Returns whether all of ``index`` do."""
    all_plain = True
    for j in range(len(index)):
        p = index[j]
        if room[p] == room[p + 1]:
            continue
        all_plain = False
        a, at = low[p], high[p]
        tail_a, tail_at = tail_begin[p], tail_end[p]
        out = room[p + 1]
        taken = 0
        while taken < most:
            in_tail = tail_at > tail_a
            if in_tail and (at == a or tail_times[tail_rows[tail_at - 1]] >= np.int64(value_at(times, at - 1))):
                tail_at -= 1
                out -= 1
                refs[out] = ~tail_rows[tail_at]
                taken += 1
            elif at > a:
                at -= 1
                known = plain[p]
                if not known:
                    row_version = np.int64(value_at(versions, at))
                    known = row_version <= version[p] and not _is_gone(at, row_version, before, p, gone)
                if known and (not filtered or _wanted(group, valid, at, groups)):
                    out -= 1
                    refs[out] = at
                    taken += 1
            else:
                break
        begin[p] = out
        count[p] = taken
    return all_plain


@kernel
def sum_counts(count, offsets):
    """``offsets`` [P + 1] of ``count`` [P]; returns the last."""
    offsets[0] = 0
    for p in range(len(count)):
        offsets[p + 1] = offsets[p] + count[p]
    return offsets[len(count)]


@kernel
def copy_ranges(start, stop, shard_of, begin, count, offsets, width, addresses, out):
    """The rows begin[p] to begin[p] + count[p] of ``width`` values each into the flat ``out`` from row offsets[p] on.
    ``addresses`` [shards, 2]: of a column's values, and of its blocks' starts or 0 where it is plain; two zeros: a
    shard without nulls, all valid."""
    for p in range(start, stop):
        if p + 2 < stop:
            starts = addresses[shard_of[p + 2], 1]
            prefetch(starts + np.uint64((begin[p + 2] * width >> 7) << 2))
            data, starts = addresses[shard_of[p + 1], 0], addresses[shard_of[p + 1], 1]
            if starts != 0 and count[p + 1] != 0:
                block = data + load32(starts + np.uint64((begin[p + 1] * width >> 7) << 2))
                for line in range(AHEAD):
                    prefetch(block + np.uint64(64 * line))
        if count[p] == 0:
            continue
        data, starts = addresses[shard_of[p], 0], addresses[shard_of[p], 1]
        first, size, to = np.uint64(begin[p] * width), np.uint64(count[p] * width), np.uint64(offsets[p] * width)
        if starts != 0:
            unpack_range(data, starts, first, size, out, to)
        elif data != 0:
            copy_values(out, to, data + first * np.uint64(out.itemsize), size)
        else:
            for i in range(size):
                out[to + i] = 1


@kernel
def copy_rows(index, begin, count, offsets, room, refs, width, values, tail_values, out):
    """The rows of the pointers of ``index``, all of one shard, where some are references."""
    for j in range(len(index)):
        p = index[j]
        to, start = offsets[p] * width, begin[p]
        if room[p] == room[p + 1]:
            copy_range(values, start * width, count[p] * width, out, to)
        else:
            i, stop = start, start + count[p]
            while i < stop:
                ref = refs[i]
                if ref < 0:
                    copy_range(tail_values, ~ref * width, width, out, to)
                    i += 1
                    to += width
                    continue
                first = i
                while i < stop and refs[i] - ref == i - first:  # most of a history lies in one piece
                    i += 1
                copy_range(values, ref * width, (i - first) * width, out, to)
                to += (i - first) * width


@kernel
def merge_runs(a_users, a_offsets, a_rows, a_times, a_first, b_users, b_offsets, b_rows, b_times, b_first):
    """One run of two; ``b`` holds the later arrivals."""
    na, nb = len(a_users), len(b_users)
    users = np.empty(na + nb, np.int64)
    first = np.empty(na + nb, np.int64)
    offsets = np.zeros(na + nb + 1, np.int64)
    rows = np.empty(len(a_rows) + len(b_rows), np.int64)
    times = np.empty(len(a_rows) + len(b_rows), np.int64)
    i, j, u, at = 0, 0, 0, 0
    while i < na or j < nb:
        use_a = i < na and (j == nb or a_users[i] <= b_users[j])
        use_b = j < nb and (i == na or b_users[j] <= a_users[i])
        x, x_end, y, y_end = 0, 0, 0, 0
        if use_a:
            users[u], first[u] = a_users[i], a_first[i]
            x, x_end = a_offsets[i], a_offsets[i + 1]
            i += 1
        if use_b:
            users[u] = b_users[j]
            first[u] = min(first[u], b_first[j]) if use_a else b_first[j]
            y, y_end = b_offsets[j], b_offsets[j + 1]
            j += 1
        while x < x_end or y < y_end:
            if x < x_end and (y == y_end or a_times[x] <= b_times[y]):
                rows[at], times[at] = a_rows[x], a_times[x]
                x += 1
            else:
                rows[at], times[at] = b_rows[y], b_times[y]
                y += 1
            at += 1
        u += 1
        offsets[u] = at
    return users[:u].copy(), offsets[: u + 1].copy(), rows, times, first[:u].copy()


@kernel
def merge_bucket(old_row, old_offsets, old_times, new_row, new_offsets, new_order, new_times, refs, offsets):
    """Compaction's merge. For each user: ``old_row`` / ``new_row`` [U] its row among the old / new users or -1. Writes
    row references in order to ``refs`` and the users' ``offsets`` [U + 1]; old events come first in a tie."""
    at = 0
    for u in range(len(old_row)):
        x, x_end, y, y_end = 0, 0, 0, 0
        if old_row[u] >= 0:
            x, x_end = old_offsets[old_row[u]], old_offsets[old_row[u] + 1]
        if new_row[u] >= 0:
            y, y_end = new_offsets[new_row[u]], new_offsets[new_row[u] + 1]
        while x < x_end or y < y_end:
            if x < x_end and (y == y_end or old_times[x] <= new_times[new_order[y]]):
                refs[at] = x
                x += 1
            else:
                refs[at] = ~new_order[y]
                y += 1
            at += 1
        offsets[u + 1] = at


@kernel
def version_range(offsets, versions, first, last):
    """The lowest and highest version of each user."""
    for u in range(len(offsets) - 1):
        low = versions[offsets[u]]
        high = low
        for i in range(offsets[u] + 1, offsets[u + 1]):
            low = min(low, versions[i])
            high = max(high, versions[i])
        first[u] = low
        last[u] = high


@kernel
def highest_until(users, until, keys, out):
    """The highest ``until`` of each key's marks, -1 where it has none. ``users`` are sorted."""
    for p in range(len(keys)):
        out[p] = -1
        at = _lower_bound(users, 0, len(users), keys[p])
        while at < len(users) and users[at] == keys[p]:
            out[p] = max(out[p], until[at])
            at += 1


@kernel
def seen_marks(users, first, time, until, keys, as_of, version, gone, known, lost):
    """For each pointer whether its user was known through a mark, and whether it may have seen what is gone."""
    for p in range(len(keys)):
        known[p] = False
        lost[p] = False
        if gone[p] >= 0 and version[p] >= gone[p]:
            continue
        at = _lower_bound(users, 0, len(users), keys[p])
        while at < len(users) and users[at] == keys[p]:
            if first[at] <= version[p] and version[p] < until[at]:
                known[p] = True
                lost[p] |= time[at] < as_of[p]
            at += 1

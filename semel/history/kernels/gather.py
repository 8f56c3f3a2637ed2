"""The compiled inner loops: merge and filter a history's rows, copy them out. All release the GIL.

Input arrays are read-only (mapped files and ``tail.frozen`` views), so that each kernel is compiled once a dtype. A
generation's columns may be plain or packed (``packing``); ``value_at`` and ``copy_range`` read both.
Row references: ``>= 0`` is a row of the generation's shard, ``~row`` (negative) a row of the tail.
"""

from __future__ import annotations

import numpy as np

from semel.history.kernels import kernel
from semel.history.kernels.loads import copy_values, load32, prefetch
from semel.history.kernels.packing import copy_range, unpack_range, value_at

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_FNV_START = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
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
    stay a range of the generation."""
    for j in range(len(index)):
        p = index[j]
        if room[p] == room[p + 1]:
            continue
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

"""Compiled loops over the rows of a table: finding, writing and reading many keys at once, without the interpreter.

A row's facts: ``written`` (microseconds) for itself, since a read wants it, and three int64 beside each other:
``STEP``, ``TOWER`` (version of what computed it) and ``USED``, a stamp that grows with every use. ``state``: 0 free,
``LIVE``, and ``CHANGED`` since it was last taken.
"""

from __future__ import annotations

import numpy as np

from semel.memory.index import insert, kernel, mixed, remove, slot_of
from semel.memory.prefetch import prefetch_byte, prefetch_lines

STEP, TOWER, USED = range(3)
LIVE, CHANGED = 1, 2
_BLOCK = 32
"""Keys whose slots, then rows are asked for before the first is read: their cache misses overlap."""
_AHEAD = 8
"""How many keys lie between asking for a slot, asking for its row and copying that; a power of two."""


@kernel()
def count_new(slots, keys):
    """How many of ``keys`` have no row (one that comes twice counts twice)."""
    new = 0
    for key in keys:
        if slots[slot_of(slots, key), 1] == 0:
            new += 1
    return new


@kernel()
def touch(slots, keys, facts, stamp):
    """The keys that have a row are used now."""
    for key in keys:
        row = slots[slot_of(slots, key), 1] - 1
        if row >= 0:
            facts[row, USED] = stamp


@kernel()
def place(slots, keys, stamp, free, unused, key_of, facts, state, changed, changes, seen, rows):
    """``rows[i]``: the row of ``keys[i]``, a new one from ``free[:unused]`` where it had none. Stamps ``stamp + i``, so
    that of two of one key the last one's stays. A new key sets its bit in ``seen``. Returns ``unused``, how many rows
    ``changed`` notes, the longest probe."""
    mask = np.uint64(len(slots) - 1)
    bits = np.uint64(8 * len(seen) - 1)
    longest = np.int64(0)
    for i in range(len(keys)):
        if i % _BLOCK == 0:
            for j in range(i, min(i + _BLOCK, len(keys))):
                prefetch_lines(slots, np.int64(mixed(keys[j]) & mask), 16)
            for j in range(i, min(i + _BLOCK, len(keys))):
                row = slots[slot_of(slots, keys[j]), 1] - 1
                if row >= 0:
                    prefetch_lines(facts, row, 24)
                    prefetch_lines(state, row, 1)
        key = keys[i]
        at = slot_of(slots, key)
        row = slots[at, 1] - 1
        if row < 0:
            unused -= 1
            row = np.int64(free[unused])
            slots[at, 0] = key
            slots[at, 1] = row + 1
            key_of[row] = key
            bit = (mixed(key) >> np.uint64(20)) & bits
            seen[bit >> np.uint64(3)] |= np.uint8(1 << (bit & np.uint64(7)))
            probes = np.int64((np.uint64(at) - mixed(key)) & mask) + 1
            if probes > longest:
                longest = probes
        if not state[row] & CHANGED:
            changed[changes] = row
            changes += 1
        state[row] = LIVE | CHANGED
        facts[row, USED] = stamp + i
        rows[i] = row
    return unused, changes, longest


@kernel(fastmath={"contract"})
def store(rows, vectors, when, step, tower, stamp, written, facts, table, start, stop):
    """Copies the vectors ``start:stop`` into their rows, of each row the last one only."""
    width = vectors.shape[1] * vectors.itemsize
    for i in range(start, stop):
        if (i - start) % _BLOCK == 0:
            for j in range(i, min(i + _BLOCK, stop)):
                prefetch_lines(facts, rows[j], 24)
                prefetch_lines(written, rows[j], 8)
                prefetch_lines(table, rows[j], width)
        row = rows[i]
        if facts[row, USED] == stamp + i:
            written[row] = when[i]
            facts[row, STEP] = step[i]
            facts[row, TOWER] = tower[i]
            source, target = vectors[i], table[row]
            for d in range(len(source)):
                target[d] = source[d]


@kernel()
def release(slots, rows, key_of, state, free, unused):
    """Takes rows out of the table; returns how many are ``unused`` then."""
    for row in rows:
        remove(slots, key_of[row])
        state[row] &= np.uint8(~np.uint8(LIVE))
        free[unused] = row
        unused += 1
    return unused


@kernel()
def rebuilt(slots, key_of, state):
    """Every live key into ``slots``, which are empty."""
    for row in range(len(state)):
        if state[row] & LIVE:
            insert(slots, key_of[row], row)


@kernel()
def read(slots, keys, written, table, oldest, now, start, stop, out, hit, age):
    """Vectors, hits and ages of ``keys[start:stop]``; a miss is a row of zeros of age -1. A row that was written before
    ``oldest`` is a miss. Three keys are under way: of one the slot is asked for, of the one ``_AHEAD`` before it the
    row, that of the third is copied."""
    ring = np.empty(_AHEAD, np.int64)
    mask, width = np.uint64(len(slots) - 1), table.shape[1] * table.itemsize
    for i in range(start, stop + 2 * _AHEAD):
        if i < stop:
            prefetch_byte(slots, np.int64(mixed(keys[i]) & mask), 0)
        at = i - 2 * _AHEAD
        if at >= start:
            row = ring[np.uint64(at % _AHEAD)]
            if row >= 0 and written[row] >= oldest:
                hit[at] = True
                age[at] = max(now - written[row], 0)
                for d in range(out.shape[1]):
                    out[at, d] = table[row, d]
            else:
                hit[at] = False
                age[at] = -1
                for d in range(out.shape[1]):
                    out[at, d] = 0
        at = i - _AHEAD
        if start <= at < stop:
            row = slots[slot_of(slots, keys[at]), 1] - 1
            ring[np.uint64(at % _AHEAD)] = row
            if row >= 0:
                prefetch_byte(written, row, 0)
                prefetch_lines(table, row, width)


@kernel()
def read_bytes(slots, keys, bytes_, scale, start, stop, out, hit):
    """``read`` of rows that are kept as int8: ``out[i] = scale[row] * bytes_[row]``."""
    ring = np.empty(_AHEAD, np.int64)
    mask, width = np.uint64(len(slots) - 1), bytes_.shape[1]
    for i in range(start, stop + 2 * _AHEAD):
        if i < stop:
            prefetch_byte(slots, np.int64(mixed(keys[i]) & mask), 0)
        at = i - 2 * _AHEAD
        if at >= start:
            row = ring[np.uint64(at % _AHEAD)]
            hit[at] = row >= 0
            factor = scale[row] if row >= 0 else np.float32(0)
            source = max(row, 0)
            for d in range(out.shape[1]):
                out[at, d] = factor * np.float32(bytes_[source, d])
        at = i - _AHEAD
        if start <= at < stop:
            row = slots[slot_of(slots, keys[at]), 1] - 1
            ring[np.uint64(at % _AHEAD)] = row
            if row >= 0:
                prefetch_byte(scale, row, 0)
                prefetch_lines(bytes_, row, width)


@kernel()
def read_ages(slots, keys, written, now, age):
    """Microseconds since each key's row was written; -1 where it has none."""
    for i in range(len(keys)):
        row = slots[slot_of(slots, keys[i]), 1] - 1
        age[i] = max(now - written[row], 0) if row >= 0 else -1


@kernel(fastmath={"reassoc"})
def first_not_finite(vectors):
    """The first row that holds a NaN or an infinity; -1 for none."""
    for i in range(len(vectors)):
        row = vectors[i]
        total = row[0] * 0
        for d in range(1, len(row)):
            total += row[d] * 0
        if total != 0:  # NaN is unequal to everything
            return i
    return -1

"""Copying what pointers select out of a generation's columns and the tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from semel.history.arrays import bits, frozen
from semel.history.kernels import gather
from semel.history.kernels.packing import Packed
from semel.history.reading import parallel
from semel.history.view.following import View

SERIAL_VALUES = 1 << 17
"""A read of fewer values is done before a second thread has begun."""


@dataclass(frozen=True)
class Part:
    """One shard's share of a batch: ``index``: its pointers."""

    shard: int
    index: np.ndarray


@dataclass(slots=True)  # not frozen: that takes a microsecond, of the thirty of a single pointer
class Selection:
    """Which rows each pointer gets, columns not yet read. ``shard_of``/``begin``/``count`` [P]: a range of the shard's
    rows, or of ``refs`` where ``room`` [P + 1] leaves it some. ``parts``: none where all pointers are ranges of
    rows."""

    shard_of: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    status: np.ndarray
    parts: tuple[Part, ...]
    room: np.ndarray
    refs: np.ndarray


def copy_columns(view: View, chosen: Selection, offsets: np.ndarray,
                 names: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(columns, validity of those that may have nulls) of the chosen rows; ``offsets`` [P + 1] of each pointer's."""
    total, lookup, tail = int(offsets[-1]), view.generation.lookup, view.tail
    threads = parallel.cores() if total * len(names) > SERIAL_VALUES else 1
    ranges = [] if chosen.parts else _shares(offsets, threads)
    columns: dict[str, np.ndarray] = {}
    validity: dict[str, np.ndarray] = {}
    jobs: list[parallel.Job] = []
    for name in names:
        place = lookup.column(name)
        columns[name], flat = place.empty(total)
        in_tail = len(chosen.refs) > 0 and name in tail.valid
        if place.valid is not None or in_tail:
            validity[name] = np.empty(total, bool)
        if chosen.parts:
            jobs += _row_jobs(view, chosen, offsets, name, place.width, flat)
            if name in validity:
                jobs += _validity_jobs(view, chosen, offsets, name, bits(validity[name]))
            continue
        cut = chosen.shard_of, chosen.begin, chosen.count, offsets
        table = place.values.of(chosen.shard_of)
        jobs += [(gather.copy_ranges, (a, b, *cut, place.width, table, flat)) for a, b in ranges]
        if place.valid is not None:
            table = place.valid.of(chosen.shard_of)
            jobs += [(gather.copy_ranges, (a, b, *cut, 1, table, bits(validity[name]))) for a, b in ranges]
    parallel.run(jobs, threads)
    return columns, validity


def _shares(offsets: np.ndarray, threads: int) -> list[tuple[int, int]]:
    """Ranges of pointers of about equally many rows, more than threads so that none waits long for the others."""
    pointers = len(offsets) - 1
    if threads == 1:
        return [(0, pointers)]
    edges = np.searchsorted(offsets, np.linspace(0, offsets[-1], 2 * threads + 1)[1:-1])
    return [(a, b) for a, b in pairwise([0, *edges.tolist(), pointers]) if b > a]


def _row_jobs(view: View, chosen: Selection, offsets: np.ndarray, name: str, width: int,
              out: np.ndarray) -> Iterator[parallel.Job]:
    """A job a shard, where some rows are references."""
    new = view.tail.words(name)
    for part in chosen.parts:
        shard = view.generation.shards[part.shard]
        old = flat(shard.column(name)) if shard.rows else new[:0]
        yield gather.copy_rows, (part.index, chosen.begin, chosen.count, offsets, chosen.room, chosen.refs, width, old,
                                 new, out)


def _validity_jobs(view: View, chosen: Selection, offsets: np.ndarray, name: str,
                   out: np.ndarray) -> Iterator[parallel.Job]:
    tail = view.tail
    new = bits(tail.valid[name] if name in tail.valid else _all_valid(tail.rows))
    for part in chosen.parts:
        shard = view.generation.shards[part.shard]
        old = flat(shard.valid(name) if len(shard.valid(name)) else _all_valid(shard.rows))
        yield gather.copy_rows, (part.index, chosen.begin, chosen.count, offsets, chosen.room, chosen.refs, 1, old, new,
                                 out)


def _all_valid(rows: int) -> np.ndarray:
    return frozen(np.ones(rows, bool))


def flat(column: np.ndarray | Packed) -> np.ndarray | Packed:
    return bits(column) if isinstance(column, np.ndarray) else column

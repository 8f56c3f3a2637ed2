"""One read of a user's history for all of its pointers in a batch.

The history of an earlier pointer is a prefix of that of a later one, so their last events overlap. Neighbouring
pointers of a user are read through one, their *head*: as of the newest of them, with a few more events than the last
ones, and each pointer gets its cut. A pointer whose cut could differ from a read of its own gets a read of its own: the
result is, bit for bit, what ``HistoryStore.read`` gives.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pyarrow as pa

from semel.batch import JaggedTable, Pointers, offsets_of
from semel.history import HistoryStore, Projection, Status

_NO_LIMIT = 1 << 61  # as ``last``, with room to add to it
_WORTH = 0.8  # share only where it leaves less than this share of the events to read: a cut costs a copy


@dataclass
class ReadCounters:
    """``pointers``: histories asked for; ``lookups``: ranges read from the store; ``events_read`` and
    ``events_delivered``; their bytes in memory, columns that only decide a cut included; ``withheld``: histories from
    which a deletion or retention may have taken events (status SCRUBBED or EXPIRED)."""

    pointers: int = 0
    lookups: int = 0
    events_read: int = 0
    events_delivered: int = 0
    bytes_read: int = 0
    bytes_delivered: int = 0
    withheld: int = 0

    @property
    def lookups_saved(self) -> int:
        return self.pointers - self.lookups

    @property
    def bytes_saved(self) -> int:
        """How many bytes more a read for each pointer takes."""
        return self.bytes_delivered - self.bytes_read

    def __iadd__(self, other: ReadCounters) -> ReadCounters:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


@dataclass(frozen=True)
class Histories:
    """P histories over the events that were read for them. ``events``: a row for each lookup; ``starts`` and
    ``lengths`` [P]: history p is this range of their values (None: row p is history p); ``status`` [P]; ``counters``:
    what it took."""

    events: JaggedTable
    starts: np.ndarray | None
    lengths: np.ndarray | None
    status: np.ndarray
    counters: ReadCounters

    def table(self) -> JaggedTable:
        """What ``HistoryStore.read`` returns for the pointers."""
        if self.starts is None:
            return self.events
        table = self.spread(self.events)
        validity = {name: valid for name, valid in (table.validity or {}).items() if not valid.all()}
        return dataclasses.replace(table, validity=validity or None)

    def spread(self, events: JaggedTable) -> JaggedTable:
        """``events``, or columns made of it value by value (numpy or torch), as the P histories."""
        if self.starts is None or self.lengths is None:
            return events
        offsets = offsets_of(self.lengths)

        def spread(values: Any) -> Any:
            if not isinstance(values, np.ndarray):
                import torch

                return torch.from_numpy(spread(values.numpy()))
            out = np.empty((int(offsets[-1]), *values.shape[1:]), values.dtype)
            _copy(self.starts, self.lengths, int(np.prod(values.shape[1:])), _bits(values), _bits(out))
            return out

        table = JaggedTable(
            {name: spread(column) for name, column in events.columns.items()}, offsets,
            None if events.validity is None else {name: spread(valid) for name, valid in events.validity.items()},
            events.dictionaries, self.status)
        return table if isinstance(events.offsets, np.ndarray) else table.torch()


def read_histories(store: HistoryStore, pointers: Pointers, projection: Projection) -> Histories:
    """What ``store.read(pointers, projection)`` gives, a user's events read once where they can be. Raises what
    ``store.read`` raises."""
    groups = _groups(store, pointers, projection) if len(pointers) > 1 else None
    if groups is None:
        table = store.read(pointers, projection)
        return Histories(table, None, None, _status(table), _counters([table], projection, table.lengths,
                                                                      _status(table)))
    return _read_groups(store, pointers, projection, *groups)


def _groups(store: HistoryStore, pointers: Pointers, projection: Projection,
            ) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Which pointers share a read: [P] the group of each, [groups] the place of its newest, and how many events are
    read for it at most. None where sharing saves too little."""
    user = _users(store, pointers, projection)
    if int(user.max(initial=0)) + 1 > _WORTH * len(pointers):
        return None
    # Where pointers stand in the history: only an estimate (of late events, groups left out), cuts are checked.
    length = store.lengths(pointers, Projection((), since=projection.since))[0]
    last = _NO_LIMIT if projection.last is None else int(projection.last)
    order = np.lexsort((pointers.as_of, user))
    group, newest = np.empty((2, len(pointers)), np.int64)
    more = [0] if last == _NO_LIMIT else [0, last // 16, last // 4, last, 4 * last]
    costs = [_group(order, user, length, last, extra, group, newest)[1] for extra in more]
    best = more[int(np.argmin(costs))]
    if min(costs) > _WORTH * int(np.minimum(length, last).sum()):
        return None
    count = _group(order, user, length, last, best, group, newest)[0]
    return group, newest[:count], last + best


def _users(store: HistoryStore, pointers: Pointers, projection: Projection) -> np.ndarray:
    """[P] numbers from 0 on; pointers with the same one may share reads. A column that was added later is null for
    older pointers, which are kept apart."""
    if pointers.user_id.dtype == object:
        codes = pa.array(pointers.user_id, pa.string()).dictionary_encode().indices
        user = codes.to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        user = np.unique(pointers.user_id, return_inverse=True)[1]
    layout = store.schema.layout
    added = sorted({since for name in projection.columns if name in layout
                    if (since := getattr(layout[name], "since_version", 0))})
    if added:
        step = np.searchsorted(np.asarray(added), pointers.version, side="right")
        user = np.unique(user * (len(added) + 1) + step, return_inverse=True)[1]
    return user


def _read_groups(store: HistoryStore, pointers: Pointers, projection: Projection, group: np.ndarray,
                 newest: np.ndarray, last: int) -> Histories:
    version = np.zeros(len(newest), np.int64)
    np.maximum.at(version, group, pointers.version)
    older = np.flatnonzero(np.full(len(pointers), store.expired_before > 0) | (pointers.version < version[group]))
    need = ("event_time", "version") if len(older) else ("event_time",)
    head = dataclasses.replace(projection, columns=tuple(dict.fromkeys((*projection.columns, *need))),
                               last=None if last >= _NO_LIMIT else last)
    table = store.read(Pointers(pointers.user_id[newest], pointers.as_of[newest], version), head)
    of_head = _status(table)
    status, seen = of_head[group], np.full(len(pointers), -1, np.int64)
    if len(older):  # how much they see, and their status (a shorter one may be EXPIRED); no column is read for it
        found = store.read(pointers[older], dataclasses.replace(projection, columns=()))
        seen[older], status[older] = found.lengths, _status(found)
    usual = (of_head == Status.OK) | (of_head == Status.UNKNOWN_USER)
    starts, lengths = np.empty((2, len(pointers)), np.int64)
    good = _cuts(table.offsets, table.columns["event_time"], table.columns.get("version", table.offsets), group,
                 usual, pointers.as_of, pointers.version, _NO_LIMIT if projection.last is None else projection.last,
                 last, seen, status, starts, lengths)
    tables = [table]
    alone = np.flatnonzero(~good)
    if len(alone):
        begin = table.offsets[-1]
        table = store.read(pointers[alone], projection)
        tables.append(table)
        starts[alone], lengths[alone], status[alone] = begin + table.offsets[:-1], table.lengths, _status(table)
    return Histories(_concatenate(tables, projection.columns), starts, lengths, status,
                     _counters(tables, projection, lengths, status))


def _status(table: JaggedTable) -> np.ndarray:
    return np.zeros(len(table), np.uint8) if table.status is None else table.status


def is_withheld(status: np.ndarray) -> np.ndarray:
    """[P] bool: whether a history may be shorter than what the request saw."""
    return (status == Status.SCRUBBED) | (status == Status.EXPIRED)


def _counters(tables: list[JaggedTable], projection: Projection, lengths: np.ndarray, status: np.ndarray,
              ) -> ReadCounters:
    read, delivered = sum(int(table.offsets[-1]) for table in tables), int(lengths.sum())
    nbytes = sum(column.nbytes for table in tables for column in table.columns.values())
    wanted = sum(table.columns[name].nbytes for table in tables for name in projection.columns)
    return ReadCounters(len(lengths), sum(map(len, tables)), read, delivered, nbytes,
                        delivered * (wanted // max(read, 1)), int(is_withheld(status).sum()))


def _concatenate(tables: list[JaggedTable], names: tuple[str, ...]) -> JaggedTable:
    """The rows of all tables, columns ``names``. Dictionaries only grow, so the longest serves all."""
    dictionaries: dict[str, np.ndarray] = {}
    for table in tables:
        for name, words in (table.dictionaries or {}).items():
            if name in names and len(words) >= len(dictionaries.get(name, ())):
                dictionaries[name] = words
    nullable = {name for table in tables for name in table.validity or {} if name in names}

    def join(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    return JaggedTable(
        {name: join([table.columns[name] for table in tables]) for name in names},
        offsets_of(join([table.lengths for table in tables])),
        {name: join([(table.validity or {}).get(name, np.ones(int(table.offsets[-1]), bool)) for table in tables])
         for name in names if name in nullable} or None,
        dictionaries or None)


def _bits(array: np.ndarray) -> np.ndarray:
    """Flat, as unsigned integers: kernels are compiled once a width."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


@numba.njit(cache=True, nogil=True)
def _group(order: Any, user: Any, length: Any, last: int, more: int, group: Any, newest: Any) -> Any:
    """Go through each user's pointers, newest first: one that needs at most ``more`` events before those that the head
    needs belongs to its group, any other is the head of the next. Returns how many groups there are and how many events
    their reads take."""
    groups, events, head = 0, 0, -1
    for k in range(len(order) - 1, -1, -1):
        i = order[k]
        if head < 0 or user[i] != user[head] or (length[head] > last + more and length[head] - length[i] > more):
            head = i
            newest[groups] = i
            groups += 1
            events += min(length[i], last + more)
        group[i] = groups - 1
    return groups, events


@numba.njit(cache=True, nogil=True)
def _cuts(offsets: Any, times: Any, versions: Any, group: Any, usual: Any, as_of: Any, version: Any, last: int,
          most: int, seen: Any, status: Any, starts: Any, lengths: Any) -> Any:
    """Each pointer's cut of its head's events (of which ``most`` were read), and whether it is what the pointer sees:
    the head's status is ``usual``, no event that it needs lies before those read, and for a pointer of an older version
    (``seen`` not -1) all events are of visible versions and as many as it ``seen``."""
    good = np.empty(len(group), np.bool_)
    for i in range(len(group)):
        row = group[i]
        start, end = offsets[row], offsets[row + 1]
        cut = start + np.searchsorted(times[start:end], as_of[i])
        starts[i] = max(start, cut - last)
        lengths[i] = cut - starts[i]
        if seen[i] == 0:
            lengths[i] = 0
            good[i] = True
            continue
        good[i] = usual[row] and (lengths[i] == last or end - start < most)
        if seen[i] > 0:
            good[i] &= seen[i] == lengths[i] and status[i] == 0
            for at in range(starts[i], cut):
                good[i] &= versions[at] <= version[i]
    return good


@numba.njit(cache=True, nogil=True)
def _copy(starts: Any, lengths: Any, width: int, values: Any, out: Any) -> None:
    """The ranges one after the other, ``width`` values an event; arrays are flat."""
    to = 0
    for i in range(len(starts)):
        start, count = starts[i] * width, lengths[i] * width
        source, target = values[start : start + count], out[to : to + count]
        for k in range(count):  # not slice to slice, which numba compiles for eight times as long
            target[k] = source[k]
        to += count

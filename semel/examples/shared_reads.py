"""One read of a user's history for all of its pointers in a batch.

The history of an earlier pointer is a prefix of that of a later one, so their last events overlap. The newest pointer
of each user is read (its *head*), the rows before the head's that older pointers need are read once (the *extension*),
and each pointer gets its cut of the two. A pointer whose cut could differ from a read of its own gets a read of its
own: the result is, bit for bit, what ``HistoryStore.read`` gives.
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

_HEADS = 4               # most heads of one user in a batch; what they leave is read pointer by pointer
_LEAST_EXTENSION = 16    # extensions are read in sizes that double from here: one read a size
_NO_LIMIT = 1 << 62


@dataclass
class ReadCounters:
    """``pointers``: histories asked for; ``lookups``: ranges read from the store; ``events_read`` and
    ``events_delivered``; their bytes in memory, columns that only decide a cut included."""

    pointers: int = 0
    lookups: int = 0
    events_read: int = 0
    events_delivered: int = 0
    bytes_read: int = 0
    bytes_delivered: int = 0

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
    ``lengths`` [P, 2]: history p is two ranges of their values, one after the other (None: row p is history p);
    ``status`` [P]; ``counters``: what it took."""

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
        offsets = offsets_of(self.lengths.sum(axis=1))

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
    user = _users(store, pointers, projection) if len(pointers) > 1 else np.zeros(len(pointers), np.int64)
    if len(user) == user.max(initial=-1) + 1:  # nobody has two pointers
        table = store.read(pointers, projection)
        return Histories(table, None, None, _status(table), _counters([table], projection, table.lengths))
    return _SharedRead(store, pointers, projection, user).histories()


def _users(store: HistoryStore, pointers: Pointers, projection: Projection) -> np.ndarray:
    """[P] numbers from 0 on; pointers with the same one may share reads. A column that was added later is null for
    older pointers, which are kept apart."""
    user = pa.array(pointers.user_id).dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    layout = store.schema.layout
    added = sorted({since for name in projection.columns if name in layout
                    if (since := getattr(layout[name], "since_version", 0))})
    if added:
        step = np.searchsorted(np.asarray(added), pointers.version, side="right")
        user = np.unique(user * (len(added) + 1) + step, return_inverse=True)[1]
    return user


class _SharedRead:
    """The reads of one batch, their values thought of as lying one after the other. ``starts``, ``lengths`` [P, 2] and
    ``status`` [P] are filled in as pointers are served."""

    def __init__(self, store: HistoryStore, pointers: Pointers, projection: Projection, user: np.ndarray) -> None:
        self.store, self.pointers, self.projection, self.user = store, pointers, projection, user
        self.last = _NO_LIMIT if projection.last is None else int(projection.last)
        newest = np.zeros(int(user.max()) + 1, np.int64)
        np.maximum.at(newest, user, pointers.version)
        self.older = pointers.version < newest[user]
        need = ("event_time", "version") if self.older.any() else ("event_time",)
        self.columns = tuple(dict.fromkeys((*projection.columns, *need)))
        self.starts, self.lengths = np.zeros((2, len(pointers), 2), np.int64)
        self.status = np.full(len(pointers), Status.OK.value, np.uint8)
        self.seen = np.full(len(pointers), -1, np.int64)  # [P] how many events an older pointer sees
        self.tables: list[JaggedTable] = []

    def histories(self) -> Histories:
        left = self._ask_older() if self.older.any() else np.arange(len(self.pointers))
        alone: list[np.ndarray] = []
        for _ in range(_HEADS):
            if len(left):
                left, refused = self._serve(left)
                alone.append(refused)
        rest = np.concatenate([*alone, left])
        if len(rest):
            table, begin = self._read(self.pointers[rest], self.projection.columns, self.last)
            self._put(rest, begin[:-1], np.zeros(len(rest), np.int64), 0)  # they may have been given a cut that failed
            self._put(rest, begin[:-1], table.lengths, 1)
            self.status[rest] = _status(table)
        return Histories(_concatenate(self.tables, self.projection.columns), self.starts, self.lengths, self.status,
                         _counters(self.tables, self.projection, self.lengths))

    def _ask_older(self) -> np.ndarray:
        """How much pointers see whose version is older than their head's, and their status, for which no column is
        read. Returns the rows that are left: all but those that see nothing."""
        older = np.flatnonzero(self.older)
        found = self.store.read(self.pointers[older], dataclasses.replace(self.projection, columns=()))
        self.seen[older], self.status[older] = found.lengths, _status(found)
        return np.flatnonzero(self.seen != 0)

    def _read(self, pointers: Pointers, columns: tuple[str, ...], last: int) -> tuple[JaggedTable, np.ndarray]:
        """Histories and where they begin among the values of all reads: [pointers + 1]."""
        before = sum(int(table.offsets[-1]) for table in self.tables)
        table = self.store.read(pointers, dataclasses.replace(
            self.projection, columns=columns, last=None if last >= _NO_LIMIT else last))
        self.tables.append(table)
        return table, table.offsets + before

    def _put(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, part: int) -> None:
        self.starts[rows, part], self.lengths[rows, part] = starts, lengths

    def _serve(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One head for each user of ``rows``. Returns the rows that need another head, and those that need a read of
        their own."""
        users, group = np.unique(self.user[rows], return_inverse=True)
        as_of, version = self.pointers.as_of[rows], self.pointers.version[rows]
        someone = np.empty(len(users), np.int64)
        someone[group] = rows
        top = np.full((2, len(users)), np.iinfo(np.int64).min)
        np.maximum.at(top[0], group, as_of)
        np.maximum.at(top[1], group, version)
        heads = Pointers(self.pointers.user_id[someone], top[0], top[1])
        table, begin = self._read(heads, self.columns, self.last)

        own = (as_of == top[0][group]) & (version == top[1][group])  # the head itself, whatever its status says
        fine = _status(table)[group] == Status.OK
        cut, count = _cuts(table.offsets, table.columns["event_time"], group, as_of), table.lengths[group]
        short = np.where((count < self.last) | (cut == count), 0, self.last - cut)  # rows before the head's
        short[own | ~fine] = 0
        left = (short > 0) & (cut == 0)
        partly = (short > 0) & ~left
        room, room_begin = self._extend(heads, table, group[partly], short[partly])
        left |= partly & (room[group] < 0)

        before = np.minimum(short, room[group]).clip(min=0)  # fewer than short where the history begins there
        self._put(rows, (room_begin + room)[group] - before, before, 0)
        within = np.minimum(cut, self.last)
        self._put(rows, begin[group] + cut - within, within, 1)
        served = own | (fine & ~left)
        if self.older.any():
            seen, check = self.seen[rows], np.flatnonzero(served & ~own & (version < top[1][group]))
            same = (seen[check] == (before + within)[check]) & (self.status[rows[check]] == Status.OK)
            versions = np.concatenate([table.columns["version"] for table in self.tables])
            served[check] = same & _visible(versions, self.starts[rows[check]], self.lengths[rows[check]],
                                            version[check])
        self.status[rows[own]] = _status(table)[group[own]]
        return rows[left], rows[~served & ~left]

    def _extend(self, heads: Pointers, table: JaggedTable, group: np.ndarray, short: np.ndarray,
                ) -> tuple[np.ndarray, np.ndarray]:
        """Read the ``short`` rows before the heads of ``group``. Returns for each head how many there are (-1: not
        read) and where they begin."""
        room, room_begin = np.full(len(heads), -1, np.int64), np.zeros(len(heads), np.int64)
        asking = np.bincount(group, minlength=len(heads))
        need = np.zeros(len(heads), np.int64)
        np.maximum.at(need, group, short)
        # Up to and including the head's first time: its rows of that time come again at the end and are left out.
        first, ties = _first_times(table.offsets, table.columns["event_time"])
        size = _LEAST_EXTENSION << np.ceil(np.log2(np.maximum(need + ties, 1) / _LEAST_EXTENSION)).clip(
            min=0).astype(np.int64)
        worth = (need > 0) & (size <= self.last * asking)
        for last in np.unique(size[worth]).tolist():
            some = np.flatnonzero(worth & (size == last))
            pointers = Pointers(heads.user_id[some], first[some] + 1, heads.version[some])
            found, begin = self._read(pointers, self.columns, last)
            fine = (_status(found) == Status.OK) & (found.lengths >= ties[some])
            room[some] = np.where(fine, found.lengths - ties[some], -1)
            room_begin[some] = begin[:-1]
        return room, room_begin


def _status(table: JaggedTable) -> np.ndarray:
    return np.zeros(len(table), np.uint8) if table.status is None else table.status


def _counters(tables: list[JaggedTable], projection: Projection, lengths: np.ndarray) -> ReadCounters:
    def width(table: JaggedTable, names: Any) -> int:
        return sum(table.columns[name].itemsize * int(np.prod(table.columns[name].shape[1:])) for name in names)

    read, delivered = [int(table.offsets[-1]) for table in tables], int(lengths.sum())
    return ReadCounters(
        len(lengths), sum(map(len, tables)), sum(read), delivered,
        sum(count * width(table, table.columns) for count, table in zip(read, tables, strict=True)),
        delivered * (width(tables[0], projection.columns) if tables else 0))


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
def _cuts(offsets: Any, times: Any, row: Any, as_of: Any) -> Any:
    """How many events of history ``row[i]`` are before ``as_of[i]``."""
    out = np.empty(len(row), np.int64)
    for i in range(len(row)):
        start = offsets[row[i]]
        out[i] = np.searchsorted(times[start : offsets[row[i] + 1]], as_of[i])
    return out


@numba.njit(cache=True, nogil=True)
def _first_times(offsets: Any, times: Any) -> Any:
    """The time of each history's first event, and how many events have it."""
    rows = len(offsets) - 1
    first, ties = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for row in range(rows):
        if offsets[row] < offsets[row + 1]:
            first[row] = times[offsets[row]]
            while offsets[row] + ties[row] < offsets[row + 1] and times[offsets[row] + ties[row]] == first[row]:
                ties[row] += 1
    return first, ties


@numba.njit(cache=True, nogil=True)
def _visible(versions: Any, starts: Any, lengths: Any, version: Any) -> Any:
    """Whether all events of both ranges are of visible versions."""
    out = np.ones(len(version), np.bool_)
    for i in range(len(version)):
        for part in range(2):
            for at in range(starts[i, part], starts[i, part] + lengths[i, part]):
                out[i] &= versions[at] <= version[i]
    return out


@numba.njit(cache=True, nogil=True)
def _copy(starts: Any, lengths: Any, width: Any, values: Any, out: Any) -> None:
    """The ranges one after the other, ``width`` values an event; arrays are flat."""
    to = 0
    for i in range(len(starts)):
        for part in range(2):
            start = starts[i, part] * width
            for k in range(lengths[i, part] * width):
                out[to + k] = values[start + k]
            to += lengths[i, part] * width

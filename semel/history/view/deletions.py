"""Deletions that the log holds: which events are gone, from the moment they are read until a compaction scrubs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from semel.batch import expand_rows
from semel.history.generation.generation import Generation, Shard
from semel.history.generation.marks import Marks
from semel.history.log.tail import Dictionaries, Tail
from semel.history.schema import Column, EventSchema, to_numpy

IN_TAIL = -1
"""The place of rows that lie in the tail; of the others it is the number of their shard."""

_NO_ROWS = np.empty(0, np.int64)
_HEAD = ("first_version", "first_time")


@dataclass(frozen=True)
class Deletion:
    """One ``delete``. ``users`` [n]; ``first`` and ``time`` [n]: lowest version and time of what it takes of each user.
    ``events`` None: all events of these users of an earlier version. Else a table of columns that name events, beside
    ``of`` [rows], the index of their user."""

    version: int
    users: np.ndarray
    first: np.ndarray
    time: np.ndarray
    of: np.ndarray | None = None
    events: pa.RecordBatch | None = None

    @property
    def marks(self) -> Marks:
        return Marks.of(self.users, self.first, self.time, np.full(len(self.users), self.version))


def record_of(deletion: Deletion, schema: EventSchema) -> tuple[dict[str, Any], pa.RecordBatch]:
    """A deletion as the JSON and the batch of a log record (``docs/formats/history.md``)."""
    users = pa.array(deletion.users, schema.user_id)
    arrays: list[pa.Array] = [users, pa.array(deletion.first), pa.array(deletion.time)]
    names = [schema.key, *_HEAD]
    if deletion.events is not None:
        arrays = [array.take(pa.array(deletion.of)) for array in arrays] + deletion.events.columns
        names += deletion.events.schema.names
    kind = "users" if deletion.events is None else "events"
    return {"version": deletion.version, "delete": kind}, pa.RecordBatch.from_arrays(arrays, names)


def deletion_in(metadata: dict[str, Any], batch: pa.RecordBatch) -> Deletion:
    """The inverse of ``record_of``. Raises KeyError, ValueError for what is no deletion."""
    users = np.asarray(batch.column(0).to_numpy(zero_copy_only=False))
    first, time = (batch.column(i).to_numpy() for i in (1, 2))
    if metadata["delete"] == "users":
        return Deletion(metadata["version"], users, first, time)
    if metadata["delete"] != "events":
        raise ValueError(f"a deletion of {metadata['delete']!r}")
    users, at, of = np.unique(users, return_index=True, return_inverse=True)
    return Deletion(metadata["version"], users, first[at], time[at], of.astype(np.int64), batch.select(
        list(range(3, batch.num_columns))))


@dataclass(frozen=True)
class Place:
    """Some users' rows in one shard or in the tail, whatever was deleted of them. ``rows`` [m] ascending; ``of`` [m]:
    the index of the user; ``column(name)``: ([m, ...] values, [m] validity or empty)."""

    place: int
    rows: np.ndarray
    of: np.ndarray
    column: Callable[[str], tuple[np.ndarray, np.ndarray]]


def places_of(generation: Generation, tail: Tail, users: np.ndarray) -> Iterator[Place]:
    """Where the events of ``users`` [n] lie (different ids, sorted)."""
    yield from _in_shards(generation, users)
    yield _in_tail(tail, users)


def _in_shards(generation: Generation, users: np.ndarray) -> Iterator[Place]:
    from semel.history.kernels.sharding import shards_of  # late: it compiles

    keys = [user.encode() for user in users] if users.dtype == object else np.ascontiguousarray(users)
    return (_in_shard(generation.shards[index], users) for index in np.unique(shards_of(keys, len(generation.shards)))
            if generation.shards[index].rows)


def _in_tail(tail: Tail, users: np.ndarray) -> Place:
    numbers = tail.keys_of(users)
    order = np.argsort(numbers, kind="stable")
    at = np.searchsorted(numbers[order], tail.columns[""])
    of = order[np.minimum(at, len(order) - 1)] if len(order) else at
    rows = np.flatnonzero(numbers[of] == tail.columns[""]) if len(order) else _NO_ROWS

    def column(name: str) -> tuple[np.ndarray, np.ndarray]:
        valid = tail.valid.get(name)
        return tail.columns[name][rows], _NO_ROWS if valid is None else valid[rows]

    return Place(IN_TAIL, rows, of[rows] if len(rows) else _NO_ROWS, column)


def _in_shard(shard: Shard, users: np.ndarray) -> Place:
    if users.dtype == object:
        known = {key.decode(): i for i, key in enumerate(shard.user_keys())}
        at = np.fromiter((known.get(name, -1) for name in users), np.int64, len(users))
    else:
        near = np.searchsorted(shard.users, users)
        at = np.where(shard.users[np.minimum(near, len(shard.users) - 1)] == users, near, -1)
    of = np.flatnonzero(at >= 0)
    of = of[np.argsort(at[of], kind="stable")]  # so that rows are ascending
    rows, offsets = expand_rows(shard.offsets, at[of])

    def column(name: str) -> tuple[np.ndarray, np.ndarray]:
        if not len(rows):
            _, dtype, shape = shard._generation.place(name)
            return np.empty((0, *shape), dtype), _NO_ROWS
        valid = _NO_ROWS if name in ("event_time", "version") else shard.validity(name)
        return shard.values(name)[rows], valid[rows] if len(valid) else valid

    return Place(shard.index, rows, np.repeat(of, np.diff(offsets)), column)


def matching(place: Place, deletion: Deletion, schema: EventSchema, dictionaries: Dictionaries) -> np.ndarray:
    """[m] bool: which rows of ``place`` (made for the deletion's users) it takes."""
    of_version = place.column("version")[0] < deletion.version
    if deletion.events is None or deletion.of is None:
        return of_version
    time = place.column("event_time")[0]
    wanted = deletion.events.column("event_time").to_numpy()
    # Numbers for (user, time), so that rows and deleted events with the same one can be paired.
    both = np.stack([np.concatenate([place.of, deletion.of]), np.concatenate([time, wanted])], axis=1)
    number = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    row_number, event_number = number[: len(time)], number[len(time) :]
    order = np.argsort(row_number, kind="stable")
    first, last = (np.searchsorted(row_number[order], event_number, side=side) for side in ("left", "right"))
    event = np.repeat(np.arange(len(wanted)), last - first)
    row = order[np.arange(len(event)) - np.repeat(np.cumsum(last - first) - last, last - first)]
    same = of_version[row]
    for name in deletion.events.schema.names:
        if name != "event_time":
            same &= _equal(place.column(name), row, deletion.events.column(name), event, schema.layout[name],
                           dictionaries)
    found = np.zeros(len(time), bool)
    found[row[same]] = True
    return found


def _equal(have: tuple[np.ndarray, np.ndarray], row: np.ndarray, want: pa.Array, event: np.ndarray, column: Column,
           dictionaries: Dictionaries) -> np.ndarray:
    """[pairs] whether the value of the row is that of the event; null is equal to null."""
    values, valid = have
    if column.is_dictionary:
        words = want.to_pylist()
        wanted: np.ndarray = np.array(dictionaries.codes(column.name, words), np.int64)
        wanted_valid = np.array([word is not None for word in words], bool)
    else:
        wanted, some = to_numpy(want, column)
        wanted_valid = np.ones(len(want), bool) if some is None else some
    row_valid = valid[row] if len(valid) else np.ones(len(row), bool)
    same = values[row] == wanted[event]
    if values.dtype.kind == "f":
        same |= np.isnan(values[row]) & np.isnan(wanted[event])
    if same.ndim > 1:
        same = same.all(axis=1)
    return (row_valid == wanted_valid[event]) & (same | ~row_valid)


class Deletions:
    """The deletions of a log, in the order of their versions. Immutable."""

    def __init__(self, deletions: Sequence[Deletion], schema: EventSchema, dictionaries: Dictionaries) -> None:
        self.deletions = tuple(deletions)
        self.schema, self.dictionaries = schema, dictionaries
        self._lock = threading.Lock()
        # of which generation or tail, how many of the deletions were looked for, what was found
        self._in_shards: tuple[Any, int, dict[int, np.ndarray]] = (None, 0, {})
        self._in_tail: tuple[Any, int, dict[int, np.ndarray]] = (None, 0, {})

    def __bool__(self) -> bool:
        return bool(self.deletions)

    def __reduce__(self) -> tuple[Any, ...]:
        return Deletions, (self.deletions, self.schema, self.dictionaries)

    def add(self, deletion: Deletion) -> Deletions:
        more = Deletions((*self.deletions, deletion), self.schema, self.dictionaries)
        with self._lock:
            more._in_shards, more._in_tail = self._in_shards, self._in_tail
        return more

    def after(self, version: int, schema: EventSchema) -> Deletions:
        """Those of later versions, of a store that has the columns of ``schema`` now."""
        return Deletions([d for d in self.deletions if d.version > version], schema, self.dictionaries)

    @cached_property
    def marks(self) -> Marks:
        """Of all of them."""
        return Marks.joined([Marks.empty(self.schema.string_keys), *(d.marks for d in self.deletions)])

    @cached_property
    def _whole(self) -> Marks:
        return Marks.joined([Marks.empty(self.schema.string_keys),
                             *(d.marks for d in self.deletions if d.events is None)])

    def gone_before(self, ids: np.ndarray) -> np.ndarray:
        """[P] the version before which all events of a user are gone, -1 where none are."""
        return self._whole.until_of(ids)

    def rows(self, generation: Generation, tail: Tail) -> dict[int, np.ndarray]:
        """By place (``IN_TAIL`` or shard) the rows, ascending, that were deleted one by one."""
        with self._lock:
            self._in_shards = self._found(self._in_shards, generation.number,
                                          lambda users: _in_shards(generation, users))
            self._in_tail = self._found(self._in_tail, tail.events, lambda users: [_in_tail(tail, users)])
            return {**self._in_shards[2], **self._in_tail[2]}

    def _found(self, before: tuple[Any, int, dict[int, np.ndarray]], where: Any,
               places: Callable[[np.ndarray], Iterable[Place]]) -> tuple[Any, int, dict[int, np.ndarray]]:
        known, done, rows = before
        if known != where:
            done, rows = 0, {}
        if done == len(self.deletions):
            return before
        return where, len(self.deletions), self._find(places, done, rows)

    def _find(self, places: Callable[[np.ndarray], Iterable[Place]], done: int, before: dict[int, np.ndarray],
              ) -> dict[int, np.ndarray]:
        found: dict[int, list[np.ndarray]] = {place: [rows] for place, rows in before.items()}
        for deletion in self.deletions[done:]:
            if deletion.events is not None:
                for place in places(deletion.users):
                    rows = place.rows[matching(place, deletion, self.schema, self.dictionaries)]
                    if len(rows):
                        found.setdefault(place.place, []).append(rows)
        return {place: np.unique(np.concatenate(rows)) for place, rows in found.items()}

    def survivors(self, place: Place, users: np.ndarray, generation: Generation, tail: Tail) -> np.ndarray:
        """[m] bool: which rows of ``place`` (made for ``users``) are not gone."""
        rows = self.rows(generation, tail).get(place.place, _NO_ROWS)
        before = self.gone_before(users)[place.of] if len(place.of) else _NO_ROWS
        return (place.column("version")[0] > before) & ~np.isin(place.rows, rows)


def resolve(deletion: Deletion, before: Deletions, generation: Generation, tail: Tail, expired: Marks,
            ) -> Deletion:
    """``deletion`` with ``first`` and ``time`` of what it takes from those who have something, and without the others.
    ``before``: the deletions before it; ``expired``: a deleted user's own go with the user."""
    count = len(deletion.users)
    first, time = np.full((2, count), np.iinfo(np.int64).max)
    for place in places_of(generation, tail, deletion.users):
        taken = matching(place, deletion, before.schema, before.dictionaries)
        taken &= before.survivors(place, deletion.users, generation, tail)
        np.minimum.at(first, place.of[taken], place.column("version")[0][taken])
        np.minimum.at(time, place.of[taken], place.column("event_time")[0][taken])
    if deletion.events is None and len(expired):
        gone = before.gone_before(deletion.users)
        for i in np.flatnonzero(expired.has(deletion.users) & (gone < 0)).tolist():
            mine = np.flatnonzero(expired.users == deletion.users[i])
            first[i], time[i] = min(first[i], expired.first[mine].min()), min(time[i], expired.time[mine].min())
    some = first < np.iinfo(np.int64).max
    if deletion.events is None or deletion.of is None:
        return Deletion(deletion.version, deletion.users[some], first[some], time[some])
    kept = some[deletion.of]
    return Deletion(deletion.version, deletion.users[some], first[some], time[some],
                    (np.cumsum(some) - 1)[deletion.of[kept]], deletion.events.filter(pa.array(kept)))

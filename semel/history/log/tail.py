"""The log tier in memory: the columns of not yet compacted events, and an index of them by user.

``Tail`` values are immutable; appending returns a new one. Until a read needs them a tail knows only where its events
lie in the log (``ranges``), so that a process which appends or compacts holds no events. Then their columns are loaded
into an arena: in arrival order, growing by doubling, shared by all tails of a handle. A tail sees the first ``rows`` of
them, which never change, so readers need no lock. The index is made when a read first needs it: a few sorted runs
(``Run``) of growing size, as in a log-structured merge tree, so that indexing one more event touches hundreds of rows,
not all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from semel.history.arrays import bits, frozen
from semel.history.errors import CorruptFile
from semel.history.log.ranges import Range, extended
from semel.history.schema import EventSchema, to_numpy

LEVELS = (256, 1 << 14, 1 << 20, 1 << 62)  # most rows of each run, newest first


@dataclass(frozen=True)
class Run:
    """Rows of a tail by user, then (event_time, arrival): ``users`` [U] ascending, ``offsets`` [U + 1], ``rows`` and
    ``times`` [n], ``first`` [U] the user's lowest version. All read-only."""

    users: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    times: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, users: np.ndarray, offsets: np.ndarray, rows: np.ndarray, times: np.ndarray, first: np.ndarray) -> Run:
        return cls(*(frozen(array) for array in (users, offsets, rows, times, first)))

    @classmethod
    def sorted(cls, keys: np.ndarray, times: np.ndarray, versions: np.ndarray, start: int) -> Run:
        """From rows ``start ...`` in arrival order."""
        order = np.lexsort((times, keys)) if len(keys) > 1 else np.zeros(len(keys), np.int64)  # lexsort is stable
        keys = keys[order]
        edges = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        offsets = np.concatenate(([0], edges, [len(keys)])).astype(np.int64) if len(keys) else np.zeros(1, np.int64)
        first = np.minimum.reduceat(versions[order], offsets[:-1]) if len(keys) else versions
        return cls.of(keys[offsets[:-1]], offsets, order + start, times[order], first)


_NOTHING = np.empty(0, np.int64)
EMPTY_RUN = Run.of(_NOTHING, np.zeros(1, np.int64), _NOTHING, _NOTHING, _NOTHING)


class Index:
    """The runs of a tail, newest first, field by field: what kernels take."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.users, self.offsets = tuple(r.users for r in runs), tuple(r.offsets for r in runs)
        self.rows, self.times = tuple(r.rows for r in runs), tuple(r.times for r in runs)
        self.first = tuple(r.first for r in runs)


class Arena:
    """Growing columns. ``arrays[name]`` has room for more rows than are used; ``valid[name]`` exists from the first
    null on."""

    def __init__(self, schema: EventSchema, room: int = 0) -> None:
        self.schema = schema
        self.rows = 0
        self.room = room
        self.arrays: dict[str, np.ndarray] = {
            name: np.empty(room, np.int64) for name in ("", "event_time", "version")  # "" is the key
        } | {name: np.empty((room, *column.shape), column.dtype) for name, column in schema.layout.items()}
        self.valid: dict[str, np.ndarray] = {}
        self.slots: dict[str, int] = {}  # string keys only: the integer that stands for a user in this arena

    def append(self, batch: pa.RecordBatch, versions: int | np.ndarray) -> None:
        rows, end = self.rows, self.rows + batch.num_rows
        if end > self.room:
            self.room = max(end, 2 * self.room, 1024)
            self.arrays = {name: _grown(array, rows, self.room) for name, array in self.arrays.items()}
            self.valid = {name: _grown(array, rows, self.room) for name, array in self.valid.items()}
        self.arrays["version"][rows:end] = versions
        self.arrays["event_time"][rows:end] = batch.column(1).to_numpy()
        self.arrays[""][rows:end] = self._keys(batch.column(0))
        for index, (name, column) in enumerate(self.schema.layout.items()):
            later = index + 2 >= batch.num_columns  # a column that was added after this batch
            values, valid = (0, False) if later else to_numpy(batch.column(index + 2), column)
            self.arrays[name][rows:end] = values
            if valid is not None and name not in self.valid:
                self.valid[name] = np.ones(self.room, bool)
            if name in self.valid:
                self.valid[name][rows:end] = True if valid is None else valid
        self.rows = end

    def with_schema(self, schema: EventSchema) -> Arena:
        """The same rows with the columns that ``schema`` has in addition, null."""
        new = Arena(schema)
        new.rows, new.room, new.slots = self.rows, self.room, self.slots
        new.arrays |= self.arrays
        new.valid |= self.valid
        for name in schema.layout:
            if name not in self.arrays:
                new.arrays[name] = np.zeros((self.room, *new.arrays[name].shape[1:]), new.arrays[name].dtype)
                new.valid[name] = np.zeros(self.room, bool)
        return new

    def _keys(self, array: pa.Array) -> np.ndarray:
        if not self.schema.string_keys:
            return array.to_numpy()
        encoded = array.dictionary_encode()
        slots = self.slots
        codes = [slots.setdefault(text, len(slots)) for text in encoded.dictionary.to_pylist()]
        return np.array(codes, np.int64)[encoded.indices.to_numpy()] if codes else np.empty(0, np.int64)


def _grown(array: np.ndarray, used: int, room: int) -> np.ndarray:
    new = np.empty((room, *array.shape[1:]), array.dtype)
    new[:used] = array[:used]
    return new


class Events:
    """What the tails of a handle share: the ``rows`` events of ``ranges``, and their arena once it is loaded."""

    def __init__(self, schema: EventSchema, ranges: tuple[Range, ...] = (), arena: Arena | None = None) -> None:
        self.schema, self.ranges, self.arena = schema, ranges, arena
        self.rows = sum(r.rows for r in ranges)
        self._lock = threading.Lock()

    def append(self, batch: pa.RecordBatch, versions: int | np.ndarray, place: Range, ranges: tuple[Range, ...],
               rows: int) -> None:
        """Add a batch that lies at ``place`` after the first ``rows`` events, those of ``ranges``. They are all that
        any view has: what follows was left by an append that was broken off."""
        with self._lock:
            if self.arena is not None:
                self.arena.rows = rows  # what an append that was broken off left there does not count
                self.arena.append(batch, versions)
            self.ranges, self.rows = extended(ranges, place) if batch.num_rows else ranges, rows + batch.num_rows

    def load(self) -> Arena:
        """The arena, filled now if it is not there yet. Raises CorruptFile, GenerationGone."""
        if self.arena is None:
            with self._lock:
                if self.arena is None:
                    arena = Arena(self.schema, 2 * self.rows)  # room for more costs nothing until it is used
                    for place in self.ranges:
                        for batch, versions in place.read():
                            arena.append(batch, versions)
                    self.arena = arena
        return self.arena


class Tail:
    """The first ``rows`` of a handle's events that are not compacted, which lie at ``ranges``; ``columns`` and
    ``valid`` are read-only views of them. What reads events may raise CorruptFile and GenerationGone, once, when they
    are loaded."""

    def __init__(self, events: Events, indexed: int = 0, index: Index | None = None) -> None:
        self.schema = events.schema
        self.rows, self.ranges = events.rows, events.ranges
        self._events = events
        self._columns: dict[str, np.ndarray] = {}
        self._valid: dict[str, np.ndarray] = {}
        self._indexed, self._index = indexed, index or Index((EMPTY_RUN,) * len(LEVELS))
        self._words: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    @classmethod
    def empty(cls, schema: EventSchema) -> Tail:
        return cls(Events(schema))

    def append(self, batch: pa.RecordBatch, versions: int | np.ndarray, place: Range) -> Tail:
        """The tail with one more batch (key, event_time, columns as ``Column.stored``), of one version or of an
        ascending one for each row [rows], which lies at ``place``. Only the newest tail can be appended to."""
        self._events.append(batch, versions, place, self.ranges, self.rows)
        return Tail(self._events, self._indexed, self._index)

    def after(self, version: int) -> Tail:
        """The events of later versions only, which must begin a range (a compaction ends with a segment)."""
        ranges = tuple(place for place in self.ranges if place.last > version)
        if len(ranges) == len(self.ranges):
            return self
        if ranges and ranges[0].first <= version:
            raise RuntimeError(f"version {version} does not end a segment of the log")
        return Tail(Events(self.schema, ranges, self._moved(sum(place.rows for place in ranges))))

    def _moved(self, rows: int) -> Arena | None:
        """The last ``rows`` events in an arena of their own, where they are loaded."""
        old = self._events.arena
        if old is None:
            return None
        arena = Arena(self.schema)
        start = self.rows - rows
        arena.rows = arena.room = rows
        arena.arrays = {name: array[start:].copy() for name, array in self.columns.items()}
        arena.valid = {name: array[start:].copy() for name, array in self.valid.items() if not array[start:].all()}
        if self.schema.string_keys:
            by_slot = list(old.slots)
            used, codes = np.unique(arena.arrays[""], return_inverse=True)
            arena.slots = {by_slot[slot]: new for new, slot in enumerate(used.tolist())}
            arena.arrays[""] = codes.astype(np.int64)
        return arena

    @property
    def columns(self) -> dict[str, np.ndarray]:
        if not self._columns:
            arena = self._events.load()
            self._valid = {name: frozen(array[: self.rows]) for name, array in list(arena.valid.items())}
            self._columns = {name: frozen(array[: self.rows]) for name, array in arena.arrays.items()}
        return self._columns

    @property
    def valid(self) -> dict[str, np.ndarray]:
        return self._valid if self.columns else {}  # which come together

    def users(self, version: int, after: int = 0) -> np.ndarray:
        """[U] the users of the events up to ``version``, from above ``after``: int64, or strings as objects. Loads
        nothing."""
        if self._events.arena is not None:
            keys = np.unique(self.columns[""][slice(*np.searchsorted(self.columns["version"], (after, version),
                                                                     "right"))])
            if not self.schema.string_keys:
                return keys
            by_slot = list(self._events.arena.slots)
            return np.array([by_slot[slot] for slot in keys.tolist()], object)
        found: list[np.ndarray] = [np.empty(0, object if self.schema.string_keys else np.int64)]
        for place in self.ranges:
            if place.first <= version and place.last > after:
                of_range = [batch.column(0).slice(*_between(batch.num_rows, versions, after, version))
                            for batch, versions in place.read()]
                found.append(pa.chunked_array(of_range).unique().to_numpy(zero_copy_only=False))
        return np.unique(np.concatenate(found))

    def with_schema(self, schema: EventSchema) -> Tail:
        """The same events with the columns that ``schema`` has in addition, null."""
        arena = self._events.arena
        events = Events(schema, self.ranges, None if arena is None else arena.with_schema(schema))
        return Tail(events, self._indexed, self._index)

    @property
    def events(self) -> Events:
        """What this tail shares with those that were appended to it, and with no other."""
        return self._events

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """[P] user ids -> the int64 that stand for them here; -1 for a string that is not here (an integer id stands
        for itself)."""
        if not self.schema.string_keys:
            return ids
        slots = self._events.load().slots
        return np.fromiter((slots.get(text, -1) for text in ids), np.int64, len(ids))

    def words(self, name: str) -> np.ndarray:
        """A column as ``bits``."""
        words = self._words.get(name)
        if words is None:
            words = self._words[name] = bits(self.columns[name])
        return words

    @property
    def index(self) -> Index:
        """The rows by user; made now if it is not there yet."""
        if self._indexed != self.rows:
            with self._lock:
                if self._indexed != self.rows:
                    self._index = self._extended()
                    self._indexed = self.rows
        return self._index

    def _extended(self) -> Index:
        from semel.history.kernels.gather import merge_runs

        new = slice(self._indexed, self.rows)
        run = Run.sorted(self.columns[""][new], self.columns["event_time"][new], self.columns["version"][new],
                         self._indexed)
        runs: list[Run] = list(self._index.runs)
        for level, most in enumerate(LEVELS):
            old = runs[level]
            if len(old.rows):
                run = Run.of(*merge_runs(old.users, old.offsets, old.rows, old.times, old.first,
                                         run.users, run.offsets, run.rows, run.times, run.first))
            if len(run.rows) <= most:
                runs[level] = run
                return Index(runs)
            runs[level] = EMPTY_RUN
        raise CorruptFile("more events than 2**62")  # cannot be reached


def _between(rows: int, versions: int | np.ndarray, after: int, upto: int) -> tuple[int, int]:
    """Where in a batch the rows of ascending ``versions`` (one, or [rows]) above ``after`` and up to ``upto`` begin,
    and how many they are."""
    first, last = np.searchsorted(np.broadcast_to(versions, rows), (after, upto), "right").tolist()
    return first, last - first


def erased(code: int) -> str:
    """What stands where a string was erased: codes never move."""
    return f"\x00{code}"


def _is_erased(word: str, code: int) -> bool:
    return word[:1] == "\x00" and word == erased(code)


class Dictionaries:
    """The strings of dictionary columns, by code. They only grow, so a code never changes its meaning."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names: tuple[str, ...] = ()
        self._arrays: dict[str, np.ndarray] = {}
        self._codes: dict[str, dict[str, int]] = {}
        self._sizes: dict[str, int] = {}
        self.include(names)

    def include(self, names: Sequence[str]) -> None:
        """Have a dictionary, empty at first, for each of ``names``."""
        for name in names:
            if name not in self._codes:
                self._arrays[name], self._codes[name], self._sizes[name] = np.empty(0, object), {}, 0
                self.names = (*self.names, name)

    def size(self, name: str) -> int:
        return self._sizes[name]

    def array(self, name: str) -> np.ndarray:
        """The dictionary now, as a read-only object array that later growth leaves alone."""
        return frozen(self._arrays[name][: self._sizes[name]])

    def extend(self, name: str, start: int, values: list[str], where: Any) -> None:
        """Append ``values``, the first of which has the code ``start``; known ones must be equal, or erased."""
        codes, size = self._codes[name], self._sizes[name]
        known = size - start
        self._forget(name, start, values[:max(known, 0)])
        words = self._arrays[name]
        if known < 0 or any(words[start + i] != value for i, value in enumerate(values[:known])):
            raise CorruptFile(f"{where}: the dictionary of {name!r} does not continue the one before it")
        values = values[max(known, 0):]
        if not values:
            return
        fresh = {value: code for code, value in enumerate(values, size) if not _is_erased(value, code)}
        there = sum(not _is_erased(value, code) for code, value in enumerate(values, size))
        if len(fresh) < there or not codes.keys().isdisjoint(fresh):
            raise CorruptFile(f"{where}: the dictionary of {name!r} repeats a value")
        if size + len(values) > len(words):
            words = self._arrays[name] = _grown(words, size, max(2 * size, size + len(values), 16))
        words[size : size + len(values)] = values
        codes.update(fresh)
        self._sizes[name] = size + len(values)

    def _forget(self, name: str, start: int, values: list[str]) -> None:
        """Take over the strings that were erased. Nothing is looked up as one: it has no code any more."""
        codes, words = self._codes[name], self._arrays[name]
        for code, value in enumerate(values, start):
            if _is_erased(value, code) and words[code] != value:
                words = words.copy()  # arrays that were handed out stay as they are
                del codes[words[code]]
                words[code] = value
        self._arrays[name] = words

    def codes(self, name: str, values: Sequence[Any]) -> list[int]:
        """The codes of ``values``; -1 for those that are not in the dictionary."""
        codes = self._codes[name]
        return [codes.get(value, -1) for value in values]

    def encode(self, name: str, arrays: Sequence[pa.DictionaryArray]) -> tuple[list[pa.Array], list[str]]:
        """Dictionary-encoded strings -> (int32 codes of each array, the values that must be appended first to make
        them valid). Raises ValueError where the codes would not fit."""
        codes, size = self._codes[name], self._sizes[name]
        fresh: dict[str, int] = {}
        encoded = []
        for array in arrays:
            table = [codes[value] if value in codes else fresh.setdefault(value, size + len(fresh))
                     for value in array.dictionary.to_pylist()]
            if size + len(fresh) > np.iinfo(np.int32).max:
                raise ValueError(f"column {name!r}: more than 2**31 - 1 different strings")
            encoded.append(pa.array(table, pa.int32()).take(array.indices))
        return encoded, list(fresh)

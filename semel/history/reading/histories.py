"""Reading histories: cut each pointer's range in generation and tail, merge them, copy the projected columns out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from semel.batch import JaggedTable, Pointers
from semel.history.arrays import frozen
from semel.history.generation.generation import NO_VALIDITY
from semel.history.kernels import cutting, gather
from semel.history.kernels.packing import Packed
from semel.history.kernels.sharding import packed
from semel.history.log.tail import LEVELS
from semel.history.reading import parallel
from semel.history.reading.copying import Part, Selection, copy_columns
from semel.history.schema import RESERVED, EventSchema, Projection, Status
from semel.history.view.deletions import IN_TAIL
from semel.history.view.following import View

SERIAL_POINTERS = 1 << 12
"""The rows of fewer pointers are found before a second thread has begun."""

_NO_LIMIT = 1 << 62
_NO_SINCE = int(np.iinfo(np.int64).min)
_NO_GROUPS = frozen(np.empty(0, np.int64))
_NO_COLUMN = frozen(np.empty(0, np.int32))
_NO_ROWS = np.empty(0, np.int64)
_NO_MARK = np.empty(0, bool)
_NO_GONE: dict[int, np.ndarray] = {}


def check_projection(projection: Projection, schema: EventSchema) -> None:
    for name in projection.columns:
        if name not in schema.layout and name not in RESERVED:
            known = ", ".join((*schema.layout, *RESERVED))
            raise ValueError(f"the projection names column {name!r}; the store has {known}")
    if projection.groups is not None:
        if schema.group is None:
            raise ValueError("the projection names groups, but the store's schema has no group column")
        strings = schema.layout[schema.group].is_dictionary
        for value in projection.groups:
            if not isinstance(value, str if strings else (int, np.integer)):
                kind = "strings" if strings else "integers"
                raise ValueError(f"group {value!r}: the values of {schema.group!r} are {kind}")


def group_codes(view: View, schema: EventSchema, projection: Projection) -> np.ndarray:
    """The codes of the projection's groups; a group that no event has yet has none."""
    groups = projection.groups
    if groups is None:
        return _NO_GROUPS
    if schema.group is not None and schema.layout[schema.group].is_dictionary:
        codes = view.dictionaries.codes(schema.group, groups)
        return frozen(np.array([code for code in codes if code >= 0], np.int64))
    return frozen(np.array([int(value) for value in groups], np.int64))


def select(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> Selection:
    """The rows that ``pointers`` see through ``projection``."""
    touched = _touched(view, pointers)
    chosen = _select(view, schema, pointers, projection, touched)
    if len(touched) or len(view.generation.deleted) or len(view.generation.expired):
        _explain(view, schema, pointers, projection, touched, chosen)
    return chosen


def count(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> np.ndarray:
    """How many rows those are, [P] int64. Where a user has ``last`` rows for sure it is not looked up which."""
    touched = _touched(view, pointers)
    enough = projection.last
    if enough is None or len(touched) or projection.since is not None or projection.groups is not None:
        enough = _NO_LIMIT
    return _select(view, schema, pointers, projection, touched, enough).count


def _touched(view: View, pointers: Pointers) -> np.ndarray:
    """Which of the users have deletions in the log; empty where none have."""
    touched = view.deletions.marks.has(pointers.user_id) if view.deletions else _NO_MARK
    return touched if touched.any() else _NO_MARK


def _explain(view: View, schema: EventSchema, pointers: Pointers, projection: Projection, touched: np.ndarray,
             chosen: Selection) -> None:
    """Correct the statuses where something was taken away."""
    ids, as_of, version, status = pointers.user_id, pointers.as_of, pointers.version, chosen.status
    known, before = status == Status.OK, np.full(len(pointers), -1, np.int64)
    if len(touched):  # whether what is left makes the user known
        some = np.flatnonzero(touched)
        whole = Pointers(ids[some], np.full(len(some), np.iinfo(np.int64).max), version[some])
        left = _select(view, schema, whole, Projection((), last=1), touched[some])
        known[some] = left.count > 0
        before[some] = view.deletions.gone_before(ids[some])
    scrubbed, expired = np.zeros((2, len(pointers)), bool)
    nothing = np.full(len(pointers), -1, np.int64)
    for marks in (view.deletions.marks, view.generation.deleted):
        if len(marks):
            seen, lost = marks.seen(ids, as_of, version, nothing)
            known |= seen
            scrubbed |= lost
    if len(view.generation.expired):
        seen, lost = view.generation.expired.seen(ids, as_of, version, before)
        known |= seen
        expired = lost & (projection.last is None or chosen.count < projection.last)
        if projection.since is not None and projection.since >= view.generation.expired_before:
            expired[:] = False
    status[:] = np.where(known, Status.OK.value, Status.UNKNOWN_USER.value)
    status[expired] = Status.EXPIRED.value
    status[scrubbed] = Status.SCRUBBED.value


def _select(view: View, schema: EventSchema, pointers: Pointers, projection: Projection, touched: np.ndarray,
            enough: int = _NO_LIMIT) -> Selection:
    """``touched`` [P]: see ``_touched``. Where the generation has ``enough`` rows for a pointer it does not
    matter which they are."""
    size = len(pointers)
    before, gone = _NO_GROUPS, _NO_GONE
    if len(touched):
        before = frozen(view.deletions.gone_before(pointers.user_id))
        gone = view.deletions.rows(view.generation, view.tail)
    shards, lookup = view.generation.shards, view.generation.lookup
    since = _NO_SINCE if projection.since is None else int(projection.since)
    most = _NO_LIMIT if projection.last is None else int(projection.last)
    filtered = projection.groups is not None
    groups = group_codes(view, schema, projection)
    status = np.empty(size, np.uint8)
    low, high, begin, count, user, shard_of = np.empty((6, size), np.int64)
    plain = np.empty(size, bool)

    keys = view.tail.keys_of(pointers.user_id)
    keys, as_of, version = np.array((keys, pointers.as_of, pointers.version))  # writable: kernels start sooner on it
    if schema.string_keys:
        key_offsets, key_bytes = packed([text.encode() for text in pointers.user_id])
        gather.shards_of_strings(key_offsets, key_bytes, len(shards), shard_of)
        user[:] = -1
        for number, index in _by_shard(shard_of):
            if shards[number].rows:
                cutting.find_strings(*shards[number].user_strings, key_offsets, key_bytes, index, user)
    else:
        gather.shards_of_integers(keys, len(shards), shard_of)
    lookup.need(shard_of)
    times = lookup.column("event_time").values.of(shard_of)
    by_user = (shard_of, user, lookup.first_user, lookup.records, lookup.first_step, lookup.time_index, times, as_of,
               version, since, most, enough, low, high, plain, begin, count, status)

    def cut(start: int, stop: int) -> bool:
        if schema.string_keys:
            return cutting.cut(start, stop, *by_user)
        return cutting.cut_integers(start, stop, keys, lookup.first_slot, lookup.slots, *by_user)

    if size < SERIAL_POINTERS:
        all_plain = cut(0, size)
    else:
        all_plain = all(parallel.run([(cut, piece) for piece in _pieces(size)], parallel.cores()))
    if len(touched):
        plain &= ~touched
        all_plain = False

    tail = _select_tail(view, schema, keys, as_of, version, since, most, filtered, groups, status, before,
                        frozen(gone.get(IN_TAIL, _NO_GROUPS)))
    if all_plain and not filtered and tail is None:
        return Selection(shard_of, begin, count, status, (), _NO_ROWS, _NO_ROWS)
    tail_rows, tail_begin, tail_end = tail or (_NO_ROWS, *np.zeros((2, size), np.int64))
    room = np.empty(size + 1, np.int64)
    refs = np.empty(gather.reserve(low, high, plain, filtered, tail_begin, tail_end, most, room), np.int64)
    parts = tuple(Part(number, index) for number, index in _by_shard(shard_of))
    for part in parts:
        shard = shards[part.shard]
        event_times: np.ndarray | Packed = _NO_GROUPS
        versions: np.ndarray | Packed = _NO_GROUPS
        group: np.ndarray | Packed = _NO_COLUMN
        valid: np.ndarray | Packed = NO_VALIDITY
        if shard.rows:
            event_times, versions = shard.column("event_time"), shard.column("version")
            if schema.group is not None and filtered:
                group, valid = shard.column(schema.group), shard.valid(schema.group)
        gather.select(part.index, low, high, plain, event_times, versions, version, before,
                      frozen(gone.get(part.shard, _NO_GROUPS)), group, valid, groups, filtered, tail_rows, tail_begin,
                      tail_end, view.tail.columns["event_time"], most, room, refs, begin, count)
    return Selection(shard_of, begin, count, status, parts, room, refs)


def _pieces(size: int) -> list[tuple[int, int]]:
    """Ranges of pointers for threads to share."""
    edges = np.linspace(0, size, 4 * parallel.cores() + 1).astype(np.int64).tolist()
    return [(a, b) for a, b in pairwise(edges) if b > a]


def _by_shard(shard_of: np.ndarray) -> list[tuple[int, np.ndarray]]:
    if len(shard_of) == 1:
        return [(int(shard_of[0]), np.zeros(1, np.int64))]
    order = np.argsort(shard_of, kind="stable")
    used = shard_of[order]
    edges = [0, *(np.flatnonzero(used[1:] != used[:-1]) + 1).tolist(), len(used)]
    return [(int(used[a]), order[a:b]) for a, b in pairwise(edges) if b > a]


def _select_tail(view: View, schema: EventSchema, keys: np.ndarray, as_of: np.ndarray, version: np.ndarray, since: int,
                 most: int, filtered: bool, groups: np.ndarray, status: np.ndarray, before: np.ndarray,
                 gone: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(rows, begin [P], end [P]): each pointer's visible, wanted rows of the tail, in order. None where there are
    none."""
    tail, size = view.tail, len(keys)
    if not tail.rows:
        return None
    index = tail.index
    low, high = np.empty((2, size, len(LEVELS)), np.int64)
    room = np.empty(size + 1, np.int64)
    most_rows = gather.cut_runs(index.users, index.offsets, index.times, index.first, keys, as_of, version, since, most,
                                low, high, room, status)
    if not most_rows:
        return None
    rows, begin = np.empty(most_rows, np.int64), np.empty(size, np.int64)
    group, valid = _NO_COLUMN, NO_VALIDITY
    if filtered:
        assert schema.group is not None
        group, valid = tail.columns[schema.group], tail.valid.get(schema.group, NO_VALIDITY)
    gather.select_tail(index.rows, index.times, low, high, tail.columns["version"], version, before, gone, group, valid,
                       groups, filtered, most, room, rows, begin)
    return rows, begin, room[1:]


def read(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> JaggedTable:
    chosen = select(view, schema, pointers, projection)
    offsets = np.empty(len(chosen.count) + 1, np.int64)
    gather.sum_counts(chosen.count, offsets)
    columns, validity = copy_columns(view, chosen, offsets, projection.columns)
    for name, valid in list(validity.items()):
        if valid.all():
            del validity[name]
        elif name in view.dictionaries.names:
            columns[name][~valid] = -1
    if not projection.allow_backfill:
        _hide_added(schema, pointers.version, offsets, columns, validity, view.dictionaries.names)
    dictionaries = {name: view.dictionaries.array(name) for name in view.dictionaries.names if name in columns}
    return JaggedTable(columns, offsets, validity or None, dictionaries or None, chosen.status)


def _hide_added(schema: EventSchema, version: np.ndarray, offsets: np.ndarray, columns: dict[str, np.ndarray],
                validity: dict[str, np.ndarray], strings: Sequence[str]) -> None:
    """Make null what pointers read of columns that were added after their version."""
    for name, column in columns.items():
        since = schema.layout[name].since_version if name in schema.layout else 0
        if not since or version.min(initial=since) >= since:
            continue
        hidden = np.repeat(version < since, np.diff(offsets))
        if hidden.any():
            validity[name] = validity.get(name, np.ones(len(column), bool)) & ~hidden
            column[hidden] = -1 if name in strings else 0


def keys(view: View) -> np.ndarray:
    """All users of whom an event had arrived by the view's version and is not deleted, sorted: int64, or strings as
    objects."""
    found = _keys(view)
    if not view.deletions:
        return found
    some = np.flatnonzero(view.deletions.marks.has(found))
    pointers = Pointers(found[some], np.full(len(some), np.iinfo(np.int64).max), np.full(len(some), view.version))
    left = _select(view, view.generation.schema, pointers, Projection((), last=1), np.ones(len(some), bool))
    return np.delete(found, some[left.count == 0])


def changed(view: View, after: int) -> np.ndarray:
    """Users with an event, or a deletion, of a version above ``after``, sorted. Looks at no event: a generation knows
    the last version of each user, and its marks the deletions that were carried out."""
    strings = view.generation.schema.string_keys
    found = [view.tail.users(view.version, after)]
    found += [one.users for one in view.deletions.deletions if after < one.version <= view.version]
    if after < min(view.compacted, view.version):
        for shard in view.generation.shards:
            if shard.rows and (later := shard.last > after).any():
                found.append(np.array([key.decode() for key in shard.user_keys()], object)[later] if strings
                             else shard.users[later])
        deleted = view.generation.deleted
        found.append(deleted.users[deleted.until > after])
    return np.unique(np.concatenate(found))


def _keys(view: View) -> np.ndarray:
    strings = view.generation.schema.string_keys
    found = [view.tail.users(view.version)]
    for shard in view.generation.shards:
        if shard.rows:
            mine = np.array([key.decode() for key in shard.user_keys()], object) if strings else shard.users
            if view.compacted > view.version:  # a frozen view on a later generation
                mine = mine[shard.first <= view.version]
            found.append(mine)
    return np.unique(np.concatenate(found))

"""Reading histories: cut each pointer's range in generation and tail, merge them, copy the projected columns out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from semel.batch import JaggedTable, Pointers
from semel.history import gather, parallel
from semel.history.compaction import packed
from semel.history.deletions import IN_TAIL
from semel.history.following import View
from semel.history.generation import NO_VALIDITY
from semel.history.packing import Packed
from semel.history.schema import RESERVED, EventSchema, Projection, Status
from semel.history.tail import LEVELS, bits, frozen

SERIAL_VALUES = 1 << 17
"""A read of fewer values is done before a second thread has begun."""

_NO_LIMIT = 1 << 62
_NO_SINCE = int(np.iinfo(np.int64).min)
_NO_GROUPS = frozen(np.empty(0, np.int64))
_NO_COLUMN = frozen(np.empty(0, np.int32))
_NO_ROWS = np.empty(0, np.int64)
_NO_MARK = np.empty(0, bool)
_NO_GONE: dict[int, np.ndarray] = {}


@dataclass(frozen=True)
class Part:
    """One shard's share of a batch: ``index``: its pointers; ``plain``: all of them are plain ranges."""

    shard: int
    index: np.ndarray
    plain: bool


@dataclass(frozen=True)
class Selection:
    """Which rows each pointer gets, columns not yet read. ``begin``/``count`` [P]: a range of the shard's rows, or of
    ``refs`` where ``room`` [P + 1] leaves it some."""

    parts: list[Part]
    begin: np.ndarray
    count: np.ndarray
    room: np.ndarray
    refs: np.ndarray
    status: np.ndarray


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
    touched = view.deletions.marks.has(pointers.user_id) if view.deletions else _NO_MARK
    if not touched.any():
        touched = _NO_MARK
    chosen = _select(view, schema, pointers, projection, touched)
    if len(touched) or len(view.generation.deleted) or len(view.generation.expired):
        _explain(view, schema, pointers, projection, touched, chosen)
    return chosen


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
            ) -> Selection:
    """``touched`` [P]: which users have deletions in the log; empty where none have."""
    size = len(pointers)
    before, gone = _NO_GROUPS, _NO_GONE
    if len(touched):
        before = frozen(view.deletions.gone_before(pointers.user_id))
        gone = view.deletions.rows(view.generation, view.tail)
    shards = view.generation.shards
    as_of, version = frozen(np.ascontiguousarray(pointers.as_of)), frozen(np.ascontiguousarray(pointers.version))
    since = _NO_SINCE if projection.since is None else int(projection.since)
    most = _NO_LIMIT if projection.last is None else int(projection.last)
    filtered = projection.groups is not None
    groups = group_codes(view, schema, projection)
    status = np.full(size, Status.UNKNOWN_USER.value, np.uint8)
    low, high, begin, count, user, of_shard = np.empty((6, size), np.int64)
    plain = np.empty(size, bool)

    if schema.string_keys:
        encoded = [text.encode() for text in pointers.user_id]
        key_offsets, key_bytes = packed(encoded)
        gather.shards_of_strings(key_offsets, key_bytes, len(shards), of_shard)
        keys = frozen(view.tail.keys_of(pointers.user_id))
    else:
        keys = frozen(np.ascontiguousarray(pointers.user_id))
        gather.shards_of_integers(keys, len(shards), of_shard)
    parts: list[Part] = []
    all_plain = not filtered
    for number, index in _by_shard(of_shard):
        shard = shards[number]
        is_plain = True
        if not shard.rows:
            low[index] = high[index] = begin[index] = count[index] = 0
            plain[index] = True
        else:
            by_user = (shard.offsets, shard.column("event_time"), shard.first, shard.last, index, user, as_of, version,
                       since, most, low, high, plain, begin, count, status)
            if schema.string_keys:
                gather.find_strings(*shard.user_strings, key_offsets, key_bytes, index, user)
                is_plain = gather.cut(*by_user)
            else:
                is_plain = gather.cut_integers(shard.users, keys, *by_user)
            if len(touched) and touched[index].any():
                plain[index] &= ~touched[index]
                is_plain = False
        all_plain &= is_plain
        parts.append(Part(number, index, True))

    tail = _select_tail(view, schema, keys, as_of, version, since, most, filtered, groups, status, before,
                        frozen(gone.get(IN_TAIL, _NO_GROUPS)))
    if all_plain and tail is None:
        return Selection(parts, begin, count, _NO_ROWS, _NO_ROWS, status)
    tail_rows, tail_begin, tail_end = tail or (_NO_ROWS, *np.zeros((2, size), np.int64))
    room = np.empty(size + 1, np.int64)
    refs = np.empty(gather.reserve(low, high, plain, filtered, tail_begin, tail_end, most, room), np.int64)
    for at, part in enumerate(parts):
        shard = shards[part.shard]
        times: np.ndarray | Packed = _NO_GROUPS
        versions: np.ndarray | Packed = _NO_GROUPS
        group: np.ndarray | Packed = _NO_COLUMN
        valid: np.ndarray | Packed = NO_VALIDITY
        if shard.rows:
            times, versions = shard.column("event_time"), shard.column("version")
            if schema.group is not None and filtered:
                group, valid = shard.column(schema.group), shard.valid(schema.group)
        is_plain = gather.select(part.index, low, high, plain, times, versions, version, before,
                                 frozen(gone.get(part.shard, _NO_GROUPS)), group, valid, groups, filtered, tail_rows,
                                 tail_begin, tail_end, view.tail.columns["event_time"], most, room, refs, begin, count)
        parts[at] = Part(part.shard, part.index, is_plain)
    return Selection(parts, begin, count, room, refs, status)


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
    total = gather.sum_counts(chosen.count, offsets)
    shards, tail = [view.generation.shards[part.shard] for part in chosen.parts], view.tail
    columns: dict[str, np.ndarray] = {}
    validity: dict[str, np.ndarray] = {}
    copies: list[parallel.Job] = []
    for name in projection.columns:
        template = tail.columns[name]
        out = columns[name] = np.empty((total, *template.shape[1:]), template.dtype)
        old = [flat(shard.column(name)) if shard.rows else None for shard in shards]
        copies += _copies(chosen, offsets, old, tail.words(name), bits(out), int(np.prod(template.shape[1:])))
        in_tail = name in tail.valid and len(chosen.refs) > 0
        if in_tail or any(len(shard.valid(name)) for shard in shards):
            valid = validity[name] = np.empty(total, bool)
            masks = [flat(shard.valid(name) if len(shard.valid(name)) else _all_valid(shard.rows)) for shard in shards]
            copies += _copies(chosen, offsets, masks, bits(tail.valid[name] if in_tail else _all_valid(tail.rows)),
                              bits(valid), 1)
    parallel.run(copies, parallel.cores() if total * len(columns) > SERIAL_VALUES else 1)
    for name, valid in list(validity.items()):
        if valid.all():
            del validity[name]
        elif name in view.dictionaries.names:
            columns[name][~valid] = -1
    if not projection.allow_backfill:
        _hide_added(schema, pointers.version, offsets, columns, validity, view.dictionaries.names)
    dictionaries = {name: view.dictionaries.array(name) for name in columns if name in view.dictionaries.names}
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


def _all_valid(rows: int) -> np.ndarray:
    return frozen(np.ones(rows, bool))


def flat(column: np.ndarray | Packed) -> np.ndarray | Packed:
    return bits(column) if isinstance(column, np.ndarray) else column


def _copies(chosen: Selection, offsets: np.ndarray, old: Sequence[np.ndarray | Packed | None], new: np.ndarray,
            out: np.ndarray, width: int) -> Iterator[parallel.Job]:
    """What copies the chosen rows of a column, a job a part: ``old`` for each part the shard's values (None: it has
    none), ``new`` the tail's; ``width`` values a row."""
    for part, values in zip(chosen.parts, old, strict=True):
        if values is None:
            values = new[:0]
        if part.plain:
            yield gather.copy_plain, (part.index, chosen.begin, chosen.count, offsets, width, values, out)
        else:
            yield gather.copy_rows, (part.index, chosen.begin, chosen.count, offsets, chosen.room, chosen.refs, width,
                                     values, new, out)


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

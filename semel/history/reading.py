"""Reading histories: cut each pointer's range in generation and tail, merge them, copy the projected columns out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from semel.batch import JaggedTable, Pointers, offsets_of
from semel.history import gather
from semel.history.compaction import bits, packed, shards_of
from semel.history.generation import NO_VALIDITY, Generation, Shard
from semel.history.schema import RESERVED, EventSchema, Projection, Status
from semel.history.tail import LEVELS, Tail, frozen

_NO_LIMIT = 1 << 62
_NO_SINCE = int(np.iinfo(np.int64).min)
_NO_GROUPS = frozen(np.empty(0, np.int64))
_NO_COLUMN = frozen(np.empty(0, np.int32))
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class View:
    """What a handle sees at a moment: immutable, so a reader that holds one needs no lock."""

    generation: Generation
    tail: Tail
    version: int
    dictionaries: dict[str, np.ndarray]


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
        dictionary = view.dictionaries[schema.group]
        return frozen(np.flatnonzero(np.isin(dictionary, np.array(groups, object))).astype(np.int64))
    return frozen(np.array([int(value) for value in groups], np.int64))


def select(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> Selection:
    """The rows that ``pointers`` see through ``projection``."""
    generation, tail = view.generation, view.tail
    count = len(pointers)
    strings = schema.string_keys
    encoded = [text.encode() for text in pointers.user_id] if strings else []
    key_offsets, key_bytes = packed(encoded)
    keys = frozen(np.ascontiguousarray(pointers.user_id)) if not strings else _NO_GROUPS
    as_of = frozen(np.ascontiguousarray(pointers.as_of))
    version = frozen(np.ascontiguousarray(pointers.version))
    since = _NO_SINCE if projection.since is None else int(projection.since)
    most = _NO_LIMIT if projection.last is None else int(projection.last)
    filtered = projection.groups is not None
    groups = group_codes(view, schema, projection)

    low, high = np.empty(count, np.int64), np.empty(count, np.int64)
    flags = np.empty(count, np.uint8)
    begin, lengths, user = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    known = np.zeros(count, np.uint8)
    tail_rows, tail_begin, tail_end = _NO_ROWS, _NO_ROWS, _NO_ROWS
    if tail.rows:
        tail_rows, tail_begin, tail_end = _select_tail(
            view, schema, frozen(tail.keys_of(keys if not strings else pointers.user_id)), as_of, version, since, most,
            filtered, groups, known)

    shard_of = shards_of(encoded if strings else keys, len(generation.shards))
    parts: list[Part] = []
    plain_parts: list[bool] = []
    for index_of, rows in _by_shard(shard_of):
        shard = generation.shards[index_of]
        if shard.rows:
            if strings:
                gather.find_strings(*shard.user_strings, key_offsets, key_bytes, rows, user)
            else:
                gather.find_integers(shard.users, keys, rows, user)
            gather.locate(shard.offsets, shard.column("event_time"), shard.first, shard.last, rows, user, as_of,
                          version, since, low, high, flags)
        else:
            low[rows] = high[rows] = 0
            flags[rows] = gather.PLAIN
        plain_parts.append(bool(gather.count_plain(rows, low, high, flags, most, begin, lengths)) and not filtered)
        parts.append(Part(index_of, rows, plain_parts[-1]))

    room = np.zeros(count + 1, np.int64)
    refs = _NO_ROWS
    if (tail.rows and (tail_end > tail_begin).any()) or not all(plain_parts):
        slow = np.full(count, filtered) if filtered else (flags & gather.PLAIN) == 0
        in_tail: np.ndarray | int = 0
        if tail.rows:
            in_tail = tail_end - tail_begin
            slow |= in_tail > 0
        np.cumsum(np.where(slow, np.minimum(high - low + in_tail, most), 0), out=room[1:])
        refs = np.empty(int(room[-1]), np.int64)
        zeros = np.zeros(count, np.int64)
        for at, part in enumerate(parts):
            shard = generation.shards[part.shard]
            empty = not shard.rows
            group, valid = _group_of(shard, schema) if filtered and not empty else (_NO_COLUMN, NO_VALIDITY)
            gather.select(part.index, low, high, flags, _NO_GROUPS if empty else shard.column("event_time"),
                          _NO_GROUPS if empty else shard.column("version"), version, group, valid, groups, filtered,
                          tail_rows, tail_begin if tail.rows else zeros, tail_end if tail.rows else zeros,
                          tail.columns["event_time"], most, room, refs, begin, lengths)
            parts[at] = Part(part.shard, part.index, not (room[part.index + 1] > room[part.index]).any())
    seen = ((flags & gather.KNOWN) | known) != 0
    return Selection(parts, begin, lengths, room, refs,
                     np.where(seen, Status.OK.value, Status.UNKNOWN_USER.value).astype(np.uint8))


def _by_shard(shard_of: np.ndarray) -> list[tuple[int, np.ndarray]]:
    if len(shard_of) == 1:
        return [(int(shard_of[0]), np.zeros(1, np.int64))]
    order = np.argsort(shard_of, kind="stable")
    used = shard_of[order]
    edges = [0, *(np.flatnonzero(used[1:] != used[:-1]) + 1).tolist(), len(used)]
    return [(int(used[a]), order[a:b]) for a, b in pairwise(edges) if b > a]


def _select_tail(view: View, schema: EventSchema, keys: np.ndarray, as_of: np.ndarray, version: np.ndarray, since: int,
                 most: int, filtered: bool, groups: np.ndarray, known: np.ndarray,
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, begin [P], end [P]): each pointer's visible, wanted rows of the tail, in order."""
    tail, count = view.tail, len(keys)
    runs = tail.runs
    low, high = np.zeros((count, len(LEVELS)), np.int64), np.zeros((count, len(LEVELS)), np.int64)
    for level, run in enumerate(runs):
        if len(run.rows):
            gather.locate_run(run.users, run.offsets, run.times, run.first, keys, as_of, version, since, level, low,
                              high, known)
    room = offsets_of(np.minimum((high - low).sum(axis=1), most))
    rows, begin = np.empty(int(room[-1]), np.int64), np.empty(count, np.int64)
    group, valid = _NO_COLUMN, NO_VALIDITY
    if filtered:
        assert schema.group is not None
        group, valid = tail.columns[schema.group], tail.valid.get(schema.group, NO_VALIDITY)
    gather.select_tail(tuple(run.rows for run in runs), tuple(run.times for run in runs), low, high,
                       tail.columns["version"], version, group, valid, groups, filtered, most, room, rows, begin)
    return rows, begin, room[1:].copy()


def _group_of(shard: Shard, schema: EventSchema) -> tuple[np.ndarray, np.ndarray]:
    assert schema.group is not None
    return shard.column(schema.group), shard.valid(schema.group)


def read(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> JaggedTable:
    chosen = select(view, schema, pointers, projection)
    offsets = offsets_of(chosen.count)
    columns: dict[str, np.ndarray] = {}
    validity: dict[str, np.ndarray] = {}
    for name in projection.columns:
        template = view.tail.columns[name]
        out = np.empty((int(offsets[-1]), *template.shape[1:]), template.dtype)
        _fill(view, chosen, offsets, name, False, out)
        columns[name] = out
        if _may_be_null(view, chosen, name):
            valid = np.ones(int(offsets[-1]), bool)
            _fill(view, chosen, offsets, name, True, valid)
            if not valid.all():
                validity[name] = valid
                if name in view.dictionaries:
                    out[~valid] = -1
    dictionaries = {name: view.dictionaries[name] for name in columns if name in view.dictionaries}
    return JaggedTable(columns, offsets, validity or None, dictionaries or None, chosen.status)


def _may_be_null(view: View, chosen: Selection, name: str) -> bool:
    if name in view.tail.valid and len(chosen.refs):
        return True
    return any(len(view.generation.shards[part.shard].valid(name)) for part in chosen.parts)


def _fill(view: View, chosen: Selection, offsets: np.ndarray, name: str, valid: bool, out: np.ndarray) -> None:
    """Copy one column, or its validity, of all pointers to ``out``."""
    tail = view.tail.valid.get(name, NO_VALIDITY) if valid else view.tail.columns[name]
    tail, target = bits(tail), bits(out)
    for part in chosen.parts:
        shard = view.generation.shards[part.shard]
        values = tail[:0]
        if shard.rows:
            values = bits(shard.valid(name) if valid else shard.column(name))
        if valid and not len(values):
            values = bits(frozen(np.ones(shard.rows, bool)))
        if part.plain:
            gather.copy_plain(part.index, chosen.begin, chosen.count, offsets, values, target)
        else:
            new = bits(frozen(np.ones(view.tail.rows, bool))) if valid and not len(tail) else tail
            gather.copy_rows(part.index, chosen.begin, chosen.count, offsets, chosen.room, chosen.refs, values, new,
                             target)

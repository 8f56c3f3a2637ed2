"""Compaction: one pure function from (sorted bucket of old rows, new rows) to a sorted bucket, and its driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semel.history import gather
from semel.history.backfill import AddedColumn
from semel.history.following import View
from semel.history.generation import NO_VALIDITY, Codec, GenerationWriter, Shard
from semel.history.marks import Marks
from semel.history.schema import EventSchema
from semel.history.scrubbing import Scrubbing
from semel.history.tail import Dictionaries, Tail, bits, erased, frozen

_NONE = frozen(np.empty(0, np.int64))


@dataclass(frozen=True)
class Bucket:
    """A shard's new order. ``users`` [U] sorted; ``offsets`` [U + 1]; ``refs`` [rows]: ``>= 0`` an old row, ``~row`` a
    row of the tail."""

    users: np.ndarray | list[bytes]
    offsets: np.ndarray
    refs: np.ndarray

    def only(self, keep: np.ndarray) -> Bucket:
        """The rows of ``keep`` [rows], and the users that have some."""
        left = np.concatenate([[0], np.cumsum(keep)])[self.offsets]
        some = np.diff(left) > 0
        users = [user for user, stays in zip(self.users, some.tolist(), strict=True) if stays] if isinstance(
            self.users, list) else self.users[some]
        return Bucket(users, np.concatenate([[0], left[1:][some]]), self.refs[keep])


def merge_bucket(old_users: np.ndarray | list[bytes], old_offsets: np.ndarray, old_times: np.ndarray,
                 new_keys: np.ndarray | list[bytes], new_rows: np.ndarray, tail_times: np.ndarray) -> Bucket:
    """Merge a sorted bucket with new rows. ``new_keys`` [n]: the user of each new row (int64, or UTF-8 bytes as those
    users sort); ``new_rows`` [n]: ascending rows of the tail, ``tail_times`` their arena's event times."""
    users: np.ndarray | list[bytes]
    if isinstance(new_keys, list):
        assert isinstance(old_users, list)
        names = sorted(set(new_keys))
        rank = {name: i for i, name in enumerate(names)}
        codes = np.array([rank[name] for name in new_keys], np.int64)
        users = sorted({*old_users, *names})
        place = {name: i for i, name in enumerate(users)}
        old_place = np.array([place[name] for name in old_users], np.int64)
        new_place = np.array([place[name] for name in names], np.int64)
    else:
        assert isinstance(old_users, np.ndarray)
        present, codes = np.unique(new_keys, return_inverse=True)
        users = np.union1d(old_users, present).astype(np.int64)
        old_place, new_place = np.searchsorted(users, old_users), np.searchsorted(users, present)
    old_row = np.full(len(users), -1, np.int64)
    old_row[old_place] = np.arange(len(old_place))
    new_row = np.full(len(users), -1, np.int64)
    new_row[new_place] = np.arange(len(new_place))
    order = np.lexsort((tail_times[new_rows], codes))  # stable: arrival order within a time
    new_offsets = np.zeros(len(new_place) + 1, np.int64)
    np.cumsum(np.bincount(codes, minlength=len(new_place)), out=new_offsets[1:])
    offsets = np.zeros(len(users) + 1, np.int64)
    refs = np.empty(len(old_times) + len(new_rows), np.int64)
    gather.merge_bucket(old_row, old_offsets, old_times, new_row, new_offsets, new_rows[order], tail_times, refs,
                        offsets)
    return Bucket(users, offsets, refs)


def take(refs: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The rows that ``refs`` name, of a column's old and new values."""
    out = np.empty((len(refs), *old.shape[1:]), old.dtype)
    gather.take_rows(refs, int(np.prod(old.shape[1:])), bits(old), bits(new), bits(out))
    return out


def validity(refs: np.ndarray, old: np.ndarray, rows: int, new: np.ndarray) -> np.ndarray:
    """``take`` for validity, where an empty array means that nothing is null."""
    if not len(old) and not len(new):
        return NO_VALIDITY
    old = old if len(old) else frozen(np.ones(rows, bool))
    new = new if len(new) else frozen(np.ones(int((-refs).max(initial=0)), bool))
    return take(refs, old, new)


def write_generation(folder: Path, view: View, tokens: dict[str, int], codec: Codec, scrubbing: Scrubbing,
                     added: AddedColumn | None, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the view's generation + tail as a new generation into ``folder``, without what ``scrubbing`` leaves out and
    with the column ``added``; its seal. One shard at a time in memory."""
    old, tail = view.generation, view.tail
    schema, shards = old.schema, len(old.shards)
    new_schema = schema if added is None else schema.with_column(added.column.name, added.column.type, 0)
    writer = GenerationWriter(folder, new_schema, shards, codec)
    keys = tail.columns[""]
    slots = [text.encode() for text in tail.arena.slots] if schema.string_keys else []
    of_row = shards_of(slots, shards)[keys] if schema.string_keys and len(keys) else shards_of(keys, shards)
    by_shard = np.argsort(of_row, kind="stable")
    ends = np.searchsorted(of_row[by_shard], np.arange(shards + 1))
    expired = []
    for shard in old.shards:
        rows = by_shard[ends[shard.index] : ends[shard.index + 1]]
        new_keys = [slots[slot] for slot in keys[rows].tolist()] if schema.string_keys else keys[rows]
        expired.append(_write_shard(writer, schema, shard, tail, rows, new_keys, scrubbing, added, view.dictionaries))
        if progress is not None:
            progress(shard.index + 1, shards)
    dictionaries = {name: [value.encode() for value in view.dictionaries.array(name)]
                    for name in view.dictionaries.names}
    if len(scrubbing.forget):  # a string that only erased events had goes with them
        for name, values in dictionaries.items():
            dictionaries[name] = [value if code in writer.codes[name] else erased(code).encode()
                                  for code, value in enumerate(values)]
    if added is not None and added.column.is_dictionary:
        dictionaries[added.column.name] = [word.encode() for word in added.words]
    writer.marks(*scrubbing.marks(old, expired))
    return writer.finish(dictionaries, tokens)


def _write_shard(writer: GenerationWriter, schema: EventSchema, shard: Shard, tail: Tail, rows: np.ndarray,
                 new_keys: np.ndarray | list[bytes], scrubbing: Scrubbing, added: AddedColumn | None,
                 dictionaries: Dictionaries) -> Marks:
    """Marks of what expired."""
    expired = Marks.empty(schema.string_keys)
    if not shard.rows and not len(rows):
        return expired
    empty = not shard.rows
    old_users = ([] if schema.string_keys else _NONE) if empty else (
        shard.user_keys() if schema.string_keys else shard.users)
    offsets = frozen(np.zeros(1, np.int64)) if empty else shard.offsets

    def old_column(name: str) -> np.ndarray:
        return frozen(tail.columns[name][:0]) if empty else shard.values(name)

    def old_valid(name: str) -> np.ndarray:
        return NO_VALIDITY if empty else shard.validity(name)

    bucket = merge_bucket(old_users, offsets, old_column("event_time"), new_keys, rows, tail.columns["event_time"])
    versions = take(bucket.refs, old_column("version"), tail.columns["version"])

    def column(name: str) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        return lambda: (
            take(bucket.refs, old_column(name), tail.columns[name]),
            validity(bucket.refs, old_valid(name), shard.rows, tail.valid.get(name, NO_VALIDITY)),
        )

    if scrubbing:
        times = column("event_time")()[0]
        keep, expired = scrubbing.keep(bucket.users, bucket.offsets, times, versions, lambda name: column(name)(),
                                       dictionaries)
        if not keep.all():
            bucket, versions = bucket.only(keep), versions[keep]
            if not len(bucket.refs):
                return expired
    first, last = np.empty(len(bucket.users), np.int64), np.empty(len(bucket.users), np.int64)
    gather.version_range(bucket.offsets, versions, first, last)
    columns = {name: column(name) for name in ("event_time", *schema.layout)}
    if added is not None:
        columns[added.column.name] = lambda: added.values(bucket.users, bucket.offsets, lambda name: column(name)())
    writer.shard(shard.index, bucket.users, bucket.offsets, first, last,
                 {"version": lambda: (versions, NO_VALIDITY), **columns})
    return expired


def shards_of(keys: np.ndarray | list[bytes], shards: int) -> np.ndarray:
    """[n] int64 ids or UTF-8 strings -> the shard of each: ``hash % shards``."""
    out = np.empty(len(keys), np.int64)
    if isinstance(keys, list):
        gather.shards_of_strings(*packed(keys), shards, out)
    else:
        gather.shards_of_integers(frozen(keys), shards, out)
    return out


def packed(keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Strings -> (offsets [n + 1], bytes), read-only."""
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum([len(key) for key in keys], out=offsets[1:])
    return frozen(offsets), frozen(np.frombuffer(b"".join(keys), np.uint8))

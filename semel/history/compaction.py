"""Compaction of one shard: a pure function from (sorted bucket of old rows, new rows) to a sorted bucket, column by
column. ``engines`` does it for all shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from semel.history import gather, grouping
from semel.history.backfill import AddedColumn
from semel.history.generation import NO_VALIDITY, Codec, Shard, WrittenShard, write_shard
from semel.history.schema import EventSchema
from semel.history.scrubbing import Scrubbing
from semel.history.tail import bits, frozen

_NONE = frozen(np.empty(0, np.int64))


class NewRows(Protocol):
    """The rows that come to a shard, in arrival order."""

    @property
    def rows(self) -> int: ...

    def users(self) -> tuple[np.ndarray | list[bytes], np.ndarray]:
        """(the users that have rows, each once, in any order; [rows] int32 the place there of each row's user)."""

    def column(self, name: str) -> np.ndarray:
        """[rows, *shape] of a schema column, ``event_time`` or ``version``; read anew each time."""

    def validity(self, name: str) -> np.ndarray:
        """[rows] bool, or empty where no value is null."""


@dataclass(frozen=True)
class Bucket:
    """A shard's new order. ``users`` [U] sorted; ``offsets`` [U + 1]; ``refs`` [rows]: ``>= 0`` an old row, ``~row`` a
    new one."""

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
                 new_users: np.ndarray | list[bytes], codes: np.ndarray, new_times: np.ndarray) -> Bucket:
    """Merge a sorted bucket with new rows, in arrival order. ``new_users`` [U]: those who have any (int64, or UTF-8
    bytes as those users sort), ``codes`` [n]: whose each row is; ``new_times`` [n]: their event times."""
    users: np.ndarray | list[bytes]
    if isinstance(new_users, list):
        assert isinstance(old_users, list)
        number = np.array(sorted(range(len(new_users)), key=new_users.__getitem__), np.int64)
        users = sorted({*old_users, *new_users})
        place = {name: i for i, name in enumerate(users)}
        old_place = np.array([place[name] for name in old_users], np.int64)
        new_place = np.array([place[new_users[code]] for code in number.tolist()], np.int64)
    else:
        assert isinstance(old_users, np.ndarray)
        number = np.argsort(new_users)
        users = np.union1d(old_users, new_users).astype(np.int64)
        old_place, new_place = np.searchsorted(users, old_users), np.searchsorted(users, new_users[number])
    old_row = np.full(len(users), -1, np.int64)
    old_row[old_place] = np.arange(len(old_place))
    new_row = np.full(len(users), -1, np.int64)
    new_row[new_place] = np.arange(len(new_place))
    new_offsets = np.zeros(len(number) + 1, np.int64)
    np.cumsum(np.bincount(codes, minlength=len(number))[number], out=new_offsets[1:])
    order = np.empty(len(codes), np.int64)
    grouping.order_rows(codes, new_offsets, number, new_times, order)
    offsets = np.zeros(len(users) + 1, np.int64)
    refs = np.empty(len(old_times) + len(order), np.int64)
    gather.merge_bucket(old_row, old_offsets, old_times, new_row, new_offsets, order, new_times, refs, offsets)
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


@dataclass(frozen=True)
class Change:
    """What a compaction does beside moving rows: what it leaves out, and a column that it adds."""

    scrubbing: Scrubbing
    added: AddedColumn | None = None


def compact_shard(folder: Path, schema: EventSchema, codec: Codec, old: Shard, new: NewRows, change: Change,
                  ) -> WrittenShard:
    """Write the shard with the rows of ``old`` and ``new``, which have the columns of ``schema``, into a generation's
    folder."""
    if not old.rows and not new.rows:
        return WrittenShard(old.index)
    old_users: np.ndarray | list[bytes] = [] if schema.string_keys else _NONE
    old_offsets, old_times = frozen(np.zeros(1, np.int64)), _NONE
    if old.rows:
        old_users = old.user_keys() if schema.string_keys else old.users
        old_offsets, old_times = old.offsets, old.values("event_time")
    bucket = merge_bucket(old_users, old_offsets, old_times, *new.users(), new.column("event_time"))
    del old_times

    def both(name: str) -> tuple[np.ndarray, np.ndarray]:
        values = new.column(name)
        return old.values(name) if old.rows else values[:0], values

    versions = take(bucket.refs, *both("version"))

    def column(name: str) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        return lambda: (take(bucket.refs, *both(name)),
                        validity(bucket.refs, old.validity(name) if old.rows else NO_VALIDITY, old.rows,
                                 new.validity(name)))

    scrubbing, added, expired = change.scrubbing, change.added, None
    if scrubbing:
        keep, expired = scrubbing.keep(bucket.users, bucket.offsets, column("event_time")()[0], versions,
                                       lambda name: column(name)())
        if not keep.all():
            bucket, versions = bucket.only(keep), versions[keep]
    written = WrittenShard(old.index)
    if len(bucket.refs):
        first, last = np.empty(len(bucket.users), np.int64), np.empty(len(bucket.users), np.int64)
        gather.version_range(bucket.offsets, versions, first, last)
        columns = {name: column(name) for name in ("event_time", *schema.layout)}
        if added is not None:
            schema = schema.with_column(added.column.name, added.column.type, 0)
            columns[added.column.name] = lambda: added.values(bucket.users, bucket.offsets, lambda name: column(name)())
        written = write_shard(folder, schema, codec, old.index, bucket.users, bucket.offsets, first, last,
                              {"version": lambda: (versions, NO_VALIDITY), **columns})
    if expired is None:
        return written
    return replace(written, expired=(expired.users.tolist(), expired.first.tolist(), expired.time.tolist()))


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

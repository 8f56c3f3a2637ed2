"""Compaction of one shard: a pure function from (sorted bucket of old rows, new rows) to a sorted bucket, column by
column. ``engines`` does it for all shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from semel.history.arrays import bits, frozen
from semel.history.compaction.backfill import AddedColumn
from semel.history.compaction.scrubbing import Scrubbing
from semel.history.generation.generation import NO_VALIDITY, Codec, Shard, WrittenShard, piece_rows, write_shard
from semel.history.kernels import gather, grouping
from semel.history.schema import EventSchema

if TYPE_CHECKING:
    from semel.history.kernels.packing import Packed

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


def take(refs: np.ndarray, old: np.ndarray, new: np.ndarray, first: int = 0) -> np.ndarray:
    """The rows that ``refs`` name, of a column's old values, from row ``first`` on, and its new ones."""
    out = np.empty((len(refs), *old.shape[1:]), old.dtype)
    grouping.take_rows(refs, first, int(np.prod(old.shape[1:])), bits(old), bits(new), bits(out))
    return out


class _Columns:
    """What becomes of a shard's columns in the order of ``refs``."""

    def __init__(self, old: Shard, new: NewRows, refs: np.ndarray) -> None:
        self._old, self._new, self._refs = old, new, refs

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """The values, a few thousand rows at a time: held are the new ones, and of the old ones those of a piece,
        which lie together since merging leaves their order alone."""
        new = self._new.column(name)
        column = self._old.column(name) if self._old.rows else new
        step = piece_rows(new.shape[1:])
        for at in range(0, len(self._refs), step):
            refs = self._refs[at : at + step]
            old = refs[refs >= 0]
            first, stop = (int(old[0]), int(old[-1]) + 1) if len(old) else (0, 0)
            yield take(refs, _rows(column, first, stop, new), new, first)

    def whole(self, name: str) -> np.ndarray:
        """The values."""
        new = self._new.column(name)
        return take(self._refs, self._old.values(name) if self._old.rows else new[:0], new)

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The values, and their validity."""
        return self.whole(name), self.validity(name)

    def codes(self, name: str) -> list[int]:
        """The different codes of a dictionary column."""
        values, valid = self.values(name)
        return np.unique(values[valid] if len(valid) else values).tolist()

    def validity(self, name: str) -> np.ndarray:
        """[rows] bool, or empty where nothing is null."""
        old, new = self._old.validity(name) if self._old.rows else NO_VALIDITY, self._new.validity(name)
        if not len(old) and not len(new):
            return NO_VALIDITY
        return take(self._refs, old if len(old) else frozen(np.ones(self._old.rows, bool)),
                    new if len(new) else frozen(np.ones(self._new.rows, bool)))


def _rows(column: np.ndarray | Packed, first: int, stop: int, like: np.ndarray) -> np.ndarray:
    """Rows ``first`` to ``stop`` of a column that holds rows like those of ``like``."""
    if isinstance(column, np.ndarray):
        return column[first:stop]
    out = np.empty((stop - first, *like.shape[1:]), like.dtype)
    width = int(np.prod(like.shape[1:]))
    grouping.copy_values(column, first * width, (stop - first) * width, bits(out))
    return frozen(out)


@dataclass(frozen=True)
class Change:
    """What a compaction does beside moving rows: what it leaves out, and a column that it adds."""

    scrubbing: Scrubbing
    added: AddedColumn | None = None

    def row_bytes(self, schema: EventSchema) -> int:
        """Bytes that this takes in memory for a shard's row at a time."""
        return max(self.scrubbing.row_bytes(schema), 0 if self.added is None else self.added.row_bytes(schema))


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
    columns = _Columns(old, new, bucket.refs)
    times, versions = columns.whole("event_time"), columns.whole("version")
    scrubbing, added, expired = change.scrubbing, change.added, None
    if scrubbing:
        keep, expired = scrubbing.keep(bucket.users, bucket.offsets, times, versions, columns.values)
        if not keep.all():
            bucket, times, versions = bucket.only(keep), times[keep], versions[keep]
            columns = _Columns(old, new, bucket.refs)
    written = WrittenShard(old.index)
    if len(bucket.refs):
        new_schema = schema if added is None else schema.with_column(added.column.name, added.column.type, 0)

        def column(name: str) -> tuple[Iterable[np.ndarray], np.ndarray]:
            if added is None or name != added.column.name:
                return columns.pieces(name), columns.validity(name)
            values, valid = added.values(bucket.users, bucket.offsets, columns.values)
            return [values], valid

        written = write_shard(folder, new_schema, codec, old.index, bucket.users, bucket.offsets, times, versions,
                              column)
        if len(scrubbing.forget):
            written = replace(written, codes={name: columns.codes(name) for name in schema.dictionaries})
    if expired is None:
        return written
    return replace(written, expired=(expired.users.tolist(), expired.first.tolist(), expired.time.tolist()))

"""What a compaction leaves out: events that were deleted, or that are older than retention allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from semel.batch import expand_rows
from semel.history.generation.generation import Generation
from semel.history.generation.marks import NEVER, Marks
from semel.history.schema import EventSchema
from semel.history.view.deletions import Deletions, Place, matching

_NONE = np.empty(0, np.int64)
_A_ROW = 50  # bytes: whose it is, what of that user is gone, flags; times, versions and places of the rows that stay


@dataclass(frozen=True)
class Scrubbing:
    """``expire_before``: events of an earlier time (microseconds) go. ``forget``: users of whom no mark is kept."""

    deletions: Deletions
    expire_before: int = 0
    forget: np.ndarray = field(default_factory=lambda: _NONE)

    def __bool__(self) -> bool:
        return bool(self.deletions) or self.expire_before > 0

    def row_bytes(self, schema: EventSchema) -> int:
        """Bytes that ``keep`` takes for a row of a shard, of which it may look at one column at a time."""
        if not self:
            return 0
        by_columns = any(deletion.events is not None for deletion in self.deletions.deletions)
        return _A_ROW + (2 * max(schema.widths, default=0) if by_columns else 0)

    def keep(self, users: np.ndarray | list[bytes], offsets: np.ndarray, times: np.ndarray, versions: np.ndarray,
             column: Callable[[str], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, Marks]:
        """Of a bucket with U ``users``, ``offsets`` [U + 1] of their rows, ``times`` and ``versions`` [rows],
        ``column(name)`` ([rows, ...] values, [rows] validity or empty): ([rows] bool which stay, marks of what
        expires)."""
        ids = np.array([user.decode() for user in users], object) if isinstance(users, list) else users
        of = np.repeat(np.arange(len(ids)), np.diff(offsets))
        keep = versions > self.deletions.gone_before(ids)[of]
        place_of = {user: i for i, user in enumerate(ids.tolist())}
        for deletion in self.deletions.deletions:
            if deletion.events is not None:
                here = np.fromiter((place_of.get(user, -1) for user in deletion.users), np.int64, len(deletion.users))
                some = np.flatnonzero(here >= 0)
                rows, ends = expand_rows(offsets, here[some])

                def of_rows(name: str, rows: np.ndarray = rows) -> tuple[np.ndarray, np.ndarray]:
                    known = {"event_time": times, "version": versions}.get(name)
                    values, valid = column(name) if known is None else (known, _NONE)
                    return values[rows], valid[rows] if len(valid) else valid

                place = Place(0, rows, np.repeat(some, np.diff(ends)), of_rows)
                keep[rows[matching(place, deletion, self.deletions.schema, self.deletions.dictionaries)]] = False
        expired = keep & (times < self.expire_before)
        keep &= ~expired
        return keep, earliest(ids[of[expired]], versions[expired], times[expired])

    def marks(self, old: Generation, expired: Iterable[tuple[list[Any], list[int], list[int]]],
              ) -> tuple[Marks, Marks, int]:
        """(deleted, expired, events before which time) of the new generation. ``expired``: what ``keep`` gave: users,
        lowest versions, lowest times."""
        deleted = Marks.joined([old.deleted, self.deletions.marks])
        still = old.expired.keep(self.deletions.gone_before(old.expired.users) < 0)  # a deleted user's went with it
        kind = object if still.users.dtype == object else np.int64
        now = Marks.joined([Marks.empty(kind is object), *(
            earliest(np.array(users, kind), np.array(first, np.int64), np.array(time, np.int64))
            for users, first, time in expired)])
        lost = Marks.joined([still, now])
        lost = earliest(lost.users, lost.first, lost.time)
        return (deleted.keep(~np.isin(deleted.users, self.forget)), lost.keep(~np.isin(lost.users, self.forget)),
                max(old.expired_before, self.expire_before if len(now) else 0))


def earliest(users: np.ndarray, first: np.ndarray, time: np.ndarray) -> Marks:
    """One mark a user, that never ends: the lowest of each."""
    ids, of = np.unique(users, return_inverse=True)
    least = np.full((2, len(ids)), NEVER)
    np.minimum.at(least[0], of, first)
    np.minimum.at(least[1], of, time)
    return Marks(ids, least[0], least[1], np.full(len(ids), NEVER))

"""Marks: what is remembered of events that are gone, so that a read can say whether it differs from what was seen.

A mark says of a user: events were there from version ``first`` on, the earliest of time ``time``, and were taken away
at version ``until``. A pointer of a version in between saw the user with them; if its ``as_of`` lies after ``time`` it
may have seen one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

NEVER = int(np.iinfo(np.int64).max)
"""As ``until``: no version is above it. Retention is not a version; what has expired is gone for all pointers."""


@dataclass(frozen=True, eq=False)
class Marks:
    """[m] marks, sorted by user, then ``until``. ``users``: int64, or an object array of strings."""

    users: np.ndarray
    first: np.ndarray
    time: np.ndarray
    until: np.ndarray
    _numbers: np.ndarray = field(init=False, repr=False)
    _number_of: dict[str, int] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Users as kernels take them: a number each."""
        if self.users.dtype == object:
            names, numbers = np.unique(self.users, return_inverse=True)
            object.__setattr__(self, "_numbers", numbers.astype(np.int64))
            object.__setattr__(self, "_number_of", {name: i for i, name in enumerate(names.tolist())})
        else:
            object.__setattr__(self, "_numbers", self.users)
            object.__setattr__(self, "_number_of", None)

    @classmethod
    def of(cls, users: np.ndarray, first: np.ndarray, time: np.ndarray, until: np.ndarray) -> Marks:
        """From arrays in any order."""
        order = np.lexsort((until, np.unique(users, return_inverse=True)[1])) if len(users) else np.empty(0, np.int64)
        return cls(users[order], *(np.asarray(array, np.int64)[order] for array in (first, time, until)))

    @classmethod
    def empty(cls, strings: bool) -> Marks:
        return cls(np.empty(0, object if strings else np.int64), *np.empty((3, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Marks]) -> Marks:
        """All of them; ``parts`` is not empty."""
        return cls.of(*(np.concatenate([getattr(part, name) for part in parts])
                        for name in ("users", "first", "time", "until")))

    def __len__(self) -> int:
        return len(self.users)

    def keep(self, mask: np.ndarray) -> Marks:
        return Marks(self.users[mask], self.first[mask], self.time[mask], self.until[mask])

    def numbers_of(self, ids: np.ndarray) -> np.ndarray:
        """[P] user ids as these marks count them; -1 for a string that they do not have."""
        if self._number_of is None:
            return ids
        return np.fromiter((self._number_of.get(name, -1) for name in ids), np.int64, len(ids))

    def has(self, ids: np.ndarray) -> np.ndarray:
        """[P] bool: whether there is a mark of the user."""
        return self.until_of(ids) >= 0

    def until_of(self, ids: np.ndarray) -> np.ndarray:
        """[P] the highest ``until`` of each user, -1 where there is no mark."""
        out = np.empty(len(ids), np.int64)
        from semel.history.kernels import gather

        gather.highest_until(self._numbers, self.until, self.numbers_of(ids), out)
        return out

    def seen(self, ids: np.ndarray, as_of: np.ndarray, version: np.ndarray, gone: np.ndarray,
             ) -> tuple[np.ndarray, np.ndarray]:
        """([P] the user was known through what is marked, [P] the pointer may have seen some of it). ``gone`` [P]: the
        version at which even the marks of a user go (a later deletion tells more), -1 for none."""
        known, lost = np.empty((2, len(ids)), bool)
        from semel.history.kernels import gather

        gather.seen_marks(self._numbers, self.first, self.time, self.until, self.numbers_of(ids), as_of, version, gone,
                          known, lost)
        return known, lost

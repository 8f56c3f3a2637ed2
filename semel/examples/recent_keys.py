"""Keys that were seen lately, in bounded memory: 16 bytes each, however long the texts were that they stand for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

DIGEST_BYTES = 16
BLOCKS = 64
"""Sorted blocks that the keys of a full set lie in, beside the newest ones."""
REMEMBERED = 1_000_000
DAY_US = 24 * 3600 * 1_000_000
_DIGEST = f"S{DIGEST_BYTES}"


def digest_of(text: str) -> bytes:
    """16 bytes for a text; two texts have the same ones with a chance of 2**-128."""
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class RecentKeys:
    """Digests by when they came: of the last ``window_us`` microseconds, and never more than ``capacity``. Older ones
    are forgotten, oldest first, a 64th of the capacity at a time.

    The newest are a dictionary; each time that it has a 64th of the capacity it becomes a sorted array, so a full set
    takes 16 bytes a key and about 200 for each of the newest (19 MB for a million). Times must not go back by more than
    what it may matter: a block is forgotten by its newest one. For one thread at a time.
    """

    def __init__(self, capacity: int = REMEMBERED, window_us: int = DAY_US) -> None:
        if capacity < 1 or window_us < 0:
            raise ValueError(f"capacity must be at least 1 and window_us not negative, got {capacity}, {window_us}")
        self._capacity, self._window = capacity, window_us
        self._block = max(1, capacity // BLOCKS)
        self._new: OrderedDict[bytes, int] = OrderedDict()
        self._old: list[tuple[np.ndarray, int]] = []  # sorted digests and the newest time, oldest first

    def __len__(self) -> int:
        return len(self._new) + sum(len(block) for block, _ in self._old)

    def __contains__(self, digest: bytes) -> bool:
        return self.known([digest])[0]

    def known(self, digests: Sequence[bytes | None]) -> list[bool]:
        """[n] of each whether it is remembered; None is not."""
        found = [digest in self._new for digest in digests]
        asked = [row for row, digest in enumerate(digests) if digest is not None and not found[row]]
        if asked and self._old:
            wanted = np.array([digests[row] for row in asked], _DIGEST)
            there = np.zeros(len(wanted), bool)
            for block, _ in self._old:
                there |= block[np.minimum(np.searchsorted(block, wanted), len(block) - 1)] == wanted
            for row in np.flatnonzero(there).tolist():
                found[asked[row]] = True
        return found

    def add(self, digests: Iterable[bytes | None], at: int) -> None:
        """Remember ``digests``, which came at ``at`` (microseconds), and forget what is too old or too much."""
        if len(self._new) >= self._block:
            self._old.append((np.sort(np.array(list(self._new), _DIGEST)), max(self._new.values())))
            self._new = OrderedDict()
        for digest in digests:
            if digest is not None:
                self._new[digest] = at
                self._new.move_to_end(digest)
        self.forget(at)

    def discard(self, digests: Iterable[bytes | None]) -> None:
        """Forget those of ``digests`` that came with the last ``add``."""
        for digest in digests:
            if digest is not None:
                self._new.pop(digest, None)

    def forget(self, now: int) -> None:
        """Let go of what came before the window that ends at ``now``."""
        oldest = now - self._window
        while self._old and (self._old[0][1] < oldest or len(self) > self._capacity):
            del self._old[0]
        while self._new and not self._old and (len(self._new) > self._capacity
                                               or next(iter(self._new.values())) < oldest):
            self._new.popitem(last=False)

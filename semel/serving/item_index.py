"""All items of a catalogue, ready to be scored in blocks and never behind it: what was appended is found at once.

Blocks are immutable, so a request scans the ones that it began with while others are made. An item whose row changes
leaves its block for a new one; small new blocks are joined when there are some.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from semel.history import HistoryStore

BLOCK = 4096
"""Items scored at a time: what memory for activations depends on."""
SMALL_BLOCKS = 8
"""Blocks of less than half the size that may gather before they are joined."""
EVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Block:
    """``ids`` [n] ascending; ``begins`` [n]: the ``event_time`` of an item's first row, from which on it can be
    retrieved; ``payload``: what is scored, made from the newest rows, of which the last has the time ``changed``.
    ``number``: of the block that it was when it was made; since then items may have left it, and none came."""

    ids: np.ndarray
    begins: np.ndarray
    last_begin: int
    changed: int
    payload: Any
    number: int


@dataclass(frozen=True)
class Items:
    """The items at ``version`` of the catalogue. A place counts through the blocks."""

    version: int
    blocks: tuple[Block, ...]
    offsets: np.ndarray

    @classmethod
    def of(cls, version: int, blocks: tuple[Block, ...]) -> Items:
        return cls(version, blocks, np.cumsum([0, *(len(block.ids) for block in blocks)]))

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def ids_at(self, places: np.ndarray) -> np.ndarray:
        """The ids at ``places`` [n]."""
        of = np.searchsorted(self.offsets, places, "right") - 1
        out = np.empty(len(places), self.blocks[0].ids.dtype if self.blocks else np.int64)
        for number in np.unique(of).tolist():
            mine = of == number
            out[mine] = self.blocks[number].ids[places[mine] - self.offsets[number]]
        return out


class ItemIndex:
    """``payload(ids, as_of, version)`` makes what is scored of some items. Safe to use from several threads."""

    def __init__(self, catalogue: HistoryStore, payload: Callable[[np.ndarray, int, int], Any],
                 block: int | None = None):
        self._catalogue, self._payload, self._block = catalogue, payload, block or BLOCK
        self._items = Items.of(-1, ())
        self._looked = (-1, -1, 0)  # version, generation, and what retention had taken, at the last look
        self._updating = threading.Lock()
        self._numbers = count()

    def items(self) -> Items:
        """As the catalogue is now (its handle's view). The first call reads all of it; later ones what was appended,
        whatever was compacted meanwhile; where retention has taken something, all of it again."""
        if self._looked != self._now():
            with self._updating:
                now = self._now()
                if self._looked != now:
                    self._items, self._looked = self._updated(self._items, *now), now
        return self._items

    def _now(self) -> tuple[int, int, int]:
        return self._catalogue.version, self._catalogue.generation, self._catalogue.expired_before

    def _updated(self, items: Items, version: int, generation: int, expired_before: int) -> Items:
        compacted = generation != self._looked[1]
        # Retention takes what is too old, and at each compaction what has come since and is.
        if items.version < 0 or expired_before != self._looked[2] or (compacted and expired_before > 0):
            return Items.of(version, self._blocks(self._catalogue.keys(), version))
        changed = self._catalogue.changed_keys(items.version)
        if compacted:  # what was erased left no trace
            there = self._catalogue.keys()
            erased = [np.setdiff1d(block.ids, there, assume_unique=True) for block in items.blocks]
            changed = np.unique(np.concatenate([changed, *erased]))
        kept = [block for block in (self._without(block, changed) for block in items.blocks) if len(block.ids)]
        return Items.of(version, self._joined((*kept, *self._blocks(changed, version)), version))

    def _joined(self, blocks: tuple[Block, ...], version: int) -> tuple[Block, ...]:
        small = [block for block in blocks if len(block.ids) < self._block // 2]
        if len(small) <= SMALL_BLOCKS:
            return blocks
        large = tuple(block for block in blocks if len(block.ids) >= self._block // 2)
        return large + self._blocks(np.sort(np.concatenate([block.ids for block in small])), version)

    def _blocks(self, ids: np.ndarray, version: int) -> tuple[Block, ...]:
        """Of those of ``ids`` that have a row."""
        from semel.batch import Pointers
        from semel.history import Projection

        made = []
        for start in range(0, len(ids), self._block):
            part = ids[start : start + self._block]
            rows = self._catalogue.read(Pointers(part, np.array(EVER), np.array(version)), Projection(("event_time",)))
            there = rows.lengths > 0
            if not there.any():
                continue
            part, times = part[there], rows.columns["event_time"]
            begins = times[rows.offsets[:-1][there]]
            made.append(Block(part, begins, int(begins.max()), int(times.max()), self._payload(part, EVER, version),
                              next(self._numbers)))
        return tuple(made)

    def _without(self, block: Block, ids: np.ndarray) -> Block:
        place = np.minimum(np.searchsorted(block.ids, ids), len(block.ids) - 1)
        gone = place[block.ids[place] == ids] if len(ids) else place
        if not len(gone):
            return block
        keep = np.ones(len(block.ids), bool)
        keep[gone] = False
        begins = block.begins[keep]
        return Block(block.ids[keep], begins, int(begins.max(initial=0)), block.changed, _rows(block.payload, keep),
                     block.number)


def _rows(payload: Any, keep: np.ndarray) -> Any:
    """Those rows of an array, a tensor, a Jagged of tensors, or a dict of them."""
    import torch

    from semel.batch import Jagged
    from semel.serving.broadcast import take_rows

    if isinstance(payload, dict):
        return {name: _rows(value, keep) for name, value in payload.items()}
    if isinstance(payload, np.ndarray):
        return payload[keep]
    if isinstance(payload, (Jagged, torch.Tensor)):
        return take_rows(payload, torch.from_numpy(np.flatnonzero(keep)))
    raise TypeError(f"a block of items cannot hold {type(payload).__name__}")

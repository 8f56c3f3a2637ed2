"""A memory layer's answers as rows, so that serving reads one vector a candidate and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semel.memory.layer import MemoryLayer
from semel.memory.table import Changes, ItemMemory, Rows


class FoldedMemory:
    """What ``layer`` in eval mode returns for the items of ``memory``, computed once when a row changes, not once a
    candidate: what it joins a row with depends on the item alone. A candidate without a row is computed when asked for.

    ``always_on_of(items [N]) -> `` what ``layer.always_on`` takes, N rows. ``update(changes)`` follows a memory (those
    of ``semel.memory.ItemMemory.changes``, or of a log); after a change of the layer's weights make a new one.
    """

    def __init__(self, layer: MemoryLayer, memory: ItemMemory, always_on_of: Callable[[Tensor], Any]) -> None:
        self.layer, self.always_on_of = layer, always_on_of
        self.table = ItemMemory(memory.capacity, memory.dim).eval()
        self.update(Changes(memory.rows(), torch.empty(0, dtype=torch.int64)))

    @torch.no_grad()
    def update(self, changes: Changes) -> None:
        rows = changes.rows
        fused = self._fused(rows.keys, rows.vectors, True)
        self.table.merge(Changes(Rows(rows.keys, fused, rows.step, rows.written, rows.tower), changes.gone))

    @torch.no_grad()
    def read(self, item: Tensor) -> tuple[Tensor, Tensor]:
        """``item`` [C] int64 -> vectors [C, dim], of which all count, and whether each came from a row [C] bool."""
        vectors, hit, _ = self.table.read(item)
        if not bool(hit.all()):
            missing = item[~hit]
            vectors[~hit] = self._fused(missing, torch.zeros(len(missing), self.table.dim), False)
        return vectors, hit

    def _fused(self, item: Tensor, cached: Tensor, hit: bool) -> Tensor:
        training = self.layer.training
        self.layer.eval()
        try:
            base = self.layer.always_on(self.always_on_of(item))
            return self.layer.fused(cached, base, torch.full((len(item),), hit)).float()
        finally:
            self.layer.train(training)

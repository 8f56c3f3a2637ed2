"""A memory layer's answers as rows, so that serving reads one vector a candidate and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semel.memory.layer import MemoryLayer
from semel.memory.table import Changes, ItemMemory, Rows

NO_ROW = -1
"""The tower version of what was computed without a row."""


class FoldedMemory:
    """What ``layer`` in eval mode returns for an item, computed once when its row in ``memory`` changes and not once a
    candidate: what it joins a row with depends on the item alone. An item without a row is computed when it is first
    asked for, and kept as well (``spare`` of them, those computed last).

    ``always_on_of(items [N]) -> `` what ``layer.always_on`` takes, N rows. ``update(changes)`` follows a memory
    (``ItemMemory.changes``); where an item's always-on part has changed, ``forget`` it if it has no row, else pass its
    row to ``update`` again. After a change of the layer's weights make a new one.
    """

    def __init__(self, layer: MemoryLayer, memory: ItemMemory, always_on_of: Callable[[Tensor], Any],
                 spare: int = 100_000) -> None:
        if spare < 1:
            raise ValueError(f"spare must be at least 1, got {spare}")
        self.layer, self.always_on_of = layer, always_on_of
        self.rows = ItemMemory(memory.capacity + spare, memory.dim).eval()
        self._spare, self._computed = spare, 0
        self.update(Changes(memory.rows(), torch.empty(0, dtype=torch.int64)))

    @torch.no_grad()
    def update(self, changes: Changes) -> None:
        rows = changes.rows
        fused = self._fused(rows.keys, rows.vectors, True)
        self.rows.merge(Changes(Rows(rows.keys, fused, rows.step, rows.written, rows.tower), changes.gone))

    def forget(self, items: Tensor) -> None:
        """Compute them anew when they are next asked for, as items without a row."""
        self.rows.delete(items)

    @torch.no_grad()
    def read(self, item: Tensor, out: Tensor | None = None) -> Tensor:
        """``item`` [C] int64 -> vectors [C, dim], of which every one counts; in ``out`` where it is given."""
        vectors, hit, _ = self.rows.read(item, out)
        if not bool(hit.all()):
            missing, where = torch.unique(item[~hit], return_inverse=True)
            fused = self._fused(missing, torch.zeros(len(missing), self.rows.dim), False)
            vectors[~hit] = fused[where]
            self._keep(missing, fused)
        return vectors

    def _keep(self, items: Tensor, fused: Tensor) -> None:
        """Never so many that a row of the memory has to leave for them."""
        if len(items) > self._spare:
            return
        if self._computed + len(items) > self._spare:
            known = self.rows.rows()
            self.rows.delete(known.keys[known.tower == NO_ROW])
            self._computed = 0
        self._computed += len(items)
        self.rows.write(items, fused, tower=NO_ROW)

    def _fused(self, item: Tensor, cached: Tensor, hit: bool) -> Tensor:
        training = self.layer.training
        self.layer.eval()
        try:
            base = self.layer.always_on(self.always_on_of(item))
            return self.layer.fused(cached, base, torch.full((len(item),), hit)).float()
        finally:
            self.layer.train(training)

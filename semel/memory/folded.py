"""A memory layer's answers as rows, so that serving reads one vector a candidate and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from semel.memory.layer import MemoryLayer
from semel.memory.rowwise import Rowwise
from semel.memory.table import Changes, ItemMemory, Rows

NO_ROW = -1
"""The tower version of what was computed without a row."""
_BLOCK = 32
"""Rows computed at a time, always as many: torch computes the last elements of an array by other code than the ones
before them, so that ``exp`` of one number may have other bits there."""
_AT_ONCE = 8192
"""Items whose always-on part is asked for at once."""
LEAST_SPARE = 1 << 14
"""Items without a row whose vectors are kept, at least."""


@torch.no_grad()
def fold(layer: MemoryLayer, always_on: Callable[[], Any], cached: Tensor, hit: Tensor) -> Tensor:
    """What ``layer`` in eval mode makes of rows ``cached`` [N, dim], ``hit`` [N] and what ``layer.always_on`` takes,
    which ``always_on()`` computes, N rows: [N, dim] float32. A row's bits depend on nothing but the row, as long as
    modules are made of linear maps (``semel.memory.rowwise``) and of what works element by element."""
    training = layer.training
    layer.eval()
    try:
        with Rowwise():
            inputs, parts = always_on(), []
            for start in range(0, len(hit), _BLOCK):
                rows = torch.arange(start, start + _BLOCK).clamp(max=len(hit) - 1)
                base = layer.always_on(pytree.tree_map_only(Tensor, itemgetter(rows), inputs))
                parts.append(layer.fused(cached[rows], base, hit[rows]).float())
            return torch.cat(parts)[: len(hit)] if parts else cached.float()
    finally:
        layer.train(training)


class FoldedMemory:
    """What ``layer`` in eval mode returns for an item, computed once when its row in ``memory`` changes and not once a
    candidate: what it joins a row with depends on the item alone. An item without a row is computed when it is first
    asked for, and kept as well (``spare`` of them, those computed last; by default a quarter of ``memory``'s capacity:
    a much larger index has more cache misses a lookup).

    ``always_on_of(items [N]) -> `` what ``layer.always_on`` takes, N rows. ``update(changes)`` follows a memory
    (``ItemMemory.changes``), ``renew(items, memory)`` items whose always-on part has changed. After a change of the
    layer's weights make a new one. What is computed for an item has the same bits whatever was computed with it
    (``fold``).
    """

    def __init__(self, layer: MemoryLayer, memory: ItemMemory, always_on_of: Callable[[Tensor], Any],
                 spare: int | None = None) -> None:
        spare = max(LEAST_SPARE, memory.capacity // 4) if spare is None else spare
        if spare < 1:
            raise ValueError(f"spare must be at least 1, got {spare}")
        self.layer, self.always_on_of = layer, always_on_of
        self.rows = ItemMemory(memory.capacity + spare, memory.dim).eval()
        self._spare, self._computed = spare, 0
        self.update(Changes(memory.rows(), torch.empty(0, dtype=torch.int64)))

    def update(self, changes: Changes) -> None:
        self.rows.merge(self.folded(changes))

    @torch.no_grad()
    def folded(self, changes: Changes) -> Changes:
        """``changes`` with what the layer makes of their rows in place of these."""
        rows = changes.rows
        fused = self._fused(rows.keys, rows.vectors, torch.ones(len(rows), dtype=torch.bool))
        return Changes(Rows(rows.keys, fused, rows.step, rows.written, rows.tower), changes.gone)

    def renew(self, items: Tensor, memory: ItemMemory) -> None:
        """Compute ``items`` [N] anew, of which ``memory`` has the rows."""
        vectors, hit, age = memory.read(items, now=0)
        nothing = torch.zeros(int(hit.sum()), dtype=torch.int64)
        self.forget(items[~hit])
        self.update(Changes(Rows(items[hit], vectors[hit], nothing, -age[hit], nothing), nothing[:0]))

    def forget(self, items: Tensor) -> None:
        """Compute them anew when they are next asked for, as items without a row."""
        self.rows.delete(items)

    def read(self, item: Tensor, out: Tensor | None = None) -> Tensor:
        """``item`` [C] int64 -> vectors [C, dim], of which every one counts; in ``out`` where it is given."""
        vectors, hit, _ = self.rows.read(item, out)
        if not hit.numpy().all():
            self._compute(item[~hit], vectors, ~hit)
        return vectors

    @torch.no_grad()
    def _compute(self, item: Tensor, vectors: Tensor, miss: Tensor) -> None:
        """Items without a row, into ``vectors[miss]``; and keep them."""
        missing, where = torch.unique(item, return_inverse=True)
        fused = self._fused(missing, torch.zeros(len(missing), self.rows.dim),
                            torch.zeros(len(missing), dtype=torch.bool))
        vectors[miss] = fused[where]
        self._keep(missing, fused)

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

    def _fused(self, item: Tensor, cached: Tensor, hit: Tensor) -> Tensor:
        parts = zip(item.split(_AT_ONCE), cached.split(_AT_ONCE), hit.split(_AT_ONCE), strict=True)
        return torch.cat([fold(self.layer, partial(self.always_on_of, some), rows, found)
                          for some, rows, found in parts])

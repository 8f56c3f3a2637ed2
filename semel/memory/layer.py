"""``MemoryLayer``: an item's embedding, from its tower while training, from the memory at serving, never missing.

What the memory has of an item (``cached``) is joined with what is always known of it (``always_on``: author, category,
content, a hashed id). Training hides cached rows at random, so that the second alone learns to carry a miss. The idea:
"Memory Layer: Train the In-Model Cache for Recommendation Models" (arXiv 2607.25110); how it fuses and what its scorer
reads in training is not published, so both are choices here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from semel.memory.table import MISS, ItemMemory

Fuse = Literal["gate", "sum", "mlp"]
Reads = Literal["live", "cached"]


class MemoryLayer(nn.Module):
    """``layer(item, features, always_on) -> [C, dim]``.

    ``item`` [C] int64; ``features``: what ``item_tower`` takes, a tensor or a dict, list or tuple of tensors [C, ...],
    the same for two rows of one item; ``always_on``: what the module of that name takes. Both modules return
    [rows, dim]. At serving (eval mode) ``features`` may be None: the tower does not run.

    In train mode the tower runs once for each item of the batch, its output is written to ``memory`` (detached, bit for
    bit, at ``step``, which the layer counts), after anything is read. ``reads``: whether the scorer sees that output
    ("live") or the row that was written before ("cached": the gradient goes to the tower as if the row were its
    output; an item without a row is a miss). ``miss_rate``: the share of rows hidden from the scorer.

    ``keep``: who takes the items [N] and the tower's output [N, dim] of a forward pass in place of the memory, where a
    trainer computes a batch in parts, in several threads: it gives them to ``write`` once a step. ``recall``: who gives
    the rows [N, dim] and hits [N] of items [N] in place of the memory, with ``reads="cached"``, where rows lie
    elsewhere.

    ``fuse``: "gate" ``g c + (1 - g) a`` with ``g`` = sigmoid of a linear map of (c, a, hit), 0 without a hit; "sum"
    ``c + a``; "mlp" of (c, a, hit) with one hidden layer as wide as all three. ``c`` is 0 without a hit.

    Raises ValueError for settings or shapes that do not fit.
    """

    def __init__(self, item_tower: nn.Module, memory: ItemMemory, always_on: nn.Module, fuse: Fuse = "gate",
                 miss_rate: float = 0.1, reads: Reads = "live") -> None:
        super().__init__()
        if fuse not in ("gate", "sum", "mlp"):
            raise ValueError(f'fuse must be "gate", "sum" or "mlp", got {fuse!r}')
        if reads not in ("live", "cached"):
            raise ValueError(f'reads must be "live" or "cached", got {reads!r}')
        if not 0 <= miss_rate <= 1:
            raise ValueError(f"miss_rate must be from 0 to 1, got {miss_rate}")
        self.item_tower, self.memory, self.always_on = item_tower, memory, always_on
        self.fuse, self.miss_rate, self.reads = fuse, miss_rate, reads
        dim = memory.dim
        self.join: nn.Module
        if fuse == "gate":
            self.join = nn.Linear(2 * dim + 1, dim)
        elif fuse == "mlp":
            self.join = nn.Sequential(nn.Linear(2 * dim + 1, 2 * dim + 1), nn.ReLU(), nn.Linear(2 * dim + 1, dim))
        self.keep: Callable[[Tensor, Tensor], None] | None = None
        self.recall: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.step: Tensor
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, item: Tensor, features: Any, always_on: Any, *, now: int | None = None,
                generator: torch.Generator | None = None) -> Tensor:
        """``now``: microseconds, the clock's by default; ``generator``: of what hides rows, torch's own by default."""
        base = self._output(self.always_on(always_on), len(item), "always_on")
        if not self.training:
            cached, hit, _ = self.memory.read(item, now=now)
            return self.fused(cached, base, hit)
        items, where = torch.unique(item, return_inverse=True)
        live = self._live(item, items, where, features)
        if self.reads == "live":
            cached, hit = live[where], torch.ones_like(item, dtype=torch.bool)
        else:
            rows, found = self.memory.read(items, now=now)[:2] if self.recall is None else self.recall(items)
            cached, hit = (rows + live - live.detach())[where], found[where]
        kept = torch.rand(len(item), device=item.device, generator=generator) >= self.miss_rate
        hit = hit & kept
        fused = self.fused(cached * kept[:, None], base, hit)
        if self.keep is None:
            self.write(items, live.detach(), now=now)
        else:
            self.keep(items, live.detach())
        return fused

    def live(self, item: Tensor, features: Any, always_on: Any) -> Tensor:
        """[C, dim], as training sees it: the tower's own output, a row at a time, nothing hidden, nothing written."""
        base = self._output(self.always_on(always_on), len(item), "always_on")
        output = self._output(self.item_tower(features), len(item), "item_tower")
        return self.fused(output, base, torch.ones_like(item, dtype=torch.bool))

    def write(self, items: Tensor, vectors: Tensor, *, now: int | None = None) -> None:
        """The tower's output [N, dim] for ``items`` [N], computed in one step of training, which it counts."""
        self.step += 1
        self.memory.write(items, vectors.float(), int(self.step), tower=int(self.step), now=now)

    @torch.no_grad()
    def refresh(self, item: Tensor, features: Any, *, now: int | None = None) -> None:
        """Writes the tower's output for items that nobody was shown: no score, no loss (the candidate-pool stream)."""
        if len(item):
            items, live = self.computed(item, features)
            self.memory.write(items, live, int(self.step), tower=int(self.step), now=now)

    @torch.no_grad()
    def computed(self, item: Tensor, features: Any) -> tuple[Tensor, Tensor]:
        """The distinct ones of ``item`` [N] and the tower's output [items, dim] for them, float32."""
        items, where = torch.unique(item, return_inverse=True)
        return items, self._live(item, items, where, features).float()

    def _live(self, item: Tensor, items: Tensor, where: Tensor, features: Any) -> Tensor:
        """The tower's output, once an item [items, dim]."""
        first = torch.full((len(items),), len(item), device=item.device).scatter_reduce(
            0, where, torch.arange(len(item), device=item.device), "amin")
        leaves = [leaf for leaf in pytree.tree_leaves(features) if isinstance(leaf, Tensor)]
        if not leaves or any(len(leaf) != len(item) for leaf in leaves):
            raise ValueError(f"{len(item)} items need features of as many rows, got "
                             f"{[list(leaf.shape) for leaf in leaves] or features!r}; in train mode the tower runs")
        of_first = pytree.tree_map_only(Tensor, lambda leaf: leaf[first], features)
        return self._output(self.item_tower(of_first), len(items), "item_tower")

    def _output(self, out: Tensor, rows: int, name: str) -> Tensor:
        if tuple(out.shape) != (rows, self.memory.dim):
            raise ValueError(f"{name} returned {list(out.shape)} for {rows} rows, the memory needs "
                             f"[{rows}, {self.memory.dim}]")
        return out

    def fused(self, cached: Tensor, base: Tensor, hit: Tensor) -> Tensor:
        """``cached`` [rows, dim], ``base`` [rows, dim] (what ``always_on`` gave), ``hit`` [rows] -> [rows, dim]: for
        serving that reads rows itself, of a memory that follows another one's deltas."""
        cached = cached.to(base.dtype)
        known = hit[:, None].to(base.dtype)
        cached = cached * known
        if self.fuse == "sum":
            return cached + base
        both = torch.cat([cached, base, known], 1)
        if self.fuse == "mlp":
            return self.join(both)
        gate = torch.sigmoid(self.join(both)) * known
        return gate * cached + (1 - gate) * base


class HasAges(Protocol):
    """Says of keys [N] how old their rows are (``ItemMemory.ages``)."""

    def ages(self, keys: Tensor, *, now: int | None = None) -> Tensor: ...


def pool(memory: HasAges, catalogue: Tensor, budget: int, *, now: int | None = None) -> Tensor:
    """The ``budget`` items of ``catalogue`` [N] int64 that need ``refresh`` most: those without a row in their order,
    then those whose row is oldest."""
    if budget < 0:
        raise ValueError(f"budget must be 0 or more, got {budget}")
    age = memory.ages(catalogue, now=now)
    urgency = torch.where(age == MISS, torch.iinfo(torch.int64).max, age)
    return catalogue[torch.argsort(urgency, descending=True, stable=True)[:budget]]

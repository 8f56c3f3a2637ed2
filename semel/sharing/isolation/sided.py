"""Which side every unit of a tensor is on, and the graph that is built from such tensors.

A ``Sided`` tensor has a side for each of its elements (the same for all rows of the batch):

* REQUEST: depends on request inputs only;
* CANDIDATE: may depend on the candidate;
* BOTH: there are two versions of it. ``view`` holds the one made of request units alone, for request units to use;
  ``node`` the one made of everything. A sum over fields, a width-1 gate and a pooled vector are such.

Sides are int8 tensors of the shape that the value has at a batch of ``ROWS``, so that an operator that only moves
elements gives the sides of its result by being run on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten
from semel.sharing.errors import Unproved

REQUEST, BOTH, CANDIDATE = 0, 1, 2
ROWS = 2


@dataclass(frozen=True, eq=False)
class Sided:
    """``sides``: see above. ``constant``: depends on no input. ``known``: its value where it is made of numbers and
    buffers of integers only. ``parameter``: the name of the parameter that it is, transposed if ``transposed``."""

    node: fx.Node
    sides: Tensor
    view: fx.Node | None = None
    constant: bool = False
    known: Tensor | None = None
    parameter: str | None = None
    transposed: bool = False

    @property
    def seen(self) -> fx.Node:
        """What request units may use: valid where the side is not CANDIDATE."""
        return self.node if self.view is None else self.view

    @property
    def free(self) -> Tensor:
        """Elements that request units may use."""
        return self.sides < CANDIDATE

    @property
    def split(self) -> bool:
        """Some elements are for request units, others are not."""
        return bool(self.free.any()) and not bool((self.sides == REQUEST).all())


def positions_of(mask: Tensor) -> list[int]:
    return [int(i) for i in torch.nonzero(mask).flatten()]


def along(mask: Tensor, dim: int) -> Tensor | None:
    """``mask`` as a vector over ``dim``, or None where it differs along other axes."""
    moved = mask.movedim(dim, -1).reshape(-1, mask.shape[dim])
    return moved[0] if bool((moved == moved[:1]).all()) else None


class Writer:
    """Builds the graph of the isolated model. ``origin``: the node of the original graph that is being rewritten."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.origin: fx.Node | None = None
        self.constants: dict[str, Tensor] = {}

    def constant(self, value: Tensor) -> fx.Node:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.get_attr(name)
        node.meta["sides"] = torch.zeros(value.shape, dtype=torch.int8)
        return node

    def call(self, target: Any, *args: Any, sides: Tensor | None = None, flops: float = 0.0, share: float | None = None,
             **kwargs: Any) -> fx.Node:
        """``sides`` of the result (of a view: REQUEST where it is valid); ``flops``: a row's, two a multiply-add, of
        which ``share`` is spent on request units (by default: as many as there are such units)."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(origin=self.origin, flops=flops)
        if sides is not None:
            node.meta["sides"] = sides
            if share is None:
                share = float((sides == REQUEST).double().mean()) if sides.numel() else 0.0
        node.meta["share"] = 0.0 if share is None else share
        return node

    # ------------------------------------------------------------------------------------------ parts of a tensor
    def take(self, node: fx.Node, dim: int, positions: Sequence[int]) -> fx.Node:
        """Some positions of an axis."""
        sides: Tensor = node.meta["sides"]
        if list(positions) == list(range(sides.shape[dim])):
            return node
        index = torch.tensor(positions, dtype=torch.int64)
        taken = sides.index_select(dim, index)
        if list(positions) == list(range(positions[0], positions[0] + len(positions))):
            return self.call(aten.slice.Tensor, node, dim, positions[0], positions[0] + len(positions), sides=taken)
        return self.call(aten.index_select.default, node, dim, self.constant(index), sides=taken)

    def place(self, dim: int, pieces: Sequence[tuple[Sequence[int], fx.Node]]) -> fx.Node:
        """One tensor whose ``positions`` along ``dim`` are ``pieces``."""
        pieces = [(positions, node) for positions, node in pieces if len(positions)]
        if len(pieces) == 1:
            return pieces[0][1]
        nodes = [node for _, node in pieces]
        sides = torch.cat([node.meta["sides"] for node in nodes], dim)
        joined = self.call(aten.cat.default, nodes, dim, sides=sides)
        where = [p for positions, _ in pieces for p in positions]
        order = sorted(range(len(where)), key=where.__getitem__)
        return self.take(joined, dim, order)

    def widened(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        """An axis of size one repeated, so that its copies can be of different sides."""
        sides: Tensor = node.meta["sides"]
        if sides.shape[dim] == size:
            return node
        shape = [-1] * sides.dim()
        shape[dim] = size
        return self.call(aten.expand.default, node, shape, sides=sides.expand(*shape))

    def chosen(self, mask: Tensor, request: fx.Node, everything: fx.Node, fixed: Sequence[bool]) -> fx.Node:
        """``request`` where ``mask`` (of the shape of the result), ``everything`` elsewhere. ``fixed``: of each axis,
        whether the batch is not in it."""
        for dim in range(mask.dim()):
            vector = along(mask, dim) if fixed[dim] else None
            if vector is None:
                continue
            mine, others = positions_of(vector), positions_of(~vector)
            pieces = []
            for positions, node in ((mine, request), (others, everything)):
                wide = node.meta["sides"].shape[dim] == mask.shape[dim]
                pieces.append((positions, self.take(node, dim, positions) if wide
                               else self.widened(node, dim, len(positions))))
            return self.place(dim, pieces)
        if not all(fixed[1:]) or (mask.shape[0] > 0 and not bool((mask == mask[:1]).all())):
            raise Unproved("a view folds the batch into an axis whose units are on both sides")
        sides = torch.where(mask, 0, 2).to(torch.int8)
        return self.call(aten.where.self, self.constant(mask[:1].clone()), request, everything, sides=sides)


def by_rows(x: Sided) -> Sided:
    """``x`` for an operator along its last axis that treats all rows alike. A view says nothing of rows that are the
    candidate's; where there are such, it is not used."""
    if x.view is None or not bool((x.sides == CANDIDATE).all(-1).any()):
        return x
    return labelled(x.node, None, x.sides)


def labelled(made: fx.Node, view: fx.Node | None, sides: Tensor) -> Sided:
    """A result with its sides. Without a view nothing has two versions: what would have is the candidate's."""
    sides = sides.contiguous()
    if view is None:
        sides = torch.where(sides == BOTH, CANDIDATE, sides).to(torch.int8)
    made.meta.update(sides=sides, share=float((sides == REQUEST).double().mean()) if sides.numel() else 0.0)
    if view is None or not bool((sides == BOTH).any()):
        return Sided(made, sides)
    view.meta.update(sides=torch.where(sides < CANDIDATE, REQUEST, CANDIDATE).to(torch.int8), share=1.0)
    return Sided(made, sides, view)

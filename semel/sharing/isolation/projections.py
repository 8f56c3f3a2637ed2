"""Products with a parameter, whose results are free to be on either side: block-lower-triangular weights.

``y = W x`` with inputs of both sides becomes

    y_r = W_rr x_r + b_r            y_c = W_cr x_r + W_cc x_c + b_c

``W_rc`` is dropped (``compact``: two weights, W_rr and [W_cr W_cc]) or multiplied by zero (``masked``). A row of inputs
(a token, a field) that is all of one side keeps its side, and no weight is dropped for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten
from semel.sharing.errors import Unproved
from semel.sharing.isolation.choice import request_units
from semel.sharing.isolation.sided import BOTH, CANDIDATE, REQUEST, Sided, by_rows, labelled, positions_of
from semel.sharing.isolation.walk import Piece, Walk, rule


class Weight:
    """A constant matrix ``[units, inputs]`` however it is stored, by blocks."""

    def __init__(self, walk: Walk, argument: Any, value: Sided, flip: bool = False) -> None:
        """``argument``: the node that is ``value``. ``flip``: it is ``[inputs, units]``."""
        self.walk, self.value, self.dtype, self.flip = walk, value, argument.meta["val"].dtype, flip
        self.name = value.parameter
        shape = list(value.sides.shape)
        self.units, self.inputs = shape[::-1] if flip else shape
        parameter = next((n for n, name in walk.model.parameters.items() if name == value.parameter), None)
        users = [n for n in walk.model.graph.nodes if n.op == "placeholder" and n.name == parameter]
        self.own = bool(users) and len(users[0].users) == 1 and len(argument.users) == 1  # used here only

    def block(self, suffix: str, units: Sequence[int] | None, inputs: Sequence[int] | None) -> fx.Node:
        """``[units, inputs]`` of some of each: a parameter of its own if compact, else a part of the whole one."""
        if not (self.walk.compact and self.own and self.name):
            return self.part(units, inputs)
        turned = self.flip != self.value.transposed
        rows, columns = (None if p is None else tuple(p) for p in ((inputs, units) if turned else (units, inputs)))
        sides = torch.zeros(len(rows) if rows is not None else self._stored(0),
                            len(columns) if columns is not None else self._stored(1), dtype=torch.int8)
        node = self.walk.parameter(Piece(f"{self.name}_{suffix}", self.name, rows, columns), sides)
        return self._turned(node) if turned else node

    def part(self, units: Sequence[int] | None, inputs: Sequence[int] | None) -> fx.Node:
        """The same, always of the whole one."""
        node = self.value.node
        for dim, positions in ((0, units), (1, inputs)):
            if positions is not None:
                node = self.walk.writer.take(node, 1 - dim if self.flip else dim, positions)
        return self._turned(node) if self.flip else node

    def _turned(self, node: fx.Node) -> fx.Node:
        return self.walk.writer.call(aten.transpose.int, node, 0, 1, sides=node.meta["sides"].t())

    def _stored(self, dim: int) -> int:
        shape = self.value.sides.shape
        return shape[1 - dim] if self.value.transposed else shape[dim]

    def whole(self) -> fx.Node:
        return self.part(None, None)

    def masked(self, units: Sequence[int], inputs: Sequence[int]) -> fx.Node:
        """The whole weight, zero where ``units`` would use others than ``inputs``."""
        mask = torch.ones(self.units, self.inputs)
        rows = torch.zeros(self.units, dtype=torch.bool)
        rows[list(units)] = True
        columns = torch.ones(self.inputs, dtype=torch.bool)
        columns[list(inputs)] = False
        mask[rows[:, None] & columns] = 0
        mask = mask.to(self.dtype)
        node = self.walk.writer.call(aten.mul.Tensor, self.value.node, self.walk.writer.constant(
            mask.t().contiguous() if self.flip else mask), sides=torch.zeros_like(self.value.sides), share=1.0)
        return self._turned(node) if self.flip else node


def project(walk: Walk, node: fx.Node, x: Sided, weight: Weight, bias: Sided | None, dim: int) -> Sided:
    """``W x + b`` over the last axis of ``x``. ``dim``: where the axis of units is in the node's own result."""
    x = by_rows(x)
    writer, last = walk.writer, x.sides.dim() - 1
    rows = x.free.reshape(-1, weight.inputs)
    mixed = rows.any(1) & ~rows.all(1)
    outer = x.sides.shape[:-1]
    count = x.sides.numel() // weight.inputs / 2

    def linear(n: fx.Node, w: fx.Node, units: Sequence[int] | None, sides: Tensor, flops: float | None = None,
               share: float | None = None) -> fx.Node:
        b = None if bias is None else bias.node if units is None else writer.take(bias.node, 0, units)
        made = writer.call(aten.linear.default, n, w, b,
                           flops=2.0 * count * w.meta["sides"].numel() if flops is None else flops)
        # products with request units are made once a request, whoever uses them
        once = float((n.meta["sides"] == REQUEST).double().mean()) if share is None else share
        made.meta.update(sides=sides, products=once)
        return made

    def by_row(both: bool) -> Tensor:
        """Sides of results that have the side of their row of inputs."""
        pure = (x.sides == REQUEST).all(-1)
        open_ = x.free.all(-1) if not both else x.free.any(-1)
        row = torch.where(pure, REQUEST, torch.where(open_, BOTH, CANDIDATE)).to(torch.int8)
        return row.unsqueeze(-1).expand(*outer, weight.units)

    two = bool((x.sides == BOTH).any()) and x.view is not None
    if not bool(mixed.any()) and not (two and not bool((x.sides == CANDIDATE).any())):
        sides = by_row(False)
        view = linear(x.seen, weight.whole(), None, sides) if bool((sides == BOTH).any()) else None
        return labelled(linear(x.node, weight.whole(), None, sides), view, sides)
    inputs = positions_of(rows[mixed].all(0)) if bool(mixed.any()) else list(range(weight.inputs))
    if not inputs:
        sides = torch.where((x.sides == REQUEST).all(-1, keepdim=True), REQUEST, CANDIDATE).expand(*outer, weight.units)
        return labelled(linear(x.node, weight.whole(), None, sides), None, sides.to(torch.int8))
    units = request_units(walk, node, weight.name or node.name, weight.units, len(inputs) / weight.inputs, dim)
    if units is None:  # the last mixing operator, or one unit: nothing to cut
        sides = by_row(True)
        view = linear(writer.take(x.seen, last, inputs), weight.part(None, inputs), None, sides)
        return labelled(linear(x.node, weight.whole(), None, sides), view, sides)
    others = [u for u in range(weight.units) if u not in set(units)]
    sides = torch.full((*outer, weight.units), CANDIDATE, dtype=torch.int8)
    open_rows = x.free.any(-1)
    sides[..., units] = torch.where(open_rows, REQUEST, CANDIDATE).to(torch.int8).unsqueeze(-1)
    pure = (x.sides == REQUEST).all(-1)
    sides = torch.where(pure.unsqueeze(-1), REQUEST, sides).to(torch.int8)
    a, b = 2.0 * count * len(units) * len(inputs), 2.0 * count * len(others) * weight.inputs
    if not walk.compact and not two:
        once = a + b * float((x.sides == REQUEST).double().mean())
        return labelled(linear(x.node, weight.masked(units, inputs), None, sides, a + b, once / (a + b)), None, sides)
    pieces = []
    for suffix, part, source, columns, flops in (("request", units, x.seen, inputs, a),
                                                 ("candidate", others, x.node, None, b)):
        if len(part):
            x_part = source if columns is None else writer.take(source, last, columns)
            made = linear(x_part, weight.block(suffix, part, columns), part,
                          sides.index_select(last, torch.tensor(list(part))), flops=flops)
            pieces.append((part, made))
    return labelled(writer.place(last, pieces), None, sides)


# ---------------------------------------------------------------------------------------------- operators
@rule(aten.linear.default)
def linear(walk: Walk, node: fx.Node, x: Sided, w: Sided, bias: Sided | None = None) -> Sided:
    if not w.constant:
        raise Unproved("its weight depends on an input")
    return project(walk, node, x, Weight(walk, node.args[1], w), bias, x.sides.dim() - 1)


@rule(aten.addmm.default)
def addmm(walk: Walk, node: fx.Node, bias: Sided, x: Sided, w: Sided, **kwargs: Any) -> Sided:
    if not w.constant or kwargs or not bias.constant or bias.sides.dim() != 1:
        raise Unproved("it is no linear layer")
    return project(walk, node, x, Weight(walk, node.args[2], w, flip=True), bias, 1)


def projected_matmul(walk: Walk, node: fx.Node, a: Sided, b: Sided) -> Sided | None:
    """``x P`` and ``P x`` with a constant matrix P; None if it is something else."""
    if b.constant and b.sides.dim() == 2 and a.sides.dim() >= 2:
        return project(walk, node, a, Weight(walk, node.args[1], b, flip=True), None, a.sides.dim() - 1)
    if a.constant and a.sides.dim() == 2 and b.sides.dim() >= 3:
        rank = b.sides.dim()
        made = project(walk, node, _turned(walk, b, rank - 2, rank - 1), Weight(walk, node.args[0], a), None, rank - 2)
        return _turned(walk, made, rank - 2, rank - 1)
    return None


def projected_einsum(walk: Walk, node: fx.Node, terms: Sequence[list[str]], out: list[str],
                     values: Sequence[Sided]) -> Sided | None:
    """One value and a constant matrix with one summed axis; None if it is something else."""
    if len(values) != 2 or sum(v.constant for v in values) != 1:
        return None
    at = 0 if values[0].constant else 1
    matrix, x, w, t = values[at], values[1 - at], terms[at], terms[1 - at]
    summed = [letter for letter in w if letter in t and letter not in out]
    made = [letter for letter in w if letter not in t and letter in out]
    if len(w) != 2 or len(summed) != 1 or len(made) != 1 or set(t) - set(summed) | set(made) != set(out):
        return None
    letters = [*(letter for letter in t if letter != summed[0])]
    given: Any = node.args[1] if node.target is aten.einsum.default else node.args
    argument = given[at]
    x = _permuted(walk, x, [t.index(letter) for letter in letters] + [t.index(summed[0])])
    result = project(walk, node, x, Weight(walk, argument, matrix, flip=w[0] == summed[0]), None, out.index(made[0]))
    letters.append(made[0])
    return _permuted(walk, result, [letters.index(letter) for letter in out])


@rule(aten.tensordot.default)
def tensordot(walk: Walk, node: fx.Node, a: Sided, b: Sided, dims_a: Sequence[int], dims_b: Sequence[int]) -> Sided:
    from semel.sharing.isolation.contractions import product

    left = [chr(97 + i) for i in range(a.sides.dim())]
    right = [chr(109 + i) for i in range(b.sides.dim())]
    for p, q in zip(dims_a, dims_b, strict=True):
        right[q] = left[p]
    out = [c for c in left + right if not (c in left and c in right)]
    return product(walk, node, [left, right], out, [a, b])


@rule(aten.conv1d.default)
def conv1d(walk: Walk, node: fx.Node, x: Sided, w: Sided, bias: Sided | None = None, stride: Any = (1,),
           padding: Any = (0,), dilation: Any = (1,), groups: int = 1) -> Sided:
    """Width one: a projection of channels."""
    plain = [list(v) for v in (stride, padding, dilation)] == [[1], [0], [1]] and groups == 1 and w.sides.shape[2] == 1
    if not plain or not w.constant:
        raise Unproved("only convolutions of width 1 have a rule")
    matrix = walk.writer.call(aten.select.int, w.node, 2, 0, sides=w.sides[:, :, 0])
    weight = Weight(walk, node.args[1], Sided(matrix, w.sides[:, :, 0], constant=True))
    weight.name = w.parameter
    made = project(walk, node, _turned(walk, x, 1, 2), weight, bias, 1)
    return _turned(walk, made, 1, 2)


def _turned(walk: Walk, x: Sided, first: int, second: int) -> Sided:
    return _both(x, lambda n: walk.writer.call(aten.transpose.int, n, first, second),
                 lambda s: s.transpose(first, second))


def _permuted(walk: Walk, x: Sided, order: Sequence[int]) -> Sided:
    if list(order) == list(range(len(order))):
        return x
    return _both(x, lambda n: walk.writer.call(aten.permute.default, n, list(order)), lambda s: s.permute(*order))


def _both(x: Sided, change: Callable[[fx.Node], fx.Node], sides: Callable[[Tensor], Tensor]) -> Sided:
    view = change(x.view) if x.view is not None else None
    return labelled(change(x.node), view, sides(x.sides))

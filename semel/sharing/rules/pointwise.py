"""Operators that look at one element of each argument: sums and products stay open, others are computed by block."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from semel.sharing.algebra import add, broadcast, joint, multiply
from semel.sharing.axes import BATCH, Group
from semel.sharing.emission import Stage, aten
from semel.sharing.errors import Unproved
from semel.sharing.expression import Expression, Factor, aligned, full
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.masks import Bounds, bounds, inside
from semel.sharing.values import Key, Value, inner, mapped

Shortcut = Callable[[tuple[Group, ...], Key, list[Expression]], Expression | None]


def elementwise(w: Rewriter, node: fx.Node, args: Any, kwargs: Any, shortcut: Shortcut | None = None) -> Value:
    """``node``'s operator on every combination of its arguments' blocks, but where ``shortcut`` knows better."""
    import torch.utils._pytree as pytree

    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, (Value, fx.Node)))
    if any(isinstance(item, fx.Node) for item in leaves):
        raise Unproved("it depends on a size")
    values = [item for item in leaves if isinstance(item, Value)]
    if not values:
        raise Unproved("no tensor")
    aligned_values, groups = broadcast(w.emit, values)
    every = [axis for group in groups for axis in group]
    dtype = w.dtype(node)
    parts = {}
    for key, found in joint(aligned_values):
        known = shortcut(groups, key, found) if shortcut is not None else None
        if known is not None:
            parts[key] = Expression(inner(every, key), known.terms, dtype, known._leaf)
            continue
        factors = [part.leaf(w.emit) for part in found]
        stage = max(factor.stage for factor in factors)
        have = {axis for factor in factors for axis in factor.axes}
        axes = tuple(axis for axis in inner(every, key) if axis in have)
        nodes = iter([aligned(w.emit, factor, axes, stage) for factor in factors])
        call = pytree.tree_unflatten([next(nodes) if isinstance(item, Value) else item for item in leaves], spec)
        flops = 1
        for axis in axes:
            flops *= axis.size
        made = w.emit.call(node.target, *call[0], flops=flops, **call[1])
        parts[key] = Expression.of(Factor(made, axes), dtype, inner(every, key))
    return Value(groups, parts, dtype)


def _open(w: Rewriter, node: fx.Node, *values: Any) -> bool:
    """Whether a sum or product may stay open: floating point throughout."""
    return w.dtype(node).is_floating_point and all(
        not isinstance(v, Value) or v.dtype == w.dtype(node) or (v.dtype.is_floating_point and not v.groups)
        for v in values)


@rule(aten.add.Tensor, aten.add.Scalar)
def add_(w: Rewriter, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> Value:
    if not (isinstance(a, Value) and isinstance(b, Value) and _open(w, node, a, b)):
        return elementwise(w, node, (a, b), {} if alpha == 1 else {"alpha": alpha})
    if alpha != 1:
        b = mapped(b, lambda part: part.scaled(w.emit, float(alpha)))
    return masked_sum(w, a, b, w.dtype(node))


def masked_sum(w: Rewriter, a: Value, b: Value, dtype: Any) -> Value:
    """A sum, and minus infinity where either is: a block of scores hidden by a mask needs no scores."""
    never = [any(part.uniform(w.emit) == float("-inf") for part in v.parts.values()) for v in (a, b)]
    mixed = a.mixed or b.mixed
    if not mixed or not (any(never) or any(_hides(w, part) for v in (a, b) for part in v.parts.values())):
        return add(w.emit, a, b, dtype)
    (a, b), groups = broadcast(w.emit, [a, b])
    every = [axis for group in groups for axis in group]
    parts = {}
    for key, pair in joint([a, b]):
        hidden = any(part.uniform(w.emit) == float("-inf") for part in pair)
        axes = inner(every, key)
        parts[key] = Expression.filled(w.emit, float("-inf"), axes, dtype) if hidden \
            else pair[0].plus(w.emit, pair[1], axes, dtype)
    return Value(groups, parts, dtype)


def _hides(w: Rewriter, part: Expression) -> bool:
    """Whether it is a constant with an infinite element."""
    nodes = [f.node for term in part.terms for f in term.factors]
    return len(nodes) == 1 and nodes[0].op == "get_attr" and bool(w.emit.constants[str(nodes[0].target)].isinf().any())


def masked(w: Rewriter, node: fx.Node, args: Any, mask: Value, limits: Bounds | None, yes: int, no: int) -> Value:
    """``node`` with arguments of which ``yes`` is taken where ``mask`` holds, else ``no``: block by block one of them
    alone where the mask is the same throughout, whatever the inputs."""
    at = [i for i, a in enumerate(args) if isinstance(a, Value)]
    dtype = w.dtype(node)

    def shortcut(groups: tuple[Group, ...], key: Key, found: list[Expression]) -> Expression | None:
        chosen = dict(key)
        nowhere, everywhere = inside(limits, groups, chosen)
        if not nowhere and not everywhere:
            return None
        taken = yes if everywhere else no
        if taken in at:
            part = found[at.index(taken)]
            return part if args[taken].dtype == dtype else None
        return Expression.filled(w.emit, args[taken], (), dtype)

    return elementwise(w, node, args, {}, shortcut)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(w: Rewriter, node: fx.Node, a: Value, mask: Value, value: Any) -> Value:
    return masked(w, node, (a, mask, value), mask, bounds(w, node.args[1]), 2, 0)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(w: Rewriter, node: fx.Node, mask: Value, yes: Any, no: Any) -> Value:
    return masked(w, node, (mask, yes, no), mask, bounds(w, node.args[0]), 1, 2)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(w: Rewriter, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> Value:
    if not (isinstance(a, Value) and isinstance(b, Value) and _open(w, node, a, b)):
        return elementwise(w, node, (a, b), {} if alpha == 1 else {"alpha": alpha})
    return add(w.emit, a, mapped(b, lambda part: part.scaled(w.emit, -float(alpha))), w.dtype(node))


@rule(aten.rsub.Scalar)
def rsub(w: Rewriter, node: fx.Node, a: Value, b: float, alpha: float = 1) -> Value:
    return elementwise(w, node, (a, b, alpha), {})


@rule(aten.neg.default)
def neg(w: Rewriter, node: fx.Node, a: Value) -> Value:
    return mapped(a, lambda part: part.scaled(w.emit, -1.0)) if _open(w, node, a) else elementwise(w, node, (a,), {})


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(w: Rewriter, node: fx.Node, a: Any, b: Any) -> Value:
    if not _open(w, node, a, b):
        return elementwise(w, node, (a, b), {})
    if isinstance(a, Value) and isinstance(b, Value):
        return multiply(w.emit, cast(w, a, w.dtype(node)), cast(w, b, w.dtype(node)), w.dtype(node))
    value, number = (a, b) if isinstance(a, Value) else (b, a)
    if not isinstance(number, (int, float)):
        raise Unproved("it depends on a size")
    return mapped(value, lambda part: part.scaled(w.emit, float(number)))


@rule(aten.div.Tensor, aten.div.Scalar)
def div(w: Rewriter, node: fx.Node, a: Any, b: Any) -> Value:
    if not isinstance(a, Value) or not _open(w, node, a, b) or isinstance(b, fx.Node):
        return elementwise(w, node, (a, b), {})
    if not isinstance(b, Value):
        return mapped(a, lambda part: part.scaled(w.emit, 1.0 / b)) if b else elementwise(w, node, (a, b), {})
    if not any(part.lazy for part in a.parts.values()) and not (a.stage < Stage.CANDIDATE == b.stage):
        return elementwise(w, node, (a, b), {})
    inverse = mapped(cast(w, b, w.dtype(node)), lambda part: _reciprocal(w, part))
    return multiply(w.emit, a, inverse, w.dtype(node))


def _reciprocal(w: Rewriter, part: Expression) -> Expression:
    factor = part.leaf(w.emit)
    return Expression.of(Factor(w.emit.call(aten.reciprocal.default, factor.node, flops=1), factor.axes), part.dtype,
                         part.axes)


@rule(aten.__or__.Tensor, aten.__and__.Tensor, aten.__xor__.Tensor)
def logical(w: Rewriter, node: fx.Node, a: Value, b: Value) -> Value:
    return elementwise(w, node, (a, b), {})


@rule(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.lift_fresh_copy.default)
def same(w: Rewriter, node: fx.Node, a: Value, *, memory_format: Any = None) -> Value:
    return a


@rule(aten._to_copy.default)
def to_copy(w: Rewriter, node: fx.Node, a: Value, *, dtype: Any = None, layout: Any = None, device: Any = None,
            pin_memory: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Value:
    if dtype is None or dtype == a.dtype:
        return a
    return elementwise(w, node, (a,), {"dtype": dtype})


def cast(w: Rewriter, a: Value, dtype: Any) -> Value:
    """``a`` in another dtype."""
    if a.dtype == dtype:
        return a
    return mapped(a, lambda part: _cast(w, part, dtype), dtype)


def _cast(w: Rewriter, part: Expression, dtype: Any) -> Expression:
    factor = part.leaf(w.emit)
    made = w.emit.call(aten._to_copy.default, factor.node, dtype=dtype)
    return Expression.of(Factor(made, factor.axes), dtype, part.axes)


@rule(aten.native_dropout.default)
def dropout(w: Rewriter, node: fx.Node, a: Value, p: float, train: bool | None) -> list[Value | None]:
    """A request's values are dropped once for all of its candidates."""
    if train is False or p == 0.0:
        return [a, None]
    parts = {}
    for key, part in a.parts.items():
        axes = inner(a.axes, key)
        factor = full(w.emit, part.leaf(w.emit), axes)  # every element is drawn for itself
        if a.batched and factor.stage == Stage.CONSTANT:
            raise Unproved("constants are dropped for every candidate")
        made = w.emit.call(aten.native_dropout.default, factor.node, p, train)
        parts[key] = Expression.of(Factor(w.emit.call(operator.getitem, made, 0), factor.axes), a.dtype, part.axes)
    return [Value(a.groups, parts, a.dtype), None]


@rule(aten.detach.default)
def detach(w: Rewriter, node: fx.Node, a: Value) -> Value:
    """No gradient goes through."""
    def change(part: Expression) -> Expression:
        factor = part.leaf(w.emit)
        return Expression.of(Factor(w.emit.call(aten.detach.default, factor.node), factor.axes), part.dtype, part.axes)

    return mapped(a, change)


@rule(aten.zeros_like.default, aten.ones_like.default)
def like(w: Rewriter, node: fx.Node, a: Value, **kwargs: Any) -> Value:
    return filled(w, node, 0 if "zeros" in str(node.target) else 1)


@rule(aten.full_like.default)
def full_like(w: Rewriter, node: fx.Node, a: Value, value: float, **kwargs: Any) -> Value:
    return filled(w, node, value)


@rule(aten.new_zeros.default, aten.zeros.default)
def zeros(w: Rewriter, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return filled(w, node, 0)


@rule(aten.new_ones.default, aten.ones.default)
def ones(w: Rewriter, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    return filled(w, node, 1)


@rule(aten.full.default)
def full_(w: Rewriter, node: fx.Node, size: Any, value: float, **kwargs: Any) -> Value:
    return filled(w, node, value)


@rule(aten.new_full.default)
def new_full(w: Rewriter, node: fx.Node, a: Value, size: Any, value: float, **kwargs: Any) -> Value:
    return filled(w, node, value)


def filled(w: Rewriter, node: fx.Node, value: float) -> Value:
    """One number with the node's shape: constant, whatever the batch."""
    import torch

    from semel.sharing.axes import Axis

    if isinstance(value, fx.Node):
        raise Unproved("it depends on a size")
    number = w.emit.constant(torch.tensor(value, dtype=w.dtype(node)))
    groups = []
    for size, batched in w.shape(node):
        groups.append(((BATCH,) if batched else ()) + ((Axis(size),) if size != 1 else ()))
    axes = tuple(axis for group in groups for axis in group if axis is not BATCH)
    return Value(tuple(groups), {frozenset(): Expression.of(Factor(number, ()), w.dtype(node), axes)}, w.dtype(node))

"""Normalisations: on one side as they are; over a mixed axis from sums, the request's part once."""

from __future__ import annotations

from typing import Any

from torch import fx

from semel.sharing.axes import BATCH, Axis, size_of
from semel.sharing.emission import Stage, aten
from semel.sharing.errors import Unproved
from semel.sharing.expression import Expression, Factor, full, ordered_factor
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.values import Value, add, inner, mapped, multiply, summed


@rule(aten.layer_norm.default)
def layer_norm(w: Rewriter, node: fx.Node, x: Value, shape: Any, weight: Value | None = None, bias: Value | None = None,
               eps: float = 1e-5, cudnn_enable: bool = True) -> Value:
    dims = list(range(len(x.groups) - len(shape), len(x.groups)))
    axes = [axis for d in dims for axis in x.groups[d]]
    if BATCH in axes:
        raise Unproved("it normalises over the batch")
    if any(axis.blocks for axis in axes) or _open(x):
        return _from_sums(w, node, x, dims, weight, bias, eps)
    flat = [size_of(axes)]
    nodes = [None if v is None else w.emit.reshape(v.only.leaf(w.emit).node, flat, 0) for v in (weight, bias)]
    parts = {}
    for key, part in x.parts.items():
        factor = full(w.emit, part.leaf(w.emit), axes)
        outer = tuple(axis for axis in factor.axes if axis not in axes)
        factor = ordered_factor(w.emit, factor, (*outer, *axes))
        value = factor.node if len(axes) == 1 else w.emit.reshape(
            factor.node, [*(a.size for a in outer), *flat], factor.lead)
        made = w.emit.call(aten.layer_norm.default, value, flat, *nodes, eps, flops=8 * size_of(factor.axes))
        if len(axes) != 1:
            made = w.emit.reshape(made, [a.size for a in (*outer, *axes)], factor.lead)
        parts[key] = Expression.of(Factor(made, (*outer, *axes)), w.dtype(node), part.axes)
    return Value(x.groups, parts, w.dtype(node))


def _open(x: Value) -> bool:
    return False


def _from_sums(w: Rewriter, node: fx.Node, x: Value, dims: list[int], weight: Value | None, bias: Value | None,
               eps: float) -> Value:
    """LayerNorm as ``(x - mean) * rstd * weight + bias`` with mean and variance from sums over the blocks.

    Everything is centred by the request's mean first: sums of squares of values far from zero would cancel.
    """
    dtype = w.dtype(node)
    axes = [axis for d in dims for axis in x.groups[d]]
    count = size_of(axes)
    x = _centred(w, x, axes, dims)
    squares = Value(x.groups, {key: part.times(w.emit, part, part.axes, dtype) if part.stage < Stage.CANDIDATE
                               else _square(w, part) for key, part in x.parts.items()}, dtype)
    mean = mapped(summed(w.emit, x, dims, True), lambda part: part.scaled(w.emit, 1.0 / count))
    mean = mapped(mean, lambda part: Expression.of(part.leaf(w.emit), dtype, part.axes))
    second = mapped(summed(w.emit, squares, dims, True), lambda part: part.scaled(w.emit, 1.0 / count))
    variance = add(w.emit, second, mapped(multiply(w.emit, mean, mean, dtype), lambda p: p.scaled(w.emit, -1.0)), dtype)
    rstd = mapped(variance, lambda part: _rsqrt(w, part, eps))
    out = multiply(w.emit, add(w.emit, x, mapped(mean, lambda p: p.scaled(w.emit, -1.0)), dtype), rstd, dtype)
    if weight is not None:
        out = multiply(w.emit, out, weight, dtype)
    return out if bias is None else add(w.emit, out, bias, dtype)


def _centred(w: Rewriter, x: Value, axes: list[Axis], dims: list[int]) -> Value:
    """``x`` less the mean of its request-side elements, where there are some and nothing else is mixed."""
    early = {key: part for key, part in x.parts.items() if part.stage == Stage.REQUEST}
    if not early or any(axis.blocks for axis in x.axes if axis not in axes):
        return x
    total, count = None, 0
    for key, part in early.items():
        here = inner(axes, key)
        s = part.summed(w.emit, here)
        total = s if total is None else total.plus(w.emit, s, s.axes, x.dtype)
        count += size_of(here)
    assert total is not None
    rest = tuple(axis for axis in x.axes if axis not in axes and axis is not BATCH)
    groups = tuple(() if d in dims else group for d, group in enumerate(x.groups))
    mean = Value(groups, {frozenset(): total.scaled(w.emit, -1.0 / count)}, x.dtype)
    assert set(rest) == set(mean.axes) - {BATCH}
    return add(w.emit, x, mean, x.dtype)


def _square(w: Rewriter, part: Expression) -> Expression:
    factor = part.leaf(w.emit)
    node = w.emit.call(aten.mul.Tensor, factor.node, factor.node, flops=size_of(factor.axes))
    return Expression.of(Factor(node, factor.axes), part.dtype, part.axes)


def _rsqrt(w: Rewriter, part: Expression, eps: float) -> Expression:
    factor = part.leaf(w.emit)
    node = w.emit.call(aten.rsqrt.default, w.emit.call(aten.add.Scalar, w.emit.call(
        aten.clamp_min.default, factor.node, 0.0), eps))
    return Expression.of(Factor(node, factor.axes), part.dtype, part.axes)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm(w: Rewriter, node: fx.Node, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
               momentum: float, eps: float) -> list[Value | None]:
    """In eval mode a factor and a shift per channel."""
    dtype = node.meta["val"][0].dtype
    if len(x.groups) < 2 or mean.dtype != dtype:
        raise Unproved("batch norm of another shape or dtype")
    m, v = mean.only.leaf(w.emit), var.only.leaf(w.emit)
    a = w.emit.call(aten.rsqrt.default, w.emit.call(aten.add.Scalar, v.node, eps))
    if weight is not None:
        a = w.emit.call(aten.mul.Tensor, a, weight.only.leaf(w.emit).node)
    b = w.emit.call(aten.mul.Tensor, w.emit.call(aten.neg.default, m.node), a)
    if bias is not None:
        b = w.emit.call(aten.add.Tensor, b, bias.only.leaf(w.emit).node)
    groups = [mean.groups[0], *([()] * (len(x.groups) - 2))]

    def channel(n: fx.Node) -> Value:
        return Value(tuple(groups), {frozenset(): Expression.of(Factor(n, m.axes), dtype)}, dtype)

    return [add(w.emit, multiply(w.emit, x, channel(a), dtype), channel(b), dtype), None, None]

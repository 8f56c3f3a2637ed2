"""Normalisations: on one side as they are; over a mixed axis from sums, the request's part once."""

from __future__ import annotations

from typing import Any

from torch import fx

from semel.sharing.algebra import add, multiply
from semel.sharing.axes import BATCH, size_of
from semel.sharing.emission import aten
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.expression import Expression, Factor, full, ordered_factor
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.values import Key, Value, inner


@rule(aten.layer_norm.default)
def layer_norm(w: Rewriter, node: fx.Node, x: Value, shape: Any, weight: Value | None = None, bias: Value | None = None,
               eps: float = 1e-5, cudnn_enable: bool = True) -> Value:
    dims = list(range(len(x.groups) - len(shape), len(x.groups)))
    axes = [axis for d in dims for axis in x.groups[d]]
    if BATCH in axes:
        raise MixesRows("it normalises over the batch")
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
    """LayerNorm over blocks, each centred by its own mean ``m_b``: with ``n_b`` elements of ``n`` in it,

        mean = sum_b n_b m_b / n        variance = sum_b (sum (x_b - m_b)^2 + n_b (m_b - mean)^2) / n
        out_b = (x_b - m_b) rstd + (m_b - mean) rstd

    No term of the variance is negative, so that nothing cancels however far from zero the values lie (the pairwise
    update of Chan, Golub and LeVeque, 1979). The request's ``x_b - m_b`` stays a factor, which a linear layer takes up.
    """
    dtype, emit = w.dtype(node), w.emit
    axes = [axis for d in dims for axis in x.groups[d]]
    count = size_of(axes)
    together: dict[Key, list[Key]] = {}
    for key in x.parts:
        together.setdefault(frozenset(pair for pair in key if pair[0] not in axes), []).append(key)
    parts: dict[Key, Expression] = {}
    for keys in together.values():
        sizes = {key: size_of(inner(axes, key)) for key in keys}
        means = {key: _now(w, x.parts[key].summed(emit, inner(axes, key)).scaled(emit, 1.0 / sizes[key]))
                 for key in keys}
        centred = {key: _now(w, _plus(w, x.parts[key], means[key].scaled(emit, -1.0))) for key in keys}
        mean = _total(w, [means[key].scaled(emit, sizes[key] / count) for key in keys])
        apart = {key: _now(w, _plus(w, means[key], mean.scaled(emit, -1.0))) for key in keys}
        variance = _total(w, [
            *(_square(w, centred[key]).summed(emit, inner(axes, key)).scaled(emit, 1.0 / count) for key in keys),
            *(_square(w, apart[key]).scaled(emit, sizes[key] / count) for key in keys)])
        rstd = _rsqrt(w, variance, eps)
        for key in keys:
            outer = apart[key].axes
            moved = apart[key].times(emit, rstd, outer, dtype)
            parts[key] = _plus(w, centred[key].times(emit, rstd, centred[key].axes, dtype), moved)
    out = Value(x.groups, parts, dtype)
    if weight is not None:
        out = multiply(w.emit, out, weight, dtype)
    return out if bias is None else add(w.emit, out, bias, dtype)


def _now(w: Rewriter, part: Expression) -> Expression:
    return Expression.of(part.leaf(w.emit), part.dtype, part.axes)


def _plus(w: Rewriter, a: Expression, b: Expression) -> Expression:
    return a.plus(w.emit, b, a.axes, a.dtype)


def _total(w: Rewriter, parts: list[Expression]) -> Expression:
    total = parts[0]
    for part in parts[1:]:
        total = _plus(w, total, part)
    return _now(w, total)


def _square(w: Rewriter, part: Expression) -> Expression:
    factor = part.leaf(w.emit)
    node = w.emit.call(aten.mul.Tensor, factor.node, factor.node, flops=size_of(factor.axes))
    return Expression.of(Factor(node, factor.axes), part.dtype, part.axes)


def _rsqrt(w: Rewriter, part: Expression, eps: float) -> Expression:
    factor = part.leaf(w.emit)
    node = w.emit.call(aten.rsqrt.default, w.emit.call(aten.add.Scalar, factor.node, eps))
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


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_in_training(w: Rewriter, node: fx.Node, *args: Any) -> Any:
    """As the model has it, running statistics included (``Rewriter.whole``): a request counts once a candidate."""
    raise Unproved("in train mode its statistics are those of the candidates")

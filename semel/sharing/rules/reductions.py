"""Operators along some axes: sums stay open; others need the axis whole, and run block by block of the rest."""

from __future__ import annotations

from typing import Any

from torch import fx

from semel.sharing.axes import BATCH, Axis, size_of
from semel.sharing.emission import Stage, aten
from semel.sharing.errors import SharingError, Unproved
from semel.sharing.export import place
from semel.sharing.expression import Expression, Factor, full, ordered_factor
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.values import Value, fused, inner, mapped, summed


def _dims(a: Value, dim: Any) -> list[int]:
    if not a.groups:
        raise Unproved("a scalar")
    if dim is None or dim == []:
        raise Unproved("it reduces over the batch")
    return sorted(d % len(a.groups) for d in ([dim] if isinstance(dim, int) else dim))


@rule(aten.sum.dim_IntList)
def sum_(w: Rewriter, node: fx.Node, a: Value, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Value:
    dims = _dims(a, dim)
    if not a.dtype.is_floating_point or (dtype is not None and dtype != a.dtype):
        return along(w, node, a, dims, keepdim, lambda n, d: w.emit.call(node.target, n, [d], False, dtype=dtype))
    return summed(w.emit, a, dims, keepdim)


@rule(aten.mean.dim)
def mean(w: Rewriter, node: fx.Node, a: Value, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Value:
    dims = _dims(a, dim)
    if dtype is not None and dtype != a.dtype:
        raise Unproved("it changes the dtype")
    if any(BATCH in a.groups[d] for d in dims):
        raise Unproved("it averages over the batch")
    count = size_of(axis for d in dims for axis in a.groups[d])
    return mapped(summed(w.emit, a, dims, keepdim), lambda part: part.scaled(w.emit, 1.0 / count))


def along(w: Rewriter, node: fx.Node, a: Value, dims: list[int], keep: bool, call: Any, *, shape: bool = False) -> Value:
    """``call(tensor, dim)`` with the logical axes ``dims`` as the last axis. ``shape``: the result keeps that axis."""
    gone = [axis for d in dims for axis in a.groups[d]]
    if BATCH in gone:
        raise SharingError(f"{node.name} works along the rows of a batch, so that a score depends on the other candidates "
                           f"({place(node)}); do it outside the model")
    a = fused(w.emit, a, gone)
    gone = [axis for d in dims for axis in a.groups[d]]
    rest = [axis for axis in a.axes if axis not in gone]
    flat = Axis(size_of(gone))
    parts = {}
    for key, part in a.parts.items():
        factor = full(w.emit, part.leaf(w.emit), gone)
        outer = tuple(axis for axis in factor.axes if axis not in gone)
        factor = ordered_factor(w.emit, factor, (*outer, *gone))
        x = factor.node if len(gone) == 1 else w.emit.reshape(factor.node, [*(x.size for x in outer), flat.size], factor.lead)
        made = call(x, factor.lead + len(outer))
        made.meta["flops"] = size_of(factor.axes) * (3 if shape else 1)
        if shape:
            if len(gone) != 1:
                made = w.emit.reshape(made, [*(x.size for x in outer), *(x.size for x in gone)], factor.lead)
            parts[key] = Expression.of(Factor(made, (*outer, *gone)), w.dtype(node), (*inner(rest, key), *gone))
        else:
            parts[key] = Expression.of(Factor(made, outer), w.dtype(node), inner(rest, key))
    groups = list(a.groups)
    if not shape:
        groups = [() if d in dims else group for d, group in enumerate(groups)]
        if not keep:
            groups = [group for d, group in enumerate(groups) if d not in dims]
    return Value(tuple(groups), parts, w.dtype(node))


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(w: Rewriter, node: fx.Node, a: Value, dim: int, dtype: Any = None) -> Value:
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, dtype), shape=True)


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax_(w: Rewriter, node: fx.Node, a: Value, dim: int, half_to_float: bool) -> Value:
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, half_to_float), shape=True)


@rule(aten.cumsum.default)
def cumsum(w: Rewriter, node: fx.Node, a: Value, dim: int, *, dtype: Any = None) -> Value:
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, dtype=dtype), shape=True)


@rule(aten.amax.default, aten.amin.default, aten.logsumexp.default)
def amax(w: Rewriter, node: fx.Node, a: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, list(dim) if dim else None), keepdim, lambda n, d: w.emit.call(node.target, n, [d], False))


@rule(aten.prod.dim_int, aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default)
def prod(w: Rewriter, node: fx.Node, a: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim, lambda n, d: w.emit.call(node.target, n, d, False))


@rule(aten.var.correction, aten.std.correction)
def var(w: Rewriter, node: fx.Node, a: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim, lambda n, d: w.emit.call(node.target, n, [d], correction=correction))


@rule(aten.linalg_vector_norm.default)
def vector_norm(w: Rewriter, node: fx.Node, a: Value, order: float = 2, dim: Any = None, keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim, lambda n, d: w.emit.call(node.target, n, order, [d], False))


@rule(aten.max.dim, aten.min.dim)
def max_dim(w: Rewriter, node: fx.Node, a: Value, dim: int, keepdim: bool = False) -> Any:
    import operator

    values = along(w, node.args[0], a, _dims(a, dim), keepdim,
                   lambda n, d: w.emit.call(operator.getitem, w.emit.call(node.target, n, d, False), 0))
    return [values, None]


__all__ = ["Stage", "along"]

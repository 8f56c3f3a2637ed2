"""Operators along some axes: sums stay open; others need the axis whole, and run block by block of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from torch import fx

from semel.sharing.algebra import summed
from semel.sharing.axes import BATCH, Axis, Group, size_of
from semel.sharing.blocks import fused
from semel.sharing.emission import Stage, aten
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.expression import Expression, Factor, Term, full, ordered_factor, take
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.values import Key, Value, inner, mapped


def _dims(a: Value, dim: Any) -> list[int]:
    if not a.groups:
        raise Unproved("a scalar")
    if dim is None or dim == []:
        raise MixesRows("it reduces over the batch")
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
        raise MixesRows("it averages over the batch")
    count = size_of(axis for d in dims for axis in a.groups[d])
    return mapped(summed(w.emit, a, dims, keepdim), lambda part: part.scaled(w.emit, 1.0 / count))


def along(w: Rewriter, node: fx.Node | None, a: Value, dims: list[int], keep: bool, call: Any, *,
          shape: bool = False) -> Value:
    """``call(tensor, dim)`` with the logical axes ``dims`` as the last axis. ``shape``: the result keeps that axis."""
    gone = [axis for d in dims for axis in a.groups[d]]
    if BATCH in gone:
        raise MixesRows("it works along the batch")
    a = fused(w.emit, a, gone)
    gone = [axis for d in dims for axis in a.groups[d]]
    rest = [axis for axis in a.axes if axis not in gone]
    dtype = a.dtype if node is None else w.dtype(node)
    flat = Axis(size_of(gone))
    parts = {}
    for key, part in a.parts.items():
        factor = full(w.emit, part.leaf(w.emit), gone)
        outer = tuple(axis for axis in factor.axes if axis not in gone)
        factor = ordered_factor(w.emit, factor, (*outer, *gone))
        x = factor.node if len(gone) == 1 else w.emit.reshape(
            factor.node, [*(x.size for x in outer), flat.size], factor.lead)
        made = call(x, factor.lead + len(outer))
        made.meta["flops"] = size_of(factor.axes) * (3 if shape else 1)
        if shape:
            if len(gone) != 1:
                made = w.emit.reshape(made, [*(x.size for x in outer), *(x.size for x in gone)], factor.lead)
            parts[key] = Expression.of(Factor(made, (*outer, *gone)), dtype, (*inner(rest, key), *gone))
        else:
            parts[key] = Expression.of(Factor(made, outer), dtype, inner(rest, key))
    groups = list(a.groups)
    if not shape:
        groups = [() if d in dims else group for d, group in enumerate(groups)]
        if not keep:
            groups = [group for d, group in enumerate(groups) if d not in dims]
    return Value(tuple(groups), parts, dtype)


@rule(aten.softmax.int, aten.log_softmax.int)
def softmax(w: Rewriter, node: fx.Node, a: Value, dim: int, dtype: Any = None) -> Value:
    if dtype is None and "log" not in str(node.target):
        return softmaxed(w, a, _dims(a, dim)[0])
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, dtype), shape=True)


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax_(w: Rewriter, node: fx.Node, a: Value, dim: int, half_to_float: bool) -> Value:
    if not half_to_float and "log" not in str(node.target):
        return softmaxed(w, a, _dims(a, dim)[0])
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, half_to_float),
                 shape=True)


def softmaxed(w: Rewriter, a: Value, dim: int) -> Value:
    """Softmax along a logical axis. Along a mixed one, blocks that a mask hides get no weight and are not read, and
    the request's own block is weighed once a request.

    With e the request's scores and c the candidate's, softmax([e, c]) = [softmax(e) f, g] where [f, g] =
    softmax([logsumexp(e), c]): the first is a product, kept open, so that weighted sums over it are the request's too.
    """
    if len(a.groups[dim]) != 1 or not a.groups[dim][0].blocks:
        return along(w, None, a, [dim], True, lambda n, d: w.emit.call(aten.softmax.int, n, d, None), shape=True)
    (axis,) = a.groups[dim]
    rows: dict[Key, dict[int, Expression]] = {}
    for key, part in a.parts.items():
        number = dict(key)[axis]
        rows.setdefault(key - {(axis, number)}, {})[number] = part
    parts = {}
    for rest, found in rows.items():
        seen = {n: part for n, part in found.items() if part.uniform(w.emit) != float("-inf")} or found
        early = {n: part for n, part in seen.items() if part.stage < Stage.CANDIDATE}
        late = {n: part for n, part in seen.items() if n not in early}
        weights = _weighed(w, axis, early, late) if early and late else _weighed(w, axis, {}, seen)
        for number, part in found.items():
            parts[rest | {(axis, number)}] = weights.get(number) or Expression(part.axes, (), a.dtype)
    return Value(a.groups, parts, a.dtype)


def _weighed(w: Rewriter, axis: Axis, early: dict[int, Expression],
             late: dict[int, Expression]) -> dict[int, Expression]:
    """Softmax over the blocks of both; ``early`` may be empty."""
    emit = w.emit
    outer = tuple(a for n, part in late.items() for a in part.axes if a not in axis.blocks[n].axes)
    outer = tuple(dict.fromkeys(outer))
    first: list[Factor] = []
    once: dict[int, Expression] = {}
    if early:
        scores, shared_axes = _side_by_side(w, axis, early, outer)
        dim = scores.lead + len(shared_axes)
        total = emit.call(aten.logsumexp.default, scores.node, [dim], True, flops=3 * size_of(scores.axes))
        empty = emit.call(aten.eq.Scalar, total, float("-inf"))    # all of them hidden: no weight, instead of nan
        made = emit.call(aten.softmax.int, emit.call(aten.masked_fill.Scalar, scores.node, empty, 0.0), dim, None)
        once = _taken_apart(w, axis, early, Factor(made, scores.axes), shared_axes)
        first = [Factor(emit.call(aten.squeeze.dim, total, dim), shared_axes)]
    scores, own = _side_by_side(w, axis, late, outer, first)
    made = emit.call(aten.softmax.int, scores.node, scores.lead + len(own), None, flops=3 * size_of(scores.axes))
    if not early:
        return _taken_apart(w, axis, late, Factor(made, scores.axes), own)
    dim = scores.lead + len(own)
    share = Factor(emit.call(aten.select.int, made, dim, 0), own)
    behind = Axis(scores.axes[-1].size - 1)
    rest = emit.call(aten.slice.Tensor, made, dim, 1, behind.size + 1)
    weights = _taken_apart(w, axis, late, Factor(rest, (*own, behind)), own)
    for number, part in once.items():
        weights[number] = Expression(part.axes, (Term((*part.terms[0].factors, share)),), part.dtype)
    return weights


def _side_by_side(w: Rewriter, axis: Axis, parts: dict[int, Expression], outer: Group,
                  first: Sequence[Factor] = ()) -> tuple[Factor, Group]:
    """Blocks of ``axis`` one after the other on the last axis (behind ``first``), and the axes before it."""
    emit = w.emit
    factors = {n: part.leaf(emit) for n, part in parts.items()}
    have = {a for factor in (*factors.values(), *first) for a in factor.axes}
    shared_axes = tuple(a for a in outer if a in have)
    stage = max(factor.stage for factor in (*factors.values(), *first))
    pieces = []
    for n, factor in [*((None, f) for f in first), *factors.items()]:
        inside: Group = axis.blocks[n].axes if n is not None else ()
        factor = ordered_factor(emit, full(emit, factor, (*shared_axes, *inside)), (*shared_axes, *inside))
        node = factor.node
        if factor.stage == Stage.CONSTANT and stage != Stage.CONSTANT:
            node = emit.call(aten.unsqueeze.default, node, 0)
            node = emit.call(aten.expand.default, node, [emit.rows(stage), *([-1] * len(factor.axes))])
        node = emit.spread(node, stage, 1 + len(factor.axes))
        if len(inside) != 1:
            node = emit.reshape(node, [*(a.size for a in shared_axes), size_of(inside)], int(stage != Stage.CONSTANT))
        pieces.append(node)
    width = len(first) + sum(len(axis.blocks[n].positions) for n in parts)
    dim = int(stage != Stage.CONSTANT) + len(shared_axes)
    node = pieces[0] if len(pieces) == 1 else emit.call(aten.cat.default, pieces, dim)
    return Factor(node, (*shared_axes, Axis(width))), shared_axes


def _taken_apart(w: Rewriter, axis: Axis, parts: dict[int, Expression], made: Factor,
                 outer: Group) -> dict[int, Expression]:
    """What ``_side_by_side`` put together, by block."""
    emit, start, out = w.emit, 0, {}
    for n, part in parts.items():
        inside, width = axis.blocks[n].axes, len(axis.blocks[n].positions)
        node = take(emit, made.node, made.lead + len(outer), np.arange(start, start + width), made.axes[-1].size)
        if len(inside) != 1:
            node = emit.reshape(node, [*(a.size for a in outer), *(a.size for a in inside)], made.lead)
        out[n] = Expression.of(Factor(node, (*outer, *inside)), part.dtype, part.axes)
        start += width
    return out


@rule(aten.cumsum.default)
def cumsum(w: Rewriter, node: fx.Node, a: Value, dim: int, *, dtype: Any = None) -> Value:
    return along(w, node, a, _dims(a, dim), True, lambda n, d: w.emit.call(node.target, n, d, dtype=dtype), shape=True)


@rule(aten.amax.default, aten.amin.default, aten.logsumexp.default)
def amax(w: Rewriter, node: fx.Node, a: Value, dim: Any = (), keepdim: bool = False) -> Value:
    dims = _dims(a, list(dim) if dim else None)
    return along(w, node, a, dims, keepdim, lambda n, d: w.emit.call(node.target, n, [d], False))


@rule(aten.prod.dim_int, aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default)
def prod(w: Rewriter, node: fx.Node, a: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim, lambda n, d: w.emit.call(node.target, n, d, False))


@rule(aten.var.correction, aten.std.correction)
def var(w: Rewriter, node: fx.Node, a: Value, dim: Any = None, *, correction: Any = None,
        keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim,
                 lambda n, d: w.emit.call(node.target, n, [d], correction=correction))


@rule(aten.linalg_vector_norm.default)
def vector_norm(w: Rewriter, node: fx.Node, a: Value, order: float = 2, dim: Any = None,
                keepdim: bool = False) -> Value:
    return along(w, node, a, _dims(a, dim), keepdim, lambda n, d: w.emit.call(node.target, n, order, [d], False))


@rule(aten.max.dim, aten.min.dim)
def max_dim(w: Rewriter, node: fx.Node, a: Value, dim: int, keepdim: bool = False) -> Any:
    import operator

    values = along(w, cast(fx.Node, node.args[0]), a, _dims(a, dim), keepdim,
                   lambda n, d: w.emit.call(operator.getitem, w.emit.call(node.target, n, d, False), 0))
    return [values, None]


__all__ = ["Stage", "along"]

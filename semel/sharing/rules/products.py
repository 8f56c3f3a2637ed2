"""Matrix products: all are sums of products over shared axes, and stay open."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from semel.sharing.algebra import add, broadcast, contract, joint
from semel.sharing.axes import BATCH, size_of
from semel.sharing.emission import aten
from semel.sharing.errors import Unproved
from semel.sharing.expression import Expression, Factor, aligned
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.masks import Bounds, bounds, inside
from semel.sharing.moving import select
from semel.sharing.rules.pointwise import masked_sum
from semel.sharing.values import Value, inner, mapped


@rule(aten.linear.default)
def linear(w: Rewriter, node: fx.Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    out = contract(w.emit, x, weight, [(len(x.groups) - 1, 1)], w.dtype(node))
    return out if bias is None else add(w.emit, out, bias, w.dtype(node))


@rule(aten.addmm.default)
def addmm(w: Rewriter, node: fx.Node, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    out = contract(w.emit, x, y, [(1, 0)], w.dtype(node))
    if alpha != 1:
        out = mapped(out, lambda part: part.scaled(w.emit, alpha))
    if beta != 1:
        bias = mapped(bias, lambda part: part.scaled(w.emit, beta))
    return add(w.emit, out, bias, w.dtype(node))


@rule(aten.mm.default)
def mm(w: Rewriter, node: fx.Node, x: Value, y: Value) -> Value:
    return contract(w.emit, x, y, [(1, 0)], w.dtype(node))


@rule(aten.bmm.default)
def bmm(w: Rewriter, node: fx.Node, x: Value, y: Value) -> Value:
    return contract(w.emit, x, y, [(2, 1)], w.dtype(node), [(0, 0)])


@rule(aten.baddbmm.default)
def baddbmm(w: Rewriter, node: fx.Node, bias: Value, x: Value, y: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise Unproved("scaled baddbmm")
    return add(w.emit, bmm(w, node, x, y), bias, w.dtype(node))


@rule(aten.matmul.default)
def matmul(w: Rewriter, node: fx.Node, x: Value, y: Value) -> Value:
    if len(y.groups) == 1:
        return contract(w.emit, x, y, [(len(x.groups) - 1, 0)], w.dtype(node))
    if len(x.groups) == 1:
        out = contract(w.emit, x, y, [(0, len(y.groups) - 2)], w.dtype(node))
        return out
    rank = max(len(x.groups), len(y.groups))
    x = x.with_groups([()] * (rank - len(x.groups)) + list(x.groups))
    y = y.with_groups([()] * (rank - len(y.groups)) + list(y.groups))
    together = [(dim, dim) for dim in range(rank - 2)]
    return contract(w.emit, x, y, [(rank - 1, rank - 2)], w.dtype(node), together)


@rule(aten.mv.default)
def mv(w: Rewriter, node: fx.Node, x: Value, y: Value) -> Value:
    return contract(w.emit, x, y, [(1, 0)], w.dtype(node))


@rule(aten.einsum.default)
def einsum(w: Rewriter, node: fx.Node, equation: str, operands: Any, *, path: Any = None) -> Value:
    if len(operands) != 2 or "..." in equation:
        raise Unproved("an einsum of other than two operands")
    inputs, _, out = equation.replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    if not out or len(set(a)) != len(a) or len(set(b)) != len(b) or set(out) - set(a) - set(b):
        raise Unproved("an einsum of a kind not known")
    x, y = operands
    if any(letter not in out and (letter in a) != (letter in b) for letter in a + b):
        raise Unproved("an einsum that sums one operand alone")
    over = [(a.index(c), b.index(c)) for c in a if c in b and c not in out]
    together = [(a.index(c), b.index(c)) for c in a if c in b and c in out]
    value = contract(w.emit, x, y, over, w.dtype(node), together)
    order = [c for c in a if c in out] + [c for c in b if c not in a]
    return value.with_groups([value.groups[order.index(c)] for c in out])


@rule(aten.tensordot.default)
def tensordot(w: Rewriter, node: fx.Node, x: Value, y: Value, dims: Any, other: Any) -> Value:
    pairs = [(a % len(x.groups), b % len(y.groups)) for a, b in zip(dims, other, strict=True)]
    return contract(w.emit, x, y, pairs, w.dtype(node))


@rule(aten.conv1d.default)
def conv1d(w: Rewriter, node: fx.Node, x: Value, weight: Value, bias: Value | None = None, stride: Any = (1,),
           padding: Any = (0,), dilation: Any = (1,), groups: int = 1) -> Any:
    """With a kernel of one a linear layer over the channels; others once a request where all is the request's."""
    from semel.sharing.rules.rowwise import whole_first

    if size_of(weight.groups[2]) != 1 or list(stride) != [1] or list(padding) != [0] or groups != 1:
        return whole_first(w, node, x, weight)
    matrix = select(w.emit, weight, 2, 0) if weight.groups[2] else weight.with_groups(weight.groups[:2])
    out = contract(w.emit, x, matrix, [(1, 1)], w.dtype(node))
    out = out.with_groups([out.groups[0], out.groups[2], out.groups[1]])
    if bias is None:
        return out
    return add(w.emit, out, bias.with_groups([*bias.groups, ()]), w.dtype(node))


@rule(aten.scaled_dot_product_attention.default)
def attention(w: Rewriter, node: fx.Node, q: Value, k: Value, v: Value, attn_mask: Value | None = None,
              dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> Value:
    """Written out; keys and values of the request are shared by its candidates' queries."""
    from semel.sharing.rules.reductions import softmaxed

    if enable_gqa or dropout_p or BATCH in (*q.groups[-1], *q.groups[-2], *k.groups[-2]):
        raise Unproved("attention of a kind not known")
    rank = len(q.groups)
    width = size_of(q.groups[-1])
    factor = width**-0.5 if scale is None else scale
    swapped = k.with_groups([*k.groups[:-2], k.groups[-1], k.groups[-2]])
    scores = mapped(matmul(w, node, q, swapped), lambda part: part.scaled(w.emit, factor))
    limits = bounds(w, attn_mask_node(node)) if attn_mask is not None and attn_mask.dtype == torch.bool else None
    if is_causal:
        rows, columns = size_of(q.groups[-2]), size_of(k.groups[-2])
        known = torch.ones(rows, columns, dtype=torch.bool).tril()
        attn_mask, limits = w.known(known), (known, known)
    if attn_mask is not None:
        scores = _hidden(w, scores, attn_mask, limits) if attn_mask.dtype == torch.bool else \
            masked_sum(w, scores, attn_mask, scores.dtype)
    weights = softmaxed(w, scores, rank - 1)
    return matmul(w, node, weights, v)


def attn_mask_node(node: fx.Node) -> Any:
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _hidden(w: Rewriter, scores: Value, mask: Value, limits: Bounds | None) -> Value:
    """Scores, minus infinity where ``mask`` is false."""
    (scores, mask), groups = broadcast(w.emit, [scores, mask])
    every = [axis for group in groups for axis in group]
    parts = {}
    for key, (score, seen) in joint([scores, mask]):
        axes = inner(every, key)
        nowhere, everywhere = inside(limits, groups, dict(key))
        if everywhere:
            parts[key] = Expression(axes, score.terms, score.dtype, score._leaf)
        elif nowhere:
            parts[key] = Expression.filled(w.emit, float("-inf"), axes, score.dtype)
        else:
            a, b = score.leaf(w.emit), seen.leaf(w.emit)
            have = tuple(axis for axis in axes if axis in a.axes or axis in b.axes)
            stage = max(a.stage, b.stage)
            hides = w.emit.call(aten.logical_not.default, b.node)
            made = w.emit.call(aten.masked_fill.Scalar, aligned(w.emit, a, have, stage),
                               aligned(w.emit, Factor(hides, b.axes), have, stage), float("-inf"))
            parts[key] = Expression.of(Factor(made, have), score.dtype, axes)
    return Value(groups, parts, scores.dtype)

"""Operators along an axis whose results keep their places: norms and softmax. Each side by itself, or two versions.

A *row* is what one statistic is taken over. Where a row has units of both sides,

* a norm takes the statistics of request units from request units, those of candidate units from candidate units;
* a softmax, where other rows are the candidate's (attention), keeps the request's terms only; else (pooling) it has two
  versions: over the request's terms, and over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten
from semel.sharing.errors import Unproved
from semel.sharing.isolation.sided import BOTH, CANDIDATE, REQUEST, Sided, by_rows, labelled, positions_of
from semel.sharing.isolation.walk import Walk, rule


def _rows(x: Sided) -> tuple[Tensor, Tensor, Tensor]:
    """Of the last axis as rows: which rows are mixed, which are all the candidate's, and positions that every mixed row
    may use."""
    free = x.free.reshape(-1, x.sides.shape[-1])
    some, every = free.any(1), free.all(1)
    mixed = some & ~every
    keep = free[mixed].all(0) if bool(mixed.any()) else torch.ones(free.shape[1], dtype=torch.bool)
    return mixed, ~some, keep


def _single(walk: Walk, node: fx.Node, x: Sided, make: Any, flops: float) -> Sided:
    """No row is mixed: its results are on its side."""
    free = x.free.reshape(-1, x.sides.shape[-1]).all(1)
    pure = (x.sides == REQUEST).reshape(-1, x.sides.shape[-1]).all(1)
    row = torch.where(pure, REQUEST, torch.where(free, BOTH, CANDIDATE)).to(torch.int8)
    sides = row[:, None].expand(-1, x.sides.shape[-1]).reshape(x.sides.shape)
    view = make(x.view, flops) if x.view is not None and bool((sides == BOTH).any()) else None
    return labelled(make(x.node, flops), view, sides)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def norm(walk: Walk, node: fx.Node, x: Sided, shape: Sequence[int], weight: Sided | None = None, bias: Any = None,
         *rest: Any) -> Sided:
    affine = node.target is aten.layer_norm.default
    eps = ([rest[0]] if rest else []) if affine else ([bias] if bias is not None else [])
    bias = bias if affine else None
    x = by_rows(x)
    if len(shape) != 1:
        raise Unproved("it normalises several axes; flatten them first")

    def make(n: fx.Node, flops: float, positions: list[int] | None = None) -> fx.Node:
        parts = [None if p is None else p.node if positions is None else walk.writer.take(p.node, 0, positions)
                 for p in ((weight, bias) if affine else (weight,))]
        size = shape[0] if positions is None else len(positions)
        made = walk.writer.call(node.target, n, [size], *parts, *eps, flops=flops * size / shape[0])
        if positions is not None:
            made.meta["sides"] = n.meta["sides"]
        return made

    last = x.sides.dim() - 1
    flops = 4.0 * x.sides.numel()
    mixed, _, keep = _rows(x)
    if not bool(mixed.any()):
        return _single(walk, node, x, make, flops)
    mine = positions_of(keep)
    request = (x.sides == REQUEST).reshape(-1, shape[0])[mixed].all(0) & keep
    theirs = positions_of(~request)  # with those that have two versions
    out = torch.where(keep, x.sides, CANDIDATE).to(torch.int8)
    other = make(walk.writer.take(x.node, last, theirs), flops, theirs) if theirs else None
    if not mine:
        made = make(x.node, flops)
        return labelled(made, None, out)
    first = make(walk.writer.take(x.seen, last, mine), flops, mine)
    first.meta["share"] = 1.0
    assert other is not None
    only = positions_of(request)
    local = [mine.index(p) for p in only]
    node_pieces = [(only, walk.writer.take(first, last, local) if only else first), (theirs, other)]
    made = walk.writer.place(last, node_pieces)
    view = None
    if only != mine:
        rest_of = [p for p in range(shape[0]) if p not in set(mine)]
        view = walk.writer.place(last, [(mine, first), (rest_of, walk.writer.take(
            other, last, [theirs.index(p) for p in rest_of]))])
    return labelled(made, view, out)


@rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int)
def softmax(walk: Walk, node: fx.Node, x: Sided, dim: int, *rest: Any) -> Sided:
    rank = x.sides.dim()
    dim %= rank

    def make(n: fx.Node, flops: float) -> fx.Node:
        made = walk.writer.call(node.target, n, dim, *rest, flops=flops)
        if "sides" in n.meta:
            made.meta["sides"] = n.meta["sides"]
        return made

    flops = 2.5 * x.sides.numel()
    moved = Sided(x.node, x.sides.movedim(dim, -1))
    mixed, theirs, keep = _rows(moved)
    if not bool(mixed.any()):
        plain = _single(walk, node, Sided(x.node, x.sides.movedim(dim, -1), x.view), make, flops)
        return labelled(plain.node, plain.view, plain.sides.movedim(-1, dim))
    mine, others = positions_of(keep), positions_of(~keep)
    if not mine:
        return labelled(make(x.node, flops), None, torch.full_like(x.sides, CANDIDATE))
    along = torch.where(keep, REQUEST, CANDIDATE).to(torch.int8)
    if not bool(theirs.any()):
        first = make(walk.writer.take(x.seen, dim, mine), flops * len(mine) / len(keep))
        first.meta["share"] = 1.0
        view = walk.writer.place(dim, [(mine, first), (others, walk.writer.take(x.node, dim, others))])
        sides = torch.where(keep, BOTH, CANDIDATE).to(torch.int8)
        return labelled(make(x.node, flops), view, sides.expand(moved.sides.shape).movedim(-1, dim))
    rows = (~theirs).reshape(moved.sides.shape[:-1]).unsqueeze(-1).movedim(-1, dim)  # of request rows
    fixed = walk.fixed(node.meta["val"])
    for axis in range(rank):
        flat = rows.movedim(axis, 0).flatten(1)
        if axis == dim or not fixed[axis] or not bool((flat == flat[:, :1]).all()):
            continue
        ours, rest_rows = positions_of(flat[:, 0]), positions_of(~flat[:, 0])
        part = len(ours) / len(flat)
        cut = walk.writer.take(x.seen, axis, ours)
        first = make(walk.writer.take(cut, dim, mine), flops * part * len(mine) / len(keep))
        hidden = walk.writer.take(cut, dim, others)
        zero = walk.writer.call(aten.zeros_like.default, hidden, sides=hidden.meta["sides"], share=0.0)
        top = walk.writer.place(dim, [(mine, first), (others, zero)])
        below = make(walk.writer.take(x.node, axis, rest_rows), flops * (1 - part))
        made = walk.writer.place(axis, [(ours, top), (rest_rows, below)])
        sides = torch.where(rows, along.reshape([-1 if d == dim else 1 for d in range(rank)]), CANDIDATE).to(torch.int8)
        return labelled(made, None, sides.expand(x.sides.shape))
    raise Unproved("its request rows lie along no single axis")


@rule(aten.scaled_dot_product_attention.default)
def attention(walk: Walk, node: fx.Node, q: Sided, k: Sided, v: Sided, mask: Sided | None = None, dropout: float = 0.0,
              causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Sided:
    """Request queries see request keys; candidate queries see both (masked attention)."""
    queries, keys = _tokens(q), _tokens(k) | _tokens(v)
    tokens, steps = len(queries), len(keys)
    seen = torch.ones(tokens, steps, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    mine, theirs = positions_of(~queries), positions_of(queries)
    open_keys = positions_of(~keys)
    dims = q.sides.dim() - 2
    flops = 2.0 * (q.sides.numel() + v.sides.numel() / steps * tokens) * steps / 2

    def make(rows: list[int], columns: list[int]) -> fx.Node:
        parts = [walk.writer.take(n, dims, p) for n, p in ((q.node, rows), (k.node, columns), (v.node, columns))]
        used = None
        if mask is not None:
            used = mask.node
            for axis, p in ((-2, rows), (-1, columns)):
                at = mask.sides.dim() + axis
                if mask.sides.shape[at] > 1:
                    used = walk.writer.take(used, at, p)
        whole = len(rows) == tokens and len(columns) == steps
        visible = seen[rows][:, columns]
        if causal and not whole and not bool(visible.all()):
            used = walk.writer.constant(visible)
        return walk.writer.call(node.target, *parts, used, dropout, causal and whole, scale=scale,
                                enable_gqa=enable_gqa, flops=flops * len(rows) * len(columns) / (tokens * steps))

    out = torch.full(walk.shape(node.meta["val"]), CANDIDATE, dtype=torch.int8)
    if mask is not None and bool((mask.sides != REQUEST).any()) and mine:
        raise Unproved("its mask depends on the candidate")
    everything = list(range(tokens)), list(range(steps))
    if not mine or not open_keys or (not theirs and len(open_keys) < steps):
        if mine and open_keys:  # pooling by queries that have no side: two versions
            made, view = make(*everything), make(everything[0], open_keys)
            return labelled(made, view, torch.full_like(out, BOTH))
        return labelled(make(*everything), None, out)
    out.index_fill_(dims, torch.tensor(mine), REQUEST)
    if not theirs:
        return labelled(make(*everything), None, out)
    first, second = make(mine, open_keys), make(theirs, everything[1])
    for made, p in ((first, mine), (second, theirs)):
        made.meta.update(sides=out.index_select(dims, torch.tensor(p)), share=float(made is first))
    return labelled(walk.writer.place(dims, [(mine, first), (theirs, second)]), None, out)


def _tokens(x: Sided) -> Tensor:
    """[tokens]: whose token it is, True the candidate's."""
    dim = x.sides.dim() - 2
    taken = (x.sides != REQUEST).movedim(dim, 0).flatten(1)
    if not bool((taken == taken[:, :1]).all()):
        raise Unproved("heads or units of one token are on both sides; let every token be on one side")
    return taken[:, 0]

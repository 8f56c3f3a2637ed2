"""Sums of elements, and of products of two values: which terms a request unit keeps.

A result whose terms are all free of the candidate is the request's, one without such a term the candidate's. Between:

* where other results along another axis are the candidate's anyway (attention: rows of candidate queries), the mixed
  ones are request rows. They keep their request terms and are the request's (generalized layer masking);
* else (pooling, a sum over fields) there is nothing to cut the result by, and it has two versions: of the request's
  terms for request units, of all terms for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten
from semel.sharing.errors import Unproved
from semel.sharing.isolation.sided import BOTH, CANDIDATE, REQUEST, Sided, labelled, positions_of
from semel.sharing.isolation.walk import Walk, rule

Letters = Sequence[str]


def contract(walk: Walk, node: fx.Node, terms: Sequence[Letters], out: Letters, values: Sequence[Sided],
             make: Callable[..., fx.Node], flops: float, keepdim: Sequence[int] = ()) -> Sided:
    """``terms``: the axes of each value by letter; those not in ``out`` are summed. ``make`` writes the operator on
    nodes of the same ranks, of which some axes may be shorter. ``keepdim``: axes that a reduction leaves."""
    equation = ",".join("".join(t) for t in terms) + "->" + "".join(out)

    def count(*masks: Tensor) -> Tensor:
        return torch.einsum(equation, *(m.double() for m in masks))

    free = [v.free for v in values]
    every = count(*(torch.ones_like(f) for f in free))
    kept = count(*free)
    pure = count(*(v.sides == REQUEST for v in values))
    sides = torch.where(pure == every, REQUEST, torch.where(kept == every, BOTH, CANDIDATE)).to(torch.int8)
    partial = (kept > 0) & (kept < every)
    nodes = [v.node for v in values]
    inner, summed = _one_axis(terms, out, values) if bool(partial.any()) else ("", [])
    keep = _kept(terms, out, free, partial, inner, summed) if inner else []

    def widen(t: Tensor) -> Tensor:
        for dim in sorted(keepdim):
            t = t.unsqueeze(dim)
        return t

    if not keep:
        made = make(*nodes, flops=flops)
        view = make(*(v.seen for v in values), flops=flops) if bool((sides == BOTH).any()) else None
        return labelled(made, view, widen(sides))

    def cut(which: Sequence[fx.Node], letter: str, positions: Sequence[int]) -> list[fx.Node]:
        long = [letter in t and n.meta["sides"].shape[t.index(letter)] > 1 for n, t in zip(which, terms, strict=True)]
        return [walk.writer.take(n, t.index(letter), positions) if here else n
                for n, t, here in zip(which, terms, long, strict=True)]

    seen = [v.seen for v in values]
    less = flops * len(keep) / len(summed)
    if not bool((sides == CANDIDATE)[~partial].any()):
        made = make(*nodes, flops=flops)
        view = make(*cut(seen, inner, keep), flops=less)
        return labelled(made, view, widen(torch.where(partial, BOTH, sides).to(torch.int8)))
    mine = partial | (sides == REQUEST)
    masked = torch.where(mine, REQUEST, CANDIDATE).to(torch.int8)
    for letter in out:
        rows = mine.movedim(list(out).index(letter), 0).flatten(1)
        if not bool((rows == rows[:, :1]).all()) or not _fixed(walk, node, values, terms, letter):
            continue
        ours, theirs = positions_of(rows[:, 0]), positions_of(~rows[:, 0])
        part = len(ours) / len(rows)
        first = make(*cut(cut(seen, inner, keep), letter, ours), flops=less * part)
        second = make(*cut(nodes, letter, theirs), flops=flops * (1 - part))
        dim = list(out).index(letter) + sum(k <= list(out).index(letter) for k in sorted(keepdim))
        whole = widen(masked)
        first.meta.update(sides=whole.index_select(dim, torch.tensor(ours)), share=1.0)
        second.meta.update(sides=whole.index_select(dim, torch.tensor(theirs)), share=0.0)
        return labelled(walk.writer.place(dim, [(ours, first), (theirs, second)]), None, whole)
    # mixed results that are no rows are the candidate's
    made = make(*nodes, flops=flops)
    view = make(*seen, flops=flops) if bool((sides == BOTH).any()) else None
    return labelled(made, view, widen(sides))


def _one_axis(terms: Sequence[Letters], out: Letters, values: Sequence[Sided]) -> tuple[str, list[int]]:
    """The summed axis along which sides differ, and its positions."""
    summed = sorted({letter for t in terms for letter in t if letter not in out})
    found = []
    for letter in summed:
        for t, v in zip(terms, values, strict=True):
            if letter in t and v.sides.shape[t.index(letter)] > 1:
                rows = v.free.movedim(t.index(letter), 0)
                if not bool((rows == rows[:1]).all()) and letter not in found:
                    found.append(letter)
    if len(found) != 1:
        return "", []
    size = max(v.sides.shape[t.index(found[0])] for t, v in zip(terms, values, strict=True) if found[0] in t)
    return found[0], list(range(size))


def _kept(terms: Sequence[Letters], out: Letters, free: Sequence[Tensor], partial: Tensor, inner: str,
          summed: Sequence[int]) -> list[int]:
    """Positions of the summed axis that all mixed results may use."""
    keep = []
    equation = ",".join("".join(t) for t in terms) + "->" + "".join(out)
    for position in summed:
        masks = []
        for t, f in zip(terms, free, strict=True):
            if inner in t and f.shape[t.index(inner)] > 1:
                f = f.narrow(t.index(inner), position, 1)
            masks.append(f.double())
        here = torch.einsum(equation, *masks)
        every = torch.einsum(equation, *(torch.ones_like(m) for m in masks))
        if bool((here == every)[partial].all()):
            keep.append(position)
    return keep


def _fixed(walk: Walk, node: fx.Node, values: Sequence[Sided], terms: Sequence[Letters], letter: str) -> bool:
    """The batch is not in this axis."""
    originals = [n for n in node.all_input_nodes if isinstance(walk.values[n], Sided)]
    for n in originals:
        for t, v in zip(terms, values, strict=True):
            if walk.values[n] is v and letter in t and not walk.fixed(n.meta["val"])[t.index(letter)]:
                return False
    return True


# ---------------------------------------------------------------------------------------------- operators
@rule(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default)
def reduction(walk: Walk, node: fx.Node, x: Sided, dim: Any, keepdim: bool = False, **kwargs: Any) -> Sided:
    rank = x.sides.dim()
    dims = sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim or range(rank)))
    letters = [chr(97 + i) for i in range(rank)]
    out = [c for i, c in enumerate(letters) if i not in dims]

    def make(n: fx.Node, flops: float) -> fx.Node:
        return walk.writer.call(node.target, n, dims, keepdim, flops=flops, **kwargs)

    return contract(walk, node, [letters], out, [x], make, x.sides.numel() / 2, dims if keepdim else ())


@rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
def matmul(walk: Walk, node: fx.Node, a: Sided, b: Sided) -> Sided:
    from semel.sharing.isolation.projections import projected_matmul

    made = projected_matmul(walk, node, a, b)
    return made if made is not None else matmul_of_values(walk, node, a, b)


def matmul_of_values(walk: Walk, node: fx.Node, a: Sided, b: Sided) -> Sided:
    ranks = a.sides.dim(), b.sides.dim()
    rank = max(*ranks, 2)
    lead = [chr(99 + i) for i in range(rank - 2)]
    left = [*lead[rank - ranks[0]:], "y", "x"] if ranks[0] > 1 else ["x"]
    right = [*lead[rank - ranks[1]:], "x", "z"] if ranks[1] > 1 else ["x"]
    out = [*lead, *(["y"] if ranks[0] > 1 else []), *(["z"] if ranks[1] > 1 else [])]
    def make(p: fx.Node, q: fx.Node, flops: float) -> fx.Node:
        return walk.writer.call(node.target, p, q, flops=flops)

    return contract(walk, node, [left, right], out, [a, b], make, _flops([left, right], [a, b]))


@rule(aten.einsum.default)
def einsum(walk: Walk, node: fx.Node, equation: str, values: Sequence[Sided], *, path: Any = None) -> Sided:
    left, _, right = equation.replace(" ", "").partition("->")
    if "." in equation or "->" not in equation or any(len(set(t)) != len(t) for t in left.split(",")):
        raise Unproved("write the einsum with one letter an axis and an arrow")
    return product(walk, node, [list(t) for t in left.split(",")], list(right), values)


def product(walk: Walk, node: fx.Node, terms: Sequence[list[str]], out: list[str], values: Sequence[Sided]) -> Sided:
    """An einsum of any values."""
    from semel.sharing.isolation.projections import projected_einsum

    made = projected_einsum(walk, node, terms, out, values)
    if made is not None:
        return made
    equation = ",".join("".join(t) for t in terms) + "->" + "".join(out)

    def make(*nodes: fx.Node, flops: float) -> fx.Node:
        return walk.writer.call(aten.einsum.default, equation, list(nodes), flops=flops)

    return contract(walk, node, terms, out, values, make, _flops(terms, values))


def _flops(terms: Sequence[Letters], values: Sequence[Sided]) -> float:
    sizes: dict[str, int] = {}
    for t, v in zip(terms, values, strict=True):
        for letter, size in zip(t, v.sides.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    total = 1.0
    for size in sizes.values():
        total *= size
    return total if len(terms) > 1 else total / 2

"""In which order to multiply: what has no candidate in it once per request, the rest once per candidate.

The order of a product of matrices does not change its value, only its price. Here the price of a multiplication is paid
``candidates`` times if a candidate-side factor is in it, else once; the order is chosen by exhaustion over the few
factors of a term. Terms that end in the same candidate-side tensor may add their operators first and apply them once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from semel.sharing.axes import Axis, size_of
from semel.sharing.emission import Emitter, Stage, apply, aten

if TYPE_CHECKING:
    from semel.sharing.expression import Factor, Term

Products: TypeAlias = "Sequence[tuple[Sequence[Factor], float]]"  # each with its number
LARGEST_OPERATOR = 1 << 24
"""Elements of a request's operator beyond which it is not built."""
_WORDS = 4.0  # floating-point operations that moving one element costs about as much as


def _name(axes: Sequence[Axis]) -> dict[Axis, str]:
    letters = "abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQRSTUVWXY"
    return {axis: letters[i] for i, axis in enumerate(dict.fromkeys(axes))}


def pairwise(emit: Emitter, first: Factor, second: Factor, keep: Sequence[Axis], make: Any) -> Factor:
    """The product of two factors, summed over the axes not in ``keep``, as one factor."""
    from semel.sharing.expression import aligned, ordered_factor

    kept = set(keep)
    if first.stage > second.stage:
        first, second = second, first
    out = tuple(axis for axis in dict.fromkeys((*second.axes, *first.axes)) if axis in kept)
    summed = [axis for axis in dict.fromkeys((*first.axes, *second.axes)) if axis not in kept]
    stage = second.stage
    flops = 2 * size_of({*first.axes, *second.axes})
    if not summed:
        a, b = (aligned(emit, factor, out, stage) for factor in (first, second))
        return make(emit.call(aten.mul.Tensor, a, b, flops=flops // 2), out)
    alone = [axis for axis in summed if axis not in second.axes]
    if alone:  # summed in one factor only: sum it before
        return pairwise(emit, _sum(emit, first, alone, make), second, keep, make)
    alone = [axis for axis in summed if axis not in first.axes]
    if alone:
        return pairwise(emit, first, _sum(emit, second, alone, make), keep, make)
    shared_kept = [axis for axis in first.axes if axis in second.axes and axis in kept]
    if not shared_kept and first.stage != second.stage:
        new = tuple(axis for axis in first.axes if axis in kept)
        rest = tuple(axis for axis in second.axes if axis in kept)
        state = ordered_factor(emit, second, (*rest, *summed))
        weight = ordered_factor(emit, first, (*new, *summed))
        x = _joined(emit, state.node, rest, summed, state.lead)
        if first.stage == Stage.CONSTANT:
            w = _joined(emit, weight.node, (), summed, 0, new)
            node = emit.call(aten.linear.default, x, w, flops=flops)
        else:
            w = emit.reshape(weight.node, [size_of(new), size_of(summed)], 1) \
                if len(new) != 1 or len(summed) != 1 else weight.node
            node = emit.call(apply, w, x, "oi,...i->...o", (*(a.size for a in rest), size_of(summed)), flops=flops)
        shape = [*(a.size for a in rest), *(a.size for a in new)]
        if len(new) != 1:
            node = emit.reshape(node, shape, second.lead)
        return make(node, (*rest, *new))
    names = _name([*first.axes, *second.axes])
    letters = ["".join(names[a] for a in axes) for axes in (first.axes, second.axes, out)]
    if first.stage == Stage.REQUEST and second.stage == Stage.CANDIDATE:
        node = emit.call(apply, first.node, second.node, f"{letters[0]},{letters[1]}->{letters[2]}",
                         tuple(a.size for a in second.axes), flops=flops)
    else:
        z = ["z" if factor.lead else "" for factor in (first, second)]
        equation = f"{z[0]}{letters[0]},{z[1]}{letters[1]}->{max(z)}{letters[2]}"
        node = emit.call(aten.einsum.default, equation, [first.node, second.node], flops=flops)
    return make(node, out)


def _joined(emit: Emitter, node: Any, rest: Sequence[Axis], summed: Sequence[Axis], lead: int,
            new: Sequence[Axis] | None = None) -> Any:
    """The summed axes as one, at the end; ``new`` as one too where given."""
    if len(summed) == 1 and (new is None or len(new) == 1):
        return node
    head = [size_of(new)] if new is not None else [a.size for a in rest]
    return emit.reshape(node, [*head, size_of(summed)], lead)


def _sum(emit: Emitter, factor: Factor, axes: Sequence[Axis], make: Any) -> Factor:
    dims = [factor.lead + factor.axes.index(axis) for axis in axes]
    node = emit.call(aten.sum.dim_IntList, factor.node, dims, flops=size_of(factor.axes))
    return make(node, tuple(axis for axis in factor.axes if axis not in axes))


def _cost(axes: frozenset[Axis], out: frozenset[Axis], stage: Stage, candidates: int) -> float:
    """Of multiplying two factors that have ``axes``, into one with ``out``; one request with its candidates."""
    times = candidates if stage == Stage.CANDIDATE else 1
    return times * (2.0 * size_of(axes) + _WORDS * size_of(out))


def order(items: Sequence[tuple[frozenset[Axis], Stage]], keep: frozenset[Axis], candidates: int) -> tuple[float, Any]:
    """The cheapest way to multiply ``items`` (axes and stage each): its price and a tree of indices."""
    from itertools import combinations

    n = len(items)
    best: dict[int, tuple[float, Any, frozenset[Axis], Stage]] = {
        1 << i: (0.0, i, axes, stage) for i, (axes, stage) in enumerate(items)}
    everything = (1 << n) - 1
    for count in range(2, n + 1):
        for chosen in combinations(range(n), count):
            mask = sum(1 << i for i in chosen)
            outside = keep.union(*(items[i][0] for i in range(n) if not mask >> i & 1))
            part = (mask - 1) & mask
            found = None
            while part:
                rest = mask ^ part
                if part < rest and part in best and rest in best:
                    a, b = best[part], best[rest]
                    axes = a[2] | b[2]
                    out = axes & outside
                    stage = max(a[3], b[3])
                    if stage < Stage.CANDIDATE and size_of(out) > LARGEST_OPERATOR:
                        price = math.inf
                    else:
                        price = a[0] + b[0] + _cost(axes, out, stage, candidates)
                    if found is None or price < found[0]:
                        found = (price, (a[1], b[1]), out, stage)
                part = (part - 1) & mask
            if found is not None:
                best[mask] = found
    return best[everything][0], best[everything][1]


def _multiply(emit: Emitter, factors: Sequence[Factor], tree: Any, keep: frozenset[Axis], make: Any) -> Factor:
    if isinstance(tree, int):
        return factors[tree]
    inside = set(_leaves(tree))
    left, right = tree
    wanted = keep.union(*(frozenset(f.axes) for i, f in enumerate(factors) if i not in inside))
    a = _multiply(emit, factors, left, keep, make)
    b = _multiply(emit, factors, right, keep, make)
    return pairwise(emit, a, b, [axis for axis in (*a.axes, *b.axes) if axis in wanted], make)


def _leaves(tree: Any) -> list[int]:
    return [tree] if isinstance(tree, int) else [*_leaves(tree[0]), *_leaves(tree[1])]


def contract(emit: Emitter, factors: Sequence[Factor], keep: Sequence[Axis], make: Any) -> Factor:
    """A product of factors, summed over the axes not in ``keep``, in the cheapest order."""
    wanted = frozenset(keep)
    if len(factors) == 1:
        alone = [axis for axis in factors[0].axes if axis not in wanted]
        return _sum(emit, factors[0], alone, make) if alone else factors[0]
    _, tree = order([(frozenset(f.axes), f.stage) for f in factors], wanted, emit.candidates)
    return _multiply(emit, factors, tree, wanted, make)


def _by_state(terms: Sequence[Term], out: Sequence[Axis]) -> list[list[Term]]:
    """Terms that end in the same candidate-side tensor, together, its summed axes under the same names."""
    groups: dict[Any, list[Term]] = {}
    for number, term in enumerate(terms):
        late = [f for f in term.factors if f.stage == Stage.CANDIDATE]
        key: Any = (late[0].node, tuple(a if a in out else None for a in late[0].axes)) if late else number
        group = groups.setdefault(key, [])
        if group and late:
            names = dict(zip(late[0].axes, _state(group[0]).axes, strict=True))
            # the term may have the other's axes already, for something else
            names.update({a: Axis(a.size) for f in term.factors for a in f.axes
                          if a in names.values() and a not in names})
            term = replace(term, factors=tuple(replace(f, axes=tuple(names.get(a, a) for a in f.axes))
                                               for f in term.factors))
        group.append(term)
    return list(groups.values())


def _state(term: Term) -> Factor:
    return next(f for f in term.factors if f.stage == Stage.CANDIDATE)


def _operator(emit: Emitter, terms: Sequence[Term], out: Sequence[Axis], total: Any, make: Any) -> Factor | None:
    """The sum of terms of one state as one operator on it. ``total``: how to add up what is not the state."""
    state = _state(terms[0])
    rests = [([f for f in term.factors if f.stage < Stage.CANDIDATE], term.scale) for term in terms]
    if any(not rest for rest, _ in rests):
        return None
    keep = frozenset(out) | frozenset(state.axes)
    axes = {frozenset(a for f in rest for a in f.axes) & keep for rest, _ in rests}
    if len(axes) > 1 or size_of(next(iter(axes))) > LARGEST_OPERATOR:
        return None
    order_of_axes = tuple(a for a in dict.fromkeys((*out, *state.axes)) if a in next(iter(axes)))
    return pairwise(emit, total(emit, rests, order_of_axes, make), state, out, make)


def _expanded(emit: Emitter, products: Products, keep: Sequence[Axis], make: Any) -> Factor:
    """Each product for itself, then the sum: from the result's side where that has fewer rows (the adjoint)."""
    return _add(emit, [(contract(emit, factors, keep, make), scale) for factors, scale in products], keep, make)


def _nested(emit: Emitter, products: Products, keep: Sequence[Axis], make: Any) -> Factor:
    """Horner's way: a factor that several products share multiplies their sum, once."""
    if len(products) == 1:
        return _expanded(emit, products, keep, make)
    uses: dict[Any, int] = {}
    for factors, _ in products:
        for factor in factors:
            if any(axis in keep for axis in factor.axes):  # others stand between two factors, which cannot wait apart
                key = (factor.node, factor.axes)
                uses[key] = uses.get(key, 0) + 1
    shared = max(uses, key=lambda k: uses[k]) if uses else None
    if uses.get(shared, 0) < 2:
        return _expanded(emit, products, keep, make)
    inside, outside, first = [], [], None
    for factors, scale in products:
        at = next((i for i, f in enumerate(factors) if (f.node, f.axes) == shared), None)
        if at is None or len(factors) == 1:
            outside.append((factors, scale))
        else:
            first = factors[at]
            inside.append(([*factors[:at], *factors[at + 1 :]], scale))
    if first is None or len(inside) < 2:
        return _expanded(emit, products, keep, make)
    have = {a for factors, _ in inside for f in factors for a in f.axes}
    within = [a for a in dict.fromkeys((*keep, *first.axes)) if a in have]
    inner = _nested(emit, inside, within, make)
    parts = [(contract(emit, [first, inner], keep, make), 1.0)]
    if outside:
        parts.append((_nested(emit, outside, keep, make), 1.0))
    return _add(emit, parts, keep, make)


def contract_sum(emit: Emitter, terms: Sequence[Term], out: tuple[Axis, ...], make: Any) -> Factor:
    """The value of a sum of products with the axes of ``out`` (those that any term has), as one factor."""
    parts: list[tuple[Factor, float]] = []
    early = [term for term in terms if term.stage < Stage.CANDIDATE]
    late = [term for term in terms if term.stage == Stage.CANDIDATE]
    if early and late:
        parts.append((contract_sum(emit, early, out, make), 1.0))
    else:
        late = list(terms)
    for group in _by_state(late, out):
        if len(group) == 1 or group[0].stage < Stage.CANDIDATE:
            parts += [(contract(emit, term.factors, out, make), term.scale) for term in group]
            continue
        products = [(term.factors, term.scale) for term in group]
        parts.append((emit.cheapest([
            partial(_operator, emit, group, out, _nested, make),
            partial(_operator, emit, group, out, _expanded, make),
            partial(_expanded, emit, products, out, make),
        ]), 1.0))
    return _add(emit, parts, out, make)


def _add(emit: Emitter, parts: Sequence[tuple[Factor, float]], out: Sequence[Axis], make: Any) -> Factor:
    from semel.sharing.expression import aligned

    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    stage = max(factor.stage for factor, _ in parts)
    have = {axis for factor, _ in parts for axis in factor.axes}
    axes = tuple(axis for axis in out if axis in have)
    if len(parts) == 1:
        factor, scale = parts[0]
        return make(emit.call(aten.mul.Scalar, factor.node, scale, flops=size_of(factor.axes)), factor.axes)
    parts = sorted(parts, key=lambda part: part[1] != 1.0)
    nodes = [(aligned(emit, factor, axes, stage), scale) for factor, scale in parts]
    total, scale = nodes[0]
    if scale != 1.0:
        total = emit.call(aten.mul.Scalar, total, scale)
    for node, scale in nodes[1:]:
        arguments: dict[str, Any] = {} if scale == 1.0 else {"alpha": scale}
        total = emit.call(aten.add.Tensor, total, node, flops=size_of(axes), **arguments)
    return make(total, axes)

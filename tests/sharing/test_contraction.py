"""The order of multiplying: the value is numpy's einsum in whatever order, and the order is the cheapest."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import check, costs, normal, shared_form
from torch import Tensor

from semel.sharing.axes import Axis
from semel.sharing.contraction import order
from semel.sharing.emission import Stage

REQUEST, CANDIDATE, CONSTANT = Stage.REQUEST, Stage.CANDIDATE, Stage.CONSTANT


def price(items: list[tuple[frozenset[Axis], Stage]], tree: Any, keep: frozenset[Axis], candidates: int) -> float:
    """Of a tree of products, by the rule of ``order``: two operations a multiply-add, four words' worth a result."""
    def visit(node: Any) -> tuple[frozenset[Axis], Stage, float, set[int]]:
        if isinstance(node, int):
            return *items[node], 0.0, {node}
        (a, s, p, i), (b, t, q, j) = visit(node[0]), visit(node[1])
        inside, axes, stage = i | j, a | b, max(s, t)
        outside = keep.union(*(items[k][0] for k in range(len(items)) if k not in inside))
        out = axes & outside
        times = candidates if stage == CANDIDATE else 1
        return out, stage, p + q + times * (2.0 * size(axes) + 4.0 * size(out)), inside

    return visit(tree)[2]


def size(axes: frozenset[Axis]) -> int:
    return int(np.prod([axis.size for axis in axes]))


def trees(leaves: tuple[int, ...]) -> list[Any]:
    if len(leaves) == 1:
        return [leaves[0]]
    found = []
    rest = leaves[1:]
    for n in range(len(rest)):
        for chosen in itertools.combinations(rest, n):
            left = (leaves[0], *chosen)
            right = tuple(leaf for leaf in rest if leaf not in chosen)
            found += [(a, b) for a in trees(left) for b in trees(right)]
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_cheapest_of_all_orders(data: st.DataObject) -> None:
    axes = [Axis(data.draw(st.integers(1, 9))) for _ in range(5)]
    n = data.draw(st.integers(2, 4))
    stages = data.draw(st.lists(st.sampled_from([CONSTANT, REQUEST]), min_size=n - 1, max_size=n - 1))
    items = [(frozenset(data.draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3))), stage)
             for stage in (*stages, CANDIDATE)]
    keep = frozenset(data.draw(st.lists(st.sampled_from(axes), max_size=2)))
    candidates = data.draw(st.sampled_from([1, 7, 500]))
    found, tree = order(items, keep, candidates)
    assert found == pytest.approx(price(items, tree, keep, candidates))
    assert found == pytest.approx(min(price(items, t, keep, candidates) for t in trees(tuple(range(n)))))


def test_what_has_no_candidate_is_multiplied_first_where_there_are_many() -> None:
    h, d, k = Axis(6), Axis(50), Axis(4)
    items = [(frozenset({h, d}), CONSTANT), (frozenset({d, k}), REQUEST), (frozenset({k}), CANDIDATE)]
    assert order(items, frozenset({h}), 500)[1] == (2, (0, 1)) or order(items, frozenset({h}), 500)[1] == ((0, 1), 2)
    few = order(items, frozenset({h}), 1)[1]
    assert few not in ((2, (0, 1)), ((0, 1), 2))


EINSUMS = ["bi,bj->bij", "bi,bi->b", "bij,bjk->bik", "bij,bkj->bik", "bij,bij->bi", "bij,bik->bjk", "bi,bjk->bijk"]


@pytest.mark.parametrize("equation", EINSUMS)
def test_products_of_both_sides_are_numpys(equation: str) -> None:
    left, right = equation.partition("->")[0].split(",")
    sizes = {"i": 3, "j": 4, "k": 5}
    user = normal(3, *(sizes[c] for c in left[1:]), seed=1)
    item = normal(7, *(sizes[c] for c in right[1:]), seed=2)

    def model(w: Any, user: Tensor, item: Tensor) -> Tensor:
        return torch.einsum(equation, user, item)

    shared = check(model, user, item)
    at = np.repeat(np.arange(3), [3, 0, 4])
    got = shared({"user": user}, {"item": item}, torch.tensor([0, 3, 3, 7]))
    np.testing.assert_allclose(got.numpy(), np.einsum(equation, user.numpy()[at], item.numpy()), rtol=0, atol=1e-12)


def test_a_chain_is_multiplied_from_the_side_that_is_cheap() -> None:
    """``u^T A B i``: the request's vector goes through both matrices once; a number a candidate is left."""
    def model(w: Any, user: Tensor, item: Tensor) -> Tensor:
        return ((user @ w.a) * (item @ w.b)).sum(1)

    shared = check(model, normal(3, 30), normal(7, 5), a=normal(30, 40, seed=1), b=normal(5, 40, seed=2))
    request, candidate, before = costs(shared)
    assert before >= 2 * (30 * 40 + 5 * 40) and candidate <= 2 * 5 + 5
    assert request <= 2 * (30 * 40 + 5 * 40) + 200


def test_few_candidates_do_not_pay_for_an_operator() -> None:
    from models import Function, untimed

    def model(w: Any, user: Tensor, item: Tensor) -> Tensor:
        return (user * (item @ w.b)) @ w.a

    parts = {"a": normal(40, 30, seed=1), "b": normal(5, 40, seed=2)}
    user, item = normal(2, 40), normal(2, 5)
    many = shared_form(model, user, item, **parts)
    few = untimed(Function(model, **parts).double().eval(), (user, item), ["user"], candidates_hint=1)
    assert costs(many)[1] < costs(few)[1] and costs(few)[0] < costs(many)[0]

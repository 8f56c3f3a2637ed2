"""One graph in three stages: what depends on parameters only, on the request, and on the candidate.

Rules emit ATen calls into an ``Emitter``; each node belongs to the latest stage of its arguments. Two operations join
the stages and are left open until the number of requests is known (``lowering``): ``spread`` copies a request's row to
each of its candidates, ``apply`` multiplies each candidate's row by its request's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


class Stage(IntEnum):
    CONSTANT = 0
    REQUEST = 1
    CANDIDATE = 2

    def __str__(self) -> str:
        return self.name.lower()


def spread(rows: Any, rank: int) -> Any:
    """[R, ...] -> [C, ...] of ``rank`` axes: every candidate gets its request's row. Replaced by ``lowering``."""
    raise NotImplementedError("spread is replaced before a graph runs")


def apply(operator: Any, state: Any, equation: str, shape: tuple[int, ...]) -> Any:
    """[R, ...], [C, *shape] -> [C, ...]: ``einsum`` of each candidate's row with its request's operator (the equation
    names no rows). Replaced by ``lowering``."""
    raise NotImplementedError("apply is replaced before a graph runs")


def rows(stage: int) -> Any:
    """R or C, an integer. Replaced by ``lowering``."""
    raise NotImplementedError("rows is replaced before a graph runs")


PRODUCTS = (apply, aten.linear.default, aten.einsum.default)
WORD = 8
"""Operations of a matrix product that take as long as one of a pointwise operator, which has to move data."""


class Emitter:
    """Builds the graph; equal calls are made once. ``candidates``: how many a request is expected to have, for
    the price of a node. ``origin``: the node of the exported graph that is being rewritten."""

    def __init__(self, candidates: int = 512) -> None:
        self.graph = fx.Graph()
        self.candidates = candidates
        self.origin: fx.Node | None = None
        self.constants: dict[str, torch.Tensor] = {}
        self._alike: dict[Any, list[str]] = {}  # names of constants, by what they are
        self._known: dict[Any, fx.Node] = {}
        self._made: list[tuple[fx.Node, Any]] = []
        self._uniform: dict[fx.Node, float | None] = {}

    def placeholder(self, name: str, stage: Stage) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["stage"] = stage
        return node

    def constant(self, value: torch.Tensor) -> fx.Node:
        """A tensor that is part of the graph."""
        digest = hash(value.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        alike = self._alike.setdefault((value.dtype, value.shape, digest), [])
        for name in alike:
            if torch.equal(self.constants[name], value):
                return self._known[name]
        name = f"constant_{len(self.constants)}"
        alike.append(name)
        self.constants[name] = value
        node = self._known[name] = self.graph.get_attr(name)
        node.meta["stage"] = Stage.CONSTANT
        return node

    def uniform(self, node: fx.Node) -> float | None:
        """The number that all elements of a constant are."""
        if node.op != "get_attr":
            return None
        if node not in self._uniform:
            value = self.constants[str(node.target)]
            same = bool(value.numel()) and not value.is_complex() and bool((value == value.reshape(-1)[0]).all())
            self._uniform[node] = float(value.reshape(-1)[0]) if same else None
        return self._uniform[node]

    def call(self, target: Any, *args: Any, stage: Stage | None = None, flops: int = 0,
             **kwargs: Any) -> fx.Node:
        """``flops``: a row's floating-point operations, two a multiply-add."""
        key = (target, _frozen(args), _frozen(kwargs), stage)
        if key in self._known:
            return self._known[key]
        node = self.graph.call_function(target, args, kwargs)
        if stage is None:
            stage = max((argument.meta["stage"] for argument in node.all_input_nodes), default=Stage.CONSTANT)
        node.meta.update(stage=stage, flops=flops, origin=self.origin)
        tags = getattr(target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags:
            self._known[key] = node
        self._made.append((node, key))
        return node

    def cheapest(self, ways: Sequence[Callable[[], Any]]) -> Any:
        """The result of the way whose calls cost least; the calls of the others are taken back. None is no
        way."""
        found = None
        for way in ways if len(ways) > 1 else ():
            start = len(self._made)
            result = way()
            price = self._price(start)
            self._undo(start)
            if result is not None and (found is None or price < found[0]):
                found = price, way
        return ways[0]() if len(ways) == 1 else found[1]() if found else None

    def _price(self, start: int) -> float:
        """Operations of the calls made since: a candidate's for all of them, a constant's hardly ever."""
        times = {Stage.CONSTANT: 0.1, Stage.REQUEST: 1.0, Stage.CANDIDATE: float(self.candidates)}
        return sum(times[node.meta["stage"]] * node.meta["flops"] * (1 if node.target in PRODUCTS else WORD)
                   for node, _ in self._made[start:])

    def _undo(self, start: int) -> None:
        while len(self._made) > start:
            node, key = self._made.pop()
            self._known.pop(key, None)
            self.graph.erase_node(node)

    def rows(self, stage: Stage) -> fx.Node:
        return self.call(rows, int(stage), stage=stage)

    def spread(self, node: fx.Node, stage: Stage, rank: int) -> fx.Node:
        """``node`` (of ``rank`` axes with its rows) with the rows of ``stage``; constants have none and stay."""
        if node.meta["stage"] == Stage.REQUEST and stage == Stage.CANDIDATE:
            return self.call(spread, node, rank, stage=Stage.CANDIDATE)
        return node

    # Shapes below are those behind the rows; ``lead`` is 1 where there are rows.
    def permute(self, node: fx.Node, order: Sequence[int], lead: int) -> fx.Node:
        if list(order) == list(range(len(order))):
            return node
        return self.call(aten.permute.default, node, [*range(lead), *(lead + i for i in order)])

    def reshape(self, node: fx.Node, shape: Sequence[int], lead: int) -> fx.Node:
        return self.call(aten.reshape.default, node, [*([-1] * lead), *shape])


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return (type(value), value) if isinstance(value, (bool, int, float)) else value

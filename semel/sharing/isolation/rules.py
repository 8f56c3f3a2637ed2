"""Rules of operators that move elements or look at one at a time: sides follow the elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

import semel.sharing.isolation.contractions
import semel.sharing.isolation.projections
import semel.sharing.isolation.rowwise  # noqa: F401  registers theirs
from semel.sharing.emission import aten
from semel.sharing.errors import Unproved
from semel.sharing.isolation.sided import BOTH, CANDIDATE, REQUEST, Sided, labelled
from semel.sharing.isolation.walk import Walk, rule

MOVES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.slice.Tensor, aten.select.int, aten.cat.default, aten.stack.default, aten.expand.default, aten.repeat.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.flip.default,
    aten.index_select.default, aten.index.Tensor, aten.narrow.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.tile.default,
    aten.repeat_interleave.self_int, aten.roll.default, aten.movedim.int, aten.diagonal.default,
    aten.constant_pad_nd.default, aten.pad.default, aten.tril.default, aten.triu.default, aten.alias.default,
)


VIEWS = (aten.view.default, aten._unsafe_view.default)


@rule(*MOVES)
def move(walk: Walk, node: Any, *args: Any, **kwargs: Any) -> Any:
    """Run on the sides themselves."""
    def sides(n: fx.Node) -> Any:
        value = walk.values[n]
        if not isinstance(value, Sided):
            return walk.sizes(n.meta["val"])
        if n in data:
            return value.sides
        if value.known is None:
            raise Unproved("it selects positions by numbers that only a run knows")
        return value.known

    data = _flat(node.args[:1])

    target = aten.reshape.default if node.target in VIEWS else node.target  # parts of a tensor may not be contiguous
    moved = target(*fx.map_arg(node.args, sides), **fx.map_arg(node.kwargs, sides))
    inputs = [walk.values[n] for n in node.all_input_nodes if isinstance(walk.values[n], Sided)]
    both = any(value.view is not None for value in inputs)
    made = walk.writer.call(target, *walk.written(node.args), **walk.written(node.kwargs))
    view = walk.writer.call(target, *walk.seen(node.args), **walk.seen(node.kwargs)) if both else None
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return labelled(made, view, moved)
    return [labelled(walk.writer.call(operator.getitem, made, i), None if view is None else
                     walk.writer.call(operator.getitem, view, i), s) for i, s in enumerate(moved)]


def _flat(args: Any) -> list[Any]:
    return [item for a in args for item in (_flat(a) if isinstance(a, (list, tuple)) else [a])]


@rule("pointwise", aten.dropout.default, aten.clone.default, aten._to_copy.default, aten.detach.default,
      aten.contiguous.default)
def pointwise(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Sided:
    """A result is the request's if all of its arguments are. Where a value in two versions meets one that is cut into
    sides, each side takes its version: a gate acts on request units by what request units make it."""
    inputs = {n: walk.values[n] for n in node.all_input_nodes if isinstance(walk.values[n], Sided)}
    shape = torch.broadcast_shapes(*(value.sides.shape for value in inputs.values()))
    fixed = walk.fixed(node.meta["val"])
    resolved: dict[fx.Node, Sided] = {}
    for n, value in inputs.items():
        others = [v.sides.expand(shape) for m, v in inputs.items() if m is not n and not v.constant]
        if bool((value.sides == BOTH).any()) and others:
            rest = torch.stack(others).amax(0)
            # it serves units of both sides, as a gate does: each gets its version
            serves = bool((value.sides.expand(shape)[rest == CANDIDATE] == BOTH).all())
            if serves and bool((rest == CANDIDATE).any()) and bool((rest == REQUEST).any()):
                resolved[n] = _resolved(walk, value, rest, shape, fixed)
    found = {n: resolved.get(n, value) for n, value in inputs.items()}
    sides = torch.stack([value.sides.expand(shape) for value in found.values()]).amax(0)
    flops = sides.numel() / 2

    def new(argument: Any, seen: bool) -> Any:
        return fx.map_arg(argument, lambda n: walk.values[n] if n not in found else
                          found[n].seen if seen else found[n].node)

    made = walk.writer.call(node.target, *new(node.args, False), flops=flops, **new(node.kwargs, False))
    view = None
    if any(value.view is not None for value in found.values()) and bool((sides < CANDIDATE).any()):
        view = walk.writer.call(node.target, *new(node.args, True), flops=flops, **new(node.kwargs, True))
    return labelled(made, view, sides)


def _resolved(walk: Walk, value: Sided, rest: Tensor, shape: Sequence[int], fixed: Sequence[bool]) -> Sided:
    if value.sides.dim() != len(shape):
        raise Unproved("it meets a tensor of another rank; give both the same number of axes")
    wide = value.sides.expand(shape)
    mask = (wide < CANDIDATE) & (rest == REQUEST)
    node = walk.writer.chosen(mask, value.seen, value.node, fixed)
    sides = torch.where(mask | (wide == REQUEST), REQUEST, CANDIDATE).to(torch.int8)
    node.meta["sides"] = _narrowed(sides, node.meta["sides"].shape)
    return Sided(node, node.meta["sides"])


def _narrowed(sides: Tensor, shape: Sequence[int]) -> Tensor:
    """Without the copies along axes where ``shape`` is one."""
    for dim, size in enumerate(shape):
        if size == 1 and sides.shape[dim] != 1:
            sides = sides.narrow(dim, 0, 1)
    return sides


@rule(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
      aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.empty_like.default)
def filled(walk: Walk, node: fx.Node, *args: Any, **kwargs: Any) -> Sided:
    """Of its argument, only the shape is used."""
    return walk.constant(node, [walk.values[n] for n in node.all_input_nodes if isinstance(walk.values[n], Sided)])


@rule(aten.native_dropout.default)
def native_dropout(walk: Walk, node: fx.Node, x: Sided, p: float, train: bool | None) -> list[Sided | None]:
    """Each version drops its own units."""
    def dropped(n: fx.Node) -> fx.Node:
        made = walk.writer.call(node.target, n, p, train)
        return walk.writer.call(operator.getitem, made, 0, flops=x.sides.numel() / 2)

    view = dropped(x.view) if x.view is not None else None
    return [labelled(dropped(x.node), view, x.sides), None]


@rule(aten.embedding.default)
def embedding(walk: Walk, node: fx.Node, table: Sided, index: Sided, *rest: Any) -> Sided:
    made = walk.writer.call(node.target, table.node, index.node, *rest)
    sides = index.sides.unsqueeze(-1).expand(walk.shape(node.meta["val"]))
    if bool((sides == BOTH).any()):
        raise Unproved("its index is computed from both sides")
    return labelled(made, None, sides)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm(walk: Walk, node: fx.Node, x: Sided, *rest: Any) -> list[Any]:
    """In eval mode a factor and a shift per channel."""
    given = walk.written(node.args[1:])

    def normed(n: fx.Node) -> fx.Node:
        return walk.writer.call(operator.getitem, walk.writer.call(node.target, n, *given), 0, flops=x.sides.numel())

    view = normed(x.view) if x.view is not None else None
    return [labelled(normed(x.node), view, x.sides), None, None]


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_train(walk: Walk, node: fx.Node, x: Sided, *rest: Any) -> list[Any]:
    """In train mode the statistics of a channel are over the rows of the batch, one for every candidate. Running
    statistics are those of what candidate units see."""
    given = walk.written(node.args[1:])
    per_channel = x.sides.transpose(0, 1).flatten(1).amax(1) if x.sides.dim() > 1 else x.sides
    sides = per_channel.reshape([1, -1] + [1] * (x.sides.dim() - 2)).expand_as(x.sides)
    made = walk.writer.call(node.target, x.node, *given)
    parts = [walk.writer.call(operator.getitem, made, i) for i in range(5)]
    parts[0].meta["flops"] = x.sides.numel()
    view = None
    if x.view is not None:
        second = walk.writer.call(node.target, x.view, *given)
        view = walk.writer.call(operator.getitem, second, 0, flops=x.sides.numel())
    out: list[Any] = [labelled(parts[0], view, sides)]
    for part in parts[1:]:
        found = torch.zeros(x.sides.shape[1], dtype=torch.int8)
        part.meta["sides"] = torch.full_like(found, CANDIDATE)
        out.append(Sided(part, part.meta["sides"]))
    return out

"""Computes what is asked for: a slice moves above the operators before it, as far as nobody else wants the rest.

A ranker that reads ``x[:, 0]`` or ``x[:, -1]`` of its last layer has computed that layer for every token. Here the
slice goes up through whatever treats its axis row by row: pointwise operators, linear layers, norms over other axes,
softmax along other axes, rows of a product of matrices, queries of attention. From graph to graph, before sides are
known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten

Rule = Callable[["_Slice", fx.Node], "fx.Node | None"]
RULES: dict[Any, Rule] = {}


def push_slices(graph: fx.Graph) -> None:
    """In place. Nodes that are made carry ``meta`` as the exporter's do: ``val``, and the place in the source."""
    for node in graph.nodes:
        if node.target is aten.slice.Tensor and _is_whole(*node.args):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:        # selecting is slicing and dropping an axis of size one
        if node.target is aten.select.int and isinstance(node.args[2], int):
            _select_as_slice(graph, node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.users:
            wanted = _wanted(node)
            if wanted is not None:
                _push(graph, node, wanted)
    graph.eliminate_dead_code()


def _is_whole(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    """``x[:]``, which the exporter writes for every leading axis of an index."""
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))


class _Slice:
    """``positions`` start to end of axis ``dim``, and a way to make nodes before ``at``."""

    def __init__(self, graph: fx.Graph, at: fx.Node, dim: int, start: int, end: int) -> None:
        self.graph, self.at, self.dim, self.start, self.end = graph, at, dim, start, end

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: self.at.meta[key] for key in ("stack_trace", "nn_module_stack") if key in self.at.meta})
        known, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with _mode(self.at):
            node.meta["val"] = target(*known, **named)
        return node

    def of(self, node: Any, dim: int | None = None) -> Any:
        """The slice of an argument; ``dim``: from the left, else as in the result, counted from the right."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
            return node
        rank = node.meta["val"].dim()
        if dim is None:
            dim = self.dim - (self.at.meta["val"].dim() - rank)
        if dim < 0 or node.meta["val"].shape[dim] == 1:
            return node
        return self.call(aten.slice.Tensor, node, dim, self.start, self.end)

    def again(self, *args: Any) -> fx.Node:
        return self.call(self.at.target, *args, **self.at.kwargs)


def _mode(node: fx.Node) -> Any:
    mode = getattr(node.meta["val"], "fake_mode", None)
    return mode if mode is not None else torch.no_grad()


def _select_as_slice(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    source, dim, index = given
    if not isinstance(source.meta.get("val"), Tensor) or source.op == "placeholder":
        return
    size = source.meta["val"].shape[dim]
    dim %= source.meta["val"].dim()
    if not isinstance(size, int) or size == 1:
        return
    index %= size
    here = _Slice(graph, node, dim, index, index + 1)
    node.replace_all_uses_with(here.call(aten.squeeze.dim, here.of(source, dim), dim))
    graph.erase_node(node)


def _range(user: fx.Node) -> tuple[int, int, int] | None:
    """(dim, start, end) of a slice along an axis that is not the batch."""
    source: Any = user.args[0]
    shape = source.meta["val"].shape
    given: tuple[Any, ...] = (*user.args[1:], *(0, None, None, 1)[len(user.args) - 1 :])
    dim, start, end, step = given
    dim %= len(shape)
    size = shape[dim]
    if step != 1 or not isinstance(size, int) or any(isinstance(a, fx.Node) for a in (start, end)):
        return None
    first, last, _ = slice(start, end).indices(size)
    return (dim, first, last) if last > first and last - first < size else None


def _wanted(node: fx.Node) -> tuple[int, int, int] | None:
    """The slice that all users of a node are, if they are one."""
    if not isinstance(node.meta.get("val"), Tensor) or node.target is aten.slice.Tensor:
        return None
    found = {_range(user) if user.target is aten.slice.Tensor and user.args[0] is node else None for user in node.users}
    return found.pop() if len(found) == 1 else None


def _push(graph: fx.Graph, node: fx.Node, wanted: tuple[int, int, int]) -> None:
    rule = RULES.get(node.target)
    tags = getattr(node.target, "tags", ())
    if rule is None and torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        rule = pointwise
    if rule is None or node.meta["val"].shape[wanted[0]] == 1:
        return
    made = rule(_Slice(graph, node, *wanted), node)
    if made is None:
        return
    made.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
    for user in list(node.users):
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


@_rule(aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default)
def pointwise(s: _Slice, node: fx.Node) -> fx.Node | None:
    if any(isinstance(a, fx.Node) and not isinstance(a.meta.get("val"), Tensor) for a in node.all_input_nodes):
        return None
    return s.again(*(s.of(argument) for argument in node.args))


@_rule(aten.dropout.default)
def dropout(s: _Slice, node: fx.Node) -> fx.Node | None:
    if node.args[2]:        # in training it would draw other numbers
        return None
    return s.again(s.of(node.args[0], s.dim), *node.args[1:])


@_rule(aten.linear.default)
def linear(s: _Slice, node: fx.Node) -> fx.Node | None:
    return s.again(s.of(node.args[0], s.dim), *node.args[1:]) if s.dim < node.meta["val"].dim() - 1 else None


@_rule(aten.layer_norm.default)
def layer_norm(s: _Slice, node: fx.Node) -> fx.Node | None:
    fixed: Any = node.args[1]
    if s.dim >= node.meta["val"].dim() - len(fixed):
        return None
    return s.again(s.of(node.args[0], s.dim), *node.args[1:])


@_rule(aten.softmax.int, aten._softmax.default)
def softmax(s: _Slice, node: fx.Node) -> fx.Node | None:
    along: Any = node.args[1]
    if along % node.meta["val"].dim() == s.dim:
        return None
    return s.again(s.of(node.args[0], s.dim), *node.args[1:])


@_rule(aten.matmul.default, aten.bmm.default)
def product(s: _Slice, node: fx.Node) -> fx.Node | None:
    pair: Any = node.args
    x, y = pair
    rank = node.meta["val"].dim()
    if any(a.meta["val"].dim() != rank for a in (x, y)):
        return None
    if s.dim == rank - 2:
        return s.again(s.of(x, s.dim), y)
    return s.again(x, s.of(y, s.dim)) if s.dim == rank - 1 else None


@_rule(aten.scaled_dot_product_attention.default)
def attention(s: _Slice, node: fx.Node) -> fx.Node | None:
    """Queries that nobody reads are not asked. A causal mask is written out: its rows have lost their places."""
    if s.dim != node.meta["val"].dim() - 2:
        return None
    given: tuple[Any, ...] = (*node.args, *(None, None, None, None, 0.0, False)[len(node.args) :])
    q, k, v, mask, p, causal = given
    named = dict(node.kwargs)
    mask, p, causal = named.pop("attn_mask", mask), named.pop("dropout_p", p), named.pop("is_causal", causal)
    if p or (causal and mask is not None):
        return None
    if causal:
        rows, columns = q.meta["val"].shape[-2], k.meta["val"].shape[-2]
        if not isinstance(columns, int):
            return None
        ones = s.call(aten.ones.default, [rows, columns], dtype=torch.bool, device=q.meta["val"].device)
        tril = s.call(aten.tril.default, ones)
        mask = s.call(aten.slice.Tensor, tril, 0, s.start, s.end)
    elif mask is not None:
        mask = s.of(mask, mask.meta["val"].dim() - 2)
    return s.call(node.target, s.of(q, s.dim), k, v, mask, 0.0, False, **named)


@_rule(aten.permute.default)
def permute(s: _Slice, node: fx.Node) -> fx.Node | None:
    order: Any = node.args[1]
    return s.again(s.of(node.args[0], order[s.dim] % len(order)), order)


@_rule(aten.transpose.int)
def transpose(s: _Slice, node: fx.Node) -> fx.Node | None:
    dims: Any = node.args[1:]
    a, b = (dim % node.meta["val"].dim() for dim in dims)
    return s.again(s.of(node.args[0], {a: b, b: a}.get(s.dim, s.dim)), a, b)


@_rule(aten.unsqueeze.default)
def unsqueeze(s: _Slice, node: fx.Node) -> fx.Node | None:
    given: Any = node.args[1]
    new = given % node.meta["val"].dim()
    return s.again(s.of(node.args[0], s.dim - (s.dim > new)), new)


@_rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def view(s: _Slice, node: fx.Node) -> fx.Node | None:
    """Where the same axis, with the same axes before it, is there before the view."""
    source: Any = node.args[0]
    before, after = source.meta["val"].shape, node.meta["val"].shape
    sizes, wanted = ([str(size) for size in shape[: s.dim + 1]] for shape in (before, after))
    if s.dim >= len(before) or sizes != wanted:
        return None
    given: Any = node.args[1]
    shape = list(given)
    shape[s.dim] = s.end - s.start
    return s.call(aten.reshape.default, s.of(source, s.dim), shape)


@_rule(aten.cat.default)
def cat(s: _Slice, node: fx.Node) -> fx.Node | None:
    given: tuple[Any, ...] = (*node.args, 0)
    pieces, dim = given[0], given[1] % node.meta["val"].dim()
    if dim != s.dim:
        return s.again([s.of(piece, s.dim) for piece in pieces], dim)
    start: int = 0
    for piece in pieces:        # inside one piece: the others are not wanted
        size = piece.meta["val"].shape[dim]
        if not isinstance(size, int):
            return None
        if start <= s.start and s.end <= start + size:
            if s.end - s.start == size:
                return piece
            return s.call(aten.slice.Tensor, piece, dim, s.start - start, s.end - start)
        start += size
    return None

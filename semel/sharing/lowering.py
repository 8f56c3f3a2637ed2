"""From one graph in three stages to three graph modules, for one request or for any number of them.

``single``: one request. Its rows broadcast against the candidates', and an operator is an ordinary matrix. Otherwise a
request's row is copied to its candidates by index, and operators meet their candidates in a padded table
``[R, slots]``.
"""

from __future__ import annotations

import math
import operator as operator_module
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from semel.sharing.emission import Emitter, Stage, apply, aten, rows, spread
from semel.sharing.lookup import group

OWNER, SLOT, TABLE = "owner", "slot", "table"


@dataclass(frozen=True, eq=False)
class Program:
    """One stage: ``module(*inputs)`` gives ``outputs``; inputs and outputs by name."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower(emit: Emitter, outputs: Sequence[Any], single: bool) -> dict[Stage, Program]:
    """A program for each stage. Outputs of the last stage are ``output:i``; of the others, the names of nodes."""
    wanted = [node for node in outputs if isinstance(node, fx.Node)]
    live = reachable(wanted)
    nodes = [node for node in emit.graph.nodes if node in live]
    crossing = {argument for node in nodes for argument in node.all_input_nodes
                if argument.meta["stage"] < node.meta["stage"] and _made(argument)}
    crossing |= {node for node in wanted if node.meta["stage"] < Stage.CANDIDATE and _made(node)}
    return {stage: _program(emit, nodes, stage, crossing, outputs, single) for stage in Stage}


def _made(node: fx.Node) -> bool:
    return node.op == "call_function"


def reachable(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all that they need."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return seen


def _program(emit: Emitter, nodes: Sequence[fx.Node], stage: Stage, crossing: set[fx.Node], outputs: Sequence[Any],
             single: bool) -> Program:
    graph = fx.Graph()
    inputs: dict[str, fx.Node] = {}
    made: dict[fx.Node, fx.Node] = {}
    mine = [node for node in nodes if _made(node) and node.meta["stage"] == stage]
    others = {argument for node in mine for argument in node.all_input_nodes}
    if stage == Stage.CANDIDATE:
        others.update(node for node in outputs if isinstance(node, fx.Node))
    others -= set(mine)
    for name in (OWNER, SLOT, TABLE):
        inputs[name] = graph.placeholder(name)
    for node in nodes:  # in the order of the graph, whatever uses them
        if node in others and node.op != "get_attr":
            name = str(node.target) if node.op == "placeholder" else node.name
            made[node] = inputs[name] = graph.placeholder("input_" + "".join(c if c.isalnum() else "_" for c in name))
    for node in nodes:
        if node in others and node.op == "get_attr":
            made[node] = graph.get_attr(str(node.target))

    for node in mine:
        made[node] = _lowered(graph, node, made.__getitem__, inputs.__getitem__, single)
    if stage == Stage.CANDIDATE:
        names = [f"output:{i}" for i, _ in enumerate(outputs)]
        results = [made[node] if isinstance(node, fx.Node) else node for node in outputs]
    else:
        results = [made[node] for node in mine if node in crossing]
        names = [node.name for node in mine if node in crossing]
    graph.output(tuple(results))
    for name in (OWNER, SLOT, TABLE):
        if not inputs[name].users:
            graph.erase_node(inputs.pop(name))
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr" and not hasattr(root, node.target):
            root.register_buffer(node.target, emit.constants[node.target], persistent=False)
    group(graph, root)
    graph.lint()
    return Program(fx.GraphModule(root, graph), tuple(inputs), tuple(names))


def _lowered(graph: fx.Graph, node: fx.Node, local: Any, given: Any, single: bool) -> fx.Node:
    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    arguments: tuple[Any, ...] = node.args
    if node.target is rows:
        if node.args[0] == Stage.CANDIDATE:
            return call(aten.sym_size.int, given(OWNER), 0)
        return 1 if single else call(aten.sym_size.int, given(TABLE), 0)  # type: ignore[return-value]
    if node.target is spread:
        x, rank = local(arguments[0]), arguments[1]
        if single:
            return call(aten.expand.default, x, [call(aten.sym_size.int, given(OWNER), 0), *([-1] * (rank - 1))])
        return call(aten.index_select.default, x, 0, given(OWNER))
    if node.target is apply:
        operator, state, equation, shape = arguments
        return _apply(graph, local(operator), local(state), equation, shape, given, single)
    args, kwargs = fx.map_arg(node.args, local), fx.map_arg(node.kwargs, local)
    made = graph.call_function(cast(Any, node.target), args, kwargs)
    made.meta["index_axes"] = node.meta.get("index_axes")
    return made


def _apply(graph: fx.Graph, operator: fx.Node, state: fx.Node, equation: str, shape: Sequence[int], given: Any,
           single: bool) -> fx.Node:
    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    plain = equation == "oi,...i->...o"
    left, _, right = equation.partition("->")
    first, _, second = left.partition(",")
    if single:
        matrix = call(aten.select.int, operator, 0, 0)
        if plain:
            return call(aten.linear.default, state, matrix)
        return call(aten.einsum.default, f"{first},z{second}->z{right}", [matrix, state])
    requests, slots = (call(aten.sym_size.int, given(TABLE), dim) for dim in (0, 1))
    places = call(torch.ops.aten.sym_numel.default, given(TABLE))
    table = call(aten.new_zeros.default, state, [places, *shape])
    table = call(aten.index_copy.default, table, 0, given(SLOT), state)
    if plain:
        inner = shape[-1]
        rows_each = call(operator_module.mul, slots, math.prod(shape[:-1]))
        table = call(aten.reshape.default, table, [requests, rows_each, inner])
        out = call(aten.bmm.default, table, call(aten.transpose.int, operator, 1, 2))
        width = call(aten.sym_size.int, operator, 1)
        out = call(aten.reshape.default, out, [places, *shape[:-1], width])
    else:
        table = call(aten.reshape.default, table, [requests, slots, *shape])
        out = call(aten.einsum.default, f"z{first},zN{second}->zN{right}", [operator, table])
        out = call(aten.flatten.using_ints, out, 0, 1)
    return call(aten.index_select.default, out, 0, given(SLOT))

"""Random valid inputs of a model, from examples of them and from what its graph does with them.

Ids that reach an embedding table (through views, slices and casts) are drawn from the whole table; other numbers are
rows of the examples. Floating-point values are scaled by 0.7 to 1, so that signs, zeros and upper bounds stay.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from semel.sharing.cost import VIEWS, packet
from semel.sharing.export import ModelGraph

aten = torch.ops.aten
_MOVES = VIEWS | {aten._to_copy, aten.clone, aten.contiguous, aten.index_select, aten.cat, aten.stack}


class Drawing:
    """``tables``: of each input that has ids, by column, the rows of the table that it reaches (0: none)."""

    def __init__(self, model: ModelGraph, examples: Sequence[Tensor], seed: int) -> None:
        self.examples = list(examples)
        self.tables = _tables(model, self.examples)
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, count: int) -> list[Tensor]:
        """``count`` rows of every input, in order; one row of examples gives a row of all of them."""
        length = len(self.examples[0])
        chosen = torch.randint(length, (count,), generator=self.generator)
        return [self._rows(place, tensor[chosen.to(tensor.device)]) for place, tensor in enumerate(self.examples)]

    def _rows(self, place: int, rows: Tensor) -> Tensor:
        table = self.tables.get(place)
        if rows.dtype.is_floating_point:
            scale = 0.7 + 0.3 * torch.rand(rows.shape, generator=self.generator)
            rows = rows if table is not None and bool((table > 0).all()) else rows * scale.to(rows)
        if table is None:
            return rows
        ids = torch.rand(rows.shape, generator=self.generator) * table
        return torch.where(table.to(rows.device) > 0, ids.floor().to(rows), rows)


def _tables(model: ModelGraph, examples: Sequence[Tensor]) -> dict[int, Tensor]:
    """Follows the number of each column through the operators that only move values, up to the lookups."""
    nodes = {node.name: node for node in model.graph.nodes}
    found: dict[int, Tensor] = {}
    for place, (name, example) in enumerate(zip(model.user, examples, strict=True)):
        columns = torch.arange(example[0].numel()).reshape(example.shape[1:])
        moved: dict[fx.Node, Any] = {nodes[name]: columns.expand(example.shape).to(torch.float64)}
        sizes = torch.zeros(example[0].numel(), dtype=torch.int64)
        for node in model.graph.nodes:
            if node.op != "call_function":
                continue
            if packet(node.target) is aten.embedding and node.args[1] in moved:
                reached = moved[node.args[1]].reshape(-1).long()
                table = node.args[0].meta["val"].shape[0]
                before = sizes[reached]
                sizes[reached] = torch.where(before > 0, before.clamp(max=table), table)
            elif (packet(node.target) in _MOVES or node.target is operator.getitem) and node.all_input_nodes and all(
                    n in moved or _size(n, model, len(example)) is not None for n in node.all_input_nodes):
                moved[node] = _moved(node, moved, model, len(example))
        if bool((sizes > 0).any()):
            found[place] = sizes.reshape(example.shape[1:])
    return found


def _size(node: fx.Node, model: ModelGraph, batch: int) -> int | None:
    """A size among an operator's arguments, with the examples' batch."""
    value = node.meta.get("val")
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        size, batched = model.size(value)
        return size * batch if batched else size
    return None


def _moved(node: fx.Node, moved: Mapping[fx.Node, Any], model: ModelGraph, batch: int) -> Any:
    def given(argument: fx.Node) -> Any:
        return moved[argument] if argument in moved else _size(argument, model, batch)

    args = cast("tuple[Any, ...]", fx.map_arg(node.args, given))
    kwargs = cast("dict[str, Any]", fx.map_arg(node.kwargs, given))
    target: Any = node.target
    return args[0] if packet(target) is aten._to_copy else target(*args, **kwargs)

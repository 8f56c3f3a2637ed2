"""Walks a model's graph, gives every value its sides, and writes the isolated graph.

An operator whose arguments are all on one side stays as it is. One that meets both sides has a rule, which keeps
request units free of candidate units and says on which side its results are. Without a rule: SharingError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import Stage, aten
from semel.sharing.errors import SharingError, Unproved
from semel.sharing.export import ModelGraph, place
from semel.sharing.inputs import Input, Signature
from semel.sharing.isolation.sided import BOTH, CANDIDATE, REQUEST, ROWS, Sided, Writer

RULES: dict[Any, Callable[..., Any]] = {}
CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "_functional_assert")
SCALARS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def rule(*targets: Any) -> Callable[[Any], Any]:
    """Registers ``function(walk, node, *args, **kwargs)``: arguments as the operator has them, a ``Sided`` for each
    tensor; it returns the Sided of the result (or a list). Unproved: this case is not covered."""
    def register(function: Any) -> Any:
        for target in targets:
            RULES[target] = function
        return function

    return register


@dataclass(frozen=True)
class Piece:
    """A parameter of the isolated model: ``rows`` and ``columns`` (None: all) of the first two axes of ``source``."""

    name: str
    source: str
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        for dim, index in enumerate((self.rows, self.columns)):
            if index is not None:
                tensor = tensor.index_select(dim, torch.tensor(index, device=tensor.device))
        return tensor


@dataclass
class Walk:
    """``split``: request units by module, as the caller gave them; ``splits``: as they were chosen; ``compact``:
    weights that are zero are dropped; ``pieces``: parameters by placeholder of the new graph."""

    model: ModelGraph
    compact: bool
    split: Mapping[str, Any]
    writer: Writer = field(default_factory=Writer)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    splits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pieces: dict[fx.Node, Piece] = field(default_factory=dict)
    folded: dict[fx.Node, tuple[bool, ...]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------- facts
    def sizes(self, value: Any) -> Any:
        """Sizes at a batch of ROWS."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return int(value.node.expr.subs(self.model.batch, ROWS))
        return value

    def shape(self, value: Tensor) -> list[int]:
        return [self.sizes(size) for size in value.shape]

    def fixed(self, value: Tensor) -> tuple[bool, ...]:
        """Of each axis: the batch is not in it."""
        return tuple(isinstance(size, int) for size in value.shape)

    def numbers(self, argument: Any) -> Any:
        """An argument with sizes in place of nodes that stand for them, tensors by what is known of them."""
        return fx.map_arg(argument, lambda n: self.sizes(n.meta["val"]) if isinstance(n.meta["val"], SCALARS)
                          else self.values[n].known)

    def written(self, argument: Any) -> Any:
        """An argument with nodes of the new graph in place of the old one's."""
        def new(node: fx.Node) -> Any:
            value = self.values[node]
            return value.node if isinstance(value, Sided) else value
        return fx.map_arg(argument, new)

    def seen(self, argument: Any) -> Any:
        """The same, as request units may use it."""
        def new(node: fx.Node) -> Any:
            value = self.values[node]
            return value.seen if isinstance(value, Sided) else value
        return fx.map_arg(argument, new)

    # ------------------------------------------------------------------------------------------------- the walk
    def run(self, node: Any) -> Any:
        self.writer.origin = node
        if any(name in str(node.target) for name in CHECKS):
            return None
        value = node.meta.get("val")
        if isinstance(value, SCALARS):
            return self.writer.call(node.target, *self.written(node.args), **self.written(node.kwargs))
        if node.target is operator.getitem:
            return self.values[node.args[0]][node.args[1]]
        arguments = [self.values[n] for n in node.all_input_nodes if isinstance(self.values[n], (Sided, list))]
        flat = [a for item in arguments for a in (item if isinstance(item, list) else [item]) if a is not None]
        if all(a.constant for a in flat):
            return self.constant(node, flat)
        args, kwargs = (fx.map_arg(x, lambda n: self.values[n]) for x in (node.args, node.kwargs))
        function = RULES.get(node.target)
        if function is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            function = RULES["pointwise"]
        try:
            if function is not None:
                return function(self, node, *args, **kwargs)
            raise Unproved("there is no rule for it")
        except Unproved as reason:
            if any(a.split for a in flat):
                raise SharingError(
                    f"{node.target} at {place(node) or node.name} meets units of both sides, and isolate cannot keep "
                    f"them apart: {reason}. Compute it for request and candidate units apart and concatenate the "
                    "results, or add a rule to semel.sharing.isolation") from None
            return self.whole(node, flat)

    def ahead(self, node: fx.Node, later: Container[fx.Node], free: Container[Any]) -> Any:
        """The value of a node whose turn has not come, if it is made of known ones by ``free`` operators only."""
        if node not in self.values:
            if node in later or node.op != "call_function" or node.target not in free:
                return None
            for n in node.all_input_nodes:
                if self.ahead(n, later, free) is None and not isinstance(n.meta.get("val"), SCALARS):
                    return None
            origin = self.writer.origin
            self.values[node] = self.run(node)
            self.writer.origin = origin
        return self.values[node]

    def whole(self, node: Any, arguments: Sequence[Sided]) -> Any:
        """The operator as it is: the candidate's, unless all arguments are the request's."""
        side = max((int(a.sides.max()) for a in arguments if a.sides.numel()), default=REQUEST)
        side = CANDIDATE if side == BOTH else side
        made = self.writer.call(node.target, *self.written(node.args), **self.written(node.kwargs))
        return self.results(node, made, side)

    def results(self, node: Any, made: fx.Node, side: int, constant: bool = False) -> Any:
        def wrapped(made: fx.Node, value: Tensor) -> Sided:
            sides = torch.full(self.shape(value), side, dtype=torch.int8)
            made.meta.update(sides=sides, share=float(side == REQUEST),
                             flops=made.meta.get("flops") or sides.numel() / ROWS)
            return Sided(made, sides, constant=constant)

        value = node.meta["val"]
        if isinstance(value, Tensor):
            return wrapped(made, value)
        return [wrapped(self.writer.call(operator.getitem, made, i), v) if isinstance(v, Tensor) else None
                for i, v in enumerate(value)]

    def constant(self, node: Any, arguments: Sequence[Sided]) -> Any:
        """What depends on parameters and numbers alone."""
        made = self.writer.call(node.target, *self.written(node.args), **self.written(node.kwargs))
        result = self.results(node, made, REQUEST, constant=True)
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return result
        made.meta["flops"] = 0.0
        if all(a.known is not None for a in arguments) and all(self.fixed(value)) and \
                torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            with torch.no_grad():
                known = node.target(*self.numbers(node.args), **self.numbers(node.kwargs))
            return Sided(made, result.sides, constant=True, known=known)
        source = arguments[0] if len(arguments) == 1 else None
        if source is not None and source.parameter and value.dim() == 2 and \
                node.target in (aten.t.default, aten.transpose.int, aten.permute.default) and \
                tuple(value.stride()) != tuple(node.args[0].meta["val"].stride()):
            return Sided(made, result.sides, constant=True, parameter=source.parameter,
                         transposed=not source.transposed)
        return result

    # ------------------------------------------------------------------------------------------------- placeholders
    def parameter(self, piece: Piece, sides: Tensor) -> fx.Node:
        for node, known in self.pieces.items():
            if known == piece:
                return node
        first = next(iter(self.writer.graph.nodes), None)
        with self.writer.graph.inserting_before(first) if first is not None else nullcontext():
            node = self.writer.graph.placeholder(f"parameter_{len(self.pieces)}")
        node.meta["sides"] = sides
        self.pieces[node] = piece
        return node

    def placeholders(self, signature: Signature, tensors: Callable[[str], Tensor]) -> Iterator[tuple[fx.Node, Any]]:
        inputs = iter(signature.inputs)
        for node in self.model.graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            if node.name in self.model.parameters:
                name = self.model.parameters[node.name]
                tensor = tensors(name)
                sides = torch.zeros(tensor.shape, dtype=torch.int8)
                known = None if tensor.dtype.is_floating_point else tensor
                yield node, Sided(self.parameter(Piece(name, name), sides), sides, constant=True, known=known,
                                  parameter=name)
            elif node.name in self.model.lifted:
                tensor = self.model.lifted[node.name].detach().clone()
                yield node, Sided(self.writer.constant(tensor), torch.zeros(tensor.shape, dtype=torch.int8),
                                  constant=True, known=tensor)
            elif isinstance(value, Tensor):
                item = next(inputs)
                made = self.writer.graph.placeholder(f"input_{node.name}")
                made.meta["sides"] = _sides_of(item, self.shape(value))
                yield node, Sided(made, made.meta["sides"])
            else:
                yield node, None


def _sides_of(item: Input, shape: Sequence[int]) -> Tensor:
    sides = torch.full(list(shape), REQUEST if item.stage == Stage.REQUEST else CANDIDATE, dtype=torch.int8)
    if item.columns is not None:
        sides[:, torch.from_numpy(item.columns)] = REQUEST
    return sides


def walk(model: ModelGraph, signature: Signature, tensors: Callable[[str], Tensor], compact: bool,
         split: Mapping[str, Any]) -> tuple[Walk, list[Any]]:
    """The isolated graph, and the model's outputs (with what it updates) as Sided values."""
    import semel.sharing.isolation.rules  # noqa: F401  registers them

    walker = Walk(model, compact, split)
    walker.values.update(walker.placeholders(signature, tensors))
    for node in model.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            continue
        if node.op != "call_function":
            raise SharingError(f"the graph has a node of kind {node.op} ({node.name}); inline control flow")
        if node not in walker.values:
            walker.values[node] = walker.run(node)
    outputs = [walker.values[item] if isinstance(item, fx.Node) else item for item in model.outputs]
    outputs += [walker.values[item] for item in model.mutated]
    results = [item.node if isinstance(item, Sided) else item for item in outputs]
    walker.writer.graph.output(tuple(results))
    walker.writer.graph.eliminate_dead_code()
    for node in list(walker.pieces):
        if not node.users:
            walker.writer.graph.erase_node(node)
            del walker.pieces[node]
    return walker, outputs


__all__ = ["Piece", "Walk", "rule", "walk"]

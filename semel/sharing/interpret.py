"""Walks a model's graph and gives every node a value: by its rule, else for every candidate.

The default is to broadcast: all arguments are spread to the candidates and the operator runs as the model wrote it.
A rule may do better; where it has no proof it raises ``Unproved`` and the default is taken.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from semel.sharing.axes import BATCH, Axis, Block, Group
from semel.sharing.blocks import materialize
from semel.sharing.cost import row_flops
from semel.sharing.emission import Emitter, Stage, aten
from semel.sharing.errors import MixesRows, SharingError, Unproved
from semel.sharing.export import ModelGraph, place
from semel.sharing.expression import Expression, Factor
from semel.sharing.inputs import Signature
from semel.sharing.values import NO_BLOCK, Value, leaf

RULES: dict[Any, Callable[..., Any]] = {}
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "_functional_assert")


def rule(*targets: Any) -> Callable[[Any], Any]:
    """Registers ``function(rewriter, node, *args, **kwargs)`` for operators of the exported graph.

    Arguments are those of the operator with a ``Value`` for every tensor; it returns a Value (or a list of them), or
    raises Unproved. A keyword that the function does not name is refused.
    """
    def register(function: Any) -> Any:
        for target in targets:
            RULES[target] = function
        return function

    return register


@dataclass(frozen=True, eq=False)
class Opaque:
    """A tensor whose axes are not understood: [as the model has it], computed for every candidate."""

    node: fx.Node


@dataclass
class Rewriter:
    model: ModelGraph
    emit: Emitter = field(default_factory=Emitter)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    unshared: dict[fx.Node, str] = field(default_factory=dict)
    """Why an operator with request-side arguments is computed for every candidate."""
    bounds: dict[fx.Node, Any] = field(default_factory=dict)
    """Of masks, by node (``masks``)."""
    training: bool = False

    def dtype(self, node: fx.Node) -> torch.dtype:
        return node.meta["val"].dtype

    def shape(self, node: fx.Node) -> tuple[tuple[int, bool], ...]:
        return self.model.shape(node.meta["val"])

    def run(self, node: fx.Node) -> Any:
        self.emit.origin = node
        if node.target is operator.getitem:
            source, index = node.args
            found = self.values[cast(fx.Node, source)]
            if isinstance(found, Opaque):
                return self.broadcast(node)
            return found[index]
        if any(name in str(node.target) for name in _CHECKS):
            return None
        value = node.meta.get("val")
        if isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None  # sizes are taken from the values' shapes
        args = fx.map_arg(node.args, lambda n: self.values[n] if self.values.get(n) is not None else n)
        kwargs = fx.map_arg(node.kwargs, lambda n: self.values[n] if self.values.get(n) is not None else n)
        folded = self.folded(node)
        if folded is not None:
            return folded
        tags = getattr(node.target, "tags", ())
        random = torch.Tag.nondeterministic_seeded in tags
        alike = torch.Tag.pointwise in tags and not random
        function = RULES.get(node.target) or (pointwise if alike else None)
        flat = [a for a in _flat((args, kwargs)) if isinstance(a, (Value, Opaque, list))]
        try:
            if function is None:
                raise Unproved("no rule")
            if any(isinstance(a, Opaque) for a in flat):
                raise Unproved("an argument is not understood")
            try:
                inspect.signature(function).bind(self, node, *args, **kwargs)
            except TypeError as error:
                raise Unproved(f"an argument the rule does not take ({error})") from error
            return function(self, node, *args, **kwargs)
        except MixesRows as reason:
            raise SharingError(f"{node.name} ({node.target}) mixes the rows of a batch ({reason}), so that a score "
                               f"depends on the other candidates; compute it a row, or outside the model{_at(node)}"
                               ) from None
        except Unproved as reason:
            if random and not self.training and _draws(node):
                raise SharingError(f"{node.name} ({node.target}) draws random numbers; call eval(), or draw them "
                                   f"outside the model{_at(node)}") from None
            if any((isinstance(a, Value) and a.batched and a.stage == Stage.REQUEST) or
                   (isinstance(a, Value) and a.mixed) for a in flat):
                self.unshared[node] = str(reason)
            return self.broadcast(node)

    def folded(self, node: fx.Node) -> Value | None:
        """The value of a node that depends on no parameter and no input."""
        inputs = [self.values.get(n) for n in node.all_input_nodes]
        if any(not isinstance(v, Value) or v.known is None for v in inputs):
            return None
        result = node.meta.get("val")
        if not isinstance(result, Tensor) or any(batched for _, batched in self.model.shape(result)):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        with torch.no_grad():
            known = cast(Any, node.target)(*fx.map_arg(node.args, lambda n: self.values[n].known),
                                           **fx.map_arg(node.kwargs, lambda n: self.values[n].known))
        return self.known(known)

    def known(self, tensor: Tensor) -> Value:
        node, groups = compact(self.emit, self.emit.constant(tensor.detach().clone()), list(tensor.shape))
        return leaf(node, groups, tensor.dtype, tensor)

    def size(self, argument: Any, stage: Stage) -> Any:
        """A size among an operator's arguments, as a node where it follows the batch."""
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta["val"]
        if isinstance(value, (int, float, bool)):
            return value
        try:
            size, _ = self.model.size(value)
        except (SharingError, AttributeError) as error:
            raise SharingError(f"{argument.name} follows the batch size in a way that cannot be shared "
                               f"({place(argument)})") from error
        rows = self.emit.rows(stage)
        from semel.sharing.blocks import times
        return rows if size == 1 else self.emit.call(times, rows, size, stage=stage)

    def broadcast(self, node: fx.Node) -> Any:
        """The operator as the model has it, for every candidate."""
        return self.whole(node, Stage.CANDIDATE)

    def whole(self, node: fx.Node, stage: Stage) -> Any:
        """The operator as the model has it, on whole tensors with the rows of ``stage``; parameters stay constant."""
        found = [self.values.get(n) for n in node.all_input_nodes]
        flat = [item for value in found for item in (value if isinstance(value, list) else [value])]
        shapes = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else \
            [v for v in node.meta["val"] if isinstance(v, Tensor)]
        constant = not any(isinstance(v, Opaque) or (isinstance(v, Value) and v.batched) for v in flat) and \
            not any(batched for v in shapes for _, batched in self.model.shape(v))

        def tensor(argument: fx.Node) -> Any:
            value = self.values.get(argument)
            if value is None:
                return self.size(argument, stage)
            if isinstance(value, Opaque):
                return value.node
            if isinstance(value, list):
                raise SharingError(f"{argument.name} is used as a whole ({place(argument)})")
            return materialize(self.emit, value, stage)

        args, kwargs = fx.map_arg(node.args, tensor), fx.map_arg(node.kwargs, tensor)
        flops = 0 if constant else int(row_flops(node, self.model))
        made = self.emit.call(node.target, *args, flops=flops, stage=Stage.CONSTANT if constant else stage, **kwargs)
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return self.wrapped(made, value, node)
        return [self.item(made, i, v, node) if isinstance(v, Tensor) else None for i, v in enumerate(value)]

    def item(self, made: fx.Node, index: int, value: Tensor, node: fx.Node) -> Value | Opaque | None:
        """One of several results, if the graph uses it."""
        users = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
        if not users:
            return None
        one = self.emit.call(operator.getitem, made, index)
        if all(user in self.model.mutated for user in users):
            return Opaque(one)  # only a buffer's next value, which may well look across rows
        return self.wrapped(one, value, node)

    def wrapped(self, made: fx.Node, value: Tensor, node: fx.Node) -> Value | Opaque:
        shape = self.model.shape(value)
        batched = [i for i, (_, batch) in enumerate(shape) if batch]
        stage = made.meta["stage"]
        if stage == Stage.CONSTANT and not batched:
            made, groups = compact(self.emit, made, [size for size, _ in shape])
            return leaf(made, groups, value.dtype)
        if not batched:
            if value.numel() == 0:
                return Opaque(made)
            raise SharingError(f"{node.name} mixes the rows of a batch, so that a score depends on other candidates "
                               f"({place(node)}); compute it a row, or outside the model")
        if len(batched) > 1 or shape[batched[0]][0] != 1:
            return Opaque(made)
        at = batched[0]
        if at:
            made = self.emit.call(aten.permute.default, made, [at, *(i for i in range(len(shape)) if i != at)])
        made, groups = compact(self.emit, made, [size for size, batch in shape if not batch], 1)
        return leaf(made, [*groups[:at], (BATCH,), *groups[at:]], value.dtype)


def compact(emit: Emitter, node: fx.Node, sizes: Sequence[int], lead: int = 0) -> tuple[fx.Node, list[Group]]:
    """``node`` [rows, *sizes] without its axes of size one, and its groups behind the rows."""
    if any(size == 1 for size in sizes):
        node = emit.reshape(node, [size for size in sizes if size != 1], lead)
    return node, [(Axis(size),) if size != 1 else () for size in sizes]


def _at(node: fx.Node) -> str:
    where = place(node)
    return f" ({where})" if where else ""


def _draws(node: fx.Node) -> bool:
    """Whether an operator that may draw random numbers does: not with dropout of nothing, nor in eval mode."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "train" in given or "training" in given:
        return bool(given.get("train", given.get("training")))
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for inside in value for item in _flat(inside)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


def pointwise(rewriter: Rewriter, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """Any operator that looks at one element of each argument at a time: block by block."""
    from semel.sharing.rules.pointwise import elementwise

    return elementwise(rewriter, node, args, kwargs)


def interpret(model: ModelGraph, signature: Signature, tensors: Callable[[str], Tensor],
              candidates: int, training: bool = False) -> tuple[Rewriter, list[Any]]:
    """The values of the model's outputs (materialized for every candidate). ``tensors``: a parameter by its name;
    ``candidates``: how many a request is expected to have."""
    import semel.sharing.rules  # noqa: F401  registers them

    rewriter = Rewriter(model, Emitter(candidates), training=training)
    emit = rewriter.emit
    inputs = iter(signature.inputs)
    for node in model.graph.nodes:
        if node.op == "output":
            break
        if node.op != "placeholder":
            if node.op != "call_function":
                raise SharingError(f"the graph has a node of kind {node.op} ({node.name}); inline control flow")
            rewriter.values[node] = rewriter.run(node)
            continue
        value = node.meta.get("val")
        if node.name in model.parameters:
            name = model.parameters[node.name]
            tensor = tensors(name)
            frozen = name not in model.mutated.values()  # its value is part of the code
            if frozen and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
                rewriter.values[node] = rewriter.known(tensor)
            else:
                made = emit.placeholder(f"parameter:{name}", Stage.CONSTANT)
                rewriter.values[node] = _constant(rewriter, made, tensor)
        elif node.name in model.lifted:
            rewriter.values[node] = rewriter.known(model.lifted[node.name])
        elif isinstance(value, Tensor):
            rewriter.values[node] = _input(rewriter, next(inputs), value)
        else:
            rewriter.values[node] = None
    return rewriter, [_output(rewriter, item) for item in model.outputs]


def updated(rewriter: Rewriter, node: fx.Node) -> Any:
    """The new value of a buffer that the model updates (``ModelGraph.mutated``), of the buffer's number of elements."""
    value = rewriter.values[node]
    if isinstance(value, Opaque):
        return value.node
    return materialize(rewriter.emit, value)


def _constant(rewriter: Rewriter, node: fx.Node, tensor: Tensor) -> Value:
    node, groups = compact(rewriter.emit, node, list(tensor.shape))
    return leaf(node, groups, tensor.dtype)


def _input(rewriter: Rewriter, item: Any, value: Tensor) -> Value:
    sizes = [size for size, _ in rewriter.model.shape(value)][1:]
    emit = rewriter.emit
    if item.columns is None:
        node, groups = compact(emit, emit.placeholder(f"{item.stage}:{item.name}", item.stage), sizes, 1)
        return leaf(node, [(BATCH,), *groups], value.dtype)
    axis, parts, blocks = Axis(sizes[0]), {}, []
    rest: list[Group] = [(Axis(size),) if size != 1 else () for size in sizes[1:]]
    for number, (stage, positions) in enumerate(((Stage.REQUEST, item.columns), (Stage.CANDIDATE, item.others))):
        node = emit.placeholder(f"{stage}:{item.name}", stage)
        node, _ = compact(emit, node, [len(positions), *sizes[1:]], 1)
        inside = (Axis(len(positions)),) if len(positions) != 1 else ()
        axes = (*inside, *(group[0] for group in rest if group))
        blocks.append(Block(positions, inside))
        parts[frozenset({(axis, number)})] = Expression.of(Factor(node, axes), value.dtype)
    axis.blocks = tuple(blocks)
    return Value(((BATCH,), (axis,), *rest), parts, value.dtype)


def _output(rewriter: Rewriter, item: Any) -> Any:
    if not isinstance(item, fx.Node):
        return item
    value = rewriter.values[item]
    if isinstance(value, Opaque):
        return value.node
    if not isinstance(value, Value):
        raise SharingError(f"output {item.name} is no tensor ({place(item)})")
    return materialize(rewriter.emit, value, Stage.CANDIDATE)


__all__ = ["NO_BLOCK", "Opaque", "Rewriter", "interpret", "rule"]

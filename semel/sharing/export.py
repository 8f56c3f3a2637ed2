"""The graph of a model: ``torch.export`` with a dynamic batch, functionalized, parameters by reference."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from semel.sharing.demand import push_slices
from semel.sharing.errors import SharingError
from semel.sharing.functional import functional


@dataclass(frozen=True)
class ModelGraph:
    """``parameters``: graph placeholder -> name in ``state_dict``; ``lifted``: placeholder -> tensor that is part of
    the code; ``user``: placeholders of the inputs in order; ``outputs``: nodes; ``out_spec``: their tree; ``mutated``:
    output node -> buffer that the model updates; ``batch``: the symbol of the batch size."""

    graph: fx.Graph
    parameters: Mapping[str, str]
    lifted: Mapping[str, Tensor]
    user: tuple[str, ...]
    outputs: tuple[Any, ...]
    out_spec: Any
    mutated: Mapping[fx.Node, str]
    batch: sympy.Symbol

    def shape(self, value: Any) -> tuple[tuple[int, bool], ...]:
        """Of each axis of a node's tensor: its size without the batch, and whether the batch is in it."""
        return tuple(self.size(size) for size in value.shape)

    def size(self, size: Any) -> tuple[int, bool]:
        if isinstance(size, int):
            return size, False
        ratio = sympy.simplify(size.node.expr / self.batch)
        if ratio.is_Integer:
            return int(ratio), True
        raise SharingError(f"a size of the model is {size.node.expr}, which is no multiple of the batch size; "
                           "let no tensor's shape depend on the batch but by its own rows")


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelGraph:
    """Raises SharingError where torch cannot export the model, with torch's reason and the place."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))  # one tensor may come twice
    rows = torch.export.Dim("rows", min=2)
    dynamic = pytree.tree_map(lambda leaf: {0: rows} if isinstance(leaf, Tensor) else None, (args, kwargs))
    try:
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, args, dict(kwargs), strict=False,
                                          dynamic_shapes=_by_name(model, args, kwargs, dynamic))
            graph = functional(program.graph)
            if graph is None:  # a second trace, longer than the first
                program = program.run_decompositions({})
                graph = program.graph
        push_slices(graph)
    except Exception as error:  # torch raises many kinds
        raise SharingError(f"torch.export cannot trace {type(model).__name__}: {_reason(error)}") from error
    signature = program.graph_signature
    parameters, lifted, user = {}, {}, []
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            parameters[spec.arg.name] = spec.target
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            lifted[spec.arg.name] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT:
            user.append(spec.arg.name)
        else:
            raise SharingError(f"{type(model).__name__} takes an input of kind {spec.kind.name}; pass it as a tensor")
    output = next(node for node in graph.nodes if node.op == "output")
    nodes = {node.name: node for node in graph.nodes}
    outputs, mutated = [], {}
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            outputs.append(value)
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            mutated[value] = spec.target
        else:
            raise SharingError(f"{type(model).__name__} changes its inputs in place; return a new tensor instead")
    tensors = [nodes[name] for name in user if isinstance(nodes[name].meta.get("val"), Tensor)]
    sizes = [node.meta["val"].shape[0] for node in tensors]
    batch = next((size for size in sizes if not isinstance(size, int)), None)
    fixed = [node.name for node, size in zip(tensors, sizes, strict=True) if isinstance(size, int)]
    if batch is None or fixed:
        raise SharingError(f"{type(model).__name__} fixes the batch size of {', '.join(fixed) or 'its inputs'}; "
                           "let it take any number of rows")
    others = {str(size.node.expr) for size in sizes} - {str(batch.node.expr)}
    if others:
        raise SharingError(f"{type(model).__name__} does not need all inputs to have the same number of rows; only "
                           "models that score one row a candidate can be shared")
    return ModelGraph(graph, parameters, lifted, tuple(node.name for node in tensors), tuple(outputs),
                      program.call_spec.out_spec, mutated, batch.node.expr)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs the graph as far as it came; the error says what a user needs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Any) -> Any:
    from inspect import Parameter, signature

    bound = signature(model.forward).bind(*args, **kwargs)
    positional, by_keyword = dynamic
    shapes: dict[str, Any] = {}
    rest = list(positional)
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments:
            continue
        if parameter.kind is Parameter.VAR_POSITIONAL:
            shapes[name] = tuple(rest)
            rest = []
        elif parameter.kind is Parameter.VAR_KEYWORD:
            shapes[name] = {key: by_keyword[key] for key in bound.arguments[name]}
        elif name in by_keyword:
            shapes[name] = by_keyword[name]
        else:
            shapes[name] = rest.pop(0)
    return shapes


def _reason(error: Exception) -> str:
    """The line that says what is wrong, and the model's line if torch names it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    places = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    advice = ""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        advice = "; a decision of the model depends on values of its input: replace the branch by torch.where or a mask"
    if "Constraints violated" in str(error):
        advice = "; the number of rows decides something in the model: let it do the same for any number of two or more"
    return f"{type(error).__name__}: {first}{advice}" + (f" ({places[-1]})" if places else "")


def place(node: fx.Node) -> str:
    """The line of the model's source that a node comes from."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return ""
    at = files[-1]
    where = lines[at].split(", in ")[0].replace("File ", "").replace('"', "").replace(", line ", ":")
    return f"{where}: {lines[at + 1]}" if at + 1 < len(lines) else where

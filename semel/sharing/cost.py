"""What an operator costs, a row of the batch: floating-point operations (two a multiply-add) and bytes of activations.

Matrix products count as their formulas say; an operator that looks at one element at a time counts one an element it
writes, a sum one an element it reads, softmax 3, BatchNorm 2, LayerNorm 8. Views, lookups and copies compute nothing.
Bytes are those of the rows' tensors that an operator reads and writes; views move none, and parameters are not counted,
since a batch reads them once. What depends on parameters alone costs nothing a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.errors import SharingError
from semel.sharing.export import ModelGraph

aten = torch.ops.aten
_Formula = Callable[..., float]

VIEWS = {getattr(aten, name) for name in (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "numpy_T", "unsqueeze",
    "squeeze", "expand", "slice", "select", "unbind", "split", "split_with_sizes", "chunk", "alias", "detach",
    "lift_fresh_copy")}


def packet(target: Any) -> Any:
    """The operator without its overload."""
    return getattr(target, "overloadpacket", target)


def row_flops(node: fx.Node, model: ModelGraph) -> float:
    """Of an operator of the exported graph, for one row of the batch."""
    outputs = _tensors(node.meta.get("val"))
    if not any(_batched(tensor, model) for tensor in outputs):
        return 0.0
    args = [_shape(argument, model) for argument in node.args]
    return _flops(node.target, args, node.args, [_row(tensor, model) for tensor in outputs])


def row_bytes(node: fx.Node, model: ModelGraph) -> float:
    """Of an operator of the exported graph, for one row of the batch."""
    outputs = [tensor for tensor in _tensors(node.meta.get("val")) if _batched(tensor, model)]
    if not outputs or packet(node.target) in VIEWS:
        return 0.0
    inputs = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val")) if _batched(t, model)]
    return float(sum(math.prod(_row(t, model)) * t.element_size() for t in (*outputs, *inputs)))


def flops_of(node: fx.Node, values: Mapping[fx.Node, Any]) -> float:
    """Of an operator whose arguments and result have the shapes of ``values``."""
    def shape(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [shape(item) for item in argument]
        value = values.get(argument) if isinstance(argument, fx.Node) else None
        return list(value.shape) if isinstance(value, Tensor) else None

    outputs = _tensors(values[node])
    return _flops(node.target, [shape(argument) for argument in node.args], node.args, [list(t.shape) for t in outputs])


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)] \
        if isinstance(value, (list, tuple)) else []


def _batched(tensor: Tensor, model: ModelGraph) -> bool:
    try:
        return any(batched for _, batched in model.shape(tensor))
    except (SharingError, AttributeError):
        return False


def _row(tensor: Tensor, model: ModelGraph) -> list[int]:
    """The shape with the batch taken out of it."""
    try:
        return [size for size, _ in model.shape(tensor)]
    except (SharingError, AttributeError):
        return []


def _shape(argument: Any, model: ModelGraph) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_shape(item, model) for item in argument]
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return _row(value, model) if isinstance(value, Tensor) else None


def _flops(target: Any, shapes: list[Any], args: Any, outputs: list[list[int]]) -> float:
    """``shapes``: of the arguments that are tensors (lists of them for lists), the batch taken out."""
    name = packet(target)
    written = math.prod(outputs[0])
    if name in _PRODUCTS:
        return 2.0 * written * _PRODUCTS[name](shapes)
    if name is aten.einsum:
        return _einsum(args[0], shapes[1])
    if name is aten.tensordot:
        return 2.0 * written * math.prod(shapes[0][d] for d in args[2])
    if name is aten.scaled_dot_product_attention:
        query, key, value = shapes[:3]
        pairs = math.prod(query[:-1]) * key[-2]
        return pairs * (2.0 * query[-1] + 2.0 * value[-1] + 3.0)
    if name in (aten.conv1d, aten.conv2d, aten.convolution):
        return 2.0 * written * math.prod(shapes[1][1:])
    if name in (aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu):
        steps = math.prod(shapes[0][:-1])
        return steps * sum(2.0 * math.prod(shape) for shape in _flat_shapes(shapes[2]))
    if name in (aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax):
        return 3.0 * written
    if name in (aten.layer_norm, aten.rms_norm, aten.group_norm):
        return 8.0 * written
    if name in (aten._native_batch_norm_legit_no_training, aten._native_batch_norm_legit_functional, aten.batch_norm):
        return 2.0 * written
    if name in _REDUCTIONS:
        return float(math.prod(shapes[0]))
    return float(written) if torch.Tag.pointwise in getattr(target, "tags", ()) and name not in _COPIES else 0.0


_COPIES = {aten._to_copy, aten.clone, aten.fill, aten.copy}
_PRODUCTS: dict[Any, Callable[[list[Any]], int]] = {
    aten.linear: lambda shapes: shapes[0][-1],
    aten.mm: lambda shapes: shapes[0][-1],
    aten.bmm: lambda shapes: shapes[0][-1],
    aten.matmul: lambda shapes: shapes[0][-1],
    aten.mv: lambda shapes: shapes[0][-1],
    aten.dot: lambda shapes: shapes[0][-1],
    aten.addmm: lambda shapes: shapes[1][-1],
    aten.baddbmm: lambda shapes: shapes[1][-1],
}
_REDUCTIONS = {getattr(aten, name) for name in (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "logsumexp", "linalg_vector_norm", "cumsum",
    "any", "all", "argmax", "argmin")}


def _einsum(equation: str, shapes: list[list[int]]) -> float:
    """All letters' sizes multiplied, for each product of two operands."""
    inputs = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        if "." in letters:
            head, _, tail = letters.partition("...")
            middle = shape[len(head) : len(shape) - len(tail)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
            shape = [*shape[: len(head)], *shape[len(shape) - len(tail) :]]
            letters = head + tail
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    return 2.0 * max(len(inputs) - 1, 0.5) * math.prod(sizes.values())


def _flat_shapes(value: Any) -> list[list[int]]:
    if not isinstance(value, list):
        return []
    return [value] if value and isinstance(value[0], int) else [shape for item in value for shape in _flat_shapes(item)]

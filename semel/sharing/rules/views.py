"""Operators that move elements: views, slices, and putting tensors together. None of them computes anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from semel.sharing.algebra import cat
from semel.sharing.axes import BATCH, size_of
from semel.sharing.emission import aten
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.moving import merged, regroup, select, take
from semel.sharing.rules.pointwise import cast
from semel.sharing.values import Value

END = (1 << 62)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_copy.default)
def view(w: Rewriter, node: fx.Node, a: Value, shape: Any) -> Value:
    return regroup(w.emit, a, w.shape(node))


@rule(aten.flatten.using_ints, aten.unflatten.int)
def flatten(w: Rewriter, node: fx.Node, a: Value, *args: Any) -> Value:
    return regroup(w.emit, a, w.shape(node))


@rule(aten.permute.default)
def permute(w: Rewriter, node: fx.Node, a: Value, dims: Any) -> Value:
    return a.with_groups([a.groups[dim] for dim in dims])


@rule(aten.transpose.int)
def transpose(w: Rewriter, node: fx.Node, a: Value, first: int, second: int) -> Value:
    groups = list(a.groups)
    groups[first], groups[second] = groups[second], groups[first]
    return a.with_groups(groups)


@rule(aten.t.default, aten.numpy_T.default)
def t(w: Rewriter, node: fx.Node, a: Value) -> Value:
    return a.with_groups(a.groups[::-1])


@rule(aten.unsqueeze.default)
def unsqueeze(w: Rewriter, node: fx.Node, a: Value, dim: int) -> Value:
    dim %= len(a.groups) + 1
    return a.with_groups([*a.groups[:dim], (), *a.groups[dim:]])


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(w: Rewriter, node: fx.Node, a: Value, dims: Any = None) -> Value:
    n = len(a.groups)
    chosen = range(n) if dims is None else [d % n for d in ([dims] if isinstance(dims, int) else dims)]
    gone = [d for d in chosen if BATCH not in a.groups[d] and size_of(a.groups[d]) == 1]
    out = a
    for d in sorted(gone, reverse=True):
        out = select(w.emit, out, d, 0) if out.groups[d] else out.with_groups([*out.groups[:d], *out.groups[d + 1 :]])
    return out


@rule(aten.expand.default)
def expand(w: Rewriter, node: fx.Node, a: Value, sizes: Any, *, implicit: bool = False) -> Value:
    from semel.sharing.axes import Axis
    from semel.sharing.expression import Expression

    shape = w.shape(node)
    groups = [()] * (len(shape) - len(a.groups)) + list(a.groups)
    new = []
    for at, (size, batched) in enumerate(shape):
        if not groups[at] and (size != 1 or batched):
            groups[at] = ((BATCH,) if batched else ()) + ((Axis(size),) if size != 1 else ())
            new += [axis for axis in groups[at] if axis is not BATCH]
    parts = {key: Expression((*part.axes, *new), part.terms, part.dtype, part._leaf) for key, part in a.parts.items()}
    return Value(tuple(groups), parts, a.dtype)


@rule(aten.repeat.default)
def repeat(w: Rewriter, node: fx.Node, a: Value, repeats: Any) -> Value:
    shape = w.shape(node)
    groups = [()] * (len(shape) - len(a.groups)) + list(a.groups)
    if any(group and (size_of(x for x in group if x is not BATCH), BATCH in group) != want
           for group, want in zip(groups, shape, strict=True)):
        raise Unproved("it repeats an axis")
    return expand(w, node, a, repeats)


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(w: Rewriter, node: fx.Node, a: Value, repeats: Any, dim: Any = None, *,
                      output_size: Any = None) -> Value:
    if dim is None or a.groups[dim]:
        raise Unproved("it repeats an axis")
    return expand(w, node, a, None)


@rule(aten.slice.Tensor)
def slice_(w: Rewriter, node: fx.Node, a: Value, dim: int = 0, start: Any = None, end: Any = None,
           step: int = 1) -> Value:
    dim %= len(a.groups)
    group = a.groups[dim]
    if isinstance(start, fx.Node) or isinstance(end, fx.Node) or BATCH in group:
        whole = (size_of(x for x in group if x is not BATCH), True)
        if start in (None, 0) and step == 1 and w.shape(node)[dim] == whole:
            return a
        raise MixesRows("it selects rows of the batch")
    size = size_of(group)
    positions = np.arange(size)[slice(start, size if end is None or end >= END else end, step)]
    return take(w.emit, a, dim, positions)


@rule(aten.select.int)
def select_(w: Rewriter, node: fx.Node, a: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, int):
        raise Unproved("it depends on a size")
    dim %= len(a.groups)
    size = size_of(a.groups[dim]) if BATCH not in a.groups[dim] else 1
    return select(w.emit, a, dim, index % size)


@rule(aten.unbind.int)
def unbind(w: Rewriter, node: fx.Node, a: Value, dim: int = 0) -> list[Value]:
    dim %= len(a.groups)
    if BATCH in a.groups[dim]:
        raise MixesRows("it takes the batch apart")
    return [select(w.emit, a, dim, i) for i in range(size_of(a.groups[dim]))]


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes)
def split_(w: Rewriter, node: fx.Node, a: Value, sizes: Any, dim: int = 0) -> list[Value]:
    dim %= len(a.groups)
    if BATCH in a.groups[dim]:
        raise MixesRows("it takes the batch apart")
    out, start = [], 0
    for result in node.meta["val"]:
        size = w.model.shape(result)[dim][0]
        out.append(take(w.emit, a, dim, np.arange(start, start + size)))
        start += size
    return out


@rule(aten.cat.default)
def cat_(w: Rewriter, node: fx.Node, values: Any, dim: int = 0) -> Value:
    values = [v for v in values if not _legacy_empty(v, values)]
    values = [cast(w, v, w.dtype(node)) for v in values]
    return cat(w.emit, values, dim % len(w.shape(node)), w.dtype(node))


def _legacy_empty(value: Value, values: Any) -> bool:
    """``cat`` ignores a vector without elements."""
    return len(value.groups) == 1 and not value.batched and size_of(value.groups[0]) == 0 \
        and any(len(other.groups) > 1 for other in values)


@rule(aten.stack.default)
def stack(w: Rewriter, node: fx.Node, values: Any, dim: int = 0) -> Value:
    dim %= len(w.shape(node))
    rows = [v.with_groups([*v.groups[:dim], (), *v.groups[dim:]]) for v in values]
    return cat(w.emit, [cast(w, v, w.dtype(node)) for v in rows], dim, w.dtype(node))


@rule(aten.index_select.default)
def index_select(w: Rewriter, node: fx.Node, a: Value, dim: int, index: Value) -> Value:
    if index.known is None:
        raise Unproved("the index is not fixed")
    return take(w.emit, a, dim % len(a.groups), index.known.reshape(-1).numpy())


@rule(aten.index.Tensor)
def index(w: Rewriter, node: fx.Node, a: Value, indices: Any) -> Value:
    """Fixed indices along one axis, or along neighbouring axes together (the pairs of a triangle)."""
    used = [dim for dim, item in enumerate(indices) if item is not None]
    if any(not isinstance(indices[dim], Value) or indices[dim].known is None for dim in used):
        raise Unproved("the index is not fixed")
    if used != list(range(used[0], used[-1] + 1)) or any(BATCH in a.groups[dim] for dim in used):
        raise Unproved("it indexes axes apart from one another, or the batch")
    known = [indices[dim].known for dim in used]
    if any(k.dim() != 1 or k.dtype.is_floating_point or str(k.dtype) == "torch.bool" for k in known):
        raise Unproved("an index that is no list of positions")
    sizes = [size_of(a.groups[dim]) for dim in used]
    position = np.zeros(1, np.int64)
    for k, size in zip(known, sizes, strict=True):
        at = k.numpy().astype(np.int64)
        position = position * size + np.where(at < 0, at + size, at)
    first = used[0]
    joined = tuple(axis for dim in used for axis in a.groups[dim])
    value = a.with_groups([*a.groups[:first], joined, *a.groups[used[-1] + 1 :]])
    return take(w.emit, merged(value, first), first, np.broadcast_to(position, (max(len(k) for k in known),)).copy())

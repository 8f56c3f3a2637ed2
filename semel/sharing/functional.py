"""An exported graph without operators that write into their arguments or may return them: by rewriting its nodes.

``ExportedProgram.run_decompositions({})`` does the same by tracing the whole graph a second time, which takes longer
than the first. Rankers write few things in place (a ReLU, a running sum of logits), on tensors that nothing else sees;
those become their functional twins here. For anything that is not understood the answer is False: trace again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_RESHAPES = (aten.flatten.using_ints, aten.reshape.default, aten.view_as.default, aten.reshape_as.default)
_KEPT = ("val", "stack_trace", "nn_module_stack", "from_node", "source_fn_stack", "torch_fn")


def functional(exported: fx.Graph) -> fx.Graph | None:
    """A copy without such operators; None where not all was understood."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(exported, val_map={}))
    walk = _Walk(graph)
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if not walk.node(node):
                return None
        elif node.op not in ("placeholder", "output") and not _sizes(node):
            return None
    graph.eliminate_dead_code()
    graph.lint()
    return graph


def _sizes(node: fx.Node) -> bool:
    """Arithmetic of sizes, or one of several results."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "torch")


class _Walk:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.fresh: set[fx.Node] = set()
        """Made by operators that return new memory, of which no view was taken."""
        self.place = {node: i for i, node in enumerate(graph.nodes)}

    def node(self, node: fx.Node) -> bool:
        """Whether it is understood."""
        target = cast(torch._ops.OpOverload, node.target)
        rule = _RULES.get(target)
        if rule is not None:
            made = rule(self, node)
            if made is not None and made is not node:
                node.replace_all_uses_with(made)
                self.graph.erase_node(node)
            return made is not None
        if target._schema.is_mutable:
            return self.in_place(node, target)
        aliases = any(argument.alias_info is not None for argument in target._schema.arguments)
        if torch.Tag.maybe_aliasing_or_mutating in target.tags or (aliases and _composite(target)):
            return False
        if aliases:
            self.seen(node)
        elif isinstance(node.meta.get("val"), Tensor):
            self.fresh.add(node)
        return True

    def seen(self, node: fx.Node) -> None:
        """A view of its arguments may be left: writing into either would be seen through the other."""
        self.fresh.difference_update(node.all_input_nodes)

    def in_place(self, node: fx.Node, target: torch._ops.OpOverload) -> bool:
        """``x.relu_()`` as ``relu(x)``, which all that comes later reads."""
        name = target._schema.name.removeprefix("aten::")
        twin = getattr(getattr(aten, name.removesuffix("_"), None), target._overloadname, None)
        x = node.args[0] if node.args else None
        if twin is None or not name.endswith("_") or name.startswith("_") or name in _UNLIKE \
                or torch.Tag.nondeterministic_seeded in target.tags or not isinstance(x, fx.Node) \
                or x.op != "call_function" or node.kwargs:
            return False
        tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        shape_only = torch.Tag.inplace_view in target.tags
        wider = any(t.dtype not in (torch.bool, tensors[0].dtype) for t in tensors)    # the twin's result might be
        if not shape_only and (x not in self.fresh or wider):
            return False
        made = self.call(node, twin, node.args)
        node.replace_all_uses_with(made)
        x.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made and self.after(user, node))
        self.graph.erase_node(node)
        if shape_only:
            self.seen(made)
        else:
            self.fresh.add(made)
        return True

    def after(self, user: fx.Node, node: fx.Node) -> bool:
        return self.place.get(user, -1) > self.place[node]      # what was made here stands before

    def call(self, node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        """In the place of ``node``, with its value."""
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        self.place[made] = self.place[node]
        return made


_UNLIKE = {"copy_", "set_", "resize_", "resize_as_", "as_strided_", "data_", "requires_grad_", "zero_", "fill_"}


def _composite(target: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


# ------------------------------------------------------------ operators that return their argument, or a copy of it
_Rule = Callable[[_Walk, Any], Any]


def _convert(walk: _Walk, node: Any) -> Any:
    """``to``: the tensor itself where nothing changes. None: it goes to another device or layout, or is a copy."""
    x, value = node.args[0], node.meta["val"]
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    before = x.meta["val"]
    if given.get("copy") or given.get("memory_format") not in (None, torch.preserve_format) or \
            value.device != before.device or value.layout != before.layout or given.get("pin_memory"):
        return None
    if value.dtype == before.dtype:
        return x
    made = walk.call(node, aten._to_copy.default, (x,), dtype=value.dtype)
    walk.fresh.add(made)
    return made


def _reshape(walk: _Walk, node: Any) -> Any:
    x, value = node.args[0], node.meta["val"]
    walk.seen(node)
    before, after = list(x.meta["val"].shape), list(value.shape)
    if [str(size) for size in before] == [str(size) for size in after]:
        return x
    open_ = [i for i, size in enumerate(after) if not isinstance(size, int)]
    if node.target in (aten.reshape.default,):
        return walk.call(node, aten.reshape.default, (x, node.args[1]))
    if len(open_) > 1:
        return None
    return walk.call(node, aten.reshape.default, (x, [size if isinstance(size, int) else -1 for size in after]))


def _dropout(walk: _Walk, node: Any) -> Any:
    return None if node.args[2] else node.args[0]


def _batch_norm(walk: _Walk, node: Any) -> Any:
    x, weight, bias, mean, var, training, momentum, eps, *_ = node.args
    if training or mean is None or var is None:
        return None
    value = node.meta["val"]
    both = walk.call(node, aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum,
                                                                               eps))
    both.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
    made = walk.call(node, operator.getitem, (both, 0))
    walk.fresh.add(made)
    return made


def _copy(walk: _Walk, node: Any) -> Any:
    made = walk.call(node, aten.clone.default, (node.args[0],))
    walk.fresh.add(made)
    return made


def _contiguous(walk: _Walk, node: Any) -> Any:
    walk.seen(node)         # itself, or a copy: neither is written into
    return node.args[0]


def _chunk(walk: _Walk, node: Any) -> Any:
    x, parts, dim = (*node.args, 0)[:3]
    size = x.meta["val"].shape[dim]
    if not isinstance(size, int):
        return None
    walk.seen(node)
    return walk.call(node, aten.split.Tensor, (x, -(-size // parts), dim))


_RULES: dict[Any, _Rule] = {
    aten.chunk.default: _chunk,
    aten.to.dtype: _convert, aten.to.dtype_layout: _convert, aten.to.device: _convert, aten.to.other: _convert,
    **dict.fromkeys(_RESHAPES, _reshape),
    aten.dropout.default: _dropout, aten.feature_dropout.default: _dropout, aten.batch_norm.default: _batch_norm,
    aten.lift_fresh_copy.default: _copy, aten.contiguous.default: _contiguous,
}

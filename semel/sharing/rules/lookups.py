"""Embedding tables: looked up once a request where the index is the request's."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from semel.sharing.axes import Axis
from semel.sharing.emission import aten
from semel.sharing.expression import Expression, Factor
from semel.sharing.interpret import Rewriter, rule
from semel.sharing.values import Value


@rule(aten.embedding.default)
def embedding(w: Rewriter, node: fx.Node, table: Value, index: Value, padding_idx: int = -1,
              scale_grad_by_freq: bool = False, sparse: bool = False) -> Value:
    weight = w.emit.call(aten.reshape.default, table.only.leaf(w.emit).node, [s for s, _ in w.model.shape(
        cast(fx.Node, node.args[0]).meta["val"])]) if any(not g for g in table.groups) else table.only.leaf(w.emit).node
    size = w.shape(node)[-1][0]
    new = (Axis(size),) if size != 1 else ()
    parts: dict[Any, Expression] = {}
    for key, part in index.parts.items():
        factor = part.leaf(w.emit)
        made = w.emit.call(aten.embedding.default, weight, factor.node, padding_idx, scale_grad_by_freq, sparse)
        made.meta["index_axes"] = len(factor.axes)
        if not new:
            made = w.emit.call(aten.squeeze.dim, made, -1)
        parts[key] = Expression.of(Factor(made, (*factor.axes, *new)), w.dtype(node), (*part.axes, *new))
    return Value((*index.groups, new), parts, w.dtype(node))

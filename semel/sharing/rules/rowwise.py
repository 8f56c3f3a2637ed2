"""Operators that treat each row alone but are not taken apart: once a request where all of it is the request's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from semel.sharing.axes import BATCH
from semel.sharing.emission import Stage, aten
from semel.sharing.errors import Unproved
from semel.sharing.interpret import RULES, Rewriter
from semel.sharing.values import Value


def _batch_axis(value: Value) -> int:
    for dim, group in enumerate(value.groups):
        if BATCH in group:
            if group != (BATCH,):
                raise Unproved("a view folds the batch")
            return dim
    return -1


def _whole(allowed: Callable[..., bool]) -> Callable[..., Any]:
    def apply(w: Rewriter, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        values = [v for v in _flat((args, list(kwargs.values()))) if isinstance(v, Value)]
        axes = {_batch_axis(v) for v in values if v.batched}
        if len(axes) != 1 or not allowed(axes.pop(), values[0], *args[1:], **kwargs):
            raise Unproved("it may look across rows")
        stage = max(v.stage for v in values)
        if stage != Stage.REQUEST:
            raise Unproved("it has candidate-side arguments")
        return w.whole(node, Stage.REQUEST)

    return apply


def _flat(value: Any) -> list[Any]:
    return [item for inside in value for item in _flat(inside)] if isinstance(value, (list, tuple)) else [value]


def _first(batch: int, *args: Any, **kwargs: Any) -> bool:
    return batch == 0


def _other_axis(batch: int, x: Value, *args: Any, **kwargs: Any) -> bool:
    dims = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    return bool(dims) and all(d % len(x.groups) != batch for d in dims[-1:])


def recurrent(w: Rewriter, node: fx.Node, x: Value, states: Any, *args: Any) -> Any:
    """(input, states, parameters, biases, layers, dropout, train, bidirectional, batch_first); the rows of the states
    lie along their second axis, whatever the last of these says."""
    first = _flat([states])
    if _batch_axis(x) != (0 if args[-1] else 1) or any(v.batched and _batch_axis(v) != 1 for v in first):
        raise Unproved("it may look across rows")
    if max(v.stage for v in (x, *first)) != Stage.REQUEST:
        raise Unproved("it has candidate-side arguments")
    return w.whole(node, Stage.REQUEST)


whole_first = _whole(_first)
for target in (aten.conv2d.default, aten.convolution.default, aten.max_pool1d.default,
               aten.max_pool2d.default, aten.avg_pool1d.default, aten.avg_pool2d.default, aten.group_norm.default,
               aten.adaptive_avg_pool1d.default):
    RULES.setdefault(target, whole_first)
for target in (aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input):
    RULES.setdefault(target, recurrent)
for target in (aten.gather.default,):
    RULES.setdefault(target, _whole(lambda batch, x, dim, *rest, **kw: batch != dim % len(x.groups)))
for target in (aten.sort.default, aten.argsort.default, aten.flip.default):
    RULES.setdefault(target, _whole(_other_axis))

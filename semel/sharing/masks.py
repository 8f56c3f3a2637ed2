"""What a mask is for every row of a batch, whatever the inputs: a lower and an upper bound of each of its elements.

A causal mask is a number known beforehand; combined with the lengths of histories it is not, yet what it hides it hides
for every row. Where a block of scores (request's queries, candidate's keys) is hidden as a whole, the request's tokens
never see the candidate, and stay the request's at every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from semel.sharing.axes import BATCH, Axis, Group
from semel.sharing.emission import aten
from semel.sharing.errors import SharingError

if TYPE_CHECKING:
    from semel.sharing.interpret import Rewriter

Bounds = tuple[Tensor, Tensor]
LARGEST = 1 << 22
"""Elements of a mask (of one row) beyond which nothing is known about it."""
_BOTH = {aten.logical_and.default: torch.logical_and, aten.bitwise_and.Tensor: torch.logical_and,
         aten.__and__.Tensor: torch.logical_and, aten.logical_or.default: torch.logical_or,
         aten.bitwise_or.Tensor: torch.logical_or, aten.__or__.Tensor: torch.logical_or,
         aten.mul.Tensor: torch.logical_and}
_NOT = (aten.logical_not.default, aten.bitwise_not.default)
_MOVES = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.view.default,
          aten.reshape.default, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int,
          aten.clone.default, aten._to_copy.default, aten.repeat.default, aten.alias.default)


def bounds(w: Rewriter, node: Any) -> Bounds | None:
    """(lower, upper), each with the shape of ``node``'s tensor at a batch of one row; None where nothing is known."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    if node not in w.bounds:
        found = _bounds(w, node)
        if found is not None:
            shape = [size for size, _ in w.shape(node)]
            found = (found[0].expand(shape), found[1].expand(shape))
        w.bounds[node] = found
    return w.bounds[node]


def _bounds(w: Rewriter, node: fx.Node) -> Bounds | None:
    known = getattr(w.values.get(node), "known", None)
    if known is not None:
        return (known, known) if known.numel() <= LARGEST else None
    if node.op != "call_function":
        return None
    if node.target in _MOVES:
        inside = bounds(w, node.args[0])
        if inside is None or any(size == 0 for size, _ in w.shape(node)):
            return None
        try:
            args, kwargs = fx.map_arg((node.args[1:], node.kwargs), lambda n: w.model.size(n.meta["val"])[0])
            return node.target(inside[0], *args, **kwargs), node.target(inside[1], *args, **kwargs)
        except (SharingError, RuntimeError, AttributeError):   # a size that is none at a batch of one
            return None
    if node.meta["val"].dtype != torch.bool:
        return None
    if node.target in _NOT:
        inside = bounds(w, node.args[0])
        return None if inside is None else (~inside[1].bool(), ~inside[0].bool())
    if node.target in _BOTH and all(isinstance(a, fx.Node) for a in node.args):
        return _both(_BOTH[node.target], [bounds(w, a) for a in node.args])
    return None


def _both(function: Callable[..., Tensor], found: Sequence[Bounds | None]) -> Bounds | None:
    """``and``, ``or``: both are monotone, so that bounds meet bounds."""
    if all(item is None for item in found):
        return None
    nothing = (torch.zeros((), dtype=torch.bool), torch.ones((), dtype=torch.bool))
    (a, b), (c, d) = (nothing if item is None else item for item in found)
    return function(a, c), function(b, d)


def positions(groups: Sequence[Group], chosen: dict[Axis, int]) -> list[np.ndarray]:
    """Where a part lies: of each logical axis the positions (of one row) that it covers, in its order."""
    out = []
    for group in groups:
        at = np.zeros(1, np.int64)
        for axis in group:
            if axis is not BATCH:
                grid = axis.blocks[chosen[axis]].positions if axis.blocks else np.arange(axis.size)
                at = (at[:, None] * axis.size + grid).reshape(-1)
        out.append(at)
    return out


def inside(limits: Bounds | None, groups: Sequence[Group], chosen: dict[Axis, int]) -> tuple[bool, bool]:
    """Whether a mask is false everywhere in a part, and whether it is true everywhere."""
    if limits is None:
        return False, False
    shape = [int(np.prod([axis.size for axis in group if axis is not BATCH], dtype=np.int64)) for group in groups]
    where = np.ix_(*positions(groups, chosen)) if groups else ()
    lower, upper = (limit.expand(shape)[where] for limit in limits)
    return not bool(upper.any()), bool(lower.all())

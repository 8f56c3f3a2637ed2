"""Which hidden units are the request's. A unit has no side of its own, so somebody must choose.

In this order: what the caller says (``split``); the layout of what the units are added to or multiplied with, position
by position (a residual, a cross layer); else the request's share of the inputs, first units first, in whole fields and
in every chunk alike where the units are viewed or chunked so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from semel.sharing.emission import aten
from semel.sharing.errors import SharingError
from semel.sharing.export import place
from semel.sharing.isolation.sided import CANDIDATE, REQUEST, Sided
from semel.sharing.isolation.walk import Walk

MIXING = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default,
    aten.einsum.default, aten.tensordot.default, aten.conv1d.default, aten.conv2d.default, aten.convolution.default,
    aten.layer_norm.default, aten.rms_norm.default, aten.softmax.int, aten._softmax.default,
    aten.scaled_dot_product_attention.default,
}
KEEPING = {
    aten.dropout.default, aten.clone.default, aten._to_copy.default, aten.layer_norm.default, aten.rms_norm.default,
    aten.native_dropout.default, aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default, aten.softmax.int, aten.contiguous.default,
}
CUTS = {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default,
        aten.unbind.int, aten.narrow.default}


def request_units(walk: Walk, node: fx.Node, name: str, units: int, share: float, dim: int) -> list[int] | None:
    """Positions of the request's units among ``units``, or None where there is nothing to cut."""
    asked = [key for key in (name, name.rpartition(".")[0]) if key in walk.split]
    if asked:
        chosen = _given(asked[0], walk.split[asked[0]], units)
        walk.splits[asked[0]] = tuple(chosen)
        return chosen
    if units == 1 or not _mixes_later(node):
        return None
    key = name.rpartition(".")[0] or name
    found = _Forward(walk, node, units, dim)
    layouts = {tuple(layout): where for layout, where in found.layouts}
    if len(layouts) > 1:
        (a, first), (b, second) = list(layouts.items())[:2]
        raise SharingError(
            f"the {units} units of {key!r} meet {sum(a)} request units at {first} and {sum(b)} in another order at "
            f"{second}; choose which of them are the request's: split={{{key!r}: n}} or a list of positions")
    chosen = [i for i, mine in enumerate(next(iter(layouts))) if mine] if layouts else _default(units, share, found)
    walk.splits[key] = tuple(chosen)
    return chosen


def _given(key: str, asked: Any, units: int) -> list[int]:
    count = isinstance(asked, int) and not isinstance(asked, bool)
    if not count and (not isinstance(asked, Iterable) or any(not isinstance(i, int) for i in asked)):
        raise SharingError(f"split[{key!r}] must be a number of units or a list of positions, got {asked!r}")
    positions = list(range(asked)) if count else sorted(set(asked))
    if (count and asked < 0) or any(not 0 <= i < units for i in positions):
        raise SharingError(f"split[{key!r}] is {asked!r}; the module has {units} units")
    return positions


def _default(units: int, share: float, found: _Forward) -> list[int]:
    chosen: list[int] = []
    for piece in found.chunks or [list(range(units))]:
        group = found.group if found.group and len(piece) % found.group == 0 and len(piece) > found.group else 1
        pieces = len(piece) // group
        count = round(pieces * share)
        if pieces > 1:
            count = min(max(count, 1), pieces - 1)
        chosen += piece[: count * group]
    return sorted(chosen)


def _mixes_later(node: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in seen:
            continue
        seen.add(user)
        if user.target in MIXING:
            return True
        stack += user.users
    return False


class _Forward:
    """Follows units of ``node`` (its axis ``dim``) through what keeps or moves them. ``layouts``: of values that they
    meet, whether each is the request's, and where; ``chunks``: positions that are cut off together; ``group``: units to
    a field in the first view that gives them fields."""

    def __init__(self, walk: Walk, node: fx.Node, units: int, dim: int) -> None:
        self.walk, self.units = walk, units
        self.layouts: list[tuple[list[bool], str]] = []
        self.group = 0
        cuts: list[frozenset[int]] = []
        shape = walk.shape(node.meta["val"])
        start = torch.arange(units).reshape([units if d == dim else 1 for d in range(len(shape))]).expand(shape)
        ids: dict[fx.Node, Any] = {node: start}
        for user in _after(node):
            if not any(n in ids for n in user.all_input_nodes):
                continue
            value = user.meta.get("val")
            if user.target is operator.getitem and user.args[0] in ids:
                held = ids[user.args[0]]
                ids[user] = held[user.args[1]] if isinstance(held, (list, tuple)) else held
                if user.args[1] and not isinstance(held, (list, tuple)):
                    del ids[user]
            elif user.target in KEEPING:
                if user.args[0] in ids:
                    ids[user] = ids[user.args[0]]
            elif torch.Tag.pointwise in getattr(user.target, "tags", ()) and isinstance(value, torch.Tensor):
                met = self._meet(user, ids)
                if met is not None:
                    ids[user] = met
            elif user.target in _moves():
                moved = self._move(user, ids)
                if moved is None:
                    continue
                ids[user] = moved
                if user.target in CUTS:
                    for part in moved if isinstance(moved, (list, tuple)) else [moved]:
                        have = frozenset(int(i) for i in part.unique() if i >= 0)
                        if 0 < len(have) < units:
                            cuts.append(have)
                elif not self.group and isinstance(moved, Tensor):
                    self.group = self._fields(moved)
        whole = set(cuts)
        self.chunks = [sorted(c) for c in whole] if whole and sum(map(len, whole)) == units and \
            len(frozenset().union(*whole)) == units else []

    def _move(self, user: Any, ids: Mapping[fx.Node, Any]) -> Any:
        def argument(n: fx.Node) -> Any:
            value = self.walk.values.get(n)
            if n in ids:
                return ids[n]
            if isinstance(value, Sided) and value.known is not None:
                return value.known
            meta = n.meta["val"]
            return torch.full(self.walk.shape(meta), -1) if isinstance(meta, Tensor) else self.walk.sizes(meta)
        try:
            return user.target(*fx.map_arg(user.args, argument), **fx.map_arg(user.kwargs, argument))
        except (RuntimeError, IndexError, TypeError):
            return None

    def _fields(self, ids: Tensor) -> int:
        size = ids.shape[-1]
        if not 1 < size < self.units or self.units % size:
            return 0
        rows = ids.reshape(-1, size)
        rows = rows[(rows >= 0).all(1)]
        return size if len(rows) and bool((rows == rows[:, :1] + torch.arange(size)).all()) else 0

    def _meet(self, user: Any, ids: Mapping[fx.Node, Any]) -> Any:
        mine = [ids[n] for n in user.all_input_nodes if n in ids and isinstance(ids[n], Tensor)]
        if not mine:
            return None
        shape = self.walk.shape(user.meta["val"])
        found = mine[0].expand(shape)
        for n in user.all_input_nodes:
            value = None if n in ids else self.walk.ahead(n, ids, _moves())
            if not isinstance(value, Sided) or value.constant:
                continue
            layout = self._layout(found, value.sides.expand(shape))
            if layout is not None and (not self.layouts or layout not in [known for known, _ in self.layouts]):
                self.layouts.append((layout, place(user) or user.name))
        return found

    def _layout(self, ids: Tensor, sides: Tensor) -> list[bool] | None:
        """The side of the element that each unit meets; None if it meets both, or none."""
        known = ids >= 0
        flat, side = ids[known], sides[known]
        touched = torch.zeros(self.units, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        taken = torch.zeros(self.units, dtype=torch.int64).scatter_add_(0, flat, (side == CANDIDATE).long())
        pure = torch.zeros(self.units, dtype=torch.int64).scatter_add_(0, flat, (side == REQUEST).long())
        if bool((touched == 0).any()) or not bool(((taken == touched) | (pure == touched)).all()):
            return None
        mine = (pure == touched).tolist()
        return mine if any(mine) and not all(mine) else None


def _after(node: fx.Node) -> Iterable[Any]:
    """Nodes behind this one, in order."""
    reached = {node}
    current = node.next
    while current.op != "root":
        if current.op == "call_function" and any(n in reached for n in current.all_input_nodes):
            reached.add(current)
            yield current
        current = current.next


def _moves() -> Any:
    from semel.sharing.isolation.rules import MOVES

    return MOVES

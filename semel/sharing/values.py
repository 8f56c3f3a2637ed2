"""A value of the exported graph: logical axes, and one expression for every combination of blocks.

Functions on values take an ``Emitter`` first where they compute something and return new values; none changes in place.
``Unproved`` is raised where a case is not covered, and the operator is then computed for every candidate. ``moving``
moves elements, ``blocks`` cuts axes and puts blocks together, ``algebra`` adds and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from semel.sharing.axes import BATCH, Axis, Block, Group
from semel.sharing.emission import Stage
from semel.sharing.expression import Expression, Factor

Key = frozenset[tuple[Axis, int]]
NO_BLOCK: Key = frozenset()


@dataclass(frozen=True, eq=False)
class Value:
    """``groups``: logical axes. ``parts``: by the block of each mixed axis. ``known``: the tensor itself where the
    graph computes it from nothing but numbers."""

    groups: tuple[Group, ...]
    parts: Mapping[Key, Expression]
    dtype: torch.dtype
    known: torch.Tensor | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for group in self.groups for axis in group)

    @property
    def mixed(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.blocks)

    @property
    def batched(self) -> bool:
        return BATCH in self.axes

    @property
    def stage(self) -> Stage:
        return max(part.stage for part in self.parts.values())

    @property
    def only(self) -> Expression:
        (part,) = self.parts.values()
        return part

    def with_groups(self, groups: Sequence[Group]) -> Value:
        return replace(self, groups=tuple(groups), known=None)


def leaf(node: fx.Node, groups: Sequence[Group], dtype: torch.dtype, known: torch.Tensor | None = None) -> Value:
    """A tensor of the graph: [rows (unless constant), *axes of groups but the batch]."""
    axes = tuple(axis for group in groups for axis in group if axis is not BATCH)
    return Value(tuple(groups), {NO_BLOCK: Expression.of(Factor(node, axes), dtype)}, dtype, known)


def mapped(value: Value, change: Callable[[Expression], Expression], dtype: torch.dtype | None = None) -> Value:
    return replace(value, parts={key: change(part) for key, part in value.parts.items()}, known=None,
                   dtype=value.dtype if dtype is None else dtype)


def inner(axes: Sequence[Axis], key: Key) -> tuple[Axis, ...]:
    """The pure axes that a part of ``key`` has for ``axes`` (without the batch)."""
    chosen = dict(key)
    out: list[Axis] = []
    for axis in axes:
        if axis is BATCH:
            continue
        out += axis.blocks[chosen[axis]].axes if axis.blocks else (axis,)
    return tuple(out)


def renamed(value: Value, names: Mapping[Axis, Axis]) -> Value:
    """Axes under other names; a mixed axis brings those of its blocks."""
    if not names:
        return value
    every = dict(names)
    for old, new in names.items():
        for a, b in zip(old.blocks, new.blocks, strict=True):
            every.update(zip(a.axes, b.axes, strict=True))
    groups = tuple(tuple(names.get(axis, axis) for axis in group) for group in value.groups)
    parts = {frozenset((names.get(axis, axis), i) for axis, i in key): part.renamed(every)
             for key, part in value.parts.items()}
    return replace(value, groups=groups, parts=parts)


def copied(value: Value, axes: Sequence[Axis]) -> Value:
    """``axes`` under fresh names, so that the value can meet itself."""
    names: dict[Axis, Axis] = {}
    for axis in axes:
        if axis is not BATCH:
            blocks = tuple(Block(b.positions, tuple(Axis(a.size) for a in b.axes)) for b in axis.blocks)
            names[axis] = Axis(axis.size, blocks)
    return renamed(value, names)


def names(axes: Iterable[Axis]) -> set[Axis]:
    """``axes`` and those of their blocks, without the batch."""
    return {name for axis in axes if axis is not BATCH for name in (axis, *(a for b in axis.blocks for a in b.axes))}


def apart(values: Sequence[Value]) -> list[Value]:
    """Values of one rank in which an axis is at most at one place: ``x[:, :, None] * x[:, None, :]`` has two."""
    out: list[Value] = []
    for value in values:
        for dim, group in enumerate(value.groups):
            elsewhere = {name for other in out for d, g in enumerate(other.groups) if d != dim for name in names(g)}
            value = copied(value, [axis for axis in group if names([axis]) & elsewhere])
        out.append(value)
    return out

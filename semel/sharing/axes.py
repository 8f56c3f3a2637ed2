"""Axes of the values that a graph computes, and how an axis is cut into blocks.

A tensor of the exported graph has *logical* axes, each a tuple of ``Axis`` objects in row-major order: a view that
folds heads into the batch makes the group ``(BATCH, heads)``, and undoing it costs nothing. An axis of size one is the
empty group.

A *mixed* axis is cut into ``Block``s, each of which is computed on its own: the result of ``cat([user, item], 1)`` has
a block of request columns and a block of candidate columns, at any positions. A block has axes of its own, whose
product is its number of positions: the pairs (request field, candidate field) of a triangle of dot products keep both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from semel.sharing.errors import Unproved


class Axis:
    """One axis; equal only to itself. ``size``: elements (0 for the batch, whose size is not known)."""

    __slots__ = ("blocks", "size")

    def __init__(self, size: int, blocks: tuple[Block, ...] = ()) -> None:
        self.size, self.blocks = size, blocks

    def __repr__(self) -> str:
        return "B" if self is BATCH else f"{self.size}" + "|".join(str(len(b.positions)) for b in self.blocks)


@dataclass(frozen=True, eq=False)
class Block:
    """``positions`` [n] of the mixed axis, in row-major order of ``axes`` (none of them mixed)."""

    positions: np.ndarray
    axes: tuple[Axis, ...]


BATCH = Axis(0)
Group = tuple[Axis, ...]


def size_of(axes: Iterable[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def mixed(positions: Sequence[np.ndarray], inner: Sequence[Group], size: int) -> Axis:
    """The axis of ``size`` elements whose blocks lie at ``positions``."""
    return Axis(size, tuple(Block(p, axes) for p, axes in zip(positions, inner, strict=True)))


def split(axis: Axis, sizes: Sequence[int]) -> tuple[Group, dict[int, Group]]:
    """``axis`` as several axes of ``sizes`` (row-major), and what each block's own last axes become.

    Only the first of the new axes can be mixed. Raises Unproved when a block's positions do not run through the others.
    """
    if not axis.blocks:
        return tuple(Axis(size) for size in sizes), {}
    inner = math.prod(sizes[1:])
    positions, axes, pieces = [], [], {}
    for number, block in enumerate(axis.blocks):
        if len(block.positions) % inner:
            raise Unproved("a view cuts a block of columns")
        table = block.positions.reshape(-1, inner)
        if not (table == table[:, :1] + np.arange(inner)).all() or (table[:, 0] % inner).any():
            raise Unproved("a view mixes columns of both sides")
        new = (Axis(len(table)), *(Axis(size) for size in sizes[1:]))
        positions.append(table[:, 0] // inner)
        axes.append(new[:1])
        pieces[number] = new
    return (mixed(positions, axes, sizes[0]), *(Axis(size) for size in sizes[1:])), pieces

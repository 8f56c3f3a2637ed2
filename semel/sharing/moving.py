"""Views, slices and selections of values: elements move, nothing is computed unless a block has to be flattened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from semel.sharing.axes import BATCH, Axis, Block, Group, size_of, split
from semel.sharing.emission import Emitter
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.expression import Expression
from semel.sharing.values import Key, Value, mapped


def merged(value: Value, group: int) -> Value:
    """A logical axis of several axes as one axis, without computing anything."""
    axes = value.groups[group]
    if len(axes) == 1 or not axes:
        return value
    if BATCH in axes:
        raise Unproved("a view folds the batch")
    strides = np.cumprod([1, *[a.size for a in axes[:0:-1]]])[::-1]
    choices = [range(len(axis.blocks)) if axis.blocks else [None] for axis in axes]
    blocks, parts = [], {}
    new = Axis(size_of(axes))
    for number, choice in enumerate(product(*choices)):
        grids = [axis.blocks[c].positions if c is not None else np.arange(axis.size)
                 for axis, c in zip(axes, choice, strict=True)]
        positions = np.zeros(1, np.int64)
        for grid, stride in zip(grids, strides, strict=True):
            positions = (positions[:, None] + grid * stride).reshape(-1)
        key = frozenset((axis, c) for axis, c in zip(axes, choice, strict=True) if c is not None)
        inside = tuple(a for axis, c in zip(axes, choice, strict=True)
                       for a in (axis.blocks[c].axes if c is not None else (axis,)))
        blocks.append(Block(positions, inside))
        for old, part in value.parts.items():
            if key <= old:
                parts[(old - key) | {(new, number)}] = part
    new.blocks = tuple(blocks)
    groups = (*value.groups[:group], (new,), *value.groups[group + 1 :])
    return Value(groups, parts, value.dtype)


def take(emit: Emitter, value: Value, dim: int, positions: np.ndarray) -> Value:
    """Some positions of a logical axis, in that order."""
    group = value.groups[dim]
    total = size_of(group) if BATCH not in group else -1
    if len(positions) == total and (positions == np.arange(total)).all():
        return value
    if BATCH in group:
        raise MixesRows("it selects rows of the batch")
    if not group:
        raise Unproved("it selects from an axis of size one")
    if len(positions) == 1:
        value = select(emit, value, dim, int(positions[0]))
        return value.with_groups([*value.groups[:dim], (), *value.groups[dim:]])
    if len(group) > 1:
        inside = size_of(group[1:])
        if len(positions) % inside == 0 and len(positions):
            table = positions.reshape(-1, inside)
            if (table == table[:, :1] + np.arange(inside)).all() and not (table[:, 0] % inside).any():
                first = value.with_groups([*value.groups[:dim], group[:1], *value.groups[dim + 1 :], group[1:]])
                some = take(emit, first, dim, table[:, 0] // inside)
                return some.with_groups([*some.groups[:dim], some.groups[dim] + some.groups[-1],
                                         *some.groups[dim + 1 : -1]])
        value = merged(value, dim)
        group = value.groups[dim]
    (axis,) = group
    if not axis.blocks:
        new = Axis(len(positions))
        taken = mapped(value, lambda part: part.take(emit, axis, positions, new))
        return taken.with_groups([*value.groups[:dim], (new,), *value.groups[dim + 1 :]])
    blocks: list[Block] = []
    parts: dict[Key, Expression] = {}
    new = Axis(len(positions))
    for number, block in enumerate(axis.blocks):
        local = np.full(axis.size, -1)
        local[block.positions] = np.arange(len(block.positions))
        here = np.flatnonzero(local[positions] >= 0)
        if not len(here):
            continue
        chosen = local[positions[here]]
        whole = len(chosen) == len(block.positions) and (chosen == np.arange(len(chosen))).all()
        axes = block.axes if whole else (Axis(len(chosen)),)
        for key, part in value.parts.items():
            if (axis, number) not in key:
                continue
            if not whole:
                if len(block.axes) > 1:
                    flat = Axis(len(block.positions))
                    part = part.flatten(emit, block.axes, flat)
                    part = part.take(emit, flat, chosen, axes[0])
                elif block.axes:
                    part = part.take(emit, block.axes[0], chosen, axes[0])
                else:
                    part = part.with_axis(axes[0])
            parts[(key - {(axis, number)}) | {(new, len(blocks))}] = part
        blocks.append(Block(here, axes))
    return with_blocks(value, dim, new, blocks, parts)


def with_blocks(value: Value, dim: int, new: Axis, blocks: Sequence[Block], parts: Mapping[Key, Expression]) -> Value:
    """A value whose axis ``dim`` is ``new``, ordinary if it came to have a single block in order."""
    group: Group = (new,)
    if len(blocks) == 1 and (blocks[0].positions == np.arange(new.size)).all():
        parts = {frozenset(pair for pair in key if pair[0] is not new): part for key, part in parts.items()}
        group = blocks[0].axes
    else:
        new.blocks = tuple(blocks)
    return Value((*value.groups[:dim], group, *value.groups[dim + 1 :]), parts, value.dtype)


def select(emit: Emitter, value: Value, dim: int, position: int) -> Value:
    """One position of a logical axis, which goes."""
    group = value.groups[dim]
    if BATCH in group:
        raise MixesRows("it selects a row of the batch")
    rest = [*value.groups[:dim], *value.groups[dim + 1 :]]
    if not group:
        return value.with_groups(rest)
    if len(group) > 1:
        inside = size_of(group[1:])
        value = select(emit, value.with_groups([*value.groups[:dim], group[:1], group[1:], *value.groups[dim + 1 :]]),
                       dim, position // inside)
        return select(emit, value, dim, position % inside)
    (axis,) = group
    if not axis.blocks:
        return mapped(value, lambda part: part.drop(emit, axis, position)).with_groups(rest)
    for number, block in enumerate(axis.blocks):
        (found,) = np.nonzero(block.positions == position)
        if len(found):
            parts = {}
            for key, part in value.parts.items():
                if (axis, number) in key:
                    place = np.unravel_index(int(found[0]), [a.size for a in block.axes])
                    for a, at in zip(block.axes, place, strict=True):
                        part = part.drop(emit, a, int(at))
                    parts[key - {(axis, number)}] = part
            return Value(tuple(rest), parts, value.dtype)
    raise AssertionError("blocks cover their axis")


def regroup(emit: Emitter, value: Value, shape: Sequence[tuple[int, bool]]) -> Value:
    """A view. ``shape``: of each new axis the size (without the batch) and whether the batch is folded into it."""
    atoms = list(value.axes)
    groups: list[Group] = []
    for size, batched in shape:
        group: list[Axis] = []
        left, needs_batch = size, batched
        while left > 1 or needs_batch:
            if not atoms:
                raise Unproved("a view that its axes do not allow")
            atom = atoms[0]
            if atom is BATCH:
                if not needs_batch:
                    raise Unproved("a view across the batch")
                needs_batch = False
                group.append(atoms.pop(0))
            elif atom.size == 1 and not atom.blocks:
                group.append(atoms.pop(0))
            elif left % atom.size == 0 and left > 1:
                left //= atom.size
                group.append(atoms.pop(0))
            elif left > 1 and atom.size % left == 0:
                value, new = split_axis(emit, value, atom, [left, atom.size // left])
                atoms[:1] = new
            else:
                raise Unproved("a view that cuts across axes")
        while atoms and atoms[0] is not BATCH and atoms[0].size == 1 and len(groups) == len(shape) - 1:
            group.append(atoms.pop(0))
        groups.append(tuple(group))
    if atoms:
        if any(atom is BATCH or atom.size != 1 for atom in atoms) or not groups:
            raise Unproved("a view that leaves axes over")
        groups[-1] = (*groups[-1], *atoms)
    return value.with_groups(groups)


def split_axis(emit: Emitter, value: Value, axis: Axis, sizes: Sequence[int]) -> tuple[Value, Group]:
    flat = axis
    if axis.blocks and any(len(b.axes) != 1 for b in axis.blocks):
        value, flat = flat_blocks(emit, value, axis)
    new, pieces = split(flat, sizes)
    parts = {}
    if not flat.blocks:
        parts = {key: part.split(emit, flat, new) for key, part in value.parts.items()}
    else:
        behind = new[1:]
        for key, part in value.parts.items():
            number = dict(key)[flat]
            names = dict(zip(pieces[number][1:], behind, strict=True))
            inside = tuple(names.get(a, a) for a in pieces[number])
            parts[(key - {(flat, number)}) | {(new[0], number)}] = part.split(emit, flat.blocks[number].axes[0], inside)
    groups = tuple(tuple(b for a in group for b in (new if a is flat else (a,))) for group in value.groups)
    return Value(groups, parts, value.dtype), new


def flat_blocks(emit: Emitter, value: Value, axis: Axis) -> tuple[Value, Axis]:
    """A mixed axis whose blocks have one axis each."""
    new = Axis(axis.size)
    blocks, parts = [], {}
    for number, block in enumerate(axis.blocks):
        flat = block.axes if len(block.axes) == 1 else (Axis(len(block.positions)),)
        blocks.append(Block(block.positions, flat))
        for key, part in value.parts.items():
            if (axis, number) in key:
                changed = part if len(block.axes) == 1 else part.flatten(emit, block.axes, flat[0]) if block.axes \
                    else part.with_axis(flat[0])
                parts[(key - {(axis, number)}) | {(new, number)}] = changed
    new.blocks = tuple(blocks)
    groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
    return Value(groups, parts, value.dtype), new

"""Sums, products and concatenations of values: axes are brought together, then block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from semel.sharing.axes import BATCH, Axis, Block, Group, size_of
from semel.sharing.blocks import coalesced, cut, joined
from semel.sharing.emission import Emitter, Stage
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.expression import Expression
from semel.sharing.moving import flat_blocks, merged, split_axis, with_blocks
from semel.sharing.values import NO_BLOCK, Key, Value, apart, copied, inner, names, renamed

MOST_BLOCKS = 12


def unify(emit: Emitter, first: Value, i: int, second: Value, j: int) -> tuple[Value, Value]:
    """Both values with the same axes (names and blocks) in logical axis ``i`` of one and ``j`` of the other.

    The same size is asked for; an empty group of either stays as it is (it broadcasts).
    """
    at = 0
    while True:
        a_group, b_group = first.groups[i], second.groups[j]
        if not a_group or not b_group or (at >= len(a_group) and at >= len(b_group)):
            return first, second
        if at >= len(a_group) or at >= len(b_group):
            raise Unproved("axes that do not match")
        a, b = a_group[at], b_group[at]
        if a is b:
            at += 1
        elif a is BATCH or b is BATCH:
            raise Unproved("the batch meets another axis")
        elif a.size == b.size:
            first, second = _unify_axes(emit, first, a, second, b)
            at += 1
        elif a.size % b.size == 0 and len(b_group) > at + 1:
            first, _ = split_axis(emit, first, a, [b.size, a.size // b.size])
        elif b.size % a.size == 0 and len(a_group) > at + 1:
            second, _ = split_axis(emit, second, b, [a.size, b.size // a.size])
        else:
            raise Unproved("axes that do not match")


def _unify_axes(emit: Emitter, first: Value, a: Axis, second: Value, b: Axis) -> tuple[Value, Value]:
    if a.blocks and b.blocks and not _same_blocks(a, b):
        first, second, a, b = _common_blocks(emit, first, a, second, b)
    elif a.blocks and not b.blocks:
        at = second.axes.index(b)
        second = cut(emit, second, b, a.blocks)
        b = second.axes[at]
    elif b.blocks and not a.blocks:
        at = first.axes.index(a)
        first = cut(emit, first, a, b.blocks)
        a = first.axes[at]
    if a is not b:
        second = copied(second, [axis for axis in second.axes if axis is not b and names([axis]) & names([a])])
    return first, renamed(second, {b: a})


def _same_blocks(a: Axis, b: Axis) -> bool:
    return len(a.blocks) == len(b.blocks) and all(
        np.array_equal(x.positions, y.positions) and [c.size for c in x.axes] == [c.size for c in y.axes]
        for x, y in zip(a.blocks, b.blocks, strict=True))


def _common_blocks(emit: Emitter, first: Value, a: Axis, second: Value, b: Axis) -> tuple[Value, Value, Axis, Axis]:
    """Both axes cut into the intersections of their blocks."""
    wanted = [np.intersect1d(x.positions, y.positions) for x in a.blocks for y in b.blocks]
    wanted = [positions for positions in wanted if len(positions)]
    if len(wanted) > MOST_BLOCKS:
        raise Unproved("too many blocks")
    first, a = _recut(emit, first, a, wanted)
    second, b = _recut(emit, second, b, wanted)
    return first, second, a, b


def _recut(emit: Emitter, value: Value, axis: Axis, wanted: Sequence[np.ndarray]) -> tuple[Value, Axis]:
    if any(len(block.axes) != 1 for block in axis.blocks):
        value, axis = flat_blocks(emit, value, axis)
    new = Axis(axis.size)
    blocks: list[Block] = []
    parts: dict[Key, Expression] = {}
    for positions in wanted:
        number = next(n for n, block in enumerate(axis.blocks) if np.isin(positions[0], block.positions))
        block = axis.blocks[number]
        local = np.full(axis.size, -1)
        local[block.positions] = np.arange(len(block.positions))
        inside = Axis(len(positions))
        for key, part in value.parts.items():
            if (axis, number) in key:
                piece = part.take(emit, block.axes[0], local[positions], inside)
                parts[(key - {(axis, number)}) | {(new, len(blocks))}] = piece
        blocks.append(Block(positions, (inside,)))
    new.blocks = tuple(blocks)
    groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
    return Value(groups, parts, value.dtype), new


def broadcast(emit: Emitter, values: Sequence[Value]) -> tuple[list[Value], tuple[Group, ...]]:
    """Values with one another's axes, as pointwise operators want them, and the groups of the result."""
    rank = max(len(value.groups) for value in values)
    out = apart([value.with_groups([()] * (rank - len(value.groups)) + list(value.groups)) for value in values])
    for dim in range(rank):
        for _ in range(2):  # the second time round all take up what the last one brought
            for i in range(len(out)):
                for j in range(i + 1, len(out)):
                    out[i], out[j] = unify(emit, out[i], dim, out[j], dim)
    groups = tuple(next((v.groups[dim] for v in out if v.groups[dim]), ()) for dim in range(rank))
    return out, groups


def joint(values: Sequence[Value]) -> list[tuple[Key, list[Expression]]]:
    """Every combination of blocks, with each value's part."""
    found: list[tuple[Key, list[Expression]]] = [(NO_BLOCK, [])]
    for value in values:
        grown = []
        for key, parts in found:
            chosen = dict(key)
            for other, part in value.parts.items():
                if all(chosen.get(axis, number) == number for axis, number in other):
                    grown.append((key | other, [*parts, part]))
        found = grown
    return found


def multiply(emit: Emitter, first: Value, second: Value, dtype: torch.dtype) -> Value:
    (first, second), groups = broadcast(emit, [first, second])
    axes = [axis for group in groups for axis in group]
    parts = {key: a.times(emit, b, inner(axes, key), dtype) for key, (a, b) in joint([first, second])}
    return Value(groups, parts, dtype)


def add(emit: Emitter, first: Value, second: Value, dtype: torch.dtype) -> Value:
    (first, second), groups = broadcast(emit, [first, second])
    axes = [axis for group in groups for axis in group]
    parts = {key: a.plus(emit, b, inner(axes, key), dtype) for key, (a, b) in joint([first, second])}
    return Value(groups, parts, dtype)


def summed(emit: Emitter, value: Value, dims: Sequence[int], keep: bool) -> Value:
    """The sum over logical axes."""
    gone = [axis for dim in dims for axis in value.groups[dim]]
    if BATCH in gone:
        raise MixesRows("it sums over the batch")
    parts: dict[Key, Expression] = {}
    for key, part in value.parts.items():
        rest = frozenset(pair for pair in key if pair[0] not in gone)
        total = part.summed(emit, inner(gone, key))
        if rest in parts:
            total = parts[rest].plus(emit, total, total.axes, value.dtype)
        parts[rest] = total
    groups = [() if dim in dims else group for dim, group in enumerate(value.groups)]
    if not keep:
        groups = [group for dim, group in enumerate(groups) if dim not in dims]
    return Value(tuple(groups), parts, value.dtype)


def contract(emit: Emitter, first: Value, second: Value, over: Sequence[tuple[int, int]], dtype: torch.dtype,
             together: Sequence[tuple[int, int]] = ()) -> Value:
    """The product summed over pairs of logical axes; ``together``: pairs that go along without being summed.

    The result's groups: those of ``first`` but the summed, then those of ``second`` in no pair.
    """
    if first.stage == second.stage == Stage.CANDIDATE:
        second = coalesced(emit, second)    # keys and values of attention: all of them are looked at anyway
    second = copied(second, [axis for axis in second.axes if names([axis]) & names(first.axes)])
    for i, j in (*over, *together):
        first, second = unify(emit, first, i, second, j)
    gone = [axis for i, _ in over for axis in first.groups[i]]
    if BATCH in gone:
        raise MixesRows("a product that sums over the batch")
    left = [i for i, _ in over]
    paired = {a: b for a, b in together}
    used = [j for _, j in (*over, *together)]
    groups = [group or (second.groups[paired[dim]] if dim in paired else ())
              for dim, group in enumerate(first.groups) if dim not in left]
    groups += [group for dim, group in enumerate(second.groups) if dim not in used]
    if sum(BATCH in group for group in groups) > 1:
        raise MixesRows("a product across the batch")
    axes = [axis for group in groups for axis in group]
    parts: dict[Key, Expression] = {}
    for key, (a, b) in joint([first, second]):
        rest = frozenset(pair for pair in key if pair[0] not in gone)
        term = a.times(emit, b, inner(axes, rest), dtype)
        if rest in parts:
            term = parts[rest].plus(emit, term, term.axes, dtype)
        parts[rest] = term
    return Value(tuple(groups), parts, dtype)


def cat(emit: Emitter, values: Sequence[Value], dim: int, dtype: torch.dtype) -> Value:
    """Values one after the other along a logical axis: one block a side, and one for each that is still open."""
    if len(values) == 1:
        return values[0]
    values = apart([merged(value, dim) for value in values])
    for d in range(len(values[0].groups)):
        if d != dim:
            for _ in range(2):  # the second time round all take up what the last one brought
                for k in range(1, len(values)):
                    values[0], values[k] = unify(emit, values[0], d, values[k], d)
    groups = [next((v.groups[d] for v in values if v.groups[d]), ()) if d != dim else ()
              for d in range(len(values[0].groups))]
    others = [axis for group in groups for axis in group]
    keys = _keys([axis for axis in others if axis.blocks])
    offset = 0
    entries: list[tuple[np.ndarray, Group, list[Expression]]] = []
    for value in values:
        group = value.groups[dim]
        if BATCH in group:
            raise MixesRows("it puts rows of the batch together")
        axis = group[0] if group else None
        if axis is not None and axis.blocks:
            for number, block in enumerate(axis.blocks):
                found = [_part(value, key | {(axis, number)}) for key in keys]
                entries.append((block.positions + offset, block.axes, found))
        else:
            entries.append((np.arange(size_of(group)) + offset, group, [_part(value, key) for key in keys]))
        offset += size_of(group)
    rows = Stage.REQUEST if _any_rows(values) else Stage.CONSTANT
    settled: dict[tuple[Stage, ...], list[tuple[np.ndarray, Group, list[Expression]]]] = {}
    still_open = [entry for entry in entries if any(map(_is_open, entry[2]))]
    if len(still_open) > MOST_BLOCKS // 2:
        still_open = []
    for entry in entries:
        if not any(entry is other for other in still_open):
            for part in entry[2]:
                part.leaf(emit)
            settled.setdefault(tuple(max(part.stage, rows) for part in entry[2]), []).append(entry)
    blocks, parts = [], {}
    new = Axis(offset)
    before, after = ([axis for group in some for axis in group] for some in (groups[:dim], groups[dim:]))
    around = [(inner(before, key), inner(after, key)) for key in keys]
    for stages, items in sorted(settled.items()):
        blocks.append(joined(emit, stages, items, around, dtype))
    blocks += still_open
    for number, (_, _, found) in enumerate(blocks):
        for key, part in zip(keys, found, strict=True):
            parts[key | {(new, number)}] = part
    base = Value(tuple(groups), {}, dtype)
    return with_blocks(base, dim, new, [Block(positions, axes) for positions, axes, _ in blocks], parts)


def _keys(axes: Sequence[Axis]) -> list[Key]:
    """Every combination of the blocks of mixed axes."""
    return [frozenset(zip(axes, choice, strict=True)) for choice in product(*(range(len(a.blocks)) for a in axes))]


def _part(value: Value, key: Key) -> Expression:
    """The part of a value, which may lack some of the axes of ``key``."""
    (part,) = [part for other, part in value.parts.items() if other <= key]
    return part


def _is_open(part: Expression) -> bool:
    return part.lazy and any(f.stage == Stage.REQUEST for term in part.terms for f in term.factors)


def _any_rows(values: Sequence[Value]) -> bool:
    return any(value.batched for value in values)

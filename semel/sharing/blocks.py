"""Axes cut into blocks and blocks put together; at last, a value as the tensor that the model has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from semel.sharing.axes import BATCH, Axis, Block, Group, size_of
from semel.sharing.emission import Emitter, Stage, aten
from semel.sharing.errors import Unproved
from semel.sharing.expression import Expression, Factor, full, ordered_factor
from semel.sharing.values import Key, Value, inner


def cut(emit: Emitter, value: Value, axis: Axis, blocks: tuple[Block, ...]) -> Value:
    """An ordinary axis cut as ``blocks`` say; the new axis has fresh names."""
    new = Axis(axis.size, tuple(Block(b.positions, tuple(Axis(a.size) for a in b.axes)) for b in blocks))
    parts = {}
    for key, part in value.parts.items():
        for number, block in enumerate(new.blocks):
            if len(block.axes) == 1:
                piece = part.take(emit, axis, block.positions, block.axes[0])
            else:
                flat = Axis(len(block.positions))
                piece = part.take(emit, axis, block.positions, flat).split(emit, flat, block.axes)
            parts[key | {(new, number)}] = piece
    groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
    return Value(groups, parts, value.dtype)


def fuse(emit: Emitter, value: Value, axis: Axis) -> Value:
    """A mixed axis as an ordinary one: its blocks are computed and put together."""
    if not axis.blocks:
        return value
    new = Axis(axis.size)
    rest: dict[Key, dict[int, Expression]] = {}
    for key, part in value.parts.items():
        number = dict(key)[axis]
        rest.setdefault(key - {(axis, number)}, {})[number] = part
    at = value.axes.index(axis)
    parts = {}
    for key, by_block in rest.items():
        stage = max(part.stage for part in by_block.values())
        before, after = inner(value.axes[:at], key), inner(value.axes[at + 1 :], key)
        pieces, positions = [], []
        for number, block in enumerate(axis.blocks):
            factor = full(emit, by_block[number].leaf(emit), (*before, *block.axes, *after))
            factor = ordered_factor(emit, factor, (*before, *block.axes, *after))
            node = factor.node
            if factor.stage == Stage.CONSTANT and stage != Stage.CONSTANT:
                node = emit.call(aten.unsqueeze.default, node, 0)
                node = emit.call(aten.expand.default, node, [emit.rows(stage), *([-1] * len(factor.axes))])
            node = emit.spread(node, stage, 1 + len(factor.axes))
            lead = int(stage != Stage.CONSTANT)
            if len(block.axes) != 1:
                shape = [*(a.size for a in before), len(block.positions), *(a.size for a in after)]
                node = emit.reshape(node, shape, lead)
            pieces.append(node)
            positions.append(block.positions)
        dim = int(stage != Stage.CONSTANT) + len(before)
        node = interleaved(emit, pieces, positions, dim)
        parts[key] = Expression.of(Factor(node, (*before, new, *after)), value.dtype)
    groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
    return Value(groups, parts, value.dtype)


def interleaved(emit: Emitter, pieces: Sequence[fx.Node], positions: Sequence[np.ndarray], dim: int) -> fx.Node:
    """Pieces put where their positions say. Few runs: a cat of slices; many: a cat and an index."""
    if len(pieces) == 1 and (positions[0] == np.arange(len(positions[0]))).all():
        return pieces[0]
    owner = np.concatenate([np.full(len(p), i) for i, p in enumerate(positions)])
    local = np.concatenate([np.arange(len(p)) for p in positions])
    order = np.argsort(np.concatenate(positions), kind="stable")
    owner, local = owner[order], local[order]
    cuts = np.flatnonzero((np.diff(owner) != 0) | (np.diff(local) != 1)) + 1
    if len(cuts) < 16:
        runs = []
        for run in np.split(np.arange(len(order)), cuts):
            if len(run):
                start = int(local[run[0]])
                whole = start == 0 and len(run) == len(positions[owner[run[0]]])
                node = pieces[owner[run[0]]]
                runs.append(node if whole else emit.call(aten.slice.Tensor, node, dim, start, start + len(run)))
        return emit.call(aten.cat.default, runs, dim)
    joined = emit.call(aten.cat.default, list(pieces), dim) if len(pieces) > 1 else pieces[0]
    return emit.call(aten.index_select.default, joined, dim, emit.constant(torch.from_numpy(order.astype(np.int64))))


def fused(emit: Emitter, value: Value, axes: Sequence[Axis] | None = None) -> Value:
    for axis in value.mixed if axes is None else [a for a in axes if a.blocks]:
        value = fuse(emit, value, axis)
    return value


def coalesced(emit: Emitter, value: Value) -> Value:
    """Blocks of a mixed axis that are all the candidate's, and hold nothing of the request's open, as one block."""
    for axis in value.mixed:
        late = [n for n in range(len(axis.blocks)) if all(
            part.stage == Stage.CANDIDATE and not any(f.stage == Stage.REQUEST for t in part.terms for f in t.factors)
            for key, part in value.parts.items() if (axis, n) in key)]
        if len(late) < 2:
            continue
        one = Axis(sum(len(axis.blocks[n].positions) for n in late))
        new = Axis(axis.size)
        rest = [n for n in range(len(axis.blocks)) if n not in late]
        place = {n: i for i, n in enumerate(rest)}
        new.blocks = (*(axis.blocks[n] for n in rest),
                      Block(np.concatenate([axis.blocks[n].positions for n in late]), (one,)))
        parts: dict[Key, Expression] = {}
        for key, part in value.parts.items():
            number = dict(key)[axis]
            outer = key - {(axis, number)}
            if number in place:
                parts[outer | {(new, place[number])}] = part
            elif number == late[0]:
                lies, mine = part.leaf(emit).axes, axis.blocks[number].axes  # where it lies in memory
                cut = lies.index(mine[0]) if mine and mine[0] in lies else len(lies)
                others = inner([a for a in value.axes if a is not axis], key)
                before = tuple(a for a in lies[:cut] if a in others)
                after = tuple(dict.fromkeys(a for a in (*lies[cut:], *others) if a in others and a not in before))
                items = [(axis.blocks[n].positions, axis.blocks[n].axes, [value.parts[outer | {(axis, n)}]])
                         for n in late]
                (whole,) = joined(emit, [Stage.CANDIDATE], items, [(before, after)], value.dtype)[2]
                node = whole.leaf(emit).node
                parts[outer | {(new, len(rest))}] = Expression.of(Factor(node, (*before, one, *after)), value.dtype)
        groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
        value = Value(groups, parts, value.dtype)
    return value


def joined(emit: Emitter, stages: Sequence[Stage], items: Sequence[tuple[np.ndarray, Group, list[Expression]]],
            around: Sequence[tuple[Group, Group]], dtype: torch.dtype) -> tuple[np.ndarray, Group, list[Expression]]:
    """Blocks that are computed at the same stages as one; in memory it lies where it lies in the model's tensor."""
    if len(items) == 1:
        return items[0]
    positions = np.concatenate([entry[0] for entry in items])
    axis = Axis(len(positions))
    parts = []
    for at, (stage, (before, after)) in enumerate(zip(stages, around, strict=True)):
        pieces = []
        lead = int(stage != Stage.CONSTANT)
        for where, inside, found in items:
            axes = (*before, *inside, *after)
            factor = ordered_factor(emit, full(emit, found[at].leaf(emit), axes), axes)
            node = factor.node
            if factor.stage == Stage.CONSTANT and stage != Stage.CONSTANT:
                node = emit.call(aten.unsqueeze.default, node, 0)
                node = emit.call(aten.expand.default, node, [emit.rows(stage), *([-1] * len(factor.axes))])
            if len(inside) != 1:
                node = emit.reshape(node, [*(a.size for a in before), len(where), *(a.size for a in after)], lead)
            pieces.append(node)
        node = emit.call(aten.cat.default, pieces, lead + len(before))
        parts.append(Expression.of(Factor(node, (*before, axis, *after)), dtype))
    return positions, (axis,), parts


def materialize(emit: Emitter, value: Value, stage: Stage | None = None) -> fx.Node:
    """The logical tensor with the rows of ``stage`` (its own where that is later); constants without a batch stay."""
    value = fused(emit, value)
    factor = full(emit, value.only.leaf(emit), [axis for axis in value.axes if axis is not BATCH])
    if not value.batched:
        factor = ordered_factor(emit, factor, value.axes)
        if factor.stage != Stage.CONSTANT:
            raise Unproved("a value that lost its batch")
        return _shaped(emit, factor.node, value, None)
    target = max(factor.stage, Stage.REQUEST if stage is None else stage)
    factor = ordered_factor(emit, factor, value.axes)
    node = factor.node
    if factor.stage == Stage.CONSTANT:
        node = emit.call(aten.unsqueeze.default, node, 0)
        node = emit.call(aten.expand.default, node, [emit.rows(target), *([-1] * len(factor.axes))])
    node = emit.spread(node, target, len(value.axes))
    at = value.axes.index(BATCH)
    if at:
        rank = len(value.axes)
        node = emit.call(aten.permute.default, node, [*range(1, at + 1), 0, *range(at + 1, rank)])
    return _shaped(emit, node, value, target)


def _shaped(emit: Emitter, node: fx.Node, value: Value, stage: Stage | None) -> fx.Node:
    if all(len(group) == 1 for group in value.groups):
        return node
    shape: list = []
    for group in value.groups:
        if BATCH in group:
            assert stage is not None
            count = size_of(a for a in group if a is not BATCH)
            rows = emit.rows(stage)
            shape.append(rows if count == 1 else emit.call(times, rows, count, stage=stage))
        else:
            shape.append(size_of(group))
    return emit.call(aten.reshape.default, node, shape)


def times(rows: int, count: int) -> int:
    return rows * count

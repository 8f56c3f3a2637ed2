"""A value of the exported graph: logical axes, and one expression for every combination of blocks.

Functions here take an ``Emitter`` first and return new values; none changes in place. ``Unproved`` is raised where
a case is not covered, and the operator is then computed for every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import fx

from semel.sharing.axes import BATCH, Axis, Block, Group, size_of, split
from semel.sharing.emission import Emitter, Stage, aten
from semel.sharing.errors import MixesRows, Unproved
from semel.sharing.expression import Expression, Factor, full, ordered_factor

Key = frozenset[tuple[Axis, int]]
NO_BLOCK: Key = frozenset()
MOST_BLOCKS = 12


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


def pure(group: Group) -> Group:
    """Fresh axes of the same sizes."""
    return tuple(axis if axis is BATCH else Axis(axis.size) for axis in group)


def mapped(value: Value, change: Callable[[Expression], Expression], dtype: torch.dtype | None = None) -> Value:
    return replace(value, parts={key: change(part) for key, part in value.parts.items()}, known=None,
                   dtype=value.dtype if dtype is None else dtype)


def block_axes(axis: Axis, number: int) -> Group:
    return axis.blocks[number].axes


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


# ---------------------------------------------------------------------------------------------- one axis
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
                (joined,) = _joined(emit, [Stage.CANDIDATE], items, [(before, after)], value.dtype)[2]
                node = joined.leaf(emit).node
                parts[outer | {(new, len(rest))}] = Expression.of(Factor(node, (*before, one, *after)), value.dtype)
        groups = tuple(tuple(new if a is axis else a for a in group) for group in value.groups)
        value = Value(groups, parts, value.dtype)
    return value


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
    return _with_blocks(value, dim, new, blocks, parts)


def _with_blocks(value: Value, dim: int, new: Axis, blocks: Sequence[Block], parts: Mapping[Key, Expression]) -> Value:
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


# ---------------------------------------------------------------------------------------------- shapes
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
                value, new = _split(emit, value, atom, [left, atom.size // left])
                atoms[:1] = new
            else:
                raise Unproved("a view that cuts across axes")
        while atoms and atoms[0] is not BATCH and atoms[0].size == 1 and not groups_need(shape, len(groups)):
            group.append(atoms.pop(0))
        groups.append(tuple(group))
    if atoms:
        if any(atom is BATCH or atom.size != 1 for atom in atoms) or not groups:
            raise Unproved("a view that leaves axes over")
        groups[-1] = (*groups[-1], *atoms)
    return value.with_groups(groups)


def groups_need(shape: Sequence[tuple[int, bool]], done: int) -> bool:
    """Whether a later axis of a view will take up axes of size one; only the last one must."""
    return done < len(shape) - 1


def _split(emit: Emitter, value: Value, axis: Axis, sizes: Sequence[int]) -> tuple[Value, Group]:
    flat = axis
    if axis.blocks and any(len(b.axes) != 1 for b in axis.blocks):
        value, flat = _flat_blocks(emit, value, axis)
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


def _flat_blocks(emit: Emitter, value: Value, axis: Axis) -> tuple[Value, Axis]:
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
            first, _ = _split(emit, first, a, [b.size, a.size // b.size])
        elif b.size % a.size == 0 and len(a_group) > at + 1:
            second, _ = _split(emit, second, b, [a.size, b.size // a.size])
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
        value, axis = _flat_blocks(emit, value, axis)
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
        blocks.append(_joined(emit, stages, items, around, dtype))
    blocks += still_open
    for number, (_, _, found) in enumerate(blocks):
        for key, part in zip(keys, found, strict=True):
            parts[key | {(new, number)}] = part
    base = Value(tuple(groups), {}, dtype)
    return _with_blocks(base, dim, new, [Block(positions, axes) for positions, axes, _ in blocks], parts)


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


def _joined(emit: Emitter, stages: Sequence[Stage], items: Sequence[tuple[np.ndarray, Group, list[Expression]]],
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


# ---------------------------------------------------------------------------------------------- the tensor itself
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
            shape.append(rows if count == 1 else emit.call(_times, rows, count, stage=stage))
        else:
            shape.append(size_of(group))
    return emit.call(aten.reshape.default, node, shape)


def _times(rows: int, count: int) -> int:
    return rows * count

"""Sums of products, kept open until something that is not linear needs their value.

The one principle behind all exact sharing: whatever is *affine in candidate-side tensors with coefficients that belong
to the request* need not be computed in the order in which the model writes it. A block's value is therefore a sum of
``Term``s, each a product of ``Factor``s summed over the axes that the result does not have (an einsum). A linear layer,
a slice, a sum, a product with a request's vector only add factors. When a value is needed, ``contraction`` chooses the
order in which to multiply, in which whatever has no candidate in it is paid once per request. At most one factor of a
term depends on the candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from semel.sharing.axes import Axis, size_of
from semel.sharing.contraction import contract_sum, pairwise
from semel.sharing.emission import Emitter, Stage, aten

MOST_TERMS = 24


@dataclass(frozen=True, eq=False)
class Factor:
    """A tensor of the graph: [rows (unless constant), *sizes of axes]."""

    node: fx.Node
    axes: tuple[Axis, ...]

    @property
    def stage(self) -> Stage:
        return self.node.meta["stage"]

    @property
    def lead(self) -> int:
        """How many axes of rows it has."""
        return int(self.stage != Stage.CONSTANT)


@dataclass(frozen=True)
class Term:
    factors: tuple[Factor, ...]
    scale: float = 1.0

    @property
    def stage(self) -> Stage:
        return max((factor.stage for factor in self.factors), default=Stage.CONSTANT)


@dataclass(eq=False)
class Expression:
    """``axes``: of the value, none mixed. An axis that a term lacks is one along which the term does not change."""

    axes: tuple[Axis, ...]
    terms: tuple[Term, ...]
    dtype: torch.dtype
    _leaf: Factor | None = field(default=None, repr=False)
    _pair: tuple[Factor, Factor] | None = field(default=None, repr=False)
    """The two candidate-side factors that the value is the product of."""

    @classmethod
    def of(cls, factor: Factor, dtype: torch.dtype, axes: tuple[Axis, ...] | None = None) -> Expression:
        return cls(factor.axes if axes is None else axes, (Term((factor,)),), dtype, factor)

    @property
    def stage(self) -> Stage:
        return max((term.stage for term in self.terms), default=Stage.CONSTANT)

    @property
    def lazy(self) -> bool:
        return self._leaf is None

    @classmethod
    def filled(cls, emit: Emitter, number: float, axes: tuple[Axis, ...], dtype: torch.dtype) -> Expression:
        """One number throughout."""
        return cls.of(Factor(emit.constant(torch.tensor(number, dtype=dtype)), ()), dtype, axes)

    def uniform(self, emit: Emitter) -> float | None:
        """The number that the value is throughout, where that is known."""
        if not self.terms:
            return 0.0
        if len(self.terms) > 1 or len(self.terms[0].factors) != 1 or self.terms[0].scale != 1.0:
            return None
        return emit.uniform(self.terms[0].factors[0].node)

    def zero(self, emit: Emitter) -> bool:
        """Whether it is zero whatever the inputs, as long as they are finite: hidden by a mask."""
        return not self.terms or (
            len(self.terms) == 1 and any(emit.uniform(f.node) == 0.0 for f in self.terms[0].factors))

    def leaf(self, emit: Emitter) -> Factor:
        """The value as one tensor, computed now (once)."""
        if self._leaf is None:
            if self.terms:
                factor = contract_sum(emit, self.terms, self.axes, Factor)
            else:
                factor = Factor(emit.constant(torch.zeros((), dtype=self.dtype)), ())
            self._leaf = factor
            self.terms = (Term((factor,)),)
        return self._leaf

    def settle(self, emit: Emitter) -> Expression:
        """Computes what gains nothing by waiting: all that has no candidate in it, and sums that have grown long."""
        if self._leaf is not None:
            return self
        if self.stage < Stage.CANDIDATE or len(self.terms) > MOST_TERMS:
            self.leaf(emit)
            return self
        early = [term for term in self.terms if term.stage < Stage.CANDIDATE]
        if len(early) > 1:
            base = Expression(self.axes, tuple(early), self.dtype).leaf(emit)
            self.terms = (Term((base,)), *(term for term in self.terms if term.stage == Stage.CANDIDATE))
        # many tensors of the candidate, each of the value's own size: one to work on, not one product for each. Two
        # stay apart: a residual of a cross layer would otherwise become a state of its own, with operators of its own
        alone = [term for term in self.terms if term.stage == Stage.CANDIDATE and len(term.factors) == 1
                 and set(term.factors[0].axes) == set(self.axes)]
        if len(alone) > 2:
            base = Expression(self.axes, tuple(alone), self.dtype).leaf(emit)
            self.terms = (Term((base,)), *(term for term in self.terms if term not in alone))
        return self

    def renamed(self, names: Mapping[Axis, Axis]) -> Expression:
        if not any(axis in names for term in self.terms for factor in term.factors for axis in factor.axes) \
                and not any(axis in names for axis in self.axes):
            return self
        terms = tuple(Term(tuple(_renamed(f, names) for f in term.factors), term.scale) for term in self.terms)
        leaf = terms[0].factors[0] if self._leaf is not None else None
        return Expression(tuple(names.get(axis, axis) for axis in self.axes), terms, self.dtype, leaf)

    def _each_factor(self, axis: Axis, change, axes: tuple[Axis, ...]) -> Expression:
        terms = tuple(Term(tuple(change(f) if axis in f.axes else f for f in term.factors), term.scale)
                      for term in self.terms)
        leaf = terms[0].factors[0] if self._leaf is not None else None
        return Expression(axes, terms, self.dtype, leaf)

    def take(self, emit: Emitter, axis: Axis, positions: np.ndarray, new: Axis) -> Expression:
        """``positions`` of ``axis``, in that order, as ``new``."""
        def change(factor: Factor) -> Factor:
            at = factor.axes.index(axis)
            node = take(emit, factor.node, at + factor.lead, positions, axis.size)
            return Factor(node, (*factor.axes[:at], new, *factor.axes[at + 1 :]))

        return self._each_factor(axis, change, tuple(new if a is axis else a for a in self.axes))

    def drop(self, emit: Emitter, axis: Axis, position: int) -> Expression:
        """One position of ``axis``, which goes."""
        def change(factor: Factor) -> Factor:
            at = factor.axes.index(axis)
            if factor.node.op == "get_attr":
                node = emit.constant(emit.constants[str(factor.node.target)].select(at, position).clone())
            else:
                node = emit.call(aten.select.int, factor.node, at + factor.lead, position)
            return Factor(node, (*factor.axes[:at], *factor.axes[at + 1 :]))

        return self._each_factor(axis, change, tuple(a for a in self.axes if a is not axis))

    def split(self, emit: Emitter, axis: Axis, new: tuple[Axis, ...]) -> Expression:
        """``axis`` as several, row-major."""
        def change(factor: Factor) -> Factor:
            at = factor.axes.index(axis)
            axes = (*factor.axes[:at], *new, *factor.axes[at + 1 :])
            return Factor(emit.reshape(factor.node, [a.size for a in axes], factor.lead), axes)

        at = self.axes.index(axis)
        return self._each_factor(axis, change, (*self.axes[:at], *new, *self.axes[at + 1 :]))

    def with_axis(self, axis: Axis) -> Expression:
        """One axis more, along which the value does not change."""
        return Expression((*self.axes, axis), self.terms, self.dtype, self._leaf)

    def flatten(self, emit: Emitter, axes: tuple[Axis, ...], new: Axis) -> Expression:
        """Several axes as one; the value is computed."""
        leaf = full(emit, self.leaf(emit), axes)
        rest = tuple(axis for axis in leaf.axes if axis not in axes)
        ordered = ordered_factor(emit, leaf, (*rest, *axes))
        node = emit.reshape(ordered.node, [*(a.size for a in rest), new.size], ordered.lead)
        outer = tuple(axis for axis in self.axes if axis not in axes)
        return Expression.of(Factor(node, (*rest, new)), self.dtype, (*outer, new))

    def times(self, emit: Emitter, other: Expression, out: tuple[Axis, ...], dtype: torch.dtype) -> Expression:
        """The product of two values, summed over every axis that is not in ``out``."""
        if self.zero(emit) or other.zero(emit):
            return Expression(out, (), dtype)
        self, other = self.settle(emit), other.settle(emit)
        if self.stage == other.stage == Stage.CANDIDATE:
            for one, two in ((self, other), (other, self)):
                if one.lazy:
                    joined = one._into_states(emit, two, out, dtype)
                    if joined is not None:
                        return joined
            return self._both(emit, other, out, dtype)
        for scalar in (self, other):  # a number a row (the first cross network): its terms would multiply for nothing
            if not scalar.axes and len(scalar.terms) > 1:
                scalar.leaf(emit)
        if len(self.terms) * len(other.terms) > MOST_TERMS:
            self.leaf(emit) if len(self.terms) > len(other.terms) else other.leaf(emit)
        terms = []
        fresh = {axis: Axis(axis.size) for axis in {*self.axes, *other.axes} if axis not in out}
        for a in self.terms:
            for b in other.terms:
                factors = tuple(_renamed(factor, fresh) for factor in (*a.factors, *b.factors))
                scale = a.scale * b.scale
                have = {axis for factor in factors for axis in factor.axes}
                scale *= size_of(new for new in fresh.values() if new not in have)
                terms.append(Term(factors, scale))
        return Expression(out, tuple(terms), dtype).settle(emit)

    def _both(self, emit: Emitter, other: Expression, out: tuple[Axis, ...], dtype: torch.dtype) -> Expression:
        """The product of two candidate-side values, computed."""
        first, second = self.leaf(emit), other.leaf(emit)
        summed = {axis for axis in (*self.axes, *other.axes) if axis not in out}
        scale = float(size_of(axis for axis in summed if axis not in first.axes and axis not in second.axes))
        factor = pairwise(emit, first, second, out, Factor)
        if scale == 1.0:
            return Expression(out, (Term((factor,)),), dtype, factor, (first, second))
        return Expression(out, (Term((factor,), scale),), dtype).settle(emit)

    def _into_states(self, emit: Emitter, other: Expression, out: tuple[Axis, ...],
                     dtype: torch.dtype) -> Expression | None:
        """The product by a candidate's few numbers (a gate, a norm), which commutes with the request's operators: it
        multiplies what they are applied to. None where that would make those larger than the value itself."""
        if not any(f.stage == Stage.REQUEST for term in self.terms for f in term.factors):
            return None
        gate = other.leaf(emit)
        terms = []
        fresh = {axis: Axis(axis.size) for axis in (*self.axes, *other.axes) if axis not in out}
        for term in self.terms:
            state = next((f for f in term.factors if f.stage == Stage.CANDIDATE), None)
            rest = [f for f in term.factors if f is not state]
            if state is None:
                made = gate
            else:
                if 2 * size_of({*state.axes, *gate.axes}) > size_of({*self.axes, *gate.axes}):
                    return None
                made = pairwise(emit, state, gate, [*state.axes, *gate.axes], Factor)
            factors = tuple(_renamed(f, fresh) for f in (*rest, made))
            have = {axis for factor in factors for axis in factor.axes}
            scale = term.scale * size_of(new for new in fresh.values() if new not in have)
            terms.append(Term(factors, scale))
        return Expression(out, tuple(terms), dtype).settle(emit)

    def summed(self, emit: Emitter, axes: Iterable[Axis]) -> Expression:
        gone = {axis: Axis(axis.size) for axis in axes}  # fresh names: the old ones may come back as axes of the result
        terms = []
        for term in self.terms:
            have = {axis for factor in term.factors for axis in factor.axes}
            scale = term.scale * size_of(axis for axis in gone if axis not in have)
            terms.append(Term(tuple(_renamed(factor, gone) for factor in term.factors), scale))
        return Expression(tuple(axis for axis in self.axes if axis not in gone), tuple(terms), self.dtype).settle(emit)

    def scaled(self, emit: Emitter, scale: float) -> Expression:
        if self._pair is not None:      # scores of attention: rather the queries
            small, large = sorted(self._pair, key=lambda factor: size_of(factor.axes))
            if size_of(small.axes) < size_of(self.axes) and small is not large:
                less = Factor(emit.call(aten.mul.Scalar, small.node, scale, flops=size_of(small.axes)), small.axes)
                first, second = (less if factor is small else factor for factor in self._pair)
                return Expression.of(pairwise(emit, first, second, self.axes, Factor), self.dtype, self.axes)
        terms = tuple(replace(term, scale=term.scale * scale) for term in self.terms)
        return Expression(self.axes, terms, self.dtype).settle(emit)

    def plus(self, emit: Emitter, other: Expression, axes: tuple[Axis, ...], dtype: torch.dtype) -> Expression:
        if self.zero(emit) or other.zero(emit):
            one = other if self.zero(emit) else self
            return Expression(axes, one.terms, dtype, one._leaf)
        return Expression(axes, (*self.terms, *other.terms), dtype).settle(emit)


def _renamed(factor: Factor, names: Mapping[Axis, Axis]) -> Factor:
    return Factor(factor.node, tuple(names.get(axis, axis) for axis in factor.axes))


def take(emit: Emitter, node: fx.Node, dim: int, positions: np.ndarray, size: int) -> fx.Node:
    """``positions`` along ``dim``: a slice where they run, else an index."""
    n = len(positions)
    if n == size and (positions == np.arange(n)).all():
        return node
    if node.op == "get_attr":
        known = emit.constants[str(node.target)]
        return emit.constant(known.index_select(dim, torch.from_numpy(positions.astype(np.int64))))
    if n and (positions == positions[0] + np.arange(n)).all():
        return emit.call(aten.slice.Tensor, node, dim, int(positions[0]), int(positions[0]) + n)
    return emit.call(aten.index_select.default, node, dim, emit.constant(torch.from_numpy(positions.astype(np.int64))))


def ordered_factor(emit: Emitter, factor: Factor, axes: tuple[Axis, ...]) -> Factor:
    """``factor`` with its axes in the order of ``axes`` (all of its own among them)."""
    order = [axis for axis in axes if axis in factor.axes]
    node = emit.permute(factor.node, [factor.axes.index(axis) for axis in order], factor.lead)
    return Factor(node, tuple(order))


def full(emit: Emitter, factor: Factor, axes: Iterable[Axis]) -> Factor:
    """``factor`` with every one of ``axes``, those it lacks expanded (without a copy) behind the others."""
    lacking = [axis for axis in axes if axis not in factor.axes]
    if not lacking:
        return factor
    node = factor.node
    for _ in lacking:
        node = emit.call(aten.unsqueeze.default, node, -1)
    shape = [*([-1] * (factor.lead + len(factor.axes))), *(axis.size for axis in lacking)]
    return Factor(emit.call(aten.expand.default, node, shape), (*factor.axes, *lacking))


def aligned(emit: Emitter, factor: Factor, axes: tuple[Axis, ...], stage: Stage) -> fx.Node:
    """``factor`` as a node that broadcasts against [rows of stage, *axes]."""
    factor = ordered_factor(emit, factor, axes)
    node = emit.spread(factor.node, stage, factor.lead + len(factor.axes))
    at = factor.lead
    for axis in axes:
        if axis not in factor.axes:
            leading = node.meta["stage"] != Stage.CONSTANT or at > 0 or any(a in factor.axes for a in axes)
            if leading:
                node = emit.call(aten.unsqueeze.default, node, at)
            else:
                continue
        at += 1
    return node

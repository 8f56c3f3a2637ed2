"""Optimizers of embedding rows: one pass over the rows that have a gradient, nothing for the others.

Each says which state a row has, and ``update(weight, state, slots, gradient, learning_rate, step)`` changes the rows
``slots`` [M] of ``weight`` [slots, D] and of each state in place, given their summed ``gradient`` [M, D]. A slot -1 is
left out: its row is gone. On CPU a compiled loop that leaves the interpreter free for other threads; elsewhere, and as
the reference that reads like the formula, the same in torch (``plain``). Nothing a row gets depends on which other rows
are updated in the same call, so an update may come in parts.

"Lazy" below: a row that a step does not use is not touched in that step, neither its weights nor its moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numba
import numpy as np
from torch import Tensor


class RowOptimizer(Protocol):
    """``learning_rate`` may be changed between steps."""

    learning_rate: float

    def state(self, dim: int) -> Mapping[str, int]:
        """Columns of each state of a row; all float32, zeros at first."""
        ...

    def update(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
               learning_rate: float, step: int) -> None:
        """``step`` counts from 1."""
        ...

    def plain(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
              learning_rate: float, step: int) -> None:
        """The same, as the formula."""
        ...


@dataclass
class SGD:
    """``w -= lr g``."""

    learning_rate: float = 0.01

    def state(self, dim: int) -> Mapping[str, int]:
        return {}

    def update(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
               learning_rate: float, step: int) -> None:
        if weight.device.type != "cpu":
            return self.plain(weight, state, slots, gradient, learning_rate, step)
        _sgd(weight.numpy(), slots.numpy(), gradient.numpy(), np.float32(learning_rate))

    def plain(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
              learning_rate: float, step: int) -> None:
        slots, gradient = _there(slots, gradient)
        weight[slots] = weight[slots] - learning_rate * gradient


@dataclass
class RowWiseAdagrad:
    """One accumulator a row: ``a += mean(g^2); w -= lr g / (sqrt(a) + eps)`` (Duchi et al. 2011, with a row's mean in
    place of single squares, as in FBGEMM's ``EXACT_ROWWISE_ADAGRAD``)."""

    learning_rate: float = 0.01
    eps: float = 1e-8

    def state(self, dim: int) -> Mapping[str, int]:
        return {"sum": 1}

    def update(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
               learning_rate: float, step: int) -> None:
        if weight.device.type != "cpu":
            return self.plain(weight, state, slots, gradient, learning_rate, step)
        _adagrad(weight.numpy(), state["sum"].numpy(), slots.numpy(), gradient.numpy(), np.float32(learning_rate),
                 np.float32(self.eps))

    def plain(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
              learning_rate: float, step: int) -> None:
        slots, gradient = _there(slots, gradient)
        total = state["sum"][slots] + gradient.square().mean(1, keepdim=True)
        state["sum"][slots] = total
        weight[slots] = weight[slots] - learning_rate / (total.sqrt() + self.eps) * gradient


@dataclass
class Adam:
    """Lazy Adam: ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr m' / (sqrt(v') + eps)`` with
    ``m' = m / (1 - b1^t)``, ``v' = v / (1 - b2^t)`` (Kingma & Ba 2015, algorithm 1).

    t is the number of steps of the *table*, not of the row, as in ``torch.optim.SparseAdam``: it grows by one a step,
    in however many parts a step's gradients arrive. A row first met late starts with moments of zero that no
    correction lifts, so that its first step is ``(1 - b1) / sqrt(1 - b2)`` learning rates long (3.2 by default).
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    names: ClassVar[tuple[str, str]] = ("first", "second")

    def state(self, dim: int) -> Mapping[str, int]:
        return dict.fromkeys(self.names, dim)

    def update(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
               learning_rate: float, step: int) -> None:
        if weight.device.type != "cpu":
            return self.plain(weight, state, slots, gradient, learning_rate, step)
        rate, root = self._corrected(learning_rate, step)
        _adam(weight.numpy(), state["first"].numpy(), state["second"].numpy(), slots.numpy(), gradient.numpy(),
              np.float32(rate), np.float32(root), np.float32(self.betas[0]), np.float32(1 - self.betas[0]),
              np.float32(self.betas[1]), np.float32(1 - self.betas[1]), np.float32(self.eps))

    def plain(self, weight: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradient: Tensor,
              learning_rate: float, step: int) -> None:
        slots, gradient = _there(slots, gradient)
        rate, root = self._corrected(learning_rate, step)
        first = self.betas[0] * state["first"][slots] + (1 - self.betas[0]) * gradient
        second = self.betas[1] * state["second"][slots] + (1 - self.betas[1]) * gradient * gradient
        state["first"][slots], state["second"][slots] = first, second
        weight[slots] = weight[slots] - rate * first / (second.sqrt() / root + self.eps)

    def _corrected(self, learning_rate: float, step: int) -> tuple[float, float]:
        """(lr / (1 - b1^t), sqrt(1 - b2^t)), in float64."""
        return learning_rate / (1 - self.betas[0] ** step), (1 - self.betas[1] ** step) ** 0.5


def _there(slots: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    there = slots >= 0
    return slots[there], gradient[there]


@numba.njit(cache=True, nogil=True)
def _sgd(weight, slots, gradient, rate):
    for i in range(len(slots)):
        if slots[i] >= 0:
            row = weight[slots[i]]
            for d in range(len(row)):
                row[d] -= rate * gradient[i, d]


@numba.njit(cache=True, nogil=True)
def _adagrad(weight, total, slots, gradient, rate, eps):
    for i in range(len(slots)):
        if slots[i] >= 0:
            row, g = weight[slots[i]], gradient[i]
            squares = np.float32(0)
            for d in range(len(row)):
                squares += g[d] * g[d]
            total[slots[i], 0] += squares / np.float32(len(row))
            own_rate = rate / (np.sqrt(total[slots[i], 0]) + eps)
            for d in range(len(row)):
                row[d] -= own_rate * g[d]


@numba.njit(cache=True, nogil=True)
def _adam(weight, first, second, slots, gradient, rate, root, b1, c1, b2, c2, eps):
    for i in range(len(slots)):
        if slots[i] >= 0:
            row, m, v, g = weight[slots[i]], first[slots[i]], second[slots[i]], gradient[i]
            for d in range(len(row)):
                m[d] = b1 * m[d] + c1 * g[d]
                v[d] = b2 * v[d] + c2 * g[d] * g[d]
                row[d] -= rate * m[d] / (np.sqrt(v[d]) / root + eps)

"""One step's batch in pieces that are computed side by side, a thread each.

On a CPU this beats threads inside each operation: most operations of a recommender are small, and every one of them
would wait for its slowest thread. Which pieces there are, and what random numbers each draws, is decided by the recipe
and the step, never by the machine: more threads give the same bits sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.batch import offsets_of
from semel.models.randomness import drawing_from
from semel.training import balance as partitions


def cut_evenly(cost: np.ndarray, pieces: int) -> list[tuple[int, int]]:
    """[rows] costs -> at most ``pieces`` runs of rows (start, stop), none empty, their costs as near as rows allow."""
    total = np.concatenate([np.zeros(1), np.cumsum(cost, dtype=np.float64)])
    targets = total[-1] * np.arange(1, pieces) / pieces
    edges = np.searchsorted(total, targets)
    edges -= (edges > 0) & (targets - total[np.maximum(edges - 1, 0)] < total[edges] - targets)
    bounds = np.unique(np.concatenate([[0], edges, [len(cost)]]))
    return [(int(a), int(b)) for a, b in pairwise(bounds)]


def share_out(cost: np.ndarray, pieces: int, balance: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """[rows] costs -> an order of the rows, and at most ``pieces`` runs of it, none empty. ``balance`` "none" leaves
    rows where they are (``cut_evenly``), a partition of ``semel.training.balance`` says which row is whose: ranks share
    the pieces out, so that what is balanced over pieces is balanced over ranks, however many there are."""
    if balance == "none" or not len(cost):
        return np.arange(len(cost)), cut_evenly(cost, pieces)
    piece = getattr(partitions, balance)(cost, pieces)
    edges = offsets_of(np.bincount(piece, minlength=pieces))
    return np.argsort(piece, kind="stable"), [(int(a), int(b)) for a, b in pairwise(edges) if b > a]


class Workers:
    """Threads that compute the pieces of a step. A context: the calling thread's number of threads is restored."""

    def __init__(self, pieces: int, seed: int) -> None:
        self.seed = seed
        self._threads = torch.get_num_threads()
        count = min(pieces, self._threads)
        self._each = max(1, self._threads // count)
        self._pool = None if count < 2 else ThreadPoolExecutor(
            count, "semel-train", torch.set_num_threads, (self._each,))

    def __enter__(self) -> Workers:
        # The caller's threads too: after an operation they wait busily for the next, on the cores that pieces need.
        torch.set_num_threads(self._each)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def losses(self, pieces: Sequence[tuple[int, Any]], step: int, loss: Callable[[Any, torch.Generator], Tensor]
               ) -> list[Tensor]:
        """``loss`` of each numbered piece, with a generator that the step and the number decide. Raises what ``loss``
        raises, once all pieces are done."""
        return self._all(_loss, [(piece, _generator(self.seed, step, number), loss) for number, piece in pieces])

    def gradients(self, parameters: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of the sum of ``losses``, for each parameter; None where none of them depends on it."""
        return sums(self.parts(parameters, losses), len(parameters))

    def parts(self, parameters: Sequence[Tensor], losses: Sequence[Tensor],
              around: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
              ) -> list[tuple[Tensor | None, ...]]:
        """The gradients of each of ``losses``; number i's are computed within ``around(i)``, in that thread."""
        return self._all(_gradients, [(parameters, loss, around(number)) for number, loss in enumerate(losses)])

    def _all(self, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
        if self._pool is None:
            return [function(*call) for call in calls]
        waiting = [self._pool.submit(function, *call) for call in calls]
        wait(waiting)
        return [future.result() for future in waiting]


def _loss(piece: Any, source: torch.Generator, loss: Callable[[Any, torch.Generator], Tensor]) -> Tensor:
    with drawing_from(source):
        return loss(piece, source)


def _gradients(parameters: Sequence[Tensor], loss: Tensor, around: AbstractContextManager[None]
               ) -> tuple[Tensor | None, ...]:
    with around:
        return torch.autograd.grad(loss, parameters, allow_unused=True)


def sums(parts: Sequence[tuple[Tensor | None, ...]], count: int) -> list[Tensor | None]:
    """The sum of pieces' gradients, for each of ``count`` parameters, no two in one place: autograd may give one tensor
    as the gradient of two parameters, of p and q in p + q for instance."""
    totals = [_sum([gradients[i] for gradients in parts]) for i in range(count)]
    seen: set[int] = set()
    for i, total in enumerate(totals):
        if total is not None:
            totals[i] = total.clone() if total.data_ptr() in seen else total
            seen.add(total.data_ptr())
    return totals


def add(total: list[Tensor | None] | None, more: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of two parts of a batch, summed."""
    return more if total is None else [_sum([a, b]) for a, b in zip(total, more, strict=True)]


def _sum(gradients: list[Tensor | None]) -> Tensor | None:
    """In the order of the pieces, so that the sum is the same whoever is done first. Not in place: see ``sums``."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _generator(seed: int, step: int, piece: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, step, piece]).generate_state(1)[0]))

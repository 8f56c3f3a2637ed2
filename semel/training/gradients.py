"""Gradients summed over ranks while backward still computes others: bytes travel under computation.

Parameters lie in buckets, the last made first, which is about the order in which backward reaches them. When all of
this rank's pieces have given their gradients of a bucket, a thread sums these in the order of pieces and then over
ranks. It takes buckets in their order and no other, so that ranks never meet in different ones; what never comes, since
nothing depended on it here, counts as zeros once backward is done. The plain form is ``Ranks.sum_in_place`` after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from semel.comm.worker import Worker
from semel.training.ranks import Ranks
from semel.training.timeline import Timeline

BUCKET_BYTES = 1 << 20
"""Enough that a message's fixed cost is small beside it, little enough that the first one leaves early."""


class GradientSums:
    """``begin(pieces)``, then backward of each piece within ``piece(number)``, ``end()`` when all are done, and
    ``wait()`` for the sums. ``over_ranks``: sums a tensor in place, for this one's thread alone
    (``Ranks.sum_apart``)."""

    def __init__(self, parameters: Sequence[Tensor], over_ranks: Callable[[Tensor], None], timeline: Timeline,
                 bucket_bytes: int) -> None:
        self.parameters, self.timeline, self._over_ranks = list(parameters), timeline, over_ranks
        self.buckets = buckets(self.parameters, bucket_bytes)
        self._bucket = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self._worker = Worker("semel-gradients")
        self._hooks = [parameter.register_hook(partial(self._arrive, index))
                       for index, parameter in enumerate(self.parameters)]
        self._own = threading.local()
        self._lock = threading.Lock()
        self._futures: list[Future[list[Tensor]]] = []

    def begin(self, pieces: int, before: Sequence[Tensor | None] | None = None) -> None:
        """``before``: the sums of the update's earlier batches on this rank."""
        self._found: list[list[Tensor | None]] = [[None] * pieces for _ in self.parameters]
        self._before = [None] * len(self.parameters) if before is None else list(before)
        self._missing = [pieces * len(bucket) for bucket in self.buckets]
        self._futures = []

    @contextmanager
    def piece(self, number: int) -> Iterator[None]:
        self._own.piece = number
        try:
            yield
        finally:
            self._own.piece = None

    def _arrive(self, index: int, gradient: Tensor) -> None:
        """Called by autograd, in the thread that computes a piece, when a parameter's gradient is whole."""
        number = getattr(self._own, "piece", None)
        if number is None:
            return
        self._found[index][number] = gradient
        with self._lock:
            self._missing[self._bucket[index]] -= 1
            self._start()

    def end(self) -> list[bool]:
        """Backward is done: whether this rank has a gradient, by parameter."""
        with self._lock:
            self._missing = [0] * len(self.buckets)
            self._start()
        return [before is not None or any(part is not None for part in parts)
                for before, parts in zip(self._before, self._found, strict=True)]

    def wait(self) -> list[Tensor]:
        """The sums over pieces and ranks, by parameter. Raises what went wrong in one."""
        sums: dict[int, Tensor] = {}
        for bucket, future in zip(self.buckets, self._futures, strict=True):
            sums |= zip(bucket, future.result(), strict=True)
        self._found, self._before, self._futures = [], [], []
        return [sums[index] for index in range(len(self.parameters))]

    def close(self) -> None:
        """The thread ends after what was asked so far."""
        for hook in self._hooks:
            hook.remove()
        self._worker.close()

    def _start(self) -> None:
        while len(self._futures) < len(self.buckets) and not self._missing[len(self._futures)]:
            self._futures.append(self._worker.submit(partial(self._sum, self.buckets[len(self._futures)])))

    def _sum(self, bucket: list[int]) -> list[Tensor]:
        with self.timeline.span("gradients"):
            like = [self.parameters[index] for index in bucket]
            flat = torch.zeros(sum(p.numel() for p in like), dtype=like[0].dtype, device=like[0].device)
            views = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in like]), like, strict=True)]
            for index, total in zip(bucket, views, strict=True):
                parts = [part for part in self._found[index] if part is not None]
                if parts:
                    total.copy_(parts[0])
                for part in [*parts[1:], self._before[index]]:
                    if part is not None:
                        total.add_(part)
            self._over_ranks(flat)
        return views


def buckets(parameters: Sequence[Tensor], most_bytes: int) -> list[list[int]]:
    """Indices of ``parameters``, the last first, in runs of one dtype and device that hold ``most_bytes`` or one of
    them."""
    found: list[list[int]] = []
    room, kind = 0, None
    for index in reversed(range(len(parameters))):
        size = parameters[index].numel() * parameters[index].element_size()
        if not found or size > room or (parameters[index].dtype, parameters[index].device) != kind:
            found.append([])
            room, kind = most_bytes, (parameters[index].dtype, parameters[index].device)
        found[-1].append(index)
        room -= size
    return found


def gradient_sums(optimizer: torch.optim.Optimizer, ranks: Ranks, timeline: Timeline) -> GradientSums | None:
    """Of all that ``optimizer`` learns; None for one rank, whose sums are what they were."""
    if ranks.world_size == 1:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return GradientSums(parameters, ranks.sum_apart(), timeline, BUCKET_BYTES)

"""What a model computes: FLOPs of its matrix products, two a multiply-add, per request and per candidate.

Elementwise work and table look-ups are not counted. Products of torch are seen as they run; the compiled loops of
``semel.models.attention``, which torch cannot see, report theirs by ``note``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from semel.batch import Jagged, RequestBatch

_noted: ContextVar[list[int] | None] = ContextVar("semel_flops", default=None)


def note(flops: Callable[[], int]) -> None:
    """Add ``flops()`` to the count that is running, if one is."""
    total = _noted.get()
    if total is not None:
        total[0] += flops()


def count(function: Callable[[], Any]) -> int:
    """FLOPs of one call of ``function``."""
    total = [0]
    token = _noted.set(total)
    try:
        with FlopCounterMode(display=False) as counter:
            function()
    finally:
        _noted.reset(token)
    return counter.get_total_flops() + total[0]


@dataclass(frozen=True)
class Cost:
    """FLOPs ``per_request`` and ``per_candidate``: scoring N candidates takes ``per_request + N * per_candidate``."""

    per_request: float
    per_candidate: float

    def amortized(self, candidates: int) -> float:
        """A candidate's share when a request has so many (ROCS, arXiv 2607.27744: C_candidate + C_request / N)."""
        return self.per_candidate + self.per_request / candidates

    @property
    def request_share(self) -> float:
        """Of the FLOPs of one request with one candidate, the share that more candidates do not add to."""
        return self.per_request / max(self.per_request + self.per_candidate, 1e-9)


def cost_of(model: Any, batch: RequestBatch) -> Cost:
    """The mean over the requests of ``batch``, measured: what twice the candidates cost more is per candidate, the rest
    is per request. Needs a candidate."""
    if not batch.candidates:
        raise ValueError("a batch without candidates says nothing about what one costs")
    twice = torch.arange(batch.candidates).repeat_interleave(2)
    candidate = {name: rows(value, twice) for name, value in batch.candidate.items()}
    doubled = dataclasses.replace(batch, candidate=candidate, candidate_offsets=batch.candidate_offsets * 2)
    with torch.inference_mode():
        once, more = count(lambda: model(batch)), count(lambda: model(doubled))
    return Cost((2 * once - more) / batch.requests, (more - once) / batch.candidates)


def rows(value: Tensor | Jagged, index: Tensor) -> Tensor | Jagged:
    """Some rows of a candidate feature."""
    if not isinstance(value, Jagged):
        return value[index]
    lengths = value.lengths[index]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.arange(int(offsets[-1]), device=offsets.device)
    return Jagged(value.values[place + torch.repeat_interleave(value.offsets[index] - offsets[:-1], lengths)], offsets)

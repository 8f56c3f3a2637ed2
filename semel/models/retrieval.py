"""The best of very many candidates: an isolated model scores them chunk by chunk, and only the best are kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from semel.batch import RequestBatch


@dataclass(frozen=True)
class TopK:
    """``score`` [R, k], best first; ``index`` [R, k]: the candidate's place among those of its request. A request with
    fewer candidates ends with scores of -inf and indices of -1."""

    score: Tensor
    index: Tensor


def top_k(model: Any, batch: RequestBatch, k: int, *, chunk: int = 4096, column: int = 0) -> TopK:
    """The ``k`` best candidates of each request by the logit ``column`` of an isolated model.

    ``model``: anything with ``request`` and ``score`` as of ``semel.models.fields.FieldRanker``. The request side is
    computed once; candidates pass in chunks of ``chunk``, so memory for activations depends on that and not on how many
    there are. Without gradients, in eval mode if the model is. Raises ValueError for a k or chunk below 1.
    """
    if k < 1 or chunk < 1:
        raise ValueError(f"k and chunk must be at least 1, got {k} and {chunk}")
    offsets, total = batch.candidate_offsets, batch.candidates
    with torch.inference_mode():
        state = model.request(batch.request)
        score = torch.full((batch.requests, k), float("-inf"), device=offsets.device)
        index = torch.full((batch.requests, k), -1, dtype=torch.int64, device=offsets.device)
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            part = {name: value.slice(start, stop) if hasattr(value, "slice") else value[start:stop]
                    for name, value in batch.candidate.items()}
            logits = model.score(state, part, offsets.clamp(start, stop) - start)[:, column]
            _merge(score, index, logits.to(score.dtype), offsets, start, stop)
    return TopK(score, index)


def _merge(score: Tensor, index: Tensor, logits: Tensor, offsets: Tensor, start: int, stop: int) -> None:
    """Put the scores of the candidates ``start:stop`` among the best so far."""
    first = int(torch.searchsorted(offsets, start, right=True)) - 1
    last = int(torch.searchsorted(offsets, stop))
    edges = offsets[first : last + 1].tolist()
    for number, (begin, end) in enumerate(pairwise(edges), first):
        low, high = max(begin, start), min(end, stop)
        if low >= high:
            continue
        values = torch.cat([score[number], logits[low - start : high - start]])
        places = torch.cat([index[number], torch.arange(low - begin, high - begin, device=index.device)])
        score[number], best = values.topk(score.shape[1])
        index[number] = places[best]

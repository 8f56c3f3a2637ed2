"""Sampled and full softmax over the catalogue, fused with the scoring product and computed in chunks.

The logits of 15,000 positions against 3,700 items are 220 MB that nobody needs at once. Both functions compute the
gradient together with the loss, a few hundred rows at a time, and keep only the two small gradients. The plain forms
are in ``semel.models.reference``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semel.models.compiled import exp, kernel, shared_out

CHUNK_LOGITS = 1 << 19
"""Logits held at a time: 2 MiB of float32."""

SERIAL_LOGITS = 1 << 16
"""Fewer of them than this are not worth a thread."""


def softmax_loss(query: Tensor, target_vector: Tensor, target: Tensor, negative_vector: Tensor, negative: Tensor,
                 negative_log_q: Tensor, temperature: float) -> Tensor:
    """Mean over positions of ``-log softmax`` of the target among itself and shared negatives.

    ``query`` and ``target_vector`` [T, D]; ``target`` [T] item indices; ``negative_vector`` [N, D] and ``negative`` [N]
    distinct item indices, shared by all positions; ``negative_log_q`` [N]: log of the expected number of times that
    each is among the negatives, subtracted from its logit (logQ correction, Bengio & Senecal 2008; Yi et al., RecSys
    2019, sec. 3), so that the expected loss is that of the full softmax. A negative that is the position's own target
    is left out. Full softmax: all items as negatives with ``negative_log_q`` 0. Vectors of fewer bits are compared as
    float32: a loss is a difference of large sums.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, target_vector, negative_vector = query.to(wide), target_vector.to(wide), negative_vector.to(wide)
    with torch.autocast(query.device.type, enabled=False):
        return _SoftmaxLoss.apply(query, target_vector, target, negative_vector, negative, negative_log_q, temperature)


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, target_vector: Tensor, target: Tensor, negative_vector: Tensor,
                negative: Tensor, negative_log_q: Tensor, temperature: float) -> Tensor:
        total, width = len(query), len(negative)
        # Where each position's target stands among the negatives (or nowhere).
        order = torch.argsort(negative)
        place = torch.searchsorted(negative[order], target).clamp(max=width - 1)
        place = order[place]
        hit = negative[place] == target
        scaled = query * (1.0 / temperature)
        positive = (scaled * target_vector).sum(1)
        dquery, dpositive = torch.empty_like(query), torch.empty_like(positive)
        dnegative = torch.zeros_like(negative_vector.T, memory_format=torch.contiguous_format)  # summed faster this way
        loss = torch.zeros((), dtype=torch.float64, device=query.device)
        rows = max(1, CHUNK_LOGITS // max(width, 1))
        room = query.new_empty(min(rows, total), width)  # the same for all chunks: new pages cost more than their use
        for start in range(0, total, rows):
            part = slice(start, start + rows)
            logits = room[:total - start]
            torch.addmm(-negative_log_q, scaled[part], negative_vector.T, out=logits)
            hit_rows = hit[part].nonzero().flatten()
            logits[hit_rows, place[part][hit_rows]] = float("-inf")
            top = torch.maximum(logits.amax(1), positive[part])
            mine = (positive[part] - top).exp_()
            whole = normalize(logits, top, mine)
            weight = logits  # d loss / d logits
            loss += (whole.log() + top - positive[part]).sum(dtype=torch.float64)
            dpositive[part] = mine.div_(whole).sub_(1.0)
            torch.mm(weight, negative_vector, out=dquery[part])
            dnegative.addmm_(scaled[part].T, weight)
        dquery.addcmul_(dpositive[:, None], target_vector).mul_(1.0 / (temperature * max(total, 1)))
        dtarget = scaled.mul_(dpositive[:, None] / max(total, 1))
        dnegative /= max(total, 1)
        ctx.save_for_backward(dquery, dtarget, dnegative.T)
        return (loss / max(total, 1)).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dquery, dtarget, dnegative = ctx.saved_tensors
        return dquery * grads[0], dtarget * grads[0], None, dnegative * grads[0], None, None, None


def normalize(logits: Tensor, top: Tensor, mine: Tensor) -> Tensor:
    """``logits`` [T, N] become ``exp(logits - top) / whole`` in place; the result ``whole`` [T] is the sum over N of
    ``exp(logits - top)``, plus ``mine``."""
    if logits.device.type == "cpu":
        whole = torch.empty_like(mine)
        arrays = logits.numpy(), top.numpy(), mine.numpy(), whole.numpy()
        rows = len(logits)
        threads = max(1, min(torch.get_num_threads(), logits.numel() // SERIAL_LOGITS))
        shared_out(lambda part: _normalize_rows(
            *(x[part * rows // threads:(part + 1) * rows // threads] for x in arrays)), threads)
        return whole
    whole = logits.sub_(top[:, None]).exp_().sum(1).add_(mine)
    logits.div_(whole[:, None])
    return whole


@kernel
def _normalize_rows(logits, top, mine, whole):
    for i in range(len(logits)):
        row, highest, total = logits[i], top[i], mine[i]
        for j in range(len(row)):
            row[j] = exp(row[j] - highest)
        for j in range(len(row)):
            total += row[j]
        whole[i] = total
        for j in range(len(row)):
            row[j] /= total


def sample_negatives(items: int, count: int, generator: torch.Generator, popularity: Tensor | None = None
                     ) -> tuple[Tensor, Tensor]:
    """``count`` distinct item indices 1 .. items and the log of the chance that each is drawn.

    Uniform, or in proportion to ``popularity`` [items] by the Gumbel top-k trick; the chance of being among ``count``
    draws without replacement is then ``1 - exp(-w)`` with ``w`` in proportion to popularity (a Poisson approximation).
    ``count >= items`` gives all items with log chance 0: the full softmax.
    """
    if count >= items:
        return torch.arange(1, items + 1), torch.zeros(items)
    if popularity is None:
        chosen = torch.randperm(items, generator=generator)[:count]
        return chosen + 1, torch.full((count,), count / items).log()
    noise = -torch.empty(items).exponential_(generator=generator).log()
    chosen = torch.topk(popularity.log() + noise, count).indices
    weight = popularity[chosen] / popularity.sum() * count
    return chosen + 1, torch.log(-torch.expm1(-weight))

"""Plain forms of the fast algorithms in this folder: they read like their formulas and are what tests hold those to.

One row and one head at a time, no chunks, no recomputation. Quadratic memory; use them to read and to check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semel.models.attention import Weighting
from semel.models.time_bias import time_bucket


def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, *, causal: bool,
    weighting: Weighting, scale: float, norm: float = 1.0, position_bias: Tensor | None = None,
    time_bias: Tensor | None = None, query_time: Tensor | None = None, key_time: Tensor | None = None,
    own_k: Tensor | None = None, own_v: Tensor | None = None,
) -> Tensor:
    """``semel.models.attention.jagged_attention`` with its plan's arguments given directly."""
    rows = []
    for row in range(len(query_offsets) - 1):
        queries = slice(int(query_offsets[row]), int(query_offsets[row + 1]))
        keys = slice(int(key_offsets[row]), int(key_offsets[row + 1]))
        n, m = queries.stop - queries.start, keys.stop - keys.start
        steps = torch.arange(m)
        gap = torch.arange(n)[:, None] - steps if causal else (m - steps).expand(n, m)
        seen = gap >= 0
        heads = []
        for head in range(q.shape[1]):
            score = q[queries, head] @ k[keys, head].T * scale
            if position_bias is not None:
                score = score + position_bias[gap.clamp(0, len(position_bias) - 1)]
            if time_bias is not None and query_time is not None and key_time is not None:
                score = score + time_bias[time_bucket(query_time[queries][:, None] - key_time[keys]).long()]
            if own_k is not None:
                own = (q[queries, head] * own_k[queries, head]).sum(-1, keepdim=True) * scale
                score = torch.cat([score, own], 1)
            mask = seen if own_k is None else torch.cat([seen, torch.ones(n, 1, dtype=torch.bool)], 1)
            if weighting == "silu":
                weight = torch.nn.functional.silu(score) * mask
            else:
                weight = torch.softmax(score.masked_fill(~mask, float("-inf")), -1)
            result = weight[:, :m] @ v[keys, head] / norm
            if own_v is not None:
                result = result + weight[:, m:] * own_v[queries, head] / norm
            heads.append(result)
        rows.append(torch.stack(heads, 1))
    return torch.cat(rows) if rows else torch.zeros_like(q)


def softmax_loss(query: Tensor, target_vector: Tensor, target: Tensor, negative_vector: Tensor, negative: Tensor,
                 negative_log_q: Tensor, temperature: float) -> Tensor:
    """``semel.models.softmax.softmax_loss``."""
    positive = (query * target_vector).sum(1, keepdim=True) / temperature
    logits = query @ negative_vector.T / temperature - negative_log_q
    logits = logits.masked_fill(negative == target[:, None], float("-inf"))
    return -torch.log_softmax(torch.cat([positive, logits], 1), 1)[:, 0].mean()

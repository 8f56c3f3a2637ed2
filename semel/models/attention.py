"""Jagged attention: rows of different lengths, no padding outside, with a backward on any device.

No fused kernel covers causal, ragged, biased, SiLU-weighted attention with a backward on a CPU. Two ways here: compiled
loops over the rows (``attention_rows``, CPU), and small padded chunks of torch operations (``attention_chunks``, any
device and type). ``semel.models.reference`` has the formulas.

Axes: ``T`` query tokens and ``S`` key tokens of all rows together, ``H`` heads, ``D`` head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from semel.models.attention_chunks import ChunksAttention, ChunksPlan, plan_chunks
from semel.models.attention_rows import RowsAttention, RowsPlan
from semel.models.flops import note

Weighting = Literal["silu", "softmax"]


@dataclass(frozen=True)
class AttentionPlan:
    """Who may see whom: what all layers, forward and backward, share.

    The queries and keys of row r lie at ``query_offsets`` and ``key_offsets`` [rows + 1]. ``causal``: queries and keys
    are the same tokens and a query sees itself and what came before; else every query sees all keys of its row, and
    stands behind the last of them. ``window``: semi-local attention (ULTRA-HSTU's): of those keys a query sees the
    first ``prefix`` of its row and the ``window`` before it (and itself); None: all. ``positions`` > 0 asks for
    position buckets (0 .. positions - 1, by distance), ``query_time`` [T] and ``key_time`` [S] (int64 microseconds)
    for time buckets.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    causal: bool
    positions: int = 0
    query_time: Tensor | None = None
    key_time: Tensor | None = None
    window: int | None = None
    prefix: int = 0

    @cached_property
    def rows(self) -> RowsPlan:
        return RowsPlan(self.query_offsets, self.key_offsets, self.causal, self.query_time, self.key_time, self.window,
                        self.prefix)

    @cached_property
    def chunks(self) -> ChunksPlan:
        return plan_chunks(self.query_offsets, self.key_offsets, self.causal, self.positions, self.query_time,
                           self.key_time, self.window, self.prefix)

    @cached_property
    def pairs(self) -> int:
        """How many query-key pairs meet, in all rows."""
        queries, keys = (torch.diff(x).tolist() for x in (self.query_offsets, self.key_offsets))
        near = max(keys, default=0) if self.window is None else self.window
        total = 0
        for n, m in zip(queries, keys, strict=True):
            places = range(n) if self.causal else [m] * n
            # A query at place p sees [0, prefix) and [p - window, p), and in causal attention itself.
            total += sum(min(p, near) + min(self.prefix, max(0, p - near)) + self.causal for p in places)
        return total


@dataclass(frozen=True)
class KeysValues:
    """What one attention layer keeps of its requests for candidates to read: ``keys`` and ``values`` [T, H, D], those
    of request r at ``offsets[r]:offsets[r + 1]``."""

    keys: Tensor
    values: Tensor
    offsets: Tensor


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    *,
    weighting: Weighting,
    scale: float,
    norm: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """``q`` [T, H, D], ``k`` and ``v`` [S, H, D] -> [T, H, D].

    Weights are ``silu(q.k * scale + bias)`` (HSTU, arXiv 2402.17152, eq. 2) or the softmax of the same over the keys
    that a query may see; both are divided by ``norm``. ``position_bias`` [positions] and ``time_bias`` [TIME_BUCKETS]
    are added by bucket, the same for all heads. ``own_k``, ``own_v`` [T, H, D]: each query also sees one token of its
    own (a candidate sees the history and itself, never another candidate); the own token has no bias. A query without
    keys gets only its own token's part: zeros where there is none.
    """
    own_pairs = 0 if own_k is None else len(q)
    note(lambda: 4 * (plan.pairs + own_pairs) * q.shape[1] * q.shape[2])
    empty = q.new_empty(0, *q.shape[1:])
    own = (own_k, own_v) if own_k is not None and own_v is not None else (empty, empty)
    biases = [q.new_empty(0) if bias is None else bias for bias in (position_bias, time_bias)]
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64):
        return RowsAttention.apply(q, k, v, *own, *biases, plan.rows, weighting, scale, norm)
    return ChunksAttention.apply(q, k, v, *own, *biases, plan.chunks, weighting, scale, norm)

"""HSTU: hierarchical sequential transduction units (Zhai et al., "Actions Speak Louder than Words", arXiv 2402.17152).

Pointwise aggregated attention (SiLU instead of softmax, so that the amount of matching history is not normalised
away), a relative bias by position and by time, and a gate ``U``. Jagged in, jagged out.

Target-aware and isolated as it is: candidates attend to their request's history and to themselves, never to each other,
and the history never sees a candidate (its mask is the context-first one of generalized layer masking; norms, gates and
residuals are by token). So the request side, down to each layer's keys and values, is computed once per request, and a
candidate's output is a sum over those and a term of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semel.models.attention import AttentionPlan, KeysValues, jagged_attention
from semel.models.config import EncoderConfig
from semel.models.dropout import Dropout
from semel.models.time_bias import TIME_BUCKETS


class HSTU(nn.Module):
    """Layers as in eq. 1-3 of the paper."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Any = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def request(self, history: Tensor, plan: AttentionPlan) -> tuple[Tensor, list[KeysValues]]:
        """[T, dim] -> states [T, dim], and the keys and values of each layer, for candidates to read."""
        kept = []
        for layer in self.layers:
            history, shared = layer.request(history, plan)
            kept.append(shared)
        return self.norm(history), kept

    def candidate(self, candidate: Tensor, kept: Sequence[KeysValues], plan: AttentionPlan) -> Tensor:
        """[C, dim] -> [C, dim]."""
        for layer, shared in zip(self.layers, kept, strict=True):
            candidate = layer.candidate(candidate, shared, plan)
        return self.norm(candidate)


class HSTULayer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.length = config.heads, config.head_dim, config.positions
        inner = config.heads * config.head_dim
        self.norm = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, 4 * inner, bias=False)
        self.out_norm = nn.LayerNorm(inner, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(inner, config.dim)
        self.dropout = Dropout(config.dropout)
        self.position_bias = nn.Parameter(torch.ones(config.positions))
        self.time_bias = nn.Parameter(torch.zeros(TIME_BUCKETS)) if config.time else None
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def request(self, history: Tensor, plan: AttentionPlan) -> tuple[Tensor, KeysValues]:
        """[T, dim] -> the same, and keys and values, each [T, heads, head_dim] by request."""
        u, v, q, k = self._project(history)
        shared = KeysValues(k, v, plan.key_offsets)
        return self._output(history, u, self._attend(q, k, v, plan)), shared

    def candidate(self, candidate: Tensor, shared: KeysValues, plan: AttentionPlan) -> Tensor:
        u, own_v, q, own_k = self._project(candidate)
        return self._output(candidate, u, self._attend(q, shared.keys, shared.values, plan, own_k, own_v))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, own_k: Tensor | None = None,
                own_v: Tensor | None = None) -> Tensor:
        return jagged_attention(q, k, v, plan, weighting="silu", scale=1.0, norm=float(self.length), own_k=own_k,
                                own_v=own_v, position_bias=self.position_bias, time_bias=self.time_bias)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[N, dim] -> u, v, q, k, each [N, heads, head_dim]."""
        projected = nn.functional.silu(self.uvqk(self.norm(x)))
        return projected.view(len(x), 4, self.heads, self.head_dim).unbind(1)

    def _output(self, x: Tensor, u: Tensor, attended: Tensor) -> Tensor:
        gated = u.flatten(1) * self.out_norm(attended.flatten(1))
        return x + self.out(self.dropout(gated))

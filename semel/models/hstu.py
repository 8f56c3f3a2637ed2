"""HSTU: hierarchical sequential transduction units (Zhai et al., "Actions Speak Louder than Words", arXiv 2402.17152).

Pointwise aggregated attention (SiLU instead of softmax, so that the amount of matching history is not normalised
away), a relative bias by position and by time, and a gate ``U``. Jagged in, jagged out. Target-aware: candidates attend
to their request's history and to themselves, never to each other, and the history never sees a candidate, so its side
is computed once per request.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from semel.models.attention import AttentionPlan, jagged_attention
from semel.models.config import EncoderConfig
from semel.models.dropout import Dropout
from semel.models.plans import Plans
from semel.models.time_bias import TIME_BUCKETS


class HSTU(nn.Module):
    """``(history [T, dim], candidate [C, dim] or None)`` -> the same shapes; layers as in eq. 1-3 of the paper."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, history: Tensor, candidate: Tensor | None, plans: Plans) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            history, candidate = layer(history, candidate, plans)
        return self.norm(history), None if candidate is None else self.norm(candidate)


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

    def forward(self, history: Tensor, candidate: Tensor | None, plans: Plans) -> tuple[Tensor, Tensor | None]:
        u, v, q, k = self._project(history)
        new_history = self._output(history, u, self._attend(q, k, v, plans.history))
        if candidate is None or plans.candidate is None:
            return new_history, None
        cu, cv, cq, ck = self._project(candidate)
        return new_history, self._output(candidate, cu, self._attend(cq, k, v, plans.candidate, ck, cv))

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

"""A causal transformer over the history, SASRec's encoder (Kang & McAuley, arXiv 1808.09781) in pre-norm form.

The same shapes and the same rule as ``semel.models.hstu``: the history sees its past, a candidate sees the history and
itself, no candidate sees another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from semel.models.attention import jagged_attention
from semel.models.config import EncoderConfig
from semel.models.dropout import Dropout
from semel.models.plans import Plans


class Transformer(nn.Module):
    """``(history [T, dim], candidate [C, dim] or None)`` -> the same shapes."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, history: Tensor, candidate: Tensor | None, plans: Plans) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            history, candidate = layer(history, candidate, plans)
        return self.norm(history), None if candidate is None else self.norm(candidate)


class TransformerLayer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * inner)
        self.out = nn.Linear(inner, config.dim)
        self.position_bias = nn.Parameter(torch.zeros(config.positions))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.dim), nn.Linear(config.dim, 4 * config.dim), nn.GELU(),
            Dropout(config.dropout), nn.Linear(4 * config.dim, config.dim),
        )
        self.dropout = Dropout(config.dropout)

    def forward(self, history: Tensor, candidate: Tensor | None, plans: Plans) -> tuple[Tensor, Tensor | None]:
        q, k, v = self._project(history)
        scale, bias = self.head_dim ** -0.5, self.position_bias
        attended = jagged_attention(q, k, v, plans.history, weighting="softmax", scale=scale, position_bias=bias)
        new_history = self._output(history, attended)
        if candidate is None or plans.candidate is None:
            return new_history, None
        cq, ck, cv = self._project(candidate)
        attended = jagged_attention(cq, k, v, plans.candidate, weighting="softmax", scale=scale, position_bias=bias,
                                    own_k=ck, own_v=cv)
        return new_history, self._output(candidate, attended)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[N, dim] -> q, k, v, each [N, heads, head_dim]."""
        return self.qkv(self.attention_norm(x)).view(len(x), 3, self.heads, self.head_dim).unbind(1)

    def _output(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(self.out(attended.flatten(1)))
        return x + self.dropout(self.feed_forward(x))

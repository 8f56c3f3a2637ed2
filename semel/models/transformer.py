"""A causal transformer over the history, SASRec's encoder (Kang & McAuley, arXiv 1808.09781) in pre-norm form.

The same shapes and the same rule as ``semel.models.hstu``: the history sees its past, a candidate sees the history and
itself, no candidate sees another, and no event sees a candidate; so it is isolated as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semel.models.attention import AttentionPlan, KeysValues, jagged_attention
from semel.models.config import EncoderConfig
from semel.models.dropout import Dropout


class Transformer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers: Any = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
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

    def request(self, history: Tensor, plan: AttentionPlan) -> tuple[Tensor, KeysValues]:
        """[T, dim] -> the same, and keys and values, each [T, heads, head_dim] by request."""
        q, k, v = self._project(history)
        shared = KeysValues(k, v, plan.key_offsets)
        return self._output(history, self._attend(q, k, v, plan)), shared

    def candidate(self, candidate: Tensor, shared: KeysValues, plan: AttentionPlan) -> Tensor:
        q, own_k, own_v = self._project(candidate)
        return self._output(candidate, self._attend(q, shared.keys, shared.values, plan, own_k, own_v))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, own_k: Tensor | None = None,
                own_v: Tensor | None = None) -> Tensor:
        return jagged_attention(q, k, v, plan, weighting="softmax", scale=self.head_dim ** -0.5, own_k=own_k,
                                own_v=own_v, position_bias=self.position_bias)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[N, dim] -> q, k, v, each [N, heads, head_dim]."""
        return self.qkv(self.attention_norm(x)).view(len(x), 3, self.heads, self.head_dim).unbind(1)

    def _output(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(self.out(attended.flatten(1)))
        return x + self.dropout(self.feed_forward(x))

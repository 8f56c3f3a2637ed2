"""Wukong (Zhang et al., arXiv 2403.02545), and its isolated form.

A layer turns ``X`` [fields, dim] into ``LN([FMB(X); LCB(X)] + residual(X))`` (section 3.2):

    LCB(X) = W X                                     linear compression of fields (3.4)
    FMB(X) = MLP(LN(flatten(X (X^T P))))             all pairs of fields, compressed to ``rank`` a field (3.3, 3.5)

Isolated, request rows meet request rows, and candidate rows meet both:

    LCB    W_rr X_r                                  [W_cr X_r] + W_cc X_c
    pairs  X_r (X_r^T P_r)                           X_c ([X_r^T P_cr] + X_c^T P_cc)
    MLP    block lower triangular; LayerNorm and residual by side

What stands in brackets is computed once per request, as is all of the request side, at every depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker, IsolatedRanker, hidden_sides
from semel.models.heads import RankingHead, mlp
from semel.models.isolated import (
    IsolatedBlock,
    IsolatedCompression,
    IsolatedHead,
    IsolatedMLP,
    IsolatedNorm,
    IsolatedStack,
    Sides,
)


class Compression(nn.Module):
    """``Y = W X`` over fields: [N, inputs, dim] -> [N, outputs, dim]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


class FactorizationBlock(nn.Module):
    """[N, inputs, dim] -> [N, outputs, dim] through pairs of fields."""

    def __init__(self, inputs: int, outputs: int, dim: int, rank: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.projection = _projection(inputs, rank)
        self.norm = nn.LayerNorm(inputs * rank)
        self.mlp = mlp([inputs * rank, *hidden, outputs * dim], dropout)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        pairs = x @ (x.transpose(1, 2) @ self.projection)
        return self.mlp(self.norm(pairs.flatten(1))).unflatten(1, (self.outputs, -1))


class WukongLayer(nn.Module):
    """[N, inputs, dim] -> [N, 2 * block, dim]: ``block`` fields of each of the two blocks."""

    def __init__(self, inputs: int, block: int, dim: int, rank: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.factorization = FactorizationBlock(inputs, block, dim, rank, hidden, dropout)
        self.compression = Compression(inputs, block)
        self.residual = nn.Identity() if inputs == 2 * block else Compression(inputs, 2 * block)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.cat([self.factorization(x), self.compression(x)], 1) + self.residual(x))


class Wukong(FieldRanker):
    """``config.interaction_layers`` layers, a head on all fields of the last."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        widths = [self.fields.total, *[2 * config.block_fields] * config.interaction_layers]
        self.layers = nn.Sequential(*(
            WukongLayer(width, config.block_fields, config.dim, config.fm_rank, config.fm_hidden, config.dropout)
            for width in widths[:-1]
        ))
        self.head = RankingHead(widths[-1] * config.dim, config.hidden, features.tasks, config.dropout)

    def mixed(self, fields: Tensor) -> Tensor:
        return self.head(self.layers(fields).flatten(1))


class IsolatedFactorizationBlock(IsolatedBlock):
    """``FactorizationBlock`` by side. ``rank.request``: of the request rows' pairs; ``rank.candidate``: of the
    candidate rows', with fields of either side."""

    def __init__(self, inputs: Sides, outputs: Sides, dim: int, rank: Sides, hidden: Sequence[Sides],
                 dropout: float) -> None:
        super().__init__()
        flat = Sides(inputs.request * rank.request, inputs.candidate * rank.candidate)
        self.request_projection = _projection(inputs.request, rank.request)
        whole = _projection(inputs.total, rank.candidate)
        self.shared_projection = nn.Parameter(whole.detach()[: inputs.request].clone())
        self.candidate_projection = nn.Parameter(whole.detach()[inputs.request :].clone())
        self.norm = IsolatedNorm(flat)
        self.mlp = IsolatedMLP([flat, *hidden, outputs.times(dim)], dropout)
        self.outputs = outputs

    def request(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        columns = x.transpose(1, 2)
        pairs = x @ (columns @ self.request_projection)
        own, shared = self.mlp.request(self.norm.request(pairs.flatten(1)))
        return own.unflatten(1, (self.outputs.request, -1)), [columns @ self.shared_projection, shared]

    def candidate(self, x: Tensor, shared: Any, owner: Tensor) -> Tensor:
        sums, kept = shared
        pairs = x @ (sums.index_select(0, owner) + x.transpose(1, 2) @ self.candidate_projection)
        mixed = self.mlp.candidate(self.norm.candidate(pairs.flatten(1)), kept, owner)
        return mixed.unflatten(1, (self.outputs.candidate, -1))


class IsolatedWukongLayer(IsolatedBlock):
    """[R, inputs.request, dim] and [C, inputs.candidate, dim] -> twice ``block`` fields on each side."""

    def __init__(self, inputs: Sides, block: Sides, dim: int, rank: Sides, hidden: Sequence[Sides],
                 dropout: float) -> None:
        super().__init__()
        self.factorization = IsolatedFactorizationBlock(inputs, block, dim, rank, hidden, dropout)
        self.compression = IsolatedCompression(inputs, block)
        self.request_residual = _residual(inputs.request, 2 * block.request)
        self.candidate_residual = _residual(inputs.candidate, 2 * block.candidate)
        self.norm = IsolatedNorm(Sides(dim, dim))

    def request(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        pairs, by_pairs = self.factorization.request(x)
        linear, by_linear = self.compression.request(x)
        return self.norm.request(torch.cat([pairs, linear], 1) + self.request_residual(x)), [by_pairs, by_linear]

    def candidate(self, x: Tensor, shared: Any, owner: Tensor) -> Tensor:
        by_pairs, by_linear = shared
        pairs = self.factorization.candidate(x, by_pairs, owner)
        linear = self.compression.candidate(x, by_linear, owner)
        return self.norm.candidate(torch.cat([pairs, linear], 1) + self.candidate_residual(x))


class IsolatedWukong(IsolatedRanker):
    """``Wukong`` by side: its fields, ranks and hidden units divided in proportion to the features of each side, each
    side then widened as ``config`` says."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        width = config.request_width, config.candidate_width
        block = self.fields.share(config.block_fields, *width)
        hidden = [self.fields.share(units, *width) for units in config.fm_hidden]
        inputs = [self.fields, *[block.times(2)] * config.interaction_layers]
        self.layers = IsolatedStack(
            IsolatedWukongLayer(given, block, config.dim, ranks(config), hidden, config.dropout)
            for given in inputs[:-1]
        )
        self.head = IsolatedHead(inputs[-1].times(config.dim), hidden_sides(config, self.fields), len(features.tasks),
                                 config.dropout)

    def request_side(self, fields: Tensor) -> list[Any]:
        fields, layers = self.layers.request(fields)
        return [layers, self.head.request(fields.flatten(1))[1]]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        layers, head = state
        return self.head.candidate(self.layers.candidate(fields, layers, owner).flatten(1), head, owner)


def ranks(config: ModelConfig) -> Sides:
    """The rank of the pairs of each side's rows."""
    return Sides(max(1, round(config.fm_rank * config.request_width)),
                 max(1, round(config.fm_rank * config.candidate_width)))


def _projection(fields: int, rank: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(fields, rank) * fields ** -0.5)


def _residual(inputs: int, outputs: int) -> nn.Module:
    return nn.Identity() if inputs == outputs else Compression(inputs, outputs)

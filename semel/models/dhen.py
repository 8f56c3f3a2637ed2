"""DHEN (Zhang et al., arXiv 2203.11014): layers that are ensembles of interactions, and their isolated form.

A layer runs several interactions on the same fields ``X`` [fields, dim] and adds them up (section 3.2, eq. 1-2):

    X_{n+1} = LN(sum over members of Member_i(X_n) + X_n)

Members here, each [fields, dim] -> [fields, dim]: ``cross``, X * (W X + b) over all units (DCN V2's layer; the
shortcut adds its X); ``factorization``, pairs of fields (Wukong's block); ``attention`` of fields to fields; and
``linear``, a compression of fields. The first layer is preceded by a compression to ``2 * block_fields`` fields.

A sum of isolated members, and LayerNorm within a field, are isolated again: in the isolated form every member is, and
the request side of all of them is computed once per request at every depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker, IsolatedRanker, hidden_sides
from semel.models.heads import RankingHead
from semel.models.isolated import (
    IsolatedBlock,
    IsolatedCompression,
    IsolatedHead,
    IsolatedLinear,
    IsolatedNorm,
    IsolatedStack,
    Sides,
)
from semel.models.wukong import Compression, FactorizationBlock, IsolatedFactorizationBlock, ranks


class CrossMember(nn.Module):
    """``X * (W X + b)`` over all units."""

    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(fields * dim, fields * dim)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x.flatten(1)).view_as(x)


class FieldAttention(nn.Module):
    """Softmax attention of fields to fields, one head as wide as a field."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v)


class DHENLayer(nn.Module):
    """[N, fields, dim] -> the same shape."""

    def __init__(self, fields: int, config: ModelConfig) -> None:
        super().__init__()
        made = {
            "cross": lambda: CrossMember(fields, config.dim),
            "factorization": lambda: FactorizationBlock(fields, fields, config.dim, config.fm_rank, config.fm_hidden,
                                                        config.dropout),
            "attention": lambda: FieldAttention(config.dim),
            "linear": lambda: Compression(fields, fields),
        }
        self.members = nn.ModuleDict({name: made[name]() for name in config.members})
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for member in self.members.values():
            total = total + member(x)
        return self.norm(total)


class DHEN(FieldRanker):
    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        fields = 2 * config.block_fields
        self.compression = Compression(self.fields.total, fields)
        self.layers = nn.Sequential(*(DHENLayer(fields, config) for _ in range(config.interaction_layers)))
        self.head = RankingHead(fields * config.dim, config.hidden, features.tasks, config.dropout)

    def mixed(self, fields: Tensor) -> Tensor:
        return self.head(self.layers(self.compression(fields)).flatten(1))


class IsolatedCrossMember(IsolatedBlock):
    def __init__(self, fields: Sides, dim: int) -> None:
        super().__init__()
        self.linear = IsolatedLinear(fields.times(dim), fields.times(dim))

    def request(self, x: Tensor) -> tuple[Tensor, Tensor]:
        crossed, shared = self.linear.request(x.flatten(1))
        return x * crossed.view_as(x), shared

    def candidate(self, x: Tensor, shared: Tensor, owner: Tensor) -> Tensor:
        return x * self.linear.candidate(x.flatten(1), shared, owner).view_as(x)


class IsolatedFieldAttention(IsolatedBlock):
    """``FieldAttention`` with a mask: request fields see request fields; candidate fields see those, whose keys and
    values are computed once per request, and the candidate's own. The weights are the unmasked module's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def request(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1)
        return self.out(weights @ v), [k, v]

    def candidate(self, x: Tensor, shared: Sequence[Tensor], owner: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        request_k, request_v = (part.index_select(0, owner) for part in shared)
        scores = torch.cat([q @ request_k.transpose(1, 2), q @ k.transpose(1, 2)], -1) * q.shape[-1] ** -0.5
        to_request, to_own = torch.softmax(scores, -1).split([request_k.shape[1], k.shape[1]], -1)
        return self.out(to_request @ request_v + to_own @ v)


class IsolatedDHENLayer(IsolatedBlock):
    def __init__(self, fields: Sides, config: ModelConfig, hidden: Sequence[Sides]) -> None:
        super().__init__()
        made = {
            "cross": lambda: IsolatedCrossMember(fields, config.dim),
            "factorization": lambda: IsolatedFactorizationBlock(fields, fields, config.dim, ranks(config), hidden,
                                                                config.dropout),
            "attention": lambda: IsolatedFieldAttention(config.dim),
            "linear": lambda: IsolatedCompression(fields, fields),
        }
        self.members: Any = nn.ModuleDict({name: made[name]() for name in config.members})
        self.norm = IsolatedNorm(Sides(config.dim, config.dim))

    def request(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        total, kept = x, []
        for member in self.members.values():
            own, shared = member.request(x)
            total = total + own
            kept.append(shared)
        return self.norm.request(total), kept

    def candidate(self, x: Tensor, shared: Sequence[Any], owner: Tensor) -> Tensor:
        total = x
        for member, kept in zip(self.members.values(), shared, strict=True):
            total = total + member.candidate(x, kept, owner)
        return self.norm.candidate(total)


class IsolatedDHEN(IsolatedRanker):
    """``DHEN`` by side, its fields, ranks and hidden units divided as in ``IsolatedWukong``."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        width = config.request_width, config.candidate_width
        fields = self.fields.share(2 * config.block_fields, *width)
        hidden = [self.fields.share(units, *width) for units in config.fm_hidden]
        self.layers = IsolatedStack([
            IsolatedCompression(self.fields, fields),
            *(IsolatedDHENLayer(fields, config, hidden) for _ in range(config.interaction_layers)),
        ])
        self.head = IsolatedHead(fields.times(config.dim), hidden_sides(config, self.fields), len(features.tasks),
                                 config.dropout)

    def request_side(self, fields: Tensor) -> list[Any]:
        fields, layers = self.layers.request(fields)
        return [layers, self.head.request(fields.flatten(1))[1]]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        layers, head = state
        return self.head.candidate(self.layers.candidate(fields, layers, owner).flatten(1), head, owner)

"""DCN V2 (Wang et al., arXiv 2008.13535) and rDCN, whose request rows never see candidates.

    DCN V2   x_{l+1}   = x_0 * (W_l x_l + b_l) + x_l
    rDCN     x_{l+1,r} = x_{0,r} * (W_rr x_{l,r} + b_r) + x_{l,r}                      once per request, at every depth
             x_{l+1,c} = x_{0,c} * ([W_cr x_{l,r} + b_c] + W_cc x_{l,c}) + x_{l,c}     the bracket once per request

rDCN is DCN V2 with block-lower-triangular weights (the rank-aware decomposition, arXiv 2605.27450, names it; its layer
is not public, and this is the only form that generalized layer masking allows). A product of a request and a candidate
unit that a request row of DCN V2 holds is still there, on the candidate's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker, IsolatedRanker, hidden_sides
from semel.models.heads import RankingHead, mlp
from semel.models.isolated import IsolatedBlock, IsolatedHead, IsolatedLinear, IsolatedMLP, Sides


def of_request(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Of ``layers`` that read ``[x_r, x_c]``: ``W_r x_r + b`` of each, [R, out]."""
    return [linear(x, layer.weight[:, : x.shape[1]], layer.bias) for layer in layers]


def of_candidate(layers: Sequence[Any], known: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """The whole of it for each candidate, [C, out]; ``known``: its request's part."""
    return [part + linear(x, layer.weight[:, -x.shape[1] :]) for part, layer in zip(known, layers, strict=True)]


class CrossNet(nn.Module):
    """[N, width] -> [N, width] (DCN V2, eq. 1). ``first``: the first layer's ``W_0 x_0 + b_0``, where it is known."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x0: Tensor, first: Tensor | None = None) -> Tensor:
        x = x0
        for number, layer in enumerate(self.layers):
            x = x0 * (first if first is not None and not number else layer(x)) + x
        return x


class DCNv2(FieldRanker):
    """A cross network beside a deep one ("parallel" DCN V2), over all fields.

    Both begin with a linear layer, ``W [x_r, x_c] = W_r x_r + W_c x_c``, of which the first product is made once per
    request. After a cross layer every unit holds a bit of the candidate, and nothing is the request's alone.
    """

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        width = self.fields.total * config.dim
        self.cross = CrossNet(width, config.cross_layers)
        self.deep = mlp([width, *config.hidden], config.dropout)
        self.head = RankingHead(width + config.hidden[-1], (), features.tasks, 0.0)

    def request_side(self, fields: Tensor) -> list[Tensor]:
        x = fields.flatten(1)
        return [x, *of_request(self._first(), x)]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        request, *known = (part.index_select(0, owner) for part in state)
        x = fields.flatten(1)
        *cross, deep = of_candidate(self._first(), known, x)
        crossed = self.cross(torch.cat([request, x], -1), *cross)
        return self.head(torch.cat([crossed, torch.relu(self.deep[1:](deep))], -1))

    def mixed(self, fields: Tensor) -> Tensor:
        x = fields.flatten(1)
        return self.head(torch.cat([self.cross(x), torch.relu(self.deep(x))], -1))

    def _first(self) -> list[Any]:
        """The layers that read the fields themselves."""
        return [*self.cross.layers[:1], self.deep[0]]


class RDCNLayer(nn.Module):
    """One cross layer; ``request0`` [R, widths.request] and ``candidate0`` [C, widths.candidate] are the inputs of the
    first one."""

    def __init__(self, widths: Sides) -> None:
        super().__init__()
        self.linear = IsolatedLinear(widths, widths)

    def request(self, x0: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        crossed, shared = self.linear.request(x)
        return x0 * crossed + x, shared

    def candidate(self, x0: Tensor, x: Tensor, shared: Tensor, owner: Tensor) -> Tensor:
        return x0 * self.linear.candidate(x, shared, owner) + x

    def forward(self, request0: Tensor, candidate0: Tensor, request: Tensor, candidate: Tensor,
                owner: Tensor) -> tuple[Tensor, Tensor]:
        own, shared = self.request(request0, request)
        return own, self.candidate(candidate0, candidate, shared, owner)


class RDCNCrossNet(IsolatedBlock):
    """``layers`` cross layers, widths unchanged."""

    def __init__(self, widths: Sides, layers: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(RDCNLayer(widths) for _ in range(layers))

    def request(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x0, kept = x, []
        for layer in self.layers:
            x, shared = layer.request(x0, x)
            kept.append(shared)
        return x, kept

    def candidate(self, x: Tensor, shared: Sequence[Tensor], owner: Tensor) -> Tensor:
        x0 = x
        for layer, kept in zip(self.layers, shared, strict=True):
            x = layer.candidate(x0, x, kept, owner)
        return x


class RDCN(IsolatedRanker):
    """rDCN beside an isolated deep network: the isolated form of ``DCNv2``.

    A side whose width in ``config`` is not 1 is projected to that multiple of its fields first, since a cross layer
    keeps its width.
    """

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        given = self.fields.times(config.dim)
        widths = Sides(round(given.request * config.request_width), round(given.candidate * config.candidate_width))
        self.widen_request = _projection(given.request, widths.request)
        self.widen_candidate = _projection(given.candidate, widths.candidate)
        self.cross = RDCNCrossNet(widths, config.cross_layers)
        hidden = hidden_sides(config, self.fields)
        self.deep = IsolatedMLP([given, *hidden], config.dropout)
        self.head = IsolatedHead(widths.plus(hidden[-1]), (), len(features.tasks), 0.0)

    def request_side(self, fields: Tensor) -> list[Any]:
        x = fields.flatten(1)
        crossed, cross = self.cross.request(self.widen_request(x))
        hidden, deep = self.deep.request(x)
        head = self.head.request(torch.cat([crossed, torch.relu(hidden)], -1))[1]
        return [cross, deep, head]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        cross, deep, head = state
        x = fields.flatten(1)
        crossed = self.cross.candidate(self.widen_candidate(x), cross, owner)
        hidden = torch.relu(self.deep.candidate(x, deep, owner))
        return self.head.candidate(torch.cat([crossed, hidden], -1), head, owner)


def _projection(given: int, width: int) -> nn.Module:
    return nn.Identity() if given == width else nn.Linear(given, width)

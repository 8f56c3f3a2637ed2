"""FinalMLP (Mao et al., AAAI 2023, arXiv 2304.00902), and its isolated form.

Two deep networks ("streams") read the same units through gates of their own, one conditioned on the request, the other
on the candidate (section 3.1), and meet in a bilinear form of ``heads`` heads (section 3.2):

    h_s = 2 sigmoid(Gate_s(x_s)) * x,  o_s = MLP_s(h_s)      s = 1, 2
    logit = b + w_1.o_1 + w_2.o_2 + sum over heads of o_1^T W_head o_2

Isolated, the streams are block lower triangular, and a request unit's gate reads the request only: the first gate is
computed once per request as it is; the second gates request units by the request and candidate units by the candidate.
The bilinear form need not be masked, since only candidates come after it, and its request parts are exact:
``o_1r^T W o_2r`` and the vectors ``o_1r^T W`` and ``W o_2r`` that meet candidate units are computed once per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker, IsolatedRanker
from semel.models.heads import mlp
from semel.models.isolated import IsolatedHead, IsolatedMLP, Sides


class BilinearFusion(nn.Module):
    """Two streams [N, width] -> [N, tasks]."""

    def __init__(self, width: int, heads: int, tasks: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the last hidden width {width} is not a multiple of fusion_heads {heads}")
        self.heads = heads
        self.linear = nn.Linear(2 * width, tasks)
        self.weight = _bilinear(tasks, heads, width // heads)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one, two = (x.unflatten(-1, (self.heads, -1)) for x in (first, second))
        fused = (_times(one, self.weight) * two[:, None]).sum((-2, -1))
        return self.linear(torch.cat([first, second], -1)) + fused


class FinalMLP(FieldRanker):
    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        if not self.fields.request:
            raise ValueError("a final_mlp model gates one stream by the request: it needs request features or a "
                             "history")
        given = self.fields.times(config.dim)
        gate = config.hidden[-1]
        self.request_gate = mlp([given.request, gate, given.total])
        self.candidate_gate = mlp([given.candidate, gate, given.total])
        self.first = mlp([given.total, *config.hidden], config.dropout)
        self.second = mlp([given.total, *config.hidden], config.dropout)
        self.fusion = BilinearFusion(config.hidden[-1], config.fusion_heads, len(features.tasks))

    def mixed(self, fields: Tensor) -> Tensor:
        x = fields.flatten(1)
        request, candidate = x.tensor_split([self.fields.request * fields.shape[2]], -1)
        first = self.first(x * _gate(self.request_gate(request)))
        second = self.second(x * _gate(self.candidate_gate(candidate)))
        return self.fusion(torch.relu(first), torch.relu(second))


class IsolatedFusion(nn.Module):
    """``BilinearFusion`` of two streams with units on both sides, exactly: the request's part once per request. Each
    head takes an equal share of either side's units."""

    def __init__(self, width: Sides, heads: int, tasks: int) -> None:
        super().__init__()
        if width.request % heads or width.candidate % heads:
            raise ValueError(f"{width.request} request and {width.candidate} candidate units do not divide into "
                             f"{heads} heads")
        self.heads = heads
        self.linear = IsolatedHead(width.plus(width), (), tasks, 0.0)
        self.weight = _bilinear(tasks, heads, width.total // heads)
        self.split = width.request // heads

    def request(self, first: Tensor, second: Tensor) -> list[Any]:
        """[R, width.request] twice -> what candidates read: a number a task, and a vector for each stream."""
        one, two = (x.unflatten(-1, (self.heads, -1)) for x in (first, second))
        weight, n = self.weight, self.split
        both = _times(one, weight[..., :n, :])              # o_1r^T W, [R, tasks, heads, request + candidate units]
        number = (both[..., :n] * two[:, None]).sum((-2, -1))
        back = _times(two, weight[..., n:, :n].transpose(-2, -1))   # W_cr o_2r
        return [self.linear.request(torch.cat([first, second], -1))[1], number, both[..., n:], back]

    def candidate(self, first: Tensor, second: Tensor, shared: Any, owner: Tensor) -> Tensor:
        linear, number, forth, back = shared
        one, two = (x.unflatten(-1, (self.heads, -1)) for x in (first, second))
        met = _times(one, self.weight[..., self.split :, self.split :]) + forth.index_select(0, owner)
        fused = (met * two[:, None]).sum((-2, -1)) + (back.index_select(0, owner) * one[:, None]).sum((-2, -1))
        straight = self.linear.candidate(torch.cat([first, second], -1), linear, owner)
        return straight + fused + number.index_select(0, owner)


class IsolatedFinalMLP(IsolatedRanker):
    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        given = self.fields.times(config.dim)
        width, heads = (config.request_width, config.candidate_width), config.fusion_heads
        gate = self.fields.share(config.hidden[-1], *width)
        self.request_gate = mlp([given.request, gate.request, given.total])
        self.request_gate_of_second = mlp([given.request, gate.request, given.request])
        self.candidate_gate = mlp([given.candidate, gate.candidate, given.candidate])
        hidden = [self.fields.share(units, *width) for units in config.hidden[:-1]]
        hidden.append(self.fields.share(config.hidden[-1], *width, multiple=heads))
        self.first = IsolatedMLP([given, *hidden], config.dropout)
        self.second = IsolatedMLP([given, *hidden], config.dropout)
        self.fusion = IsolatedFusion(hidden[-1], heads, len(features.tasks))

    def request_side(self, fields: Tensor) -> list[Any]:
        x = fields.flatten(1)
        gates = _gate(self.request_gate(x))
        first, by_first = self.first.request(x * gates[:, : x.shape[1]])
        second, by_second = self.second.request(x * _gate(self.request_gate_of_second(x)))
        return [gates[:, x.shape[1] :], by_first, by_second, self.fusion.request(torch.relu(first), torch.relu(second))]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        gates, by_first, by_second, fusion = state
        x = fields.flatten(1)
        first = self.first.candidate(x * gates.index_select(0, owner), by_first, owner)
        second = self.second.candidate(x * _gate(self.candidate_gate(x)), by_second, owner)
        return self.fusion.candidate(torch.relu(first), torch.relu(second), fusion, owner)


def _gate(x: Tensor) -> Tensor:
    return 2.0 * torch.sigmoid(x)


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """[N, heads, i] and [tasks, heads, i, j] -> [N, tasks, heads, j]."""
    return torch.einsum("nhi,thij->nthj", x, weight)


def _bilinear(tasks: int, heads: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(tasks, heads, width, width) / width)

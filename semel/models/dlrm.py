"""DLRM (Naumov et al., arXiv 1906.00091): dot products of all pairs of fields, then a deep network.

A pair of two request fields is the request's own. Those pairs and the request's fields go through their columns of the
network's first layer once per request; a candidate adds the columns of the pairs that it is in and of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker
from semel.models.heads import RankingHead


class DLRM(FieldRanker):
    """``request_columns``, ``candidate_columns``: of the first layer, whose inputs are the pairs (i, j), i < j, in the
    order of ``torch.triu_indices``, then the fields."""

    request_pairs: Tensor
    candidate_pairs: Tensor
    request_columns: Tensor
    candidate_columns: Tensor

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        fields = self.fields.total
        pairs = torch.triu_indices(fields, fields, 1)
        width = pairs.shape[1] + fields * config.dim
        own = pairs[1] < self.fields.request
        flat = torch.arange(pairs.shape[1], width).split([side * config.dim for side in
                                                          (self.fields.request, self.fields.candidate)])
        for side, of_side, columns in (("request", own, flat[0]), ("candidate", ~own, flat[1])):
            self.register_buffer(f"{side}_pairs", pairs[:, of_side], persistent=False)
            self.register_buffer(f"{side}_columns", torch.cat([of_side.nonzero()[:, 0], columns]), persistent=False)
        self.head = RankingHead(width, config.hidden, features.tasks, config.dropout)

    def mixed(self, fields: Tensor) -> Tensor:
        i, j = torch.triu_indices(fields.shape[1], fields.shape[1], 1)
        dots = torch.bmm(fields, fields.transpose(1, 2))[:, i, j]
        return self.head(torch.cat([dots, fields.flatten(1)], -1))

    def request_side(self, fields: Tensor) -> list[Tensor]:
        i, j = self.request_pairs
        dots = torch.bmm(fields, fields.transpose(1, 2))[:, i, j]
        first: Any = self.head.layers[0]
        return [fields, linear(torch.cat([dots, fields.flatten(1)], -1), first.weight[:, self.request_columns],
                               first.bias)]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        request, known = (part.index_select(0, owner) for part in state)
        i, j = self.candidate_pairs
        every = torch.cat([request, fields], 1)
        dots = torch.bmm(fields, every.transpose(1, 2))[:, j - self.fields.request, i]
        x = torch.cat([dots, fields.flatten(1)], -1)
        layers: Any = self.head.layers
        return layers[1:](known + linear(x, layers[0].weight[:, self.candidate_columns]))

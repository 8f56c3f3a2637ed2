"""DLRM (Naumov et al., arXiv 1906.00091): dot products of all pairs of fields, then a deep network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from semel.batch import RequestBatch
from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.fields import FieldRanker
from semel.models.heads import RankingHead


class DLRM(FieldRanker):
    pairs: Tensor

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        fields = self.fields.total
        self.register_buffer("pairs", torch.triu_indices(fields, fields, 1), persistent=False)
        width = self.pairs.shape[1] + fields * config.dim
        self.head = RankingHead(width, config.hidden, features.tasks, config.dropout)

    def forward(self, batch: RequestBatch) -> Tensor:
        fields = self.all_fields(batch)
        dots = torch.bmm(fields, fields.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.head(torch.cat([dots, fields.flatten(1)], -1))

"""DCN V2 over what HSTU reads: candidates attend to the history, and a cross network meets all three sides.

    h_c = encoder(candidate c | history)                                      semel.models.sequence_ranker
    x_0 = [request, candidate, h_c],   x_{l+1} = x_0 * (W_l x_l + b_l) + x_l  DCN V2 (arXiv 2008.13535, eq. 1)

Request rows never see candidates. The two first layers of the scorer read ``x_0`` itself, ``W x_0 = W_r x_r + W_c
[x_c, h_c]``, whose first product is the request's alone as well, and part of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import RequestBatch
from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.dcn import CrossNet, of_candidate, of_request
from semel.models.heads import RankingHead, mlp
from semel.models.sequence_ranker import SequenceModel


class SequenceDCNv2(SequenceModel):
    """A target-aware encoder over the history, scored by a cross network beside a deep one. ``request`` and ``score``
    as of ``semel.models.fields.FieldRanker``."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        width = sum(self.widths) + config.encoder.dim
        self.cross = CrossNet(width, config.cross_layers)
        self.deep = mlp([width, *config.hidden], config.dropout)
        self.head = RankingHead(width + config.hidden[-1], (), features.tasks, 0.0)

    def request(self, request: Mapping[str, Any]) -> list[Any]:
        """Each request's fields [R, widths[0]], its part of the first layers, and what the encoder keeps of it."""
        fields, kept = self.request_side(request)
        return [fields, of_request(self._first(), fields), kept]

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        """[C, tasks]."""
        request, known, kept = state
        fields, _, reads, owner = self.candidate_side(kept, candidate, candidate_offsets)
        x = torch.cat([fields, reads], -1)
        *cross, deep = of_candidate(self._first(), [part[owner] for part in known], x)
        crossed = self.cross(torch.cat([request[owner], x], -1), *cross)
        return self.head(torch.cat([crossed, torch.relu(self.deep[1:](deep))], -1))

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, tasks]."""
        return self.score(self.request(batch.request), batch.candidate, batch.candidate_offsets)

    def _first(self) -> list[Any]:
        """The layers that read the fields themselves."""
        return [*self.cross.layers[:1], self.deep[0]]

"""HSTU or a transformer over the history, candidates attending to it.

Target-aware with a context-first mask: the history sees its past, a candidate sees the history and itself. Request rows
never see candidates, at no depth: what candidates read of a request is a token, and the keys and values of each layer.
What is said of the history is pooled over it as well: a mean is what attention learns last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import Jagged, JaggedTable, RequestBatch
from semel.features import FeatureSpec
from semel.models.config import EncoderConfig, ModelConfig
from semel.models.dropout import Dropout
from semel.models.embeddings import FeatureTables, segment_mean
from semel.models.heads import RankingHead
from semel.models.hstu import HSTU
from semel.models.isolated import owners
from semel.models.plans import candidate_plan, history_plan
from semel.models.transformer import Transformer


def make_encoder(config: EncoderConfig) -> HSTU | Transformer:
    return HSTU(config) if config.kind == "hstu" else Transformer(config)


class SequenceModel(nn.Module):
    """Features, their tokens, and the encoder that candidates read the history by; what scores them comes after.
    ``widths``: of a request's fields and of a candidate's."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.tables = FeatureTables(features, encoders, config.dim, config.unknown_rate)
        width = config.encoder.dim
        history, request, candidate = len(features.history), len(features.request), len(features.candidate) + 1
        self.widths = (request + history) * config.dim + 1, candidate * config.dim
        self.history_token = nn.Linear(history * config.dim, width)
        self.request_token = nn.Linear(self.widths[0], width)
        self.candidate_token = nn.Linear(self.widths[1], width)
        self.encoder = make_encoder(config.encoder)
        self.dropout = Dropout(config.dropout)

    def request_side(self, request: Mapping[str, Any]) -> tuple[Tensor, list[Any]]:
        """Each request's fields [R, widths[0]]; and its token [R, width], when it came [R], its events' times, and each
        layer's keys and values."""
        table: JaggedTable = request["history"]
        columns = self.tables.history(request)
        pooled = [segment_mean(column, table.offsets) for column in columns]
        length = torch.log1p(table.lengths.to(columns[0].dtype))[:, None]
        fields = torch.cat([*self.tables.request(request), *pooled, length / 5.0], -1)
        history = self.dropout(self.history_token(torch.cat(columns, -1)))
        time = table.columns["event_time"]
        plan = history_plan(self.encoder.config, table.offsets, time)
        _, kept = self.encoder.request(history, plan)
        return fields, [self.request_token(fields), request["as_of"], Jagged(time, table.offsets), kept]

    def candidate_side(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor,
                       ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[C, ...] of each candidate: its fields, its token, what it reads of the history, and its request's row."""
        request, as_of, time, kept = state
        fields = torch.cat(self.tables.candidate(candidate), -1)
        owner = owners(candidate_offsets, len(fields))
        token = self.candidate_token(fields) + request[owner]
        plan = candidate_plan(self.encoder.config, time.offsets, time.values, candidate_offsets, as_of[owner])
        return fields, token, self.encoder.candidate(self.dropout(token), kept, plan), owner


class SequenceRanker(SequenceModel):
    """A target-aware encoder over the history, a head on each candidate's state. ``request`` and ``score`` as of
    ``semel.models.fields.FieldRanker``."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        self.head = RankingHead(3 * config.encoder.dim, config.hidden, features.tasks, config.dropout)

    def request(self, request: Mapping[str, Any]) -> list[Any]:
        """Each request's token [R, width], when it came [R], its events' times, and each layer's keys and values."""
        return self.request_side(request)[1]

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        """[C, tasks]."""
        _, token, reads, owner = self.candidate_side(state, candidate, candidate_offsets)
        return self.head(torch.cat([reads, token, state[0][owner] * token], -1))

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, tasks]."""
        return self.score(self.request(batch.request), batch.candidate, batch.candidate_offsets)

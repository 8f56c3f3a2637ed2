"""Models that map a ``RequestBatch`` to logits ``[C, tasks]``. All do request-side work once per request.

``SequenceRanker`` reads the history with HSTU or a transformer, candidates attending to it; ``DCNv2`` and ``DLRM`` see
request, candidate and pooled history as fields and cross them. What is said of the history is pooled over it as well:
a mean is what attention learns last.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from semel.batch import JaggedTable, RequestBatch
from semel.features import FeatureSpec
from semel.models.config import EncoderConfig, ModelConfig
from semel.models.dropout import Dropout
from semel.models.embeddings import FeatureTables, segment_mean
from semel.models.heads import RankingHead, mlp
from semel.models.hstu import HSTU
from semel.models.plans import Plans
from semel.models.transformer import Transformer


def make_encoder(config: EncoderConfig) -> HSTU | Transformer:
    return HSTU(config) if config.kind == "hstu" else Transformer(config)


def pooled_history(tables: FeatureTables, batch: RequestBatch) -> list[Tensor]:
    """The mean of each history feature over the history, each [R, dim]."""
    offsets = batch.request["history"].offsets
    return [segment_mean(column, offsets) for column in tables.history(batch)]


class SequenceRanker(nn.Module):
    """A target-aware encoder over the history, a head on each candidate's state."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.tables = FeatureTables(features, encoders, config.dim, config.unknown_rate)
        width = config.encoder.dim
        history, request, candidate = len(features.history), len(features.request), len(features.candidate) + 1
        self.history_token = nn.Linear(history * config.dim, width)
        self.request_token = nn.Linear((request + history) * config.dim + 1, width)
        self.candidate_token = nn.Linear(candidate * config.dim, width)
        self.encoder = make_encoder(config.encoder)
        self.dropout = Dropout(config.dropout)
        self.head = RankingHead(3 * width, config.hidden, features.tasks, config.dropout)

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, tasks]."""
        table: JaggedTable = batch.request["history"]
        rows = batch.candidate_to_request()
        columns = self.tables.history(batch)
        pooled = [segment_mean(column, table.offsets) for column in columns]
        length = torch.log1p(table.lengths.to(columns[0].dtype))[:, None]
        request = self.request_token(torch.cat([*self.tables.request(batch), *pooled, length / 5.0], -1))
        history = self.dropout(self.history_token(torch.cat(columns, -1)))
        token = self.candidate_token(torch.cat(self.tables.candidate(batch), -1)) + request[rows]
        plans = Plans.of(self.encoder.config, table.offsets, table.columns["event_time"], batch.candidate_offsets,
                         batch.request["as_of"][rows])
        _, state = self.encoder(history, self.dropout(token), plans)
        return self.head(torch.cat([state, token, request[rows] * token], -1))


class CrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`` (DCN V2, Wang et al., arXiv 2008.13535, eq. 1)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class _FieldRanker(nn.Module):
    """Request, candidate and pooled-history fields, each [C, dim], as a list."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.tables = FeatureTables(features, encoders, config.dim, config.unknown_rate)
        self.use_history = config.history
        self.fields = len(features.request) + len(features.candidate) + 1
        self.fields += len(features.history) if config.history else 0

    def _fields(self, batch: RequestBatch) -> list[Tensor]:
        request = self.tables.request(batch)
        if self.use_history:
            request = request + pooled_history(self.tables, batch)
        rows = batch.candidate_to_request()
        return [field[rows] for field in request] + self.tables.candidate(batch)


class DCNv2(_FieldRanker):
    """A cross network beside a deep one ("parallel" DCN V2), over all fields."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        width = self.fields * config.dim
        self.cross = CrossNet(width, config.cross_layers)
        self.deep = mlp([width, *config.hidden], config.dropout)
        self.head = RankingHead(width + config.hidden[-1], (), features.tasks, 0.0)

    def forward(self, batch: RequestBatch) -> Tensor:
        x = torch.cat(self._fields(batch), -1)
        return self.head(torch.cat([self.cross(x), torch.relu(self.deep(x))], -1))


class DLRM(_FieldRanker):
    """Dot products of all pairs of fields, then a deep network (Naumov et al., arXiv 1906.00091)."""

    pairs: Tensor

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        self.register_buffer("pairs", torch.triu_indices(self.fields, self.fields, 1), persistent=False)
        width = self.pairs.shape[1] + self.fields * config.dim
        self.head = RankingHead(width, config.hidden, features.tasks, config.dropout)

    def forward(self, batch: RequestBatch) -> Tensor:
        fields = torch.stack(self._fields(batch), 1)
        dots = torch.bmm(fields, fields.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.head(torch.cat([dots, fields.flatten(1)], -1))

"""What field models begin with: request, candidate and pooled-history features as fields of one width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import RequestBatch
from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.embeddings import FeatureTables, segment_mean
from semel.models.isolated import Sides, owners


def pooled_history(tables: FeatureTables, request: Mapping[str, Any]) -> list[Tensor]:
    """The mean of each history feature over the history, each [R, dim]."""
    offsets = request["history"].offsets
    return [segment_mean(column, offsets) for column in tables.history(request)]


class FieldRanker(nn.Module):
    """The fields of both sides; ``fields`` says how many there are.

    ``request(batch.request)`` gives a state, all that candidates read of their request: tensors with first axis R,
    ``Jagged`` and ``KeysValues`` of R rows, and lists of those (``semel.models.states`` cuts and joins them).
    ``score(state, batch.candidate, batch.candidate_offsets)`` gives logits [C, tasks] for any candidates of these
    requests, as often as wanted. ``forward`` is the one after the other.

    How much the state holds is the model's to say, by ``request_side`` and ``candidate_side``. A model without sides
    has ``mixed``, which maps all fields of a candidate to its logits as its paper does; by itself it shares the
    request's fields, looked up and pooled once.
    """

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.tables = FeatureTables(features, encoders, config.dim, config.unknown_rate)
        self.use_history = config.history
        history = len(features.history) if config.history else 0
        self.fields = Sides(len(features.request) + history, len(features.candidate) + 1)

    def request_fields(self, request: Mapping[str, Any]) -> Tensor:
        """[R, fields.request, dim]."""
        fields = self.tables.request(request)
        if self.use_history:
            fields = fields + pooled_history(self.tables, request)
        if not fields:
            return next(self.parameters()).new_zeros(len(request["as_of"]), 0, self.tables.dim)
        return torch.stack(fields, 1)

    def candidate_fields(self, candidate: Mapping[str, Any]) -> Tensor:
        """[C, fields.candidate, dim]."""
        return torch.stack(self.tables.candidate(candidate), 1)

    def all_fields(self, batch: RequestBatch) -> Tensor:
        """[C, fields, dim], what ``mixed`` takes: every candidate with a copy of its request's fields."""
        request = self.request_fields(batch.request)[batch.candidate_to_request()]
        return torch.cat([request, self.candidate_fields(batch.candidate)], 1)

    def request(self, request: Mapping[str, Any]) -> Any:
        return self.request_side(self.request_fields(request))

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        fields = self.candidate_fields(candidate)
        return self.candidate_side(fields, state, owners(candidate_offsets, len(fields)))

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, tasks]."""
        return self.score(self.request(batch.request), batch.candidate, batch.candidate_offsets)

    def request_side(self, fields: Tensor) -> Any:
        """[R, fields.request, dim] -> the state."""
        return [fields]

    def candidate_side(self, fields: Tensor, state: Any, owner: Tensor) -> Tensor:
        """[C, fields.candidate, dim], the state and [C] -> logits [C, tasks]."""
        return self.mixed(torch.cat([state[0][owner], fields], 1))

    def mixed(self, fields: Tensor) -> Tensor:
        """[C, fields, dim] -> logits [C, tasks], of a model that has no sides."""
        raise NotImplementedError


class IsolatedRanker(FieldRanker):
    """A model whose request rows never see candidates: its state holds them at every depth."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        if not self.fields.request:
            raise ValueError(f"a {config.kind} model needs request features or a history: without them there is "
                             f"nothing to compute once per request")


def hidden_sides(config: ModelConfig, by: Sides) -> list[Sides]:
    """``config.hidden`` divided in proportion to ``by``, widened as ``config`` says."""
    return [by.share(width, config.request_width, config.candidate_width) for width in config.hidden]

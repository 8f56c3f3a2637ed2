"""Features of a ``RequestBatch`` as vectors: one table a feature, shared where the same feature has two places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import Jagged, JaggedTable
from semel.features import Feature, FeatureSpec
from semel.models.randomness import generator
from semel.models.vocabulary import Vocabulary

ITEM = "item_id"
"""The candidate's item: always there, and in the table of the history's item column."""


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """[T, D] by rows of ``offsets`` [N + 1] -> [N, D], zeros for empty rows."""
    lengths = offsets[1:] - offsets[:-1]
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=len(values))
    total = values.new_zeros(len(lengths), values.shape[1]).index_add(0, rows, values)
    return total / lengths.clamp(min=1)[:, None].to(values.dtype)


class FeatureTables(nn.Module):
    """``embed(feature, value)``: [N] or Jagged of N rows -> [N, dim].

    ``encoders``: a ``Vocabulary`` (categorical, multi) or a ``Scale`` (numeric) by feature name, built from the
    training data. ``unknown_rate``: share of item ids that training replaces by "unknown".
    """

    def __init__(self, features: FeatureSpec, encoders: Mapping[str, nn.Module], dim: int, unknown_rate: float) -> None:
        super().__init__()
        self.features, self.dim, self.unknown_rate = features, dim, unknown_rate
        self.encoders = nn.ModuleDict(dict(encoders))
        self.tables = nn.ModuleDict()
        for name, encoder in self.encoders.items():
            if isinstance(encoder, Vocabulary):
                table = nn.Embedding(len(encoder) + 1, dim)
                nn.init.normal_(table.weight, std=0.02)
                self.tables[name] = table
            else:
                self.tables[name] = nn.Linear(2, dim)

    def items(self, ids: Tensor) -> Tensor:
        """Stable item ids -> indices into the item table."""
        return self.encoders[self.features.item](ids)

    def start_items_at(self, vectors: Tensor) -> None:
        """Set the item table's rows to ``vectors`` [items, dim]; the row of unknown items stays."""
        with torch.no_grad():
            self.tables[self.features.item].get_parameter("weight")[1:] = vectors

    def embed(self, feature: Feature, value: Tensor | Jagged) -> Tensor:
        name = self.features.item if feature.name == ITEM else feature.name
        encoder, table = self.encoders[name], self.tables[name]
        if isinstance(value, Jagged):
            return segment_mean(table(encoder(value.values)), value.offsets)
        index = encoder(value)
        if self.training and name == self.features.item and self.unknown_rate > 0:
            drawn = torch.rand(index.shape, generator=generator(), device=index.device)
            index = index.masked_fill(drawn < self.unknown_rate, 0)
        return table(index)

    def history(self, request: Mapping[str, Any]) -> list[Tensor]:
        """Each history feature of ``RequestBatch.request`` as [T, dim]."""
        table: JaggedTable = request["history"]
        return [self.embed(feature, table.columns[feature.name]) for feature in self.features.history]

    def request(self, request: Mapping[str, Any]) -> list[Tensor]:
        """Each request feature as [R, dim]."""
        return [self.embed(feature, request[feature.name]) for feature in self.features.request]

    def candidate(self, candidate: Mapping[str, Any]) -> list[Tensor]:
        """The item and each candidate feature of ``RequestBatch.candidate`` as [C, dim]."""
        features = (Feature(ITEM), *self.features.candidate)
        return [self.embed(feature, candidate[feature.name]) for feature in features]

"""What the training data say about features before training: which ids there are, how numbers are spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from semel.batch import Jagged, RequestBatch
from semel.features import Feature, FeatureSpec
from semel.models import Scale, Vocabulary
from semel.models.embeddings import ITEM


@dataclass
class _Numbers:
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        known = values[~torch.isnan(values)].double()
        self.count += len(known)
        self.total += float(known.sum())
        self.squares += float((known * known).sum())

    def scale(self) -> Scale:
        mean = self.total / max(self.count, 1.0)
        variance = self.squares / max(self.count, 1.0) - mean * mean
        return Scale(mean, max(variance, 0.0) ** 0.5 or 1.0)


@dataclass
class FeatureStatistics:
    """Gathers, batch by batch; ``encoders()`` gives a Vocabulary or a Scale by feature name. A candidate's item and the
    history's item column are one feature."""

    features: FeatureSpec
    ids: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, _Numbers] = field(default_factory=dict)

    def add(self, batch: RequestBatch) -> None:
        history = batch.request["history"]
        for feature in self.features.history:
            self._add(feature.name, feature, history.columns[feature.name])
        for feature in self.features.request:
            self._add(feature.name, feature, batch.request[feature.name])
        self._add(self.features.item, Feature(ITEM), batch.candidate[ITEM])
        for feature in self.features.candidate:
            self._add(feature.name, feature, batch.candidate[feature.name])

    def add_history(self, columns: dict[str, Tensor]) -> None:
        for feature in self.features.history:
            self._add(feature.name, feature, columns[feature.name])

    def _add(self, name: str, feature: Feature, value: Tensor | Jagged) -> None:
        values: Tensor = value.values if isinstance(value, Jagged) else value
        if feature.kind == "numeric":
            self.numbers.setdefault(name, _Numbers()).add(values)
        else:
            known = self.ids.get(name)
            new = torch.unique(values)
            self.ids[name] = new if known is None else torch.unique(torch.cat([known, new]))

    def encoders(self) -> dict[str, nn.Module]:
        names = [*(f.name for f in (*self.features.history, *self.features.request, *self.features.candidate))]
        found: dict[str, nn.Module] = {}
        for name in dict.fromkeys(names):
            if name in self.numbers:
                found[name] = self.numbers[name].scale()
            else:
                found[name] = Vocabulary(self.ids.get(name, torch.empty(0, dtype=torch.int64)))
        return found


def request_statistics(features: FeatureSpec, batches: Iterable[RequestBatch]) -> FeatureStatistics:
    """Over one pass of a loader of training requests."""
    statistics = FeatureStatistics(features)
    for batch in batches:
        statistics.add(batch)
    return statistics

"""The next-item model: an encoder over the history, scored against item vectors (SASRec, HSTU retrieval)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import JaggedTable, RequestBatch
from semel.features import FeatureSpec
from semel.models.config import ModelConfig
from semel.models.dropout import Dropout
from semel.models.embeddings import ITEM, FeatureTables
from semel.models.isolated import owners
from semel.models.plans import history_plan
from semel.models.sequence_ranker import make_encoder
from semel.models.softmax import sample_negatives, softmax_loss


class NextItem(nn.Module):
    """Scores ``similarity(state, item) / temperature``, the state being the encoder's at the last event (or a learned
    start where there is none). Its logits [C, 1] rank candidates like any other model's."""

    popularity: Tensor

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module],
                 counts: Tensor | None = None) -> None:
        super().__init__()
        if config.dim != config.encoder.dim:
            raise ValueError(f"a next-item model ties tokens to item vectors: dim {config.dim} must equal encoder.dim "
                             f"{config.encoder.dim}")
        self.config = config
        self.tables = FeatureTables(features, encoders, config.dim, 0.0)
        self.encoder = make_encoder(config.encoder)
        self.position = nn.Embedding(config.encoder.positions, config.dim)
        self.start = nn.Parameter(torch.zeros(config.dim))
        self.dropout = Dropout(config.embedding_dropout)
        nn.init.normal_(self.position.weight, std=0.02)
        nn.init.normal_(self.start, std=0.02)
        items = len(encoders[features.item])  # type: ignore[arg-type]
        self.register_buffer("popularity", torch.ones(items) if counts is None else counts)

    def encode(self, history: JaggedTable, as_of: Tensor | None = None) -> Tensor:
        """Histories of T events -> states [T, dim]; a state has seen its own event and what came before.

        Each state is asked at the time of the event after it, the last of each history at ``as_of`` [R] (its own time
        if None): when a request comes is known when it is answered.
        """
        features = self.tables.features.history
        token = sum(self.tables.embed(feature, history.columns[feature.name]) for feature in features)
        assert isinstance(token, Tensor)
        lengths, offsets, time = history.lengths, history.offsets, history.columns["event_time"]
        start = torch.repeat_interleave(offsets[:-1], lengths, output_size=len(token))
        steps = torch.arange(len(token), device=token.device) - start
        token = token * self.config.dim ** 0.5 + self.position(steps.clamp(max=self.position.num_embeddings - 1))
        asked = time.roll(-1)
        some = lengths > 0
        last = offsets[1:][some] - 1
        asked[last] = time[last] if as_of is None else as_of[some]
        plan = history_plan(self.encoder.config, offsets, time, query_time=asked)
        return self.encoder.request(self.dropout(token), plan)[0]

    def last_state(self, history: JaggedTable, as_of: Tensor) -> Tensor:
        """[R, dim], ready to be multiplied with ``item_vectors``."""
        states = torch.cat([self.encode(history, as_of), self.start[None]])
        last = torch.where(history.lengths > 0, history.offsets[1:] - 1, len(states) - 1)
        return self._comparable(states[last])

    def item_vectors(self, index: Tensor) -> Tensor:
        """Indices of the item table -> [..., dim]."""
        return self._comparable(self.tables.tables[self.tables.features.item](index))

    def _comparable(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1) if self.config.similarity == "cosine" else vectors

    def request(self, request: Mapping[str, Any]) -> list[Tensor]:
        """The state [R, dim]; ``request`` and ``score`` as of ``semel.models.fields.FieldRanker``."""
        return [self.last_state(request["history"], request["as_of"])]

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        """[C, 1]."""
        vectors = self.item_vectors(self.tables.items(candidate[ITEM]))
        asked = state[0][owners(candidate_offsets, len(vectors))]
        return (asked * vectors).sum(-1, keepdim=True) / self.config.temperature

    def request_vector(self, state: Any) -> Tensor:
        """[R, dim]; this and ``item_vector`` as of ``semel.models.states.DotProduct``."""
        return state[0] / self.config.temperature

    def item_vector(self, item_ids: Tensor) -> Tensor:
        """[N] -> [N, dim]."""
        return self.item_vectors(self.tables.items(item_ids))

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, 1]."""
        return self.score(self.request(batch.request), batch.candidate, batch.candidate_offsets)

    def score_items(self, batch: RequestBatch, item_ids: Tensor) -> Tensor:
        """Every request's history against the same items: ``item_ids`` [I] stable ids -> [R, I]."""
        state = self.last_state(batch.request["history"], batch.request["as_of"])
        return state @ self.item_vectors(self.tables.items(item_ids)).T / self.config.temperature

    def draw_negatives(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Item indices [N] to compare with, and the log of the chance of each (``sample_negatives``)."""
        items = len(self.popularity)
        weights = self.popularity ** self.config.popularity if self.config.popularity else None
        return sample_negatives(items, self.config.negatives or items, generator, weights)

    def loss(self, history: JaggedTable, generator: torch.Generator,
             negatives: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Mean over all events but the first of each history: the softmax loss of predicting it from those before.
        ``negatives``: of ``draw_negatives``; None draws some from ``generator``."""
        item = self.tables.items(history.columns[self.tables.features.item])
        keep = torch.ones(len(item), dtype=torch.bool, device=item.device)
        keep[history.offsets[1:] - 1] = False  # nothing follows a last event
        target = item.roll(-1)[keep]
        query = self._comparable(self.encode(history)[keep])
        known = target > 0  # an item outside the vocabulary cannot be a class
        negative, log_q = self.draw_negatives(generator) if negatives is None else negatives
        return softmax_loss(query[known], self.item_vectors(target[known]), target[known], self.item_vectors(negative),
                            negative, log_q, self.config.temperature)

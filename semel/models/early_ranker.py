"""Early ranking: a user's vector against many items' vectors, which training leaves in a memory.

The user's side is an encoder over the history, once a request. The item's is a ``MemoryLayer``: a tower over its id and
its catalogue features while training, a row of the memory at serving, joined with what is always known of it (its
features and its hashed id). The two meet in a product a task, so that a candidate costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import JaggedTable, RequestBatch
from semel.features import FeatureSpec
from semel.memory.layer import MemoryLayer
from semel.memory.table import ItemMemory
from semel.models.config import ModelConfig
from semel.models.dropout import Dropout
from semel.models.embeddings import ITEM, FeatureTables, segment_mean
from semel.models.heads import mlp
from semel.models.isolated import owners
from semel.models.plans import history_plan
from semel.models.randomness import generator
from semel.models.sequence_ranker import make_encoder

ROW, HIT = "memory_row", "memory_hit"
"""Of ``RequestBatch.candidate`` at serving: each candidate's row [C, dim], zeros without one, and whether there is."""
VECTOR = "item_vector"
"""In their place, and in that of the item's features: the vector [C, dim] that comes of them, where it was computed
before."""


class HashedId(nn.Module):
    """Stable ids [N] -> [N, dim]: a table of buckets, so that an id which training never saw has a vector too."""

    def __init__(self, buckets: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, dim)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        mixed = ids * -7046029254386353131  # an odd number near 2^64 / golden ratio (Knuth, vol. 3, 6.4), as int64
        return self.table((mixed >> 32) % self.table.num_embeddings)


class EarlyRanker(nn.Module):
    """Logits ``user_t . item / sqrt(dim) + bias_t`` for each task t. ``request`` and ``score`` as of
    ``semel.models.fields.FieldRanker``.

    Whence an item's vector comes is said by the batch: it is there already where ``candidate`` holds ``VECTOR``, comes
    from rows of a memory where it holds ``ROW`` and ``HIT`` (both at serving and in replay), else from the tower. In
    train mode the tower's output is written to ``item.memory`` and rows are hidden at random, in eval mode neither (how
    good the model is at what it has just learned).
    """

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Ids hidden at random would be written as what the tower says of them; hidden rows do that work here.
        self.tables = FeatureTables(features, encoders, config.dim, 0.0)
        width, dim, tasks = config.encoder.dim, config.dim, len(features.tasks)
        history, request, candidate = len(features.history), len(features.request), len(features.candidate)
        self.history_token = nn.Linear(history * dim, width)
        self.encoder = make_encoder(config.encoder)
        self.start = nn.Parameter(torch.zeros(width))
        self.dropout = Dropout(config.dropout)
        self.user = mlp([width + (request + history) * dim + 1, *config.hidden, tasks * (dim + 1)], config.dropout)
        self.hashed = HashedId(config.hash_buckets, dim)
        tower, always_on = (mlp([fields * dim, *config.hidden[:1], dim]) for fields in (candidate + 2, candidate + 1))
        self.item = MemoryLayer(tower, ItemMemory(config.memory_rows, dim), always_on, config.fuse, config.miss_rate,
                                config.reads)
        self.tasks, self.dim = tasks, dim

    def request(self, request: Mapping[str, Any]) -> list[Tensor]:
        """Each request's vectors [R, tasks, dim] and biases [R, tasks]."""
        table: JaggedTable = request["history"]
        columns = self.tables.history(request)
        token = self.dropout(self.history_token(torch.cat(columns, -1)))
        plan = history_plan(self.encoder.config, table.offsets, table.columns["event_time"])
        states = torch.cat([self.encoder.request(token, plan)[0], self.start[None]])
        last = states[torch.where(table.lengths > 0, table.offsets[1:] - 1, len(states) - 1)]
        pooled = [segment_mean(column, table.offsets) for column in columns]
        length = torch.log1p(table.lengths.to(last.dtype))[:, None] / 5.0
        out = self.user(torch.cat([last, *self.tables.request(request), *pooled, length], -1))
        vector, bias = out.split([self.tasks * self.dim, self.tasks], -1)
        return [vector.unflatten(-1, (self.tasks, self.dim)) / self.dim**0.5, bias]

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        """[C, tasks]."""
        item = self.items(candidate)
        owner = owners(candidate_offsets, len(item))
        vector, bias = state
        return (vector[owner] * item[:, None]).sum(-1) + bias[owner]

    def items(self, candidate: Mapping[str, Any]) -> Tensor:
        """[C, dim]: each candidate's vector."""
        if VECTOR in candidate:
            return candidate[VECTOR]
        known, always_on = self.item_fields(candidate)
        if ROW in candidate:
            return self.item.fused(candidate[ROW], self.item.always_on(always_on), candidate[HIT])
        if self.training:
            return self.item(candidate[ITEM], known, always_on, generator=generator())
        return self.item.live(candidate[ITEM], known, always_on)

    def item_fields(self, candidate: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """What the tower takes of candidates [C, ...], and what is always on."""
        item, *features = self.tables.candidate(candidate)
        always_on = torch.cat([self.hashed(candidate[ITEM]), *features], -1)
        return torch.cat([item, always_on], -1), always_on

    def forward(self, batch: RequestBatch) -> Tensor:
        """[C, tasks]."""
        return self.score(self.request(batch.request), batch.candidate, batch.candidate_offsets)


def memory_layer(model: Any) -> MemoryLayer | None:
    """The memory layer of a model that has one."""
    return model.item if isinstance(model, EarlyRanker) else None

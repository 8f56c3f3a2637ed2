"""A sharded table as one reads it: one process, a dictionary of rows, no messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from semel.training.embedding.rows import initial_rows
from semel.training.embedding.update import RowOptimizer


class ReferenceEmbedding:
    """What ``ShardedEmbedding`` computes when ranks train on ``ids[rank]``, by key: dense, or any id and never full."""

    def __init__(self, dim: int, optimizer: RowOptimizer, seed: int = 0, deviation: float = 0.02) -> None:
        self.dim, self.optimizer, self.seed, self.deviation = dim, optimizer, seed, deviation
        self.rows: dict[int, Tensor] = {}
        self.state: dict[int, dict[str, Tensor]] = {}
        self.steps = 0

    def vectors(self, ids: Tensor) -> Tensor:
        """[T] -> [T, D]"""
        for key in ids.tolist():
            if key not in self.rows:
                self.rows[key] = torch.from_numpy(initial_rows(np.array([key]), self.seed, self.dim, self.deviation))
                self.state[key] = {name: torch.zeros(1, n) for name, n in self.optimizer.state(self.dim).items()}
        return torch.cat([torch.empty(0, self.dim), *(self.rows[key] for key in ids.tolist())])

    def step(self, ids: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """``gradients[rank]`` [T, D] of the vectors of ``ids[rank]`` [T]."""
        self.steps += 1
        total: dict[int, Tensor] = {}
        for of_rank, gradient in zip(ids, gradients, strict=True):
            local: dict[int, Tensor] = {}
            for key, row in zip(of_rank.tolist(), gradient, strict=True):
                local[key] = local[key] + row if key in local else row
            for key, row in local.items():
                total[key] = total[key] + row if key in total else row
        for key, row in total.items():
            self.optimizer.update(self.rows[key], self.state[key], torch.zeros(1, dtype=torch.int64), row[None],
                                  self.optimizer.learning_rate, self.steps)

"""Batches of whole histories for next-item training: the same protocol as ``semel.examples.RequestLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.batch import JaggedTable, expand_rows


class SequenceLoader:
    """Users in batches of ``batch``, each with the last ``last`` events of its history (torch, from
    ``history_tensors``). The order depends on the histories, ``seed`` and the epoch only."""

    def __init__(self, histories: JaggedTable, *, batch: int, last: int, shuffle: bool = True, seed: int = 0) -> None:
        self.histories, self.batch, self.last, self.shuffle, self.seed = histories, batch, last, shuffle, seed
        self.epoch = 0
        self.wait_seconds = 0.0
        self._next = 0
        self._offsets = histories.offsets.numpy()

    def __len__(self) -> int:
        return -(-len(self.histories) // self.batch)

    def __iter__(self) -> Iterator[JaggedTable]:
        order = np.arange(len(self.histories))
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        for step in range(self._next, len(self)):
            self._next = step + 1
            yield self.take(order[step * self.batch : (step + 1) * self.batch])
        self.epoch, self._next = self.epoch + 1, 0

    def take(self, users: np.ndarray) -> JaggedTable:
        """The last events of some users."""
        return last_events(self.histories, users, self.last)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._next = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self._next, "seed": self.seed, "users": len(self.histories)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["seed"], state["users"]) != (self.seed, len(self.histories)):
            raise ValueError(f"cannot resume: the state has seed {state['seed']} and {state['users']} users, the "
                             f"data have seed {self.seed} and {len(self.histories)} users")
        self.epoch, self._next = int(state["epoch"]), int(state["batch"])


def last_events(table: JaggedTable, users: np.ndarray, last: int) -> JaggedTable:
    """The last ``last`` events of each of ``users`` (row indices), in that order."""
    offsets = table.offsets.numpy()
    stops = offsets[users + 1]
    starts = np.maximum(offsets[users], stops - last)
    # As rows of a jagged array whose even rows are the wanted ones.
    bounds = np.stack([starts, stops], 1).ravel() if len(users) else np.zeros(1, np.int64)
    index, new = expand_rows(bounds, np.arange(0, 2 * len(users), 2))
    at = torch.from_numpy(index)
    columns: dict[str, Tensor] = {name: column[at] for name, column in table.columns.items()}
    return JaggedTable(columns, torch.from_numpy(new))

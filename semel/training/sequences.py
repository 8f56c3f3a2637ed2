"""Batches of whole histories for next-item training: the same protocol as ``semel.examples.RequestLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from semel.batch import JaggedTable
from semel.examples import take_events


class SequenceLoader:
    """Users in batches of ``batch``, each with the last ``last`` events of its history (torch, from
    ``history_tensors``), or with some chance as many that end anywhere. That chance is ``earlier`` in the first epoch
    and falls to zero over ``epochs``: what counts in the end is what comes last. The order and the choice depend on the
    histories, ``seed`` and the epoch only."""

    def __init__(self, histories: JaggedTable, *, batch: int, last: int, shuffle: bool = True, seed: int = 0,
                 earlier: float = 0.0, epochs: int = 1) -> None:
        self.histories, self.batch, self.last, self.shuffle, self.seed = histories, batch, last, shuffle, seed
        self.earlier, self.epochs = earlier, epochs
        self.epoch = 0
        self.wait_seconds = 0.0
        self._next = 0

    def __len__(self) -> int:
        return -(-len(self.histories) // self.batch)

    def __iter__(self) -> Iterator[JaggedTable]:
        order = np.arange(len(self.histories))
        generator = np.random.default_rng([self.seed, self.epoch])
        if self.shuffle:
            order = generator.permutation(order)
        left_out = self._left_out(generator)
        for step in range(self._next, len(self)):
            self._next = step + 1
            users = order[step * self.batch : (step + 1) * self.batch]
            yield last_events(self.histories, users, self.last, left_out)
        self.epoch, self._next = self.epoch + 1, 0

    def _left_out(self, generator: np.random.Generator) -> np.ndarray | None:
        """[users] how many of the latest events to leave out in this epoch."""
        chance = self.earlier * max(0.0, 1.0 - self.epoch / self.epochs)
        if not chance:
            return None
        more = (self.histories.lengths.numpy() - self.last).clip(min=0)
        return generator.integers(0, more, endpoint=True) * (generator.random(len(more)) < chance)

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


def last_events(table: JaggedTable, users: np.ndarray, last: int, left_out: np.ndarray | None = None) -> JaggedTable:
    """The last ``last`` events of each of ``users`` (row indices of the torch ``table``), in that order; the latest
    ``left_out`` [all rows] events of a row do not count."""
    offsets = table.offsets.numpy()
    stops = offsets[users + 1] - (0 if left_out is None else left_out[users])
    starts = np.maximum(offsets[users], stops - last)
    return take_events(table, starts, stops - starts).torch()

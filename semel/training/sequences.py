"""Batches of whole histories for next-item training: the same protocol as ``semel.examples.RequestLoader``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from semel.batch import JaggedTable
from semel.examples import take_events


@dataclass(frozen=True)
class SequenceBatch:
    """Histories, and what each of their events is compared with: item indices [N] and the logs of their chances; None:
    each piece of the batch draws its own."""

    history: JaggedTable
    negatives: tuple[Tensor, Tensor] | None = None

    def slice(self, start: int, stop: int) -> SequenceBatch:
        """Some of the histories."""
        return SequenceBatch(self.history.slice(start, stop), self.negatives)


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
        self._next = 0
        self._plan: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return -(-len(self.histories) // self.batch)

    def __iter__(self) -> Iterator[JaggedTable]:
        for users in self.upcoming():
            self.took()
            yield self.read(users)
        self.epoch, self._next = self.epoch + 1, 0

    def upcoming(self) -> list[np.ndarray]:
        """The batches of the current epoch that are still to come, as indices of users."""
        order = self._order()[0]
        return [order[step * self.batch : (step + 1) * self.batch] for step in range(self._next, len(self))]

    def costs(self, users: np.ndarray) -> np.ndarray:
        """[len(users)] int64: how many events each gives in this epoch."""
        return np.minimum(self.histories.lengths.numpy()[users] - self._order()[1][users], self.last)

    def read(self, users: np.ndarray) -> JaggedTable:
        """The events that some users give in this epoch."""
        return last_events(self.histories, users, self.last, self._order()[1])

    def took(self) -> None:
        """One of ``upcoming`` is done: ``state_dict`` is behind it."""
        self._next += 1

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """[users] in which order they come in this epoch, and [users] how many of the latest events each leaves out."""
        if self._plan is None or self._plan[0] != self.epoch:
            generator = np.random.default_rng([self.seed, self.epoch])
            order = np.arange(len(self.histories))
            if self.shuffle:
                order = generator.permutation(order)
            self._plan = self.epoch, order, self._left_out(generator)
        return self._plan[1:]

    def _left_out(self, generator: np.random.Generator) -> np.ndarray:
        chance = self.earlier * max(0.0, 1.0 - self.epoch / self.epochs)
        if not chance:
            return np.zeros(len(self.histories), np.int64)
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

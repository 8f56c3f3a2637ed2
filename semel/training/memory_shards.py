"""The item memory of a model in training, over its ranks: each holds, writes and publishes the rows of its own keys.

What a batch computed every rank gives (``write``). What follows from the state of the whole, such as which items of the
catalogue are to be computed next, rank 0 decides (``lead``); the others answer what it asks meanwhile. The clock is
rank 0's, so that ages compare; alone, a rank asks nobody.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from semel.comm.transport import transport
from semel.memory import ItemMemory, ShardedMemory
from semel.memory.layer import MemoryLayer
from semel.memory.table import Changes, Rows
from semel.training.ranks import Ranks

_WRITE, _AGES, _COUNT, _DONE, _PUBLISH = range(5)


def shard_capacity(rows: int, ranks: int) -> int:
    """Of each of ``ranks`` shards of a memory of ``rows``: its share and six standard deviations of how many keys fall
    to one, so that no row leaves early because of how they fall."""
    return min(rows, math.ceil(rows / ranks + 6 * math.sqrt(rows / ranks)))


class MemoryShards:
    """Of the memory of ``layer``, in whose place it puts this rank's shard, with the rows that it had. ``capacity``: of
    all shards together. All ranks make it, and call ``write``, ``lead``, ``save`` and ``load``, together; ``put``,
    ``ages`` and ``len`` are rank 0's, within ``lead``. Raises PeerLost where a rank is gone."""

    def __init__(self, layer: MemoryLayer, ranks: Ranks) -> None:
        whole, self.ranks, self.capacity = layer.memory, ranks, layer.memory.capacity
        if ranks.world_size > 1:
            layer.memory = ItemMemory(shard_capacity(whole.capacity, ranks.world_size), whole.dim, whole.policy,
                                      whole.probes, whole.ttl).train(whole.training)
        self.shared = ShardedMemory(layer.memory, transport())
        if ranks.world_size > 1:
            self._merge(whole.rows())

    @property
    def memory(self) -> ItemMemory:
        """This rank's shard."""
        return self.shared.memory

    def write(self, items: Tensor, vectors: Tensor, step: int) -> None:
        """Of a batch: what this rank computed, ``items`` [N] distinct, ``vectors`` [N, dim]. Of an item that several
        ranks computed the lowest one's counts."""
        self.shared.write(items, vectors, step, tower=step, now=self._told(_WRITE, step)[2])

    def lead(self, work: Callable[[], None], due: Callable[[], bool] = lambda: False) -> bool:
        """``work()`` on rank 0; on all ranks: whether ``due()`` was true there behind it."""
        if self.ranks.rank:
            return self._answered()
        end = _DONE
        try:
            work()
            end = _PUBLISH if due() else _DONE
        finally:
            self._told(end)
        return end == _PUBLISH

    def _answered(self) -> bool:
        nothing = torch.empty(0, dtype=torch.int64)
        while True:
            what, step, now = self._told()
            if what == _WRITE:
                self.shared.write(nothing, torch.empty(0, self.memory.dim), step, tower=step, now=now)
            elif what == _AGES:
                self.shared.ages(nothing, now=now)
            elif what == _COUNT:
                self.ranks.sum([len(self.memory)])
            else:
                return what == _PUBLISH

    def put(self, items: Tensor, vectors: Tensor, step: int) -> None:
        """Writes what rank 0 alone computed."""
        self.write(items, vectors, step)

    def ages(self, keys: Tensor, *, now: int | None = None) -> Tensor:
        """As ``ItemMemory.ages``."""
        return self.shared.ages(keys, now=self._told(_AGES, now=now)[2])

    def __len__(self) -> int:
        self._told(_COUNT)
        return int(self.ranks.sum([len(self.memory)])[0])

    def _told(self, what: int = 0, step: int = 0, now: int | None = None) -> tuple[int, int, int]:
        """What rank 0 says."""
        now = time.time_ns() // 1000 if now is None else now
        said = self.ranks.sum([what, step, now] if self.ranks.rank == 0 else [0, 0, 0])
        return int(said[0]), int(said[1]), int(said[2])

    def save(self, folder: Path) -> None:
        """Each rank its rows; ``load`` on any number of ranks."""
        from safetensors.torch import save_file

        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.ranks.sum([0])  # the folder is there
        rows = {name: value.contiguous() for name, value in self.memory.state_dict().items()}
        save_file(rows, folder / f"rows-{self.ranks.rank:04d}.safetensors")
        self.ranks.sum([0])  # all have saved

    def load(self, folder: Path) -> None:
        """What ``save`` saved."""
        from safetensors.torch import load_file

        for file in sorted(folder.glob("rows-*.safetensors")):
            self._merge(Rows(**load_file(file)))

    def _merge(self, rows: Rows) -> None:
        self.memory.merge(Changes(rows.select(self.shared.owned(rows.keys)), torch.empty(0, dtype=torch.int64)))


def first_of_each(items: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct items, ascending, each with the first of its vectors."""
    first = np.unique(items.numpy(), return_index=True)[1]
    return items[first], vectors[first]

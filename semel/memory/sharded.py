"""A memory whose rows several ranks share: each key has one owner, who alone writes, keeps and publishes its row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.comm.interface import Transport, exchange_counts
from semel.memory.publisher import DeltaPublisher
from semel.memory.table import ItemMemory


def owners(keys: np.ndarray, world_size: int) -> np.ndarray:
    """[N] int64 keys -> the rank that owns each: the finalizer of MurmurHash3 (Appleby, public domain), modulo."""
    x = keys.astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(world_size)).astype(np.int64)


class ShardedMemory:
    """``memory`` holds this rank's keys. Every method but ``owned`` must be called by all ranks, in the same order,
    with keys of their own [N] int64 (none is fine); keys and vectors go to their owners and rows come back through
    ``transport``. Raises what ``ItemMemory`` raises, before anything is sent, and PeerLost where a rank is gone."""

    def __init__(self, memory: ItemMemory, transport: Transport) -> None:
        self.memory, self.transport = memory, transport

    def owned(self, keys: Tensor) -> Tensor:
        """[N] bool: whose owner this rank is."""
        return torch.from_numpy(owners(keys.numpy(), self.transport.world_size) == self.transport.rank)

    def write(self, keys: Tensor, vectors: Tensor, step: int = 0, *, tower: int = 0, now: int | None = None) -> None:
        """As ``ItemMemory.write``. Of a key that several ranks write the lowest rank's row stays, so that rows do not
        depend on who was first."""
        if tuple(vectors.shape) != (len(keys), self.memory.dim):
            raise ValueError(f"vectors have shape {list(vectors.shape)}, {len(keys)} keys need "
                             f"[{len(keys)}, {self.memory.dim}]")
        if not torch.isfinite(vectors).all():
            bad = int((~torch.isfinite(vectors).all(1)).nonzero()[0])
            raise ValueError(f"the vector of key {int(keys[bad])} (row {bad}) holds a NaN or an infinity")
        order, send, receive = self._routes(keys)
        asked = self.transport.all_to_all(keys[order], send, receive)
        sent = self.transport.all_to_all(vectors[order].float(), send, receive)
        mine, rows = asked.wait().split(receive)[::-1], sent.wait().split(receive)[::-1]
        self.memory.write(torch.cat(mine), torch.cat(rows), step, tower=tower, now=now)

    def read(self, keys: Tensor, *, now: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As ``ItemMemory.read``: vectors [N, dim], hit [N], age [N]."""
        order, send, receive = self._routes(keys)
        asked = self.transport.all_to_all(keys[order], send, receive).wait()
        vectors, _, age = self.memory.read(asked, now=now)
        rows = self.transport.all_to_all(vectors, receive, send)
        ages = self.transport.all_to_all(age, receive, send)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        found = ages.wait()[back]
        return rows.wait()[back], found >= 0, found

    def ages(self, keys: Tensor, *, now: int | None = None) -> Tensor:
        """As ``ItemMemory.ages``: [N] microseconds since each key's row was written, -1 where it has none."""
        order, send, receive = self._routes(keys)
        asked = self.transport.all_to_all(keys[order], send, receive).wait()
        ages = torch.empty_like(keys)
        ages[order] = self.transport.all_to_all(self.memory.ages(asked, now=now), receive, send).wait()
        return ages

    def delete(self, keys: Tensor) -> int:
        """How many rows there were, of this rank's keys."""
        order, send, receive = self._routes(keys)
        return self.memory.delete(self.transport.all_to_all(keys[order], send, receive).wait())

    def publisher(self, url: str | Path, **options: Any) -> DeltaPublisher:
        """This rank's part of one log, whose epoch rank 0 begins. ``flush`` it on all ranks at the same step (a record
        of a sequence number counts when all shards have it), not by ``start``."""
        rank, world_size = self.transport.rank, self.transport.world_size
        first = DeltaPublisher(self.memory, url, shards=world_size, **options) if rank == 0 else None
        epoch = int(self.transport.all_gather(torch.tensor([first.epoch if first else 0])).wait()[0, 0])
        return first or DeltaPublisher(self.memory, url, shard=rank, shards=world_size, epoch=epoch, **options)

    def _routes(self, keys: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Keys in order of owner, how many go to each rank, and how many come from each."""
        to = owners(keys.numpy(), self.transport.world_size)
        send = np.bincount(to, minlength=self.transport.world_size).tolist()
        return torch.from_numpy(np.argsort(to, kind="stable")), send, exchange_counts(self.transport, send)

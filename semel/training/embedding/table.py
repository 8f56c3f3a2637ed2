"""An embedding table too large for one process: its rows are shared by all ranks, each trains on its own batch.

A table holds no ``nn.Parameter``, and DDP does not see it: its rows are asked for, and updated, by a schedule
(``semel.training.embedding.schedule``: ``Blocking`` or ``Prioritized``), in which the optimizer's step is part of
taking gradients in. What reaches a row is the *sum* over ranks of ``gradient_scale`` times the gradients of its
vectors, see there. ``docs/embedding.md`` explains it all with a drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from semel.batch import Jagged
from semel.features import stable_id
from semel.training.embedding.exchange import by_owner
from semel.training.embedding.groups import Groups
from semel.training.embedding.rows import initial_rows, rows_policy
from semel.training.embedding.update import SGD, Adam, RowOptimizer, RowWiseAdagrad

if TYPE_CHECKING:
    from semel.comm import Transport

__all__ = ["SGD", "Adam", "RowOptimizer", "RowWiseAdagrad", "ShardedEmbedding"]

Ids = Tensor | np.ndarray | Jagged | list
"""int64 or strings, flat [T] or jagged."""


class ShardedEmbedding:
    """``rows`` vectors [dim], row-wise over the ranks of ``transport``.

    ``transport``: None makes one with a process group of its own (all ranks must then make their tables in one order);
    tables may share one, but not with calls from another thread, such as DDP's. ``new_ids``: "dense" (ids 0 .. rows -
    1, others are refused), "hashed" (any id; some share a row) or "zero_collision" (any id, a row of its own, taken
    from the row used longest ago when all are in use). Strings stand for their ``stable_id``. ``optimizer``: ``Adam``
    (the default), ``RowWiseAdagrad`` or ``SGD``. A row starts uniform around 0 with standard deviation ``deviation``,
    as ``seed`` and its id say. Raises ValueError for sizes or names that describe no table.
    """

    def __init__(self, dim: int, transport: Transport | None = None, *, rows: int,
                 new_ids: Literal["dense", "hashed", "zero_collision"] = "dense",
                 optimizer: RowOptimizer | None = None, seed: int = 0, deviation: float = 0.02,
                 device: Any = "cpu") -> None:
        if dim < 1:
            raise ValueError(f"a vector needs at least one number, got dim={dim}")
        if transport is None:
            from semel.comm.transport import transport as make_transport

            transport = make_transport(device=device)
        self.dim, self.transport, self.seed, self.deviation = dim, transport, seed, deviation
        self.optimizer = Adam() if optimizer is None else optimizer
        self.size = rows
        self.rows = rows_policy(new_ids, rows, transport.rank, transport.world_size)
        self.weight = torch.zeros(self.rows.slots, dim, device=device)
        self.state = {name: torch.zeros(self.rows.slots, width, device=device)
                      for name, width in self.optimizer.state(dim).items()}
        self.scratch = torch.zeros(self.rows.slots, dtype=torch.bool, device=device)
        self.steps = 0
        """Optimizer steps taken, or asked for and under way."""
        self.batches = 0
        self.settle: Callable[[], None] = lambda: None
        """Waits until no schedule has work under way; set by schedules."""
        keys, slots, _ = self.rows.held()
        for start in range(0, len(keys), 1 << 16):  # in pieces: what is drawn from takes twice the memory
            piece = slice(start, start + (1 << 16))
            self.weight[torch.from_numpy(slots[piece])] = self._start(keys[piece])

    def flat_ids(self, ids: Ids) -> Tensor:
        """What a caller has -> [T] int64 on the table's device. Raises TypeError for numbers that are not integers,
        ValueError for ids that a dense table has no rows for."""
        values = ids.values if isinstance(ids, Jagged) else ids
        if not isinstance(values, Tensor):
            values = torch.from_numpy(np.array(stable_id(np.asarray(values)), dtype=np.int64))
        if values.dtype.is_floating_point or values.dtype == torch.bool:
            raise TypeError(f"ids must be integers or strings, got {values.dtype}")
        flat = values.reshape(-1).to(self.weight.device, torch.int64)
        self.rows.check(flat)
        return flat

    def read(self, ids: Ids) -> Tensor:
        """[T] or jagged ids -> [T, dim], without gradients and without new rows: an id that has none reads what its row
        would start with. All ranks must call it together, those without ids with none."""
        self.settle()
        wanted, send = by_owner(self, self.flat_ids(ids))
        ones = [1] * self.transport.world_size
        receive = self.transport.all_to_all(torch.tensor(send, device=self.weight.device), ones, ones).wait().tolist()
        asked = Groups.of(self.transport.all_to_all(wanted.values, send, receive).wait())
        slots = torch.from_numpy(self.rows.find(asked.values.cpu().numpy())).to(self.weight.device)
        found = self._start(asked.values.cpu().numpy())
        found[slots >= 0] = self.weight[slots[slots >= 0]]
        out = self.weight.new_empty(len(asked.order), self.dim)
        asked.write(found, out)
        vectors = self.weight.new_empty(len(wanted.order), self.dim)
        wanted.write(self.transport.all_to_all(out, receive, send).wait(), vectors)
        return vectors

    def start_at(self, vectors: Tensor) -> None:
        """The rows that are there now [rows, dim] of a dense or hashed table, by key; each rank takes its own. Raises
        ValueError for another shape, or a table that has no rows yet."""
        if self.rows.name == "zero_collision" or vectors.shape != (self.size, self.dim):
            raise ValueError(f"{list(vectors.shape)} vectors for a {self.rows.name} table of [{self.size}, {self.dim}]")
        keys, slots, _ = self.rows.held()
        device = self.weight.device
        self.weight[torch.from_numpy(slots).to(device)] = vectors[torch.from_numpy(keys)].to(device)

    def gather(self) -> Tensor | None:
        """All rows of a dense or hashed table, by key: [rows, dim] on rank 0, where they must fit; None elsewhere. All
        ranks together. Raises ValueError for a table whose rows are known by id."""
        if self.rows.name == "zero_collision":
            raise ValueError("the rows of a zero_collision table have no places in one whole; save it, or read its ids")
        self.settle()
        link, own = self.transport, self.weight[torch.from_numpy(self.rows.held()[1]).to(self.weight.device)]
        owner = self.rows.owner(torch.arange(self.size))
        send = [len(own), *[0] * (link.world_size - 1)]
        receive = torch.bincount(owner, minlength=link.world_size).tolist() if link.rank == 0 else \
            [0] * link.world_size
        rows = link.all_to_all(own, send, receive).wait()
        if link.rank:
            return None
        whole = rows.new_empty(self.size, self.dim)
        whole[torch.sort(owner, stable=True).indices.to(rows.device)] = rows
        return whole

    def admit(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct own keys [M] that the next batch uses -> (their slots, the slots among them that are new)."""
        self.batches += 1
        slots, new = self.rows.admit(keys.cpu().numpy(), self.batches)
        fresh = torch.from_numpy(slots[new]).to(self.weight.device)
        if len(fresh):
            self.weight[fresh] = self._start(keys.cpu().numpy()[new])
            for state in self.state.values():
                state[fresh] = 0
        return torch.from_numpy(slots).to(self.weight.device), fresh

    def update(self, slots: Tensor, gradient: Tensor, learning_rate: float, step: int) -> None:
        """One optimizer step of the rows ``slots`` [M] by their summed ``gradient`` [M, dim]."""
        self.optimizer.update(self.weight, self.state, slots, gradient, learning_rate, step)

    def _start(self, keys: np.ndarray) -> Tensor:
        return torch.from_numpy(initial_rows(keys, self.seed, self.dim, self.deviation)).to(self.weight.device)

    def __len__(self) -> int:
        """Rows that this rank keeps."""
        return len(self.rows.held()[0])

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's rows in ascending order of key: ``key`` [n], ``weight`` [n, dim], ``used`` [n] (the batch that
        used the row last), ``state.NAME`` [n, ...], and ``clock`` [2]: steps and batches so far. Between two steps of
        a schedule it holds every update of the steps before."""
        self.settle()
        keys, slots, used = self.rows.held()
        at = torch.from_numpy(slots).to(self.weight.device)
        return {"key": torch.from_numpy(keys.copy()), "used": torch.from_numpy(used), "weight": self.weight[at].cpu(),
                **{f"state.{name}": values[at].cpu() for name, values in self.state.items()},
                "clock": torch.tensor([self.steps, self.batches])}

    def load_state_dict(self, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """From the ``state_dict`` of *all* ranks that saved, however many they were: takes the rows that are its own
        here. Replaces everything. Raises ValueError where rows are missing or have another shape."""
        self.settle()
        fresh = rows_policy(self.rows.name, self.size, self.transport.rank, self.transport.world_size)
        found = 0
        for shard in shards:
            expected = {"weight": self.dim, **{f"state.{name}": v.shape[1] for name, v in self.state.items()}}
            for name, width in expected.items():
                if name not in shard or shard[name].shape[1:] != (width,):
                    there = ", ".join(f"{other} {list(value.shape)}" for other, value in shard.items())
                    raise ValueError(f"the saved table has no {name} of width {width} but {there}; make the table with "
                                     f"the optimizer and dim that it was trained with")
            mine = (fresh.owner(shard["key"]) == self.transport.rank).nonzero()[:, 0]
            slots = torch.from_numpy(fresh.restore(shard["key"][mine].numpy(), shard["used"][mine].numpy()))
            slots = slots.to(self.weight.device)
            self.weight[slots] = shard["weight"][mine].to(self.weight.device)
            for name, values in self.state.items():
                values[slots] = shard[f"state.{name}"][mine].to(self.weight.device)
            self.steps, self.batches = shard["clock"].tolist()
            found += len(mine)
        if self.rows.name != "zero_collision" and found != fresh.slots:
            raise ValueError(f"rank {self.transport.rank} found {found} of its {fresh.slots} rows; pass the state of "
                             f"every rank that saved")
        self.rows = fresh

    def save(self, folder: str | Path) -> None:
        """All ranks together, into a new or an old folder that all of them see (``files``)."""
        from semel.training.embedding.files import save_table

        save_table(self, Path(folder))

    def load(self, folder: str | Path) -> None:
        """What any number of ranks saved. All ranks together."""
        from semel.training.embedding.files import load_table

        load_table(self, Path(folder))

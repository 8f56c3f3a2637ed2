"""The processes that train together: sums and messages between them, and nothing else.

What a step sends is decided by arithmetic that all ranks do alike, so that sums are all there is to agree on: of
counts, of gradients, of metrics. Alone, every sum is what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from semel.comm.interface import PeerLost

T = TypeVar("T")


HEARTBEAT_S = 5.0
"""How often a rank tells the others that it is still at what they wait for."""


class Ranks:
    """``rank`` of ``world_size`` processes: those of torch.distributed where it is initialized, else this one alone.

    Every method but the constructor must be called by all ranks, in the same order. Raises PeerLost where one is gone.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist if dist.is_available() and dist.is_initialized() else None
        self.rank: int = self._dist.get_rank() if self._dist else 0
        self.world_size: int = self._dist.get_world_size() if self._dist else 1
        # Small sums are of numbers on the host, whatever carries the gradients.
        self._host = dist.new_group(backend="gloo") if self._dist and dist.get_backend() != "gloo" else None

    def sum(self, values: Any) -> np.ndarray:
        """The sums over ranks of an array of numbers, float64 (counts are exact)."""
        array = np.array(values, dtype=np.float64)
        if self._dist:
            tensor = torch.from_numpy(array)
            self._call(self._dist.all_reduce, tensor, group=self._host)
        return array

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return bool(self.sum([flag])[0])

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over ranks: one message for each kind of number. With two ranks no bit depends
        on which is which; with more the order of summation is the transport's, the same on every rank."""
        if not self._dist:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in alike])
            self._call(self._dist.all_reduce, flat)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def sum_apart(self) -> Callable[[Tensor], None]:
        """A sum over ranks in place, for a thread of its own: on a process group of its own."""
        from semel.comm.collective import own_group

        group = own_group() if self._dist else None

        def over_ranks(tensor: Tensor) -> None:
            if self._dist:
                self._call(self._dist.all_reduce, tensor, group=group)

        return over_ranks

    def sum_metric(self, metric: T) -> T:
        """One of ``semel.metrics`` over the rows of all ranks."""
        if not self._dist:
            return metric
        state: dict[str, np.ndarray] = metric.state()  # type: ignore[attr-defined]
        flat = self.sum(np.concatenate([value.ravel() for value in state.values()]))
        parts = np.split(flat, np.cumsum([value.size for value in state.values()])[:-1])
        return metric.from_state({  # type: ignore[attr-defined]
            name: part.reshape(state[name].shape) for name, part in zip(state, parts, strict=True)})

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, by rank."""
        if not self._dist:
            return [value]
        data = torch.from_numpy(np.frombuffer(json.dumps(value).encode(), np.uint8).copy())
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._call(self._dist.all_reduce, sizes, group=self._host)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        out = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._call(self._dist.all_gather, out, padded, group=self._host)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(out, sizes.tolist(), strict=True)]

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """[N, ...] of each rank, by rank; N may differ, the rest may not. On the host."""
        if not self._dist:
            return [rows]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        self._call(self._dist.all_reduce, sizes, group=self._host)
        padded = rows.new_zeros(int(sizes.max()), *rows.shape[1:], device="cpu")
        padded[: len(rows)] = rows
        out = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._call(self._dist.all_gather, out, padded, group=self._host)
        return [part[:size] for part, size in zip(out, sizes.tolist(), strict=True)]

    def first(self, make: Callable[[], Any]) -> Any:
        """``make()`` on rank 0, its JSON value on all."""
        return self.gather(make() if self.rank == 0 else None)[0]

    def in_turn(self, make: Callable[[], T]) -> T:
        """``make()`` on every rank, rank 0 before the others: what it leaves on disk they find."""
        first = self.at_once(make if self.rank == 0 else None)
        others = self.at_once(make if self.rank else None)
        return first if self.rank == 0 else others  # type: ignore[return-value]

    def at_once(self, make: Callable[[], T] | None) -> T | None:
        """``make()`` on every rank that has something to make, and no rank goes on before all are done. However long
        one takes, the others hear from it: a rank that says nothing is taken for lost."""
        if not self._dist:
            return make() if make else None
        with ThreadPoolExecutor(1, "semel-make") as thread:
            made = thread.submit(make) if make else None
            while self.any(made is not None and not wait([made], timeout=HEARTBEAT_S).done):
                pass
        return made.result() if made else None

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost another: {why}") from error

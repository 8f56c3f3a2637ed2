"""The plain transports: torch.distributed, and one process without it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from semel.comm.interface import Done, Handle, Later, PeerLost, as_bytes, check_counts, row_bytes

gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13


class Alone:
    """One process: what it sends, it receives."""

    rank = 0
    world_size = 1

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        check_counts(self, values, send, receive)
        return Done(values.detach().clone())

    def all_gather(self, values: Tensor) -> Handle:
        return Done(values.detach().clone()[None])


class Collective:
    """torch.distributed's own all-to-all and all-gather: gloo on CPU, NCCL on GPU.

    ``group``: None is the default group, which must exist. Raises RuntimeError where torch.distributed was not set up.
    """

    def __init__(self, group: Any = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Collective needs torch.distributed; join a group first (semel.comm.join or "
                               "torch.distributed.init_process_group), or use Alone for one process")
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._order = threading.Lock()

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        check_counts(self, values, send, receive)
        out = values.new_empty(sum(receive), *values.shape[1:])
        size, sent = row_bytes(values), as_bytes(values)

        def begin() -> Any:
            return dist.all_to_all_single(as_bytes(out), sent, [size * n for n in receive], [size * n for n in send],
                                          group=self.group, async_op=True)

        return self._begin("all_to_all", begin, out, sent)

    def all_gather(self, values: Tensor) -> Handle:
        out = values.new_empty(self.world_size, *values.shape)
        sent = as_bytes(values)
        return self._begin("all_gather", lambda: gather(as_bytes(out), sent, group=self.group, async_op=True), out,
                           sent)

    def _begin(self, name: str, begin: Callable[[], Any], out: Tensor, sent: Tensor) -> Handle:
        with self._order, peers_named(name, self.rank, self.world_size):
            work = begin()

        def finish() -> Tensor:
            with peers_named(name, self.rank, self.world_size):
                work.wait()
            _ = sent  # whose memory the transfer read until now
            return out

        return Later(finish)


class peers_named:
    """Within the block, what torch.distributed says of a lost process becomes a PeerLost that says what to do."""

    def __init__(self, what: str, rank: int, world_size: int) -> None:
        self.where = f"{what} on rank {rank} of {world_size}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            why = re.split(r"\. |\n", re.sub(r"^\[[^]]*\] *", "", str(error)))[0]  # gloo names a line of C++ first
            raise PeerLost(f"{self.where}: another process ended or does not answer ({why}); its own message says why. "
                           "Restart the job from its last checkpoint") from error


_LOST = re.compile("gloo|[Cc]onnection|[Tt]imed out|closed by peer|[Ss]ocket")


def own_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """A new process group of ``ranks`` (None: all), so that one part's calls never wait behind another's, with the
    timeout of the default group. All its members must call this, and make their groups in the same order."""
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    timeout = None if options is None else options._timeout
    return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend,
                          use_local_synchronization=ranks is not None)

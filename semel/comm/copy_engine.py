"""SM-free transport inside one NVLink domain: NCCL's copy-engine collectives.

With the zero-CTA policy and buffers in symmetric memory NCCL (2.28 on) moves equal parts by copy engines instead of
kernels. Its all-to-all has equal parts only, so uneven ones go through a registered buffer of ``capacity_bytes``, in as
many rounds as the largest part needs, which all ranks agree on over gloo. Written after the interfaces of PyTorch 2.13;
not yet run: no machine with several GPUs was at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from semel.comm.collective import gather, peers_named
from semel.comm.interface import Handle, Later, as_bytes, check_counts, row_bytes

CAPACITY_BYTES = 16 << 20
ALIGNED = 16
INSTEAD = 'use transport("collective") there, or transport("staged") for an exchange without multiprocessors'


def why_not(device: Any) -> str | None:
    """What is missing for ``CopyEngine`` on ``device`` here, or None. Looks at this process only."""
    if torch.device(device).type != "cuda":
        return f"it needs a CUDA device, got {device}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if not dist.is_nccl_available():
        return f"this PyTorch ({torch.__version__}) was built without NCCL"
    if torch.cuda.nccl.version() < (2, 28):
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} has no copy-engine collectives, 2.28 has"
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        return f"this PyTorch ({torch.__version__}) cannot set NCCL's zero-CTA policy"
    return None


class CopyEngine:
    """``group``: the ranks that exchange (None: all), which must lie in one NVLink domain. Makes an NCCL communicator
    and a gloo group of its own, so all processes must make it in the same order. Raises RuntimeError, with what to use
    instead, where the device, NCCL or PyTorch lacks it."""

    def __init__(self, group: Any = None, device: Any = "cuda", capacity_bytes: int = CAPACITY_BYTES) -> None:
        missing = why_not(device)
        if missing is None and not dist.is_initialized():
            missing = "torch.distributed is not set up (semel.comm.join)"
        if missing is not None:
            raise RuntimeError(f"copy_engine is not available: {missing}; {INSTEAD}")
        import torch.distributed._symmetric_memory as symmetric

        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        self.group = dist.new_group(ranks, backend="nccl", pg_options=options)
        self.host_group = dist.new_group(ranks, backend="gloo")
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = torch.device(device)
        self.part = max(ALIGNED, capacity_bytes // self.world_size // ALIGNED * ALIGNED)
        self._order = threading.Lock()
        self._stream = torch.cuda.Stream(self.device)
        symmetric.set_backend("NCCL")
        size = self.part * self.world_size
        self._sent = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        self._received = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        for buffer in (self._sent, self._received):
            symmetric.rendezvous(buffer, group=self.group.group_name)

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        check_counts(self, values, send, receive)
        size = row_bytes(values)
        out = values.new_empty(sum(receive), *values.shape[1:])
        sent = list(as_bytes(values).split([size * n for n in send]))
        received = list(as_bytes(out).split([size * n for n in receive]))

        def carry() -> None:
            largest = torch.tensor([size * max(*send, *receive)])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host_group)
            for at, part in self._rounds(int(largest)):
                self._copy([x[at : at + part] for x in sent], self._sent.split(part))
                dist.all_to_all_single(self._received[: part * self.world_size], self._sent[: part * self.world_size],
                                       group=self.group)
                self._copy(self._received.split(part), [x[at : at + part] for x in received])

        return self._carry("all_to_all", carry, values, out)

    def all_gather(self, values: Tensor) -> Handle:
        out = values.new_empty(self.world_size, *values.shape)
        sent, received = as_bytes(values), as_bytes(out).view(self.world_size, len(as_bytes(values)))

        def carry() -> None:
            for at, part in self._rounds(len(sent)):
                self._copy([sent[at : at + part]], [self._sent])
                gather(self._received[: part * self.world_size], self._sent[:part], group=self.group)
                self._copy(self._received.split(part), [x[at : at + part] for x in received])

        return self._carry("all_gather", carry, values, out)

    def _carry(self, name: str, carry: Callable[[], None], values: Tensor, out: Tensor) -> Handle:
        done, caller = torch.cuda.Event(), torch.cuda.current_stream(self.device)
        with self._order, peers_named(name, self.rank, self.world_size), torch.cuda.stream(self._stream):
            self._stream.wait_stream(caller)
            for tensor in (values, out):
                tensor.record_stream(self._stream)
            carry()
            done.record(self._stream)

        def finish() -> Tensor:
            torch.cuda.current_stream(self.device).wait_event(done)
            return out

        return Later(finish)

    def _rounds(self, size: int) -> Iterator[tuple[int, int]]:
        """(start, bytes) of each piece of ``size`` bytes a rank; what is registered must be the same on all ranks."""
        part = min(self.part, -(-size // ALIGNED) * ALIGNED)
        return ((at, part) for at in range(0, size, max(part, 1)))

    @staticmethod
    def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=False):
            size = min(len(source), len(target))
            target[:size].copy_(source[:size])

"""SM-free transport between hosts: copy engines to and from pinned memory, the CPU in between.

Device memory goes to pinned host memory by a copy engine, chunk by chunk; gloo carries each chunk between processes
while the next is copied; what arrives is copied back. No multiprocessor is touched, so that dense kernels run
undisturbed beside it (FreeScale, arXiv 2604.24073; the third of its cures). On an idle GPU NCCL is faster: this
pays only where it is hidden behind computation. CPU tensors go the same way in the same chunks; that is tested, the
copies to and from a device are not yet measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from semel.comm.collective import peers_named
from semel.comm.interface import Handle, Later, as_bytes, check_counts, row_bytes
from semel.comm.worker import Worker

CHUNK_BYTES = 4 << 20
"""Large enough that a chunk's fixed costs vanish, small enough that copying and sending overlap."""
IN_FLIGHT = 4
"""Steps under way at once; each holds a chunk to send and a chunk a source."""


@dataclass(frozen=True)
class Step:
    """Bytes ``start:stop`` of what is sent, for the ranks ``to``; and ``(source, start, stop)`` of what is received."""

    start: int
    stop: int
    to: tuple[int, ...]
    into: tuple[tuple[int, int, int], ...]


class Staged:
    """``group``: a gloo process group of its own (None makes one of all ranks; all of them must then do so in the same
    order). Raises RuntimeError where torch.distributed was not set up or the group is not of gloo."""

    def __init__(self, group: Any = None, device: Any = "cpu", chunk_bytes: int = CHUNK_BYTES) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Staged needs torch.distributed; join a group first (semel.comm.join)")
        self.group = dist.new_group(backend="gloo") if group is None else group
        if "gloo" not in dist.get_backend(self.group):
            raise RuntimeError(f"Staged sends from host memory and needs a gloo group, this one is of "
                               f"{dist.get_backend(self.group)}; make one with semel.comm.own_group(backend='gloo')")
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device, self.chunk_bytes = torch.device(device), chunk_bytes
        self._copies = _OnDevice(self.device) if self.device.type == "cuda" else _OnHost()
        self._worker = Worker("semel-staged")

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        check_counts(self, values, send, receive)
        size = row_bytes(values)
        steps = ring_steps(self.rank, [n * size for n in send], [n * size for n in receive], self.chunk_bytes)
        return self._carry("all_to_all", values, values.new_empty(sum(receive), *values.shape[1:]), steps)

    def all_gather(self, values: Tensor) -> Handle:
        size = values.numel() * values.element_size()
        chunk = max(1, self.chunk_bytes // self.world_size)  # a step holds a chunk of every rank
        steps = gather_steps(self.rank, self.world_size, size, chunk)
        return self._carry("all_gather", values, values.new_empty(self.world_size, *values.shape), steps)

    def _carry(self, name: str, values: Tensor, out: Tensor, steps: Iterator[Step]) -> Handle:
        if values.device.type != self.device.type:
            raise ValueError(f"{name}: values are on {values.device}, this transport is for {self.device}")
        sent, received = as_bytes(values), as_bytes(out)
        self._copies.after_caller(sent, received)

        def carry() -> None:
            with peers_named(name, self.rank, self.world_size), self._copies.here():
                self._run(sent, received, steps)

        future = self._worker.submit(carry)

        def finish() -> Tensor:
            future.result()
            self._copies.before_caller(out)
            return out

        return Later(finish)

    def _run(self, sent: Tensor, received: Tensor, steps: Iterator[Step]) -> None:
        """Three things go on at once: copying step n out, sending step n - 1, receiving those before."""
        copied: _UnderWay | None = None
        sending: deque[_UnderWay] = deque()
        for step in steps:
            now = _UnderWay(self, step, sent)
            if copied is not None:
                copied.send()
                sending.append(copied)
            copied = now
            if len(sending) >= IN_FLIGHT - 1:
                sending.popleft().finish(received)
        if copied is not None:
            copied.send()
            sending.append(copied)
        for step_under_way in sending:
            step_under_way.finish(received)
        self._copies.settle()


class _UnderWay:
    """One step: its chunk on the host, and what arrives."""

    def __init__(self, of: Staged, step: Step, sent: Tensor) -> None:
        self.of, self.step = of, step
        self.arriving: list[tuple[Tensor, int, int, Any]] = []
        for source, start, stop in step.into:
            if source != of.rank:
                host = of._copies.host(stop - start)
                self.arriving.append((host, start, stop, dist.irecv(host, group=of.group, group_src=source)))
        self.chunk, self.ready = of._copies.out(sent[step.start : step.stop])
        self.works: list[Any] = []

    def send(self) -> None:
        self.of._copies.until(self.ready)
        if len(self.chunk):
            self.works = [dist.isend(self.chunk, group=self.of.group, group_dst=rank)
                          for rank in self.step.to if rank != self.of.rank]

    def finish(self, received: Tensor) -> None:
        for source, start, stop in self.step.into:
            if source == self.of.rank:
                self.of._copies.into(received[start:stop], self.chunk)
        for host, start, stop, work in self.arriving:
            work.wait()
            self.of._copies.into(received[start:stop], host)
        for work in self.works:
            work.wait()
        self.of._copies.give_back([self.chunk, *(arrived[0] for arrived in self.arriving)])


def ring_steps(rank: int, send: Sequence[int], receive: Sequence[int], chunk: int) -> Iterator[Step]:
    """An all-to-all in rounds: in round k every rank sends to the rank k after it and receives from the rank k before
    it, ``chunk`` bytes at a time. Both sides of a pair know its bytes, so they cut it into the same chunks."""
    world_size = len(send)
    starts = [sum(send[:r]) for r in range(world_size)]
    places = [sum(receive[:r]) for r in range(world_size)]
    for k in range(world_size):
        to, source = (rank + k) % world_size, (rank - k) % world_size
        for at in range(0, max(send[to], receive[source]), chunk):
            out = min(send[to], at), min(send[to], at + chunk)
            into = min(receive[source], at), min(receive[source], at + chunk)
            yield Step(starts[to] + out[0], starts[to] + out[1], (to,),
                       ((source, places[source] + into[0], places[source] + into[1]),) if into[1] > into[0] else ())


def gather_steps(rank: int, world_size: int, size: int, chunk: int) -> Iterator[Step]:
    """An all-gather of ``size`` bytes a rank: each chunk is copied to the host once and sent to all."""
    ranks = tuple((rank + k) % world_size for k in range(world_size))
    for at in range(0, size, chunk):
        stop = min(size, at + chunk)
        yield Step(at, stop, ranks, tuple((r, r * size + at, r * size + stop) for r in ranks))


class _OnHost:
    """Copies between host buffers: nothing to wait for."""

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after_caller(self, *tensors: Tensor) -> None:
        pass

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def out(self, piece: Tensor) -> tuple[Tensor, Any]:
        return piece.clone(), None

    def until(self, ready: Any) -> None:
        pass

    def into(self, place: Tensor, host: Tensor) -> None:
        place.copy_(host)

    def give_back(self, buffers: list[Tensor]) -> None:
        pass

    def settle(self) -> None:
        pass

    def before_caller(self, out: Tensor) -> None:
        pass


class _OnDevice:
    """Copies by the device's copy engines, one stream each way; pinned buffers are used again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pinned: dict[int, list[tuple[Tensor, Any]]] = {}

    def here(self) -> AbstractContextManager[Any]:
        """The worker's thread begins on device 0, where pinning would make a context that nobody needs."""
        return torch.cuda.device(self.device)

    def after_caller(self, *tensors: Tensor) -> None:
        current = torch.cuda.current_stream(self.device)
        for stream in (self.down, self.up):
            stream.wait_stream(current)
            for tensor in tensors:
                tensor.record_stream(stream)

    def host(self, size: int) -> Tensor:
        capacity = 1 << max(size - 1, 1).bit_length()  # few sizes, so that buffers come back
        free = self.pinned.get(capacity)
        if free:
            buffer, used = free.pop(0)
            used.synchronize()  # its last copy to the device
        else:
            buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        return buffer[:size]

    def out(self, piece: Tensor) -> tuple[Tensor, Any]:
        host, ready = self.host(len(piece)), torch.cuda.Event()
        with torch.cuda.stream(self.down):
            host.copy_(piece, non_blocking=True)
            ready.record(self.down)
        return host, ready

    def until(self, ready: Any) -> None:
        ready.synchronize()

    def into(self, place: Tensor, host: Tensor) -> None:
        with torch.cuda.stream(self.up):
            place.copy_(host, non_blocking=True)

    def give_back(self, buffers: list[Tensor]) -> None:
        used = torch.cuda.Event()
        used.record(self.up)
        for buffer in buffers:
            whole = buffer if buffer._base is None else buffer._base
            self.pinned.setdefault(len(whole), []).append((whole, used))

    def settle(self) -> None:
        self.up.synchronize()

    def before_caller(self, out: Tensor) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.up)

"""What every transport offers: two calls, each of which returns a handle at once.

Order is part of the interface. All processes of a group must make the same calls in the same order, else they exchange
the wrong tensors or wait for ever. A transport issues its calls in the order in which they were asked for, also when
several threads ask; but two threads ask in an order that may differ from process to process, so each part that
communicates from a thread of its own needs a transport of its own (``transport()`` makes a process group for each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Handle(Protocol):
    def wait(self) -> Tensor:
        """The received tensor; may be called again. Raises PeerLost if another process is gone or silent."""
        ...


class Transport(Protocol):
    """``rank`` of ``world_size``: of this process among those that exchange."""

    rank: int
    world_size: int

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """``values`` [sum(send), ...] in order of destination -> [sum(receive), ...] in order of source. ``send[r]``:
        rows for rank r, ``receive[r]``: rows from rank r. Any dtype; zero rows are allowed, and every rank must join.
        ``values`` must not change before ``wait`` has returned. No gradients. Raises ValueError for counts that do
        not fit."""
        ...

    def all_gather(self, values: Tensor) -> Handle:
        """``values`` of one shape and dtype on all ranks -> [world_size, ...]."""
        ...


class PeerLost(RuntimeError):
    """Another process of the group ended or stopped answering, so that an exchange cannot be completed."""


class Done:
    """A handle of what is there already."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def wait(self) -> Tensor:
        return self._values


class Later:
    """A handle whose ``wait`` calls ``finish`` once; an error is raised again by each ``wait``."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._values: Tensor | None = None
        self._error: BaseException | None = None

    def wait(self) -> Tensor:
        if self._finish is not None:
            try:
                self._values = self._finish()
            except BaseException as error:
                self._error = error
            self._finish = None  # lets go of what was sent
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values


def check_counts(transport: Transport, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
    """Raises ValueError unless the arguments of ``all_to_all`` fit one another and the transport."""
    for name, counts in (("send", send), ("receive", receive)):
        if len(counts) != transport.world_size or min(counts) < 0:
            raise ValueError(f"all_to_all: {name} must be {transport.world_size} counts from 0 on, one a rank, got "
                             f"{list(counts)}")
    if values.dim() == 0 or len(values) != sum(send):
        raise ValueError(f"all_to_all: values of shape {list(values.shape)} for {sum(send)} rows to send")
    own = transport.rank
    if send[own] != receive[own]:
        raise ValueError(f"all_to_all: rank {own} sends itself {send[own]} rows, but receives {receive[own]}")


def as_bytes(values: Tensor) -> Tensor:
    """The same memory as flat uint8: transports move bytes, so that no dtype is special."""
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def row_bytes(values: Tensor) -> int:
    """Bytes of one row of ``values`` [rows, ...]."""
    return values.shape[1:].numel() * values.element_size()


def exchange_counts(transport: Transport, send: Sequence[int]) -> list[int]:
    """How many rows each rank will send here, given how many this rank sends to each: [world_size] -> [world_size]."""
    ones = [1] * transport.world_size
    return transport.all_to_all(torch.tensor(list(send), dtype=torch.int64), ones, ones).wait().tolist()

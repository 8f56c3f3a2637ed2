"""A world of threads in one process: for tests of what communicates, without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from semel.comm.interface import Handle, Later, PeerLost, Transport, check_counts

Result = TypeVar("Result")


class Threads:
    """Rank ``rank`` of a world of threads. Unlike torch.distributed it notices calls that do not match, and raises
    PeerLost. Made by ``run_threads``."""

    def __init__(self, rank: int, world_size: int, mail: _Mail, timeout_s: float) -> None:
        self.rank, self.world_size, self._mail, self._timeout_s = rank, world_size, mail, timeout_s
        self._calls = 0
        self._order = threading.Lock()

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        check_counts(self, values, send, receive)
        return self._trade("all_to_all", values.detach().clone().split(list(send)), torch.cat, receive)

    def all_gather(self, values: Tensor) -> Handle:
        return self._trade("all_gather", [values.detach().clone()] * self.world_size, torch.stack, None)

    def _trade(self, name: str, parts: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor],
               receive: Sequence[int] | None) -> Handle:
        with self._order:
            self._calls += 1
            call = self._calls
            self._mail.post({(call, self.rank, to): (name, part) for to, part in enumerate(parts)})

        def finish() -> Tensor:
            found = [self._mail.take((call, source, self.rank), self._timeout_s) for source in range(self.world_size)]
            like = parts[0]
            for source, (theirs, part) in enumerate(found):
                rows = len(like) if receive is None else receive[source]
                if (theirs, len(part), part.dtype, part.shape[1:]) != (name, rows, like.dtype, like.shape[1:]):
                    raise PeerLost(f"call {call}: rank {self.rank} expects {name} of {[rows, *like.shape[1:]]} "
                                   f"{like.dtype}, rank {source} sends {theirs} of {list(part.shape)} {part.dtype}")
            return join([part for _, part in found])

        return Later(finish)


class _Mail:
    def __init__(self) -> None:
        self._letters: dict[tuple[int, int, int], tuple[str, Tensor]] = {}
        self._arrived = threading.Condition()
        self._closed = False

    def post(self, letters: dict[tuple[int, int, int], tuple[str, Tensor]]) -> None:
        with self._arrived:
            self._letters.update(letters)
            self._arrived.notify_all()

    def take(self, address: tuple[int, int, int], timeout_s: float) -> tuple[str, Tensor]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: address in self._letters or self._closed, timeout_s) \
                    or address not in self._letters:
                raise PeerLost(f"call {address[0]}: rank {address[1]} has sent nothing to rank {address[2]}")
            return self._letters.pop(address)

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()


def run_threads(world_size: int, function: Callable[[Transport], Result], timeout_s: float = 20.0) -> list[Result]:
    """``function(transport)`` in a thread for each rank -> their results by rank. Raises what the first one to fail
    raised; the others, which wait for it, then get PeerLost."""
    mail = _Mail()
    errors: list[BaseException] = []

    def run(rank: int) -> Any:
        try:
            return function(Threads(rank, world_size, mail, timeout_s))
        except BaseException as error:
            errors.append(error)
            mail.close()
            return None

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
        wait(futures)
    if errors:
        raise errors[0]
    return [future.result() for future in futures]

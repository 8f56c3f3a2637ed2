"""Ranks as threads of one process: the transport's two calls through shared memory, for fast tests of exchanges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 20.0


class _Mail:
    def __init__(self) -> None:
        self.parts: dict[tuple[int, int, int], Tensor] = {}
        self.changed = threading.Condition()
        self.broken = False


class _Handle:
    def __init__(self, mail: _Mail, keys: list[tuple[int, int, int]], like: Tensor) -> None:
        self.mail, self.keys, self.like = mail, keys, like
        self.received: list[Tensor] | None = None

    def parts(self) -> list[Tensor]:
        if self.received is None:
            with self.mail.changed:
                if not self.mail.changed.wait_for(
                        lambda: self.mail.broken or all(key in self.mail.parts for key in self.keys), PATIENCE_S):
                    raise TimeoutError("ranks made different calls")
                if self.mail.broken:
                    raise RuntimeError("another rank failed")
                self.received = [self.mail.parts.pop(key) for key in self.keys]
        return self.received

    def wait(self) -> Tensor:
        return torch.cat([self.like, *self.parts()])


class _Stacked(_Handle):
    def wait(self) -> Tensor:
        return torch.stack(self.parts())


class ThreadRank:
    """One rank's transport."""

    def __init__(self, mail: _Mail, rank: int, world_size: int) -> None:
        self.mail, self.rank, self.world_size, self.calls = mail, rank, world_size, 0

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Any:
        assert len(values) == sum(send) and len(send) == len(receive) == self.world_size
        keys = self._send([part.detach().clone() for part in values.split(list(send))])
        handle = _Handle(self.mail, keys, values[:0].detach())
        return _Counted(handle, list(receive))

    def all_gather(self, values: Tensor) -> Any:
        return _Stacked(self.mail, self._send([values.detach().clone()] * self.world_size), values)

    def _send(self, parts: list[Tensor]) -> list[tuple[int, int, int]]:
        self.calls += 1
        with self.mail.changed:
            for target, part in enumerate(parts):
                self.mail.parts[self.calls, self.rank, target] = part
            self.mail.changed.notify_all()
        return [(self.calls, source, self.rank) for source in range(self.world_size)]


class _Counted:
    def __init__(self, handle: _Handle, receive: list[int]) -> None:
        self.handle, self.receive = handle, receive

    def wait(self) -> Tensor:
        assert [len(part) for part in self.handle.parts()] == self.receive
        return self.handle.wait()


def on_ranks(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    """``function(transport)`` on each of ``world_size`` ranks; their results by rank. Raises what the first to fail
    raised."""
    mail = _Mail()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadRank(mail, rank, world_size))
        except BaseException as error:
            errors.append(error)
            with mail.changed:
                mail.broken = True
                mail.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S + 10)
    if errors:
        raise errors[0]
    return results

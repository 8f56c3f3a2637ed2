"""A thread that does one thing after the other, in the order asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Worker:
    """``submit(f)`` -> the future of ``f()``. The thread is a daemon: one that waits for a process that is gone must
    not keep this one alive."""

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._asked.put((function, future))
        return future

    def close(self) -> None:
        """The thread ends after what was asked so far."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, future = asked
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future, asked  # nothing asked for earlier stays in memory while the thread waits

"""Admission: a bounded number of requests may wait for the scoring threads; the rest is refused at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from semel.serving.errors import Overloaded

Result = TypeVar("Result")


class Admission:
    """``workers`` threads do the work, ``queue`` more requests may wait. Used from one event loop only."""

    def __init__(self, workers: int = 1, queue: int = 64):
        if workers < 1 or queue < 0:
            raise ValueError(f"admission needs at least one worker and no negative queue, got {workers} and {queue}")
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="semel-score")
        self._limit, self._workers = workers + queue, workers
        self._seconds = 0.01  # of one request, smoothed: what Retry-After is estimated from
        self.inside = 0

    @property
    def full(self) -> bool:
        return self.inside >= self._limit

    async def run(self, work: Callable[[float], Result]) -> Result:
        """``work(seconds it waited)`` in a scoring thread. Raises Overloaded when workers and queue are full."""
        if self.full:
            wait = self.inside * self._seconds / self._workers
            raise Overloaded(f"{self.inside} requests are being scored or wait, and {self._limit} may",
                             max(1, math.ceil(wait)))
        self.inside += 1
        entered = time.perf_counter()

        def timed() -> Result:
            started = time.perf_counter()
            try:
                return work(started - entered)
            finally:
                self._seconds += 0.1 * (time.perf_counter() - started - self._seconds)

        future = asyncio.get_running_loop().run_in_executor(self._pool, timed)
        # The slot is free when the work is done, not when its client hangs up: a cancelled await must not let the
        # queue grow behind the limit.
        future.add_done_callback(self._leave)
        return await asyncio.shield(future)

    def _leave(self, future: asyncio.Future) -> None:
        self.inside -= 1
        if not future.cancelled():
            future.exception()  # seen, so that asyncio does not report the error of a client that hung up

    def close(self) -> None:
        """Wait for the work that was admitted."""
        self._pool.shutdown(wait=True)

"""Admission: a bounded number of requests may wait for the scoring threads; the rest is refused at once."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from semel.serving.errors import Overloaded

Job = TypeVar("Job")
Result = TypeVar("Result")


class Admission(Generic[Job, Result]):
    """``workers`` threads do the work, ``queue`` more jobs may wait. Used from one event loop only.

    ``work(jobs, seconds that each waited)`` gives a result a job; one that is an exception is that job's error, what
    ``work`` raises is that of all. A free thread takes the first job that waits, and those after it as long as
    ``size`` of all is at most ``most``: nobody waits for company.
    """

    def __init__(self, work: Callable[[Sequence[Job], Sequence[float]], Sequence[Result | Exception]],
                 workers: int = 1, queue: int = 64, *, size: Callable[[Job], int] = lambda _: 1, most: int = 1):
        if workers < 1 or queue < 0:
            raise ValueError(f"admission needs at least one worker and no negative queue, got {workers} and {queue}")
        self._work, self._size, self._most = work, size, most
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="semel-score")
        self._limit, self._workers = workers + queue, workers
        self._waiting: deque[tuple[Job, float, Future[Result]]] = deque()
        self._taking = threading.Lock()
        self._seconds = 0.01  # of one request, smoothed: what Retry-After is estimated from
        self.inside = 0

    @property
    def full(self) -> bool:
        return self.inside >= self._limit

    async def run(self, job: Job) -> Result:
        """The result of ``job``. Raises Overloaded when workers and queue are full, and what is its error."""
        if self.full:
            wait = self.inside * self._seconds / self._workers
            raise Overloaded(f"{self.inside} requests are being scored or wait, and {self._limit} may",
                             max(1, math.ceil(wait)))
        self.inside += 1
        done: Future[Result] = Future()
        self._waiting.append((job, time.perf_counter(), done))
        self._pool.submit(self._next)  # finds nothing if an earlier one took this job along
        future = asyncio.wrap_future(done)
        # The slot is free when the work is done, not when its client hangs up: a cancelled await must not let the
        # queue grow behind the limit.
        future.add_done_callback(self._leave)
        return await asyncio.shield(future)

    def _next(self) -> None:
        group = self._take()
        if not group:
            return
        started = time.perf_counter()
        results: Sequence[Result | Exception]
        try:
            results = self._work([job for job, _, _ in group], [started - entered for _, entered, _ in group])
        except Exception as error:  # whatever it is, it belongs to those who wait for this group
            results = [error] * len(group)
        self._seconds += 0.1 * ((time.perf_counter() - started) / len(group) - self._seconds)
        for (_, _, done), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)

    def _take(self) -> list[tuple[Job, float, Future[Result]]]:
        group: list[tuple[Job, float, Future[Result]]] = []
        size = 0
        with self._taking:
            while self._waiting and (not group or size + self._size(self._waiting[0][0]) <= self._most):
                waiting = self._waiting.popleft()
                if waiting[2].set_running_or_notify_cancel():
                    group.append(waiting)
                    size += self._size(waiting[0])
        return group

    def _leave(self, future: asyncio.Future) -> None:
        self.inside -= 1
        if not future.cancelled():
            future.exception()  # seen, so that asyncio does not report the error of a client that hung up

    def close(self) -> None:
        """Wait for the work that was admitted."""
        self._pool.shutdown(wait=True)

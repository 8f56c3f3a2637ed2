"""Admission: what can be answered in time may wait for the scoring threads; the rest is refused at once."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

from semel.serving.errors import Overloaded
from semel.serving.forecast import Forecast, Margin

Job = TypeVar("Job")
Result = TypeVar("Result")


class Admission(Generic[Job, Result]):
    """``scorers`` threads do the work, ``queue`` more jobs may wait. Used from one event loop only.

    A job is refused (``Overloaded``) where the queue is full, and where what is ahead of it and its own work are
    likely to take longer than ``target`` seconds: by what work took lately (``Forecast``), and by how far that was
    exceeded (``Margin``). One that has nobody ahead is always taken.

    ``work(jobs, seconds that each waited)`` gives a result a job; one that is an exception is that job's error, what
    ``work`` raises is that of all. A free thread takes the first job that waits, and those after it as long as they are
    of its ``kind`` and ``size`` of all is at most ``most``: nobody waits for company. Kinds are forecast apart.
    """

    def __init__(self, work: Callable[[Sequence[Job], Sequence[float]], Sequence[Result | Exception]],
                 scorers: int = 1, queue: int = 64, *, size: Callable[[Job], int] = lambda _: 1, most: int = 1,
                 kind: Callable[[Job], str] = lambda _: "", target: float = math.inf):
        if scorers < 1 or queue < 0:
            raise ValueError(f"admission needs at least one scorer and no negative queue, got {scorers} and {queue}")
        self._work, self._size, self._most, self._kind, self._target = work, size, most, kind, target
        self._pool = ThreadPoolExecutor(scorers, thread_name_prefix="semel-score")
        self._limit, self._scorers = scorers + queue, scorers
        self._running: dict[object, float] = {}  # groups that are being worked on, and when they should be done
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Job, float, Future[Result]]] = deque()
        self._taking = threading.Lock()
        self._forecasts: dict[str, Forecast] = {}
        self._margin = Margin()
        self.inside = 0
        self._ahead: dict[str, tuple[int, int]] = {}  # of each kind: jobs that wait, and their size

    @property
    def full(self) -> bool:
        return self.inside >= self._limit

    def expected(self, size: int = 0, kind: str = "") -> float:
        """Seconds in which a job of this size and kind would be done if it came now, but for 2 of 100."""
        return self._foreseen(size, kind) * self._margin.factor

    def _foreseen(self, size: int, kind: str) -> float:
        with self._taking:
            waiting = sum(self._forecast(one).seconds(*ahead) for one, ahead in self._ahead.items())
            own = self._forecast(kind).seconds(1, size)
        now = time.perf_counter()
        # What takes longer than foreseen is expected to take as long again: a stalled machine is not a free one.
        running = sum(abs(at - now) for at in list(self._running.values()))
        return (running + waiting) / self._scorers + own

    def _forecast(self, kind: str) -> Forecast:
        return self._forecasts.setdefault(kind, Forecast())

    def check(self, size: int = 0, kind: str = "") -> None:
        """Raises Overloaded where a job of this size and kind would be refused now."""
        if self.full:
            raise Overloaded(f"{self.inside} requests are being scored or wait, and {self._limit} may",
                             max(1, math.ceil(self.expected(size, kind))))
        if self.inside >= self._scorers:
            expected = self.expected(size, kind)
            if expected > self._target:
                raise Overloaded(f"an answer would take about {1e3 * expected:.0f} ms, and {1e3 * self._target:.0f} is "
                                 f"the target: {self.inside} requests are ahead", max(1, math.ceil(expected)))

    async def run(self, job: Job) -> Result:
        """The result of ``job``. Raises Overloaded where it is refused, and what is its error."""
        size, kind = self._size(job), self._kind(job)
        self.check(size, kind)
        foreseen, entered = self._foreseen(size, kind), time.perf_counter()
        self.inside += 1
        done: Future[Result] = Future()
        with self._taking:
            self._waiting.append((job, entered, done))
            self._wait(kind, 1, size)
        self._pool.submit(self._next)  # finds nothing if an earlier one took this job along
        future = asyncio.wrap_future(done)
        # The slot is free when the work is done, not when its client hangs up: a cancelled await must not let the
        # queue grow behind the limit.
        future.add_done_callback(partial(self._leave, foreseen, entered))
        return await asyncio.shield(future)

    def _next(self) -> None:
        group = self._take()
        if not group:
            return
        started = time.perf_counter()
        size = sum(self._size(job) for job, _, _ in group)
        forecast = self._forecast(self._kind(group[0][0]))
        me = object()
        with self._changed:
            self._running[me] = started + forecast.seconds(len(group), size)
        results: Sequence[Result | Exception]
        try:
            results = self._work([job for job, _, _ in group], [started - entered for _, entered, _ in group])
        except Exception as error:  # whatever it is, it belongs to those who wait for this group
            results = [error] * len(group)
        with self._changed:
            if not all(isinstance(result, Exception) for result in results):  # a refusal takes no time
                forecast.observe(len(group), size, time.perf_counter() - started)
            del self._running[me]
            self._changed.notify_all()
        for (_, _, done), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)

    def _take(self) -> list[tuple[Job, float, Future[Result]]]:
        group: list[tuple[Job, float, Future[Result]]] = []
        size = 0
        with self._taking:
            while self._waiting:
                own, kind = self._size(self._waiting[0][0]), self._kind(self._waiting[0][0])
                if group and (kind != self._kind(group[0][0]) or size + own > self._most):
                    break
                waiting = self._waiting.popleft()
                self._wait(kind, -1, -own)
                if waiting[2].set_running_or_notify_cancel():
                    group.append(waiting)
                    size += own
        return group

    def _wait(self, kind: str, jobs: int, size: int) -> None:
        before = self._ahead.get(kind, (0, 0))
        self._ahead[kind] = before[0] + jobs, before[1] + size

    def _leave(self, foreseen: float, entered: float, future: asyncio.Future) -> None:
        self.inside -= 1
        # An error is seen here, so that asyncio does not report that of a client that hung up.
        if not future.cancelled() and future.exception() is None:
            self._margin.observe(foreseen, time.perf_counter() - entered)

    def settle(self, timeout: float) -> bool:
        """Wait until what is being worked on now is done; False if ``timeout`` seconds were not enough."""
        with self._changed:
            now = set(self._running)
            return self._changed.wait_for(lambda: not now & set(self._running), timeout)

    def close(self) -> None:
        """Wait for the work that was admitted."""
        self._pool.shutdown(wait=True)

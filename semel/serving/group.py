"""Group commit: many threads hand in jobs, one thread makes them durable together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from semel.serving.errors import Overloaded

Job = TypeVar("Job")
FRESH_SECONDS = 5.0


class GroupCommit(Generic[Job]):
    """One writer thread. ``commit(jobs)`` gets all jobs that waited while the last group was written and returns one
    result a job; a result that is an exception is that job's error. What ``commit`` raises is every job's error.

    ``max_pending`` jobs may wait (``Overloaded`` beyond); ``linger`` seconds are waited for company before a group is
    written, for jobs that nobody waits for; ``retry``: errors after which a group is written again every second in
    place of failing its jobs, for jobs whose submitter is gone. ``failure``: what the last attempt raised, None after a
    good one. ``failed``: how many jobs have failed.
    """

    def __init__(self, name: str, commit: Callable[[Sequence[Job]], Sequence[Any]], *, max_group: int = 256,
                 max_pending: int = 1024, linger: float = 0.0, retry: tuple[type[Exception], ...] = ()):
        self.name = name
        self.failure: BaseException | None = None
        self._failed_at = 0.0
        self.failed = 0
        self._commit, self._max_group, self._max_pending = commit, max_group, max_pending
        self._linger, self._retry = linger, retry
        self._jobs: deque[tuple[Job, Future]] = deque()
        self._busy = 0
        self._hurry = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"semel-{name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Jobs handed in and not yet written."""
        return len(self._jobs) + self._busy

    @property
    def recent_failure(self) -> BaseException | None:
        """``failure``, unless it is old: who hands in no jobs because of it would never learn that it is over."""
        return self.failure if time.monotonic() - self._failed_at < FRESH_SECONDS else None

    def submit(self, job: Job) -> Future:
        """Queue ``job``; the future gives its result. Overloaded when too many wait, RuntimeError when closed."""
        future: Future = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self.name} writer is closed")
            if len(self._jobs) >= self._max_pending:
                why = f": {self.failure}" if self.failure else ""
                raise Overloaded(f"{len(self._jobs)} jobs wait for the {self.name} writer{why}")
            self._jobs.append((job, future))
            self._changed.notify_all()
        return future

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was handed in is written; False when ``timeout`` seconds were not enough."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)
            finally:
                self._hurry = False

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits and stop; safe to call again. Raises TimeoutError when that could not be done in time,
        OSError when a retried group could not be written even at the end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the {self.name} writer still has {self.pending} jobs after {timeout:.0f} s"
                               + (f": {self.failure}" if self.failure else ""))
        if self._retry and self.failure:
            raise OSError(f"the {self.name} writer lost what it could not write: {self.failure}") from self.failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                if self._linger and not self._closed:
                    self._changed.wait_for(
                        lambda: self._hurry or self._closed or len(self._jobs) >= self._max_group, self._linger)
                group = [self._jobs.popleft() for _ in range(min(len(self._jobs), self._max_group))]
                self._busy = len(group)
            self._write(group)
            with self._changed:
                self._busy = 0
                self._changed.notify_all()

    def _write(self, group: list[tuple[Job, Future]]) -> None:
        while True:
            try:
                results = self._commit([job for job, _ in group])
            except Exception as error:  # whatever it is, it belongs to those who wait for this group
                self.failure, self._failed_at = error, time.monotonic()
                if isinstance(error, self._retry) and not self._closed:
                    time.sleep(1.0)
                    continue
                results = [error] * len(group)
            else:
                self.failure = None
            for (_, future), result in zip(group, results, strict=True):
                if isinstance(result, BaseException):
                    self.failed += 1
                    future.set_exception(result)
                else:
                    future.set_result(result)
            return

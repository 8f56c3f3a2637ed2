"""Threads for what kernels do without the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

MOST_THREADS = 8

Job = tuple[Callable[..., Any], tuple[Any, ...]]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "semel-read")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind in the parent


def run(jobs: Sequence[Job], threads: int) -> list[Any]:
    """What each of the jobs returned; ``threads`` of them at a time, this one among them. Raises what the first failing
    one raised, once all are done."""
    if threads <= 1 or len(jobs) <= 1:
        return [function(*arguments) for function, arguments in jobs]
    results: list[Any] = [None] * len(jobs)
    waiting = deque(enumerate(jobs))

    def work() -> None:
        while waiting:
            try:
                number, (function, arguments) = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = function(*arguments)
            except BaseException as error:
                failed.append((number, error))

    failed: list[tuple[int, BaseException]] = []
    helpers = [_pool(threads).submit(work) for _ in range(min(threads, len(jobs)) - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # it has begun
            helper.result()
    if failed:
        raise min(failed, key=lambda failure: failure[0])[1]
    return results


def cores() -> int:
    """The cores that this process may use, at most MOST_THREADS."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, MOST_THREADS)

"""Threads for what kernels do without the interpreter's lock."""

from __future__ import annotations

import os
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


def run(jobs: Sequence[Job], threads: int) -> None:
    """All jobs, ``threads`` at a time; raises what the first failing one raised, once all are done."""
    if threads <= 1 or len(jobs) <= 1:
        for function, arguments in jobs:
            function(*arguments)
        return
    waiting = [_pool(threads).submit(function, *arguments) for function, arguments in jobs]
    for future in waiting:
        future.exception()
    for future in waiting:
        future.result()


def cores() -> int:
    """The cores that this process may use, at most MOST_THREADS."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, MOST_THREADS)

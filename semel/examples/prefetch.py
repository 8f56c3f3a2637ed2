"""Two stages, reading and making, ahead of a consumer that wants the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Read = TypeVar("Read")
Made = TypeVar("Made")

AHEAD = 4
"""Items that are worked on ahead of the consumer, beside one a thread."""


def pipeline(items: Iterable[Item], read: Callable[[Item], Read], make: Callable[[Read], Made], workers: int,
             ) -> Generator[Made]:
    """``make(read(item))`` of each item, in order. ``workers`` threads read and as many make, so that the next items
    are read while one is made; at most ``AHEAD + workers`` are begun and not yet taken. An error comes out at its item.
    The threads end with the generator, also when it is closed early."""
    readers = ThreadPoolExecutor(workers, thread_name_prefix="semel-loader-read")
    makers = ThreadPoolExecutor(workers, thread_name_prefix="semel-loader-make")
    waiting: deque[Future[Made]] = deque()

    def finish(was_read: Future[Read]) -> Made:
        return make(was_read.result())

    try:
        for item in items:
            waiting.append(makers.submit(finish, readers.submit(read, item)))
            if len(waiting) >= AHEAD + workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        readers.shutdown(wait=False, cancel_futures=True)  # first: a maker may wait for what will not be read now
        makers.shutdown(wait=True, cancel_futures=True)
        readers.shutdown(wait=True)

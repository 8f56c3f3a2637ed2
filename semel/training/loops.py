"""Two loops over the same stages: one batch after the other, or the next ones prepared while this one computes.

The stages that come first and are marked ``ahead`` depend on nothing that a step changes, so both loops give the same
bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from semel.training.timeline import Timeline

W = TypeVar("W")

AHEAD = 4
"""Batches that are prepared ahead of the one that computes."""


@dataclass(frozen=True)
class Stage:
    """``run`` changes the work it is given. ``ahead``: it needs no result of an earlier batch's later stages."""

    name: str
    run: Callable[..., None]
    ahead: bool = False


def plain(stages: Sequence[Stage], items: Iterable[W], timeline: Timeline) -> Generator[W]:
    """Every stage of a batch, then the next batch: the reference."""
    for work in items:
        for stage in stages:
            with timeline.span(stage.name):
                stage.run(work)
        yield work


def overlapped(stages: Sequence[Stage], items: Iterable[W], timeline: Timeline, ahead: int = AHEAD,
               meet: Callable[[W, Future[W] | None], None] | None = None) -> Generator[W]:
    """``plain``, with the stages marked ``ahead`` of the next batches in threads, one a stage, each batch in order.

    Exactly the next ``ahead`` batches have been begun when a batch computes, and what was begun is finished, also when
    the consumer stops early: stages that talk to other ranks then say the same on all of them. What a stage raises
    comes out at its batch. ``meet(work, behind)`` is told of each batch before its other stages run, and of the one
    behind it, on its way through the stages that run ahead; None where no other was given.
    """
    early, late = [s for s in stages if s.ahead], [s for s in stages if not s.ahead]
    threads = [ThreadPoolExecutor(1, f"semel-stage-{stage.name}") for stage in early]
    waiting: deque[Future[W]] = deque()

    def begin(work: W) -> Future[W]:
        done: Future[W] = Future()
        done.set_result(work)
        for stage, thread in zip(early, threads, strict=True):
            done = thread.submit(_after, done, stage, timeline)
        return done

    def compute() -> W:
        with timeline.span("input"):
            work = waiting.popleft().result()
        if meet is not None:
            meet(work, waiting[0] if waiting else None)
        for stage in late:
            with timeline.span(stage.name):
                stage.run(work)
        return work

    try:
        for item in items:
            waiting.append(begin(item))
            if len(waiting) > ahead:
                yield compute()
        while waiting:
            yield compute()
    finally:
        for thread in threads:
            thread.shutdown(wait=True)


def _after(before: Future[W], stage: Stage, timeline: Timeline) -> W:
    work = before.result()
    with timeline.span(stage.name):
        stage.run(work)
    return work

"""Which way of computing to take at which number of candidates: whole ways are timed once, the original among them.

Counting operations mispredicts (a model of many small operators is slower when it has more of them); so each way is run
on rows of the example inputs, for a few numbers of candidates, and what was fastest is used for numbers near them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

SIZES = (1, 8, 64)
SECONDS = 5.0
"""For all rounds together. One round is run however long it takes."""
ROUNDS = 5
_LOST = 4
"""A way that takes so many times the fastest one's seconds is not run again."""
_MARGIN = 1.1
"""The original module is left only for a way that is faster by more than the noise of a few rounds."""


@dataclass(frozen=True)
class Choice:
    """``way`` is taken for ``candidates`` a request; ``seconds``: the median of each way's rounds."""

    candidates: int
    way: str
    seconds: Mapping[str, float]


def timed(ways: Mapping[str, Callable[[], object]], rivals: Sequence[Collection[str]] = (), seconds: float = SECONDS,
          compiled: bool = False) -> dict[str, float]:
    """Each way's median seconds over interleaved rounds, as many as fit into ``seconds``, at least one.

    ``rivals``: which ways are compared with each other (by default all). A way that fails is left out; one that is many
    times slower than a rival in each comparison is not run again. All are run once before the rounds; that run counts
    as a round where it takes longer than the rounds may, unless it compiles.
    """
    rivals = rivals or [tuple(ways)]
    found: dict[str, list[float]] = {}
    begin = time.perf_counter()

    def run(way: str) -> float:
        start = time.perf_counter()
        ways[way]()
        return time.perf_counter() - start

    def behind(way: str) -> bool:
        best = {one: min(runs) for one, runs in found.items() if runs}
        return way in best and all(lost({one: best[one] for one in group if one in best}, way)
                                   for group in rivals if way in group)

    with torch.no_grad():
        for way in ways:
            try:
                first = run(way)
            except Exception:  # some models squeeze away a batch of one: that way is none here
                continue
            found[way] = [first] if first * len(ways) > seconds and not compiled else []
        if compiled:
            begin = time.perf_counter()
        for _ in range(ROUNDS):
            for way, runs in found.items():
                if not (runs and (behind(way) or time.perf_counter() - begin > seconds)):
                    runs.append(run(way))
    return {way: sorted(runs)[len(runs) // 2] for way, runs in found.items()}


def lost(seconds: Mapping[str, float], way: str) -> bool:
    """Whether it is so much slower than the fastest that no more rounds are needed."""
    return seconds[way] > _LOST * min(seconds.values())


def fastest(seconds: Mapping[str, float], original: str) -> str:
    way = min(seconds, key=lambda name: seconds[name])
    return way if seconds[way] * _MARGIN < seconds.get(original, float("inf")) else original


def nearest(choices: Sequence[Choice], candidates: int) -> Choice:
    """The choice whose number of candidates is nearest, as a ratio."""
    return min(choices, key=lambda c: max(c.candidates, candidates + 1) / max(min(c.candidates, candidates + 1), 1))

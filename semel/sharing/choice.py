"""Which way of computing to take at which number of candidates: whole ways are timed once, the original among them.

Counting operations mispredicts (a model of many small operators is slower when it has more of them); so each way is run
on rows of the example inputs, for a few numbers of candidates, and what was fastest is used for numbers near them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

SIZES = (1, 8, 64)
_ROUNDS = 5
_MARGIN = 1.1
"""The original module is left only for a way that is faster by more than the noise of a few rounds."""


@dataclass(frozen=True)
class Choice:
    """``way`` is taken for ``candidates`` a request; ``seconds``: the median of each way's rounds."""

    candidates: int
    way: str
    seconds: Mapping[str, float]


def timed(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Each way's median seconds over interleaved rounds; a way that fails is left out, one that is many times slower is
    not run again."""
    seconds: dict[str, list[float]] = {}
    best = float("inf")
    with torch.no_grad():
        for way, run in ways.items():
            try:
                run()
            except Exception:  # some models squeeze away a batch of one: that way is none here
                continue
            seconds[way] = []
        for _ in range(_ROUNDS):
            for way, run in ways.items():
                if way not in seconds:
                    continue
                if seconds[way] and min(seconds[way]) > 4 * best:
                    continue
                start = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - start)
                best = min(best, seconds[way][-1])
    return {way: sorted(runs)[len(runs) // 2] for way, runs in seconds.items()}


def fastest(seconds: Mapping[str, float], original: str) -> str:
    way = min(seconds, key=lambda name: seconds[name])
    return way if seconds[way] * _MARGIN < seconds.get(original, float("inf")) else original


def nearest(choices: Sequence[Choice], candidates: int) -> Choice:
    """The choice whose number of candidates is nearest, as a ratio."""
    return min(choices, key=lambda c: max(c.candidates, candidates + 1) / max(min(c.candidates, candidates + 1), 1))

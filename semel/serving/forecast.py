"""How long work takes, from how long work like it took."""

from __future__ import annotations

import math

DECAY = 0.9
"""What an observation still counts for after the next one: about the last ten batches. When load rises, work takes
longer within a second (cores are shared), and what was learnt at rest must not count for long."""


class Forecast:
    """Seconds of a batch as ``fixed * requests + each * size``: the least-squares fit over what was observed, the older
    the less (exponentially weighted normal equations), with neither coefficient below 0. Before the first observation
    everything takes ``first`` seconds a request. Used by one thread at a time."""

    def __init__(self, first: float = 0.01):
        self._rr = self._rs = self._ss = self._rt = self._st = 0.0
        self.fixed, self.each = first, 0.0

    def observe(self, requests: int, size: int, seconds: float) -> None:
        """A batch of ``requests`` (at least 1) with ``size`` candidates in all took ``seconds``."""
        for name, value in (("_rr", requests * requests), ("_rs", requests * size), ("_ss", size * size),
                            ("_rt", requests * seconds), ("_st", size * seconds)):
            setattr(self, name, DECAY * getattr(self, name) + value)
        determinant = self._rr * self._ss - self._rs**2
        if determinant > 1e-6 * self._rr * self._ss:
            self.fixed = (self._rt * self._ss - self._st * self._rs) / determinant
            self.each = (self._st * self._rr - self._rt * self._rs) / determinant
        if determinant <= 1e-6 * self._rr * self._ss or self.each < 0:  # all alike, or more takes less
            self.fixed, self.each = self._rt / self._rr, 0.0
        elif self.fixed < 0:
            self.fixed, self.each = 0.0, self._st / self._ss

    def seconds(self, requests: int, size: int) -> float:
        """What a batch is expected to take."""
        return self.fixed * requests + self.each * size


QUANTILE, STEP = 0.98, 0.25


class Margin:
    """By what factor times exceed what was foreseen, but for 2 of 100: ``factor``, at least 1.

    Stochastic approximation of a quantile (Robbins and Monro, 1951), on the logarithm: a time beyond ``factor`` times
    its forecast raises it by 28 %, every other one lowers it by 0.5 %, so it comes to rest where 2 % are beyond. It
    follows a machine that becomes uneven within a few requests, and one that becomes even within a few hundred."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, foreseen: float, seconds: float) -> None:
        """What was foreseen to take so long (above 0) took ``seconds``."""
        beyond = seconds > foreseen * self.factor
        self.factor = max(1.0, self.factor * math.exp(STEP * (QUANTILE - (not beyond))))
        self.factor = min(self.factor, 10.0)

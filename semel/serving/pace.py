"""How many candidates fit into a stage's time, learnt from the requests before."""

from __future__ import annotations

import threading

MEMORY = 0.98
"""Weight of what was known before at each observation: about the last fifty count."""


class Pace:
    """``seconds = fixed + each * candidates``, fitted by least squares over the recent past. Safe for several threads.

    Where all requests had about as many candidates, the line goes through the origin: too careful with few candidates,
    right for many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, candidates: int, seconds: float) -> None:
        with self._lock:
            for name, value in (("_weight", 1.0), ("_n", candidates), ("_t", seconds), ("_nn", candidates * candidates),
                                ("_nt", candidates * seconds)):
                setattr(self, name, MEMORY * getattr(self, name) + value)

    def most(self, seconds: float) -> int | None:
        """How many candidates are expected to take ``seconds``, at least 1; None before the first observation."""
        with self._lock:
            weight, n, t, nn, nt = self._weight, self._n, self._t, self._nn, self._nt
        if not n:
            return None
        spread = weight * nn - n * n
        fixed, each = 0.0, t / n
        if spread > 0.01 * n * n:
            slope = (weight * nt - n * t) / spread
            if slope > 0:
                fixed, each = max(0.0, (t - slope * n) / weight), slope
        return int(max(1.0, min((seconds - fixed) / max(each, 1e-12), 2.0**31)))  # a budget may be any number

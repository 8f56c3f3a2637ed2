"""What a request costs, learned while training from how long the ranks' steps took; how idle the ranks are.

::

    model = CostModel(linear=5e-9, quadratic=1e-12)          # a guess, or one that was saved
    costs = model.predict(lengths, candidates)               # [requests], for semel.training.balance
    model.observe(features, seconds)                         # of all ranks: features [ranks, 5], seconds [ranks]
    model.fit(); print(model.describe())

Every rank must hold the same model: gather features and seconds of all ranks and let each fit the same numbers, or fit
on one and send ``model.to_json()``. Seconds are those that a rank computed, without waiting for others.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, combinations
from typing import Any

import numpy as np

from semel.training import balance

FORMAT = 1
TERMS = ("linear", "quadratic", "candidate", "constant", "step")
WINDOW = 4096
"""Observations that a fit looks at: the latest."""
HUBER = 1.345
"""Residuals above so many standard deviations count linearly, not squared: 95 % as efficient as least squares where
errors are normal (Huber 1981, section 4.5)."""


@dataclass
class CostModel:
    """Seconds, or any unit: a request of length L with C candidates costs
    ``linear * L + quadratic * L ** 2 + candidate * C + constant``; a step costs its requests and ``step``.

    ``error``: the median relative error of the last fit, None before one.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    candidate: float = 0.0
    constant: float = 0.0
    step: float = 0.0
    error: float | None = None
    _seen: deque[tuple[np.ndarray, float]] = field(default_factory=lambda: deque(maxlen=WINDOW), repr=False,
                                                   compare=False)

    def __post_init__(self) -> None:
        for name in TERMS:
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; a term of a cost must be finite and not negative")

    def predict(self, lengths: Any, candidates: Any = 0) -> np.ndarray:
        """[requests] float64: the cost of each request."""
        length = np.asarray(lengths, np.float64)
        return (self.linear * length + self.quadratic * length**2 + self.candidate * np.asarray(candidates, np.float64)
                + self.constant)

    @staticmethod
    def features(lengths: Any, candidates: Any = 0) -> np.ndarray:
        """[5] float64: what a rank's step of these requests is known by: the sums of L, L ** 2 and C, the number of
        requests, 1."""
        length = np.asarray(lengths, np.float64)
        count = np.broadcast_to(np.asarray(candidates, np.float64), length.shape)
        return np.array([length.sum(), (length**2).sum(), count.sum(), len(length), 1.0])

    def observe(self, features: Any, seconds: Any) -> None:
        """One step of some ranks: ``features`` [ranks, 5] or [5], ``seconds`` [ranks] or one. Times that are not
        positive and finite are left out."""
        rows = np.atleast_2d(np.asarray(features, np.float64))
        times = np.atleast_1d(np.asarray(seconds, np.float64))
        if rows.shape != (len(times), len(TERMS)):
            raise ValueError(f"features have shape {rows.shape} for {len(times)} times; {len(TERMS)} a rank are needed")
        for row, time in zip(rows, times, strict=True):
            if np.isfinite(time) and time > 0:
                self._seen.append((row.copy(), float(time)))

    @property
    def observations(self) -> int:
        return len(self._seen)

    def fit(self) -> CostModel:
        """Set the terms from what was observed: least squares on errors relative to what is expected (a step twice
        as long may be off by twice as much), none negative, outliers (another job, a page fault) counted linearly by
        Huber's weights. Fewer than 8 observations change nothing. What never varied apart (a request and a step, where
        counts are equal) no data can tell apart: then the sum is right and the parts are not. Returns itself."""
        if len(self._seen) < 8:
            return self
        rows, seconds = np.array([row for row, _ in self._seen]), np.array([time for _, time in self._seen])
        expected, weights = seconds, np.ones(len(seconds))
        found = np.zeros(len(TERMS))
        for _ in range(20):
            before = found
            factor = np.sqrt(weights) / expected
            found = non_negative(rows * factor[:, None], seconds * factor)
            expected = np.maximum(rows @ found, 1e-3 * np.median(seconds))
            residual = np.abs(seconds / expected - 1)
            limit = HUBER * 1.4826 * np.median(residual)  # the second factor: to a normal standard deviation
            weights = np.minimum(1, max(limit, 1e-9) / np.maximum(residual, 1e-9))
            if np.allclose(found, before, rtol=1e-6, atol=0):
                break
        for name, value in zip(TERMS, found, strict=True):
            setattr(self, name, float(value))
        self.error = float(np.median(residual))
        return self

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{getattr(self, name):.3g} {unit}" for name, unit in zip(
            TERMS, ("a token", "a token squared", "a candidate", "a request", "a step"), strict=True)
            if getattr(self, name)]
        source = "given" if self.error is None else (
            f"fitted to {self.observations} step times, median error {100 * self.error:.1f} %")
        equal = f"; attention outweighs the rest from {self.linear / self.quadratic:,.0f} tokens" if (
            self.linear and self.quadratic) else ""
        return f"cost model ({source}): {' + '.join(parts) or '0'}{equal}"

    def alpha(self, lengths: Any, world_size: int, candidates: Any = 0) -> float:
        """The power whose weights ``lengths ** alpha`` make ``balance.segments`` least idle under this model, of 0,
        0.05, ... 3. With such a model at hand ``segments`` may as well take what it predicts."""
        length = np.asarray(lengths, np.float64)
        costs = self.predict(length, candidates)
        idle = {power: balance.idle(costs, balance.segments(length**power, world_size), world_size)
                for power in np.arange(61) / 20}
        return float(min(idle, key=lambda power: idle[power]))

    def to_json(self) -> str:
        values = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return json.dumps({"format": FORMAT, **values})

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Raises ValueError for a format or a field that it does not know."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is not a cost model: {text[:80]!r} ({error})") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"this is not a cost model of format {FORMAT}: {text[:80]!r}")
        del values["format"]
        known = {one.name for one in fields(cls) if not one.name.startswith("_")}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"a cost model has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)


def non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x [terms], none negative, with the least |matrix @ x - target|: that of the set of terms for which plain
    least squares needs no negative one and leaves the least. For a handful of terms: all sets are tried."""
    scale = np.abs(matrix).max(0)
    scaled = matrix / np.where(scale > 0, scale, 1)
    gram, right = scaled.T @ scaled, scaled.T @ target
    terms = range(matrix.shape[1])
    best, least = np.zeros(len(scale)), 0.0  # |Ax - b|^2 - |b|^2
    for chosen in chain.from_iterable(combinations(terms, size) for size in range(1, len(scale) + 1)):
        at = list(chosen)
        x = np.linalg.lstsq(gram[np.ix_(at, at)], right[at], rcond=1e-10)[0]
        left = x @ gram[np.ix_(at, at)] @ x - 2 * x @ right[at]
        if (x >= 0).all() and left < least - 1e-12 * abs(least):
            best, least = np.zeros(len(scale)), left
            best[at] = x
    return np.where(scale > 0, best / np.where(scale > 0, scale, 1), 0.0)


@dataclass
class Shares:
    """How many requests of a global batch each rank gets, tuned from step times: FreeScale's variable batch size
    (arXiv 2604.24073). For ranks that are not equally fast; where all are, partitions by cost need no shares.

    ``values`` [ranks] sum to 1. A rank whose step took longer than the mean gets less the next time: its share times
    ``(mean / own) ** gain``, and no rank leaves ``widest`` times more or less than an equal share.
    """

    values: np.ndarray
    gain: float = 0.5
    widest: float = 2.0

    @classmethod
    def equal(cls, world_size: int, **how: float) -> Shares:
        return cls(np.full(world_size, 1 / world_size), **how)

    def update(self, seconds: Any) -> None:
        """``seconds`` [ranks]: how long each computed on the share that it had."""
        times = np.asarray(seconds, np.float64)
        if times.shape != self.values.shape or not (np.isfinite(times) & (times > 0)).all():
            raise ValueError(f"times must be {len(self.values)} positive numbers of seconds; got {times}")
        share = 1 / len(self.values)
        wanted = self.values * (times.mean() / times) ** self.gain
        self.values = np.clip(wanted / wanted.sum(), share / self.widest, share * self.widest)
        self.values /= self.values.sum()

    def sizes(self, requests: int) -> np.ndarray:
        """[ranks] int64 that sum to ``requests``: the shares, rounded by largest remainder."""
        exact = self.values * requests
        sizes = np.floor(exact).astype(np.int64)
        sizes[np.argsort(sizes - exact, kind="stable")[: requests - sizes.sum()]] += 1
        return sizes


@dataclass(frozen=True)
class IdleReport:
    """The share of a step that ranks wait for the slowest, judged by tokens, by modelled cost and by measured time
    (None where none was). Where only time says much, the model is wrong or ranks are not equally fast."""

    tokens: float
    cost: float
    time: float | None = None

    @classmethod
    def of(cls, lengths: Any, costs: Any, ranks: Any, world_size: int, seconds: Any = None) -> IdleReport:
        """``lengths`` and ``costs`` [requests] of one global batch, ``seconds`` [world_size] of its ranks."""
        time = None if seconds is None else balance.idle(seconds, np.arange(world_size), world_size)
        return cls(balance.idle(lengths, ranks, world_size), balance.idle(costs, ranks, world_size), time)

    def __str__(self) -> str:
        time = "" if self.time is None else f", by time {100 * self.time:.2f} %"
        return f"idle by tokens {100 * self.tokens:.2f} %, by cost {100 * self.cost:.2f} %{time}"

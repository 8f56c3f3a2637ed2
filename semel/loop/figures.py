"""Figures of the last moments: quantiles, rates and entropies over windows that slide."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence


class Recent:
    """The values of the last ``seconds``, at most ``most`` of them."""

    def __init__(self, seconds: float = 10.0, most: int = 20_000) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))

    def values(self, now: float) -> list[float]:
        while self._values and self._values[0][0] < now - self._seconds:
            self._values.popleft()
        return [value for _, value in self._values]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that ``share`` of them do not exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Entropy:
    """Normalized entropy of predictions in [0, 1] on labels, of the last ``most`` pairs and of all."""

    def __init__(self, most: int = 4000) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=most)
        self.total, self.rows, self.positive = 0.0, 0, 0.0

    def add(self, label: float, probability: float) -> None:
        loss = log_loss(label, probability)
        self._recent.append((label, loss))
        self.total += loss
        self.rows += 1
        self.positive += label

    @property
    def recent(self) -> float | None:
        """Over the window; None before both labels were seen."""
        return normalized(sum(loss for _, loss in self._recent), len(self._recent),
                          sum(label for label, _ in self._recent))

    @property
    def all(self) -> float | None:
        return normalized(self.total, self.rows, self.positive)


def log_loss(label: float, probability: float) -> float:
    """-log of the probability that was given to what happened; predictions within 1e-7 of 0 and 1 count as that."""
    p = min(max(probability, 1e-7), 1 - 1e-7)
    return -(label * math.log(p) + (1 - label) * math.log1p(-p))


def normalized(loss: float, rows: float, positive: float) -> float | None:
    """Sum of log losses over the entropy of the base rate; None where that has none."""
    if rows <= 0 or not 0 < positive < rows:
        return None
    rate = positive / rows
    return loss / rows / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))

"""A measured curve: share of a peak that is reached, over a size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Curve:
    """Points (size, share), linear between them over the logarithm of the size, constant outside.

    Sizes are above 0 and grow; shares lie in (0, 1]. Raises ValueError otherwise.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    _logs: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point (size, share)")
        for size, share in self.points:
            if not size > 0 or not 0 < share <= 1:
                raise ValueError(f"point ({size:g}, {share:g}) of a curve: sizes are above 0, shares in (0, 1]")
        sizes = [size for size, _ in self.points]
        if any(after <= before for before, after in pairwise(sizes)):
            raise ValueError(f"sizes of a curve must grow, got {sizes}")
        object.__setattr__(self, "_logs", tuple(math.log(size) for size in sizes))

    def __call__(self, size: float) -> float:
        logs, points = self._logs, self.points
        if size <= points[0][0]:
            return points[0][1]
        if size >= points[-1][0]:
            return points[-1][1]
        x = math.log(size)
        right = bisect_right(logs, x)
        left = right - 1
        share = (x - logs[left]) / (logs[right] - logs[left])
        return points[left][1] + share * (points[right][1] - points[left][1])

    def scaled(self, factor: float) -> Curve:
        """Every share times ``factor``, at most 1."""
        return Curve(tuple((size, min(1.0, share * factor)) for size, share in self.points))

    @classmethod
    def of(cls, points: Iterable[Iterable[float]]) -> Curve:
        return cls(tuple((float(size), float(share)) for size, share in points))

    @classmethod
    def flat(cls, share: float) -> Curve:
        return cls(((1.0, share),))

"""The plain forms of what serving computes fast: read these for what is meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def best(scores: np.ndarray, count: int, ids: np.ndarray) -> np.ndarray:
    """``semel.serving.selection.best``: all of them sorted by (score, best first; id, ascending), then cut."""
    places = sorted(np.flatnonzero(scores > -np.inf).tolist(), key=lambda place: (-scores[place], ids[place]))
    return np.array(places[:count], np.int64)


def capped(values: Iterable[int], most: int) -> np.ndarray:
    """``semel.serving.selection.capped``: go down the list and count."""
    met: Counter[int] = Counter()
    kept = []
    for value in values:
        met[value] += 1
        kept.append(value < 0 or met[value] <= most)
    return np.array(kept, bool)


def retrieve(scores: np.ndarray, ids: np.ndarray, count: int, excluded: Sequence[Any] = (),
             values: np.ndarray | None = None, most: int = 0) -> list[Any]:
    """The ids of ``semel.serving.retrieval``: sort the whole catalogue, walk down it, leave out what is excluded and
    what would be the ``most``-and-first of its value, stop at ``count``."""
    met: Counter[Any] = Counter()
    found: list[Any] = []
    for place in best(scores, len(scores), ids):
        value = None if values is None else values[place]
        if len(found) == count or ids[place] in excluded:
            continue
        if value is not None and value >= 0 and met[value] >= most:
            continue
        met[value] += 1
        found.append(ids[place])
    return found

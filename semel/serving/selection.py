"""Which of many scored items an answer holds: the best, in an order that is always the same, and not too many alike.

Pure functions over numpy arrays. ``semel.serving.reference`` has each as one sort and one loop.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def best(scores: np.ndarray, count: int, ids_at: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[<= count] places of the highest ``scores`` [N], best first; equal scores in ascending order of their ids
    (integers by value, strings by code point). -inf is no candidate. ``ids_at(places)``: the ids there; it is asked for
    those that reach the last score only. Takes memory in proportion to N bytes and to what is tied, sorts nothing else.
    """
    eligible = int(np.count_nonzero(scores > -np.inf))
    count = min(count, eligible)
    if count <= 0:
        return np.empty(0, np.int64)
    last = np.partition(scores, len(scores) - count)[len(scores) - count]
    places = np.flatnonzero(scores >= last)
    by_id = places[np.argsort(ids_at(places), kind="stable")]
    return by_id[np.argsort(-scores[by_id], kind="stable")][:count]


def capped(values: np.ndarray, most: int) -> np.ndarray:
    """[N] bool: the first ``most`` of each value in ``values`` [N] of integers, in their order. Negative values stand
    for "none" and are never too many."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)  # where each one's value begins
    kept = np.empty(len(values), bool)
    kept[order] = (np.arange(len(values)) - first < most) | (ordered < 0)
    return kept


def without(ids: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    """[N] bool: which of ``ids`` are not among ``excluded``, of the same kind (int64, or strings as objects)."""
    if not len(excluded) or not len(ids):
        return np.ones(len(ids), bool)
    if ids.dtype == object:
        gone = set(excluded.tolist())
        return np.fromiter((one not in gone for one in ids), bool, len(ids))
    return ~np.isin(ids, excluded)

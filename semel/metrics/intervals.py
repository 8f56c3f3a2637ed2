"""Bootstrap intervals by cluster: how sure a figure is when users, not rows, are independent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from semel.metrics import checks


@dataclass(frozen=True)
class Interval:
    """A figure and the interval that ``level`` of its bootstrap replicates fall into."""

    value: float
    low: float
    high: float
    level: float = 0.95

    def to_json(self) -> dict[str, Any]:
        return {"value": checks.number(self.value), "low": checks.number(self.low), "high": checks.number(self.high),
                "level": self.level}

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


Statistic = Callable[[np.ndarray], Any]
"""Sums [..., S] -> figure [...]; for instance ``lambda s: s[..., 0] / s[..., 1]``."""


def cluster_sums(cluster: Any, *values: Any) -> np.ndarray:
    """[G, S]: the sums of each of ``values`` [N] within each cluster, clusters in sorted order. For a paired
    difference of two models both must have the same clusters."""
    groups, code = np.unique(np.asarray(cluster), return_inverse=True)
    columns = [np.asarray(value, dtype=np.float64) for value in values]
    for column in columns:
        if column.shape != code.shape:
            raise ValueError(f"values of shape {column.shape} for {len(code)} cluster ids")
    return np.stack([np.bincount(code, column, len(groups)) for column in columns], axis=1)


def bootstrap(sums: Any, statistic: Statistic, *, samples: int = 1000, level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile interval of ``statistic`` when whole clusters are drawn again with replacement (multinomial).

    ``sums`` [G, S] from ``cluster_sums``. Rows of one user are not independent, hence clusters. Replicates for which
    the figure does not exist (NaN: one class only) are left out.
    """
    sums = _cluster_matrix(sums)
    replicates = [statistic(counts @ sums) for counts in _draws(len(sums), samples, seed)]
    return _interval(statistic(sums.sum(axis=0)), replicates, level)


def bootstrap_difference(a: Any, b: Any, statistic: Statistic, *, samples: int = 1000, level: float = 0.95,
                         seed: int = 0) -> Interval:
    """Interval of ``statistic(a) - statistic(b)`` for two models on the same clusters, drawn in pairs: what both find
    hard cancels out. ``a``, ``b`` [G, S] with equal rows meaning the same cluster."""
    a, b = _cluster_matrix(a), _cluster_matrix(b)
    if a.shape != b.shape:
        raise ValueError(f"a paired difference needs the same clusters: sums of shape {a.shape} and {b.shape}")
    replicates = [statistic(counts @ a) - statistic(counts @ b) for counts in _draws(len(a), samples, seed)]
    return _interval(statistic(a.sum(axis=0)) - statistic(b.sum(axis=0)), replicates, level)


def bootstrap_auc(cluster: Any, label: Any, score: Any, *, samples: int = 200, level: float = 0.95,
                  seed: int = 0) -> Interval:
    """Interval of the exact ``auc`` by clusters: AUC is no function of per-cluster sums, so each replicate weights the
    rows, sorted once."""
    label = checks.binary(label)
    score = checks.vector(score, "score", len(label))
    groups, code = np.unique(np.asarray(cluster), return_inverse=True)
    if len(code) != len(label):
        raise ValueError(f"cluster has {len(code)} values, label has {len(label)}")
    order = np.argsort(score, kind="stable")
    code, label, score = code[order], label[order], score[order]
    first = np.flatnonzero(np.concatenate([[True], score[1:] != score[:-1]])) if len(score) else np.empty(0, np.int64)

    def value(weight: np.ndarray) -> float:
        if not len(first):
            return float("nan")
        positive = np.add.reduceat(weight * label, first)
        negative = np.add.reduceat(weight * (1 - label), first)
        return float(checks.ratio(positive @ (np.cumsum(negative) - negative / 2), positive.sum() * negative.sum()))

    replicates = [np.array([value(row[code]) for row in counts]) for counts in _draws(len(groups), samples, seed)]
    return _interval(value(np.ones(len(label))), replicates, level)


def _cluster_matrix(sums: Any) -> np.ndarray:
    sums = np.asarray(sums, dtype=np.float64)
    if sums.ndim != 2 or not np.isfinite(sums).all():
        raise ValueError(f"cluster sums must be a finite [G, S] array, got shape {sums.shape}")
    return sums


def _draws(clusters: int, samples: int, seed: int, chunk_bytes: int = 1 << 25) -> Iterator[np.ndarray]:
    """How often each of ``samples`` replicates draws each cluster, [chunk, G] at a time: draws with replacement,
    counted, which is the multinomial distribution."""
    if clusters == 0:
        return
    generator = np.random.default_rng(seed)
    chunk = max(1, min(samples, chunk_bytes // (8 * clusters)))
    for start in range(0, samples, chunk):
        rows = min(chunk, samples - start)
        drawn = generator.integers(0, clusters, (rows, clusters)) + np.arange(rows)[:, None] * clusters
        yield np.bincount(drawn.reshape(-1), minlength=rows * clusters).reshape(rows, clusters).astype(np.float64)


def _interval(value: Any, replicates: list[Any], level: float) -> Interval:
    if not 0 < level < 1:
        raise ValueError(f"level is a share between 0 and 1, got {level}")
    drawn = np.concatenate([np.atleast_1d(part) for part in replicates]) if replicates else np.empty(0)
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Interval(float(value), float("nan"), float("nan"), level)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high), level)

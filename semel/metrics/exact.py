"""Metrics that need all rows at once: exact AUC, per-user AUC, ranks and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from semel.metrics import checks


def auc(label: Any, score: Any, weight: Any = None) -> float:
    """Exact area under the ROC curve; tied scores count half (midrank). Any finite scores. NaN with one class only."""
    label = checks.binary(label)
    score, weight = checks.vector(score, "score", len(label)), checks.weights(weight, len(label))
    values, tie = np.unique(score, return_inverse=True)
    positive = np.bincount(tie, weight * label, len(values))
    negative = np.bincount(tie, weight * (1 - label), len(values))
    return float(checks.ratio(positive @ (np.cumsum(negative) - negative / 2), positive.sum() * negative.sum()))


def auc_by_group(group: Any, label: Any, score: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AUC within each group (user): the groups that have both classes, their AUC, their rows (impressions).

    ``group`` [N] ids of any sortable kind. All three results have one entry per such group, in sorted order.
    """
    label = checks.binary(label)
    score = checks.vector(score, "score", len(label))
    groups, code = np.unique(np.asarray(group), return_inverse=True)
    if len(code) != len(label):
        raise ValueError(f"group has {len(code)} values, label has {len(label)}")
    order = np.lexsort((score, code))
    code, score, label = code[order], score[order], label[order]
    new = np.ones(len(code), dtype=bool)
    new[1:] = (code[1:] != code[:-1]) | (score[1:] != score[:-1])
    tie = np.cumsum(new) - 1  # runs of equal score within one group
    of_tie = code[new]
    positive, negative = np.bincount(tie, label), np.bincount(tie, 1 - label)
    before = np.cumsum(negative) - negative  # negatives with a smaller score, in this group and all groups before it
    all_positive = np.bincount(of_tie, positive, len(groups))
    all_negative = np.bincount(of_tie, negative, len(groups))
    before -= (np.cumsum(all_negative) - all_negative)[of_tie]
    wins = np.bincount(of_tie, positive * (before + negative / 2), len(groups))
    both = (all_positive > 0) & (all_negative > 0)
    value = wins[both] / (all_positive * all_negative)[both]
    return groups[both], value, (all_positive + all_negative)[both]


def grouped_auc(group: Any, label: Any, score: Any) -> float:
    """Per-user AUC (gAUC): the mean of ``auc_by_group`` weighted by impressions (Zhu et al., "Optimized cost per click
    in Taobao display advertising", 2017). Groups with one class have none and are left out."""
    _, value, rows = auc_by_group(group, label, score)
    return float(checks.ratio(value @ rows, rows.sum()))


def ranks_of_targets(scores: Any, target: Any) -> np.ndarray:
    """[R] 0-based ranks of item ``target[r]`` among ``scores[r]`` [R, I]: the number of items with a strictly greater
    score, plus those with an equal score and a smaller index. -inf is a score; NaN raises ValueError."""
    scores, target = np.asarray(scores), np.asarray(target)
    if scores.ndim != 2 or target.shape != scores.shape[:1] or target.dtype.kind not in "iu":
        raise ValueError(f"scores [R, I] and integer target [R] expected, got {scores.shape} and {target.shape} "
                         f"{target.dtype}")
    if target.size and not (target.min() >= 0 and target.max() < scores.shape[1]):
        raise ValueError(f"target {target.min()} to {target.max()} with {scores.shape[1]} items")
    if np.isnan(scores).any():
        row, item = np.argwhere(np.isnan(scores))[0]
        raise ValueError(f"scores[{row}, {item}] is NaN")
    own = np.take_along_axis(scores, target[:, None].astype(np.int64), axis=1)
    earlier = np.arange(scores.shape[1]) < target[:, None]
    return ((scores > own) | ((scores == own) & earlier)).sum(axis=1)


def ranking_values(ranks: Any, request: Any = None, ks: Iterable[int] = (10, 50, 200)) -> dict[str, np.ndarray]:
    """Per-request ``hr@k``, ``ndcg@k``, ``mrr`` [R] from the targets' 0-based ranks [T].

    ``hr@k``: 1 where any target is among the first k. ``ndcg@k``: gains 1, discounts 1 / log2(rank + 2), over the best
    that the request's targets allow. ``mrr``: 1 / (best rank + 1). ``request`` [T] names the request of each target
    (requests in sorted order); None: one target each, in the given order.
    """
    rank = checks.vector(ranks, "ranks")
    if rank.size and (rank.min() < 0 or (rank != np.floor(rank)).any()):
        raise ValueError("ranks are whole numbers from 0 (the best)")
    code = np.arange(len(rank)) if request is None else np.unique(np.asarray(request), return_inverse=True)[1]
    if len(code) != len(rank):
        raise ValueError(f"request has {len(code)} values, ranks has {len(rank)}")
    requests = int(code.max()) + 1 if len(code) else 0
    best = np.full(requests, np.inf)
    np.minimum.at(best, code, rank)
    targets = np.bincount(code, minlength=requests)
    gain = 1 / np.log2(rank + 2)
    most = int(targets.max(initial=0))
    ideal = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(most) + 2))])
    out: dict[str, np.ndarray] = {}
    for k in ks:
        k = checks.cutoff(k)
        out[f"hr@{k}"] = (best < k).astype(np.float64)
        out[f"ndcg@{k}"] = np.bincount(code, gain * (rank < k), requests) / ideal[np.minimum(targets, k)]
    out["mrr"] = 1 / (best + 1)
    return out

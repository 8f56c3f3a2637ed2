"""A start for item embeddings: what is met together lies together before the first step.

Item tables learn slowly, since each row moves only when its item is met. A factorization of the items' pointwise mutual
information puts them where skip-gram training would in the end (Levy & Goldberg, NIPS 2014), in seconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from semel.batch import offsets_of

SMOOTHING = 0.75
"""Exponent of the context counts: rare items would have the largest information otherwise (Levy et al., TACL 2015)."""


def co_occurrence_embeddings(item: Tensor, offsets: Tensor, items: int, dim: int, window: int, seed: int = 0) -> Tensor:
    """``item`` [T]: indices 1 .. items of histories at ``offsets`` [rows + 1], 0 unknown -> [items, dim] float32.

    The symmetric factor ``U sqrt(S)`` of the positive pointwise mutual information of items at most ``window`` events
    apart. Rows have a mean norm of 0.9, where tables of trained models of this kind end; an item without neighbours
    gets small random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(items, dim, generator=generator) * 0.02
    code, count = _pairs(item.numpy(), offsets.numpy(), items, window)
    if not len(code) or items <= dim:
        return table
    row, column = np.divmod(code, items)
    times = np.bincount(row, count, items)
    context = times ** SMOOTHING
    context *= times.sum() / context.sum()
    value = np.log(count * times.sum() / (times[row] * context[column]))
    value = (value + np.log(count * times.sum() / (times[column] * context[row]))) / 2
    keep = value > 0
    index = torch.from_numpy(np.stack([row[keep], column[keep]]))
    information = torch.sparse_coo_tensor(index, torch.from_numpy(value[keep]).float(), (items, items),
                                          check_invariants=False).coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, _ = torch.svd_lowrank(information, q=min(items, dim + 16), niter=3)
    factor = u[:, :dim] * s[:dim].sqrt()
    norm = factor.norm(dim=1)
    met = norm > 0
    table[met] = factor[met] * (0.9 / norm[met].mean())
    return table


def _pairs(item: np.ndarray, offsets: np.ndarray, items: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs ``first * items + second`` (from 0) of known items within the window, both ways, and how often."""
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    found = []
    for gap in range(1, window + 1):
        a, b = item[:-gap], item[gap:]
        keep = (row[:-gap] == row[gap:]) & (a > 0) & (b > 0) & (a != b)
        a, b = a[keep] - 1, b[keep] - 1
        found += [a * items + b, b * items + a]
    code, count = np.unique(np.concatenate(found), return_counts=True) if found else (offsets_of([]), offsets_of([]))
    return code, count.astype(np.float64)

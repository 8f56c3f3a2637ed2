"""Plain forms of the kernels: they broadcast requests to candidates, read like the formulas, and are what tests hold
the fast ones to. Same arguments, same results."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def owners(offsets: Tensor) -> list[int]:
    """The request of each candidate."""
    bounds = offsets.tolist()
    return [r for r in range(len(bounds) - 1) for _ in range(bounds[r], bounds[r + 1])]


def gather_add(candidate: Tensor, request: Tensor, offsets: Tensor) -> Tensor:
    return candidate + request[owners(offsets)]


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    bounds = offsets.tolist()
    parts = [x[start:stop].sum(0) for start, stop in pairwise(bounds)]
    return torch.stack(parts) if parts else x.new_zeros(0, *x.shape[1:])


def linear_compression(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor,
                       offsets: Tensor) -> Tensor:
    w = torch.cat([w_request, w_candidate], 1)
    e = torch.cat([e_request[owners(offsets)], e_candidate], 1)
    return w @ e


def all_pairs(request: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    """[C, F (F - 1) / 2]: the dot products of all pairs of the F = Fr + Fc fields of each candidate, requests' first,
    in the order of ``torch.triu_indices(F, F, 1)``."""
    x = torch.cat([request[owners(offsets)], candidate], 1)
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    return (x @ x.transpose(1, 2))[:, i, j]


def broadcast_attention(
    q: Tensor, k: Tensor, v: Tensor, candidate_offsets: Tensor, history_offsets: Tensor, *, weighting: str = "softmax",
    scale: float | None = None, norm: float = 1.0, own_k: Tensor | None = None, own_v: Tensor | None = None,
) -> Tensor:
    bounds = history_offsets.tolist()
    out = []
    for c, r in enumerate(owners(candidate_offsets)):
        keys, values = k[bounds[r] : bounds[r + 1]], v[bounds[r] : bounds[r + 1]]
        if own_k is not None and own_v is not None:
            keys, values = torch.cat([keys, own_k[c]]), torch.cat([values, own_v[c]])
        scores = torch.einsum("nhd,lhd->hnl", q[c], keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = torch.nn.functional.silu(scores) if weighting == "silu" else torch.softmax(scores, -1)
        out.append(torch.einsum("hnl,lhd->nhd", weights, values) / norm)
    return torch.stack(out) if out else torch.zeros_like(q)

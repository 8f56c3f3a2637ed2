"""Candidates against their request's history by torch operations: query folding over groups of requests.

Requests of nearly equal shape are padded into one batched product; a request large enough to fill one is a group of its
own, without padding or copies. Softmax on a CPU runs torch's fused attention, which keeps its scores in cache; what is
left (SiLU, other devices) runs in blocks of queries whose scores fit there. Axes as in ``broadcast_attention``, and
``T`` queries of all candidates, ``b`` requests of a group padded to ``t`` queries and ``s`` keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 1 << 18
"""Query-key pairs of a group or block, all its requests and heads together: 1 MiB of float32, which stays in cache."""

PADDING = 1.25
"""Padded pairs over real ones that a group may have: more costs more than the calls it spares."""


@dataclass(frozen=True)
class Rows:
    """Rows of a group: ``start:stop`` as they lie, or ``index`` [b, t], clamped where ``valid`` [b, t] is false."""

    requests: int
    start: int
    stop: int
    index: Tensor | None = None
    valid: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [b, H, t, D]; padding repeats some row."""
        rows = x[self.start : self.stop] if self.index is None else x.index_select(0, self.index.view(-1))
        return rows.view(self.requests, -1, *x.shape[1:]).transpose(1, 2)

    def put(self, out: Tensor, value: Tensor) -> None:
        """[b, H, t, D] -> its rows of ``out`` [T, H, D]. Each row is in one group only."""
        value = value.transpose(1, 2)
        if self.index is None:
            out[self.start : self.stop].view(value.shape).copy_(value)
        elif self.valid is None:
            out.index_copy_(0, self.index.view(-1), value.flatten(0, 1))
        else:
            out.index_copy_(0, self.index[self.valid], value[self.valid])


def groups(query_offsets: list[int], key_offsets: list[int], heads: int,
           device: torch.device) -> Iterator[tuple[Rows, Rows]]:
    """Queries and keys of each group. Requests without queries or keys are in none: theirs are zeros."""
    shapes = {
        r: (key_offsets[r + 1] - key_offsets[r], query_offsets[r + 1] - query_offsets[r])
        for r in range(len(query_offsets) - 1)
        if key_offsets[r + 1] > key_offsets[r] and query_offsets[r + 1] > query_offsets[r]
    }
    requests = sorted(shapes, key=lambda r: shapes[r], reverse=True)
    if len(set(shapes.values())) == 1 and len(shapes) == len(query_offsets) - 1:
        n = len(shapes)
        yield Rows(n, 0, query_offsets[-1]), Rows(n, 0, key_offsets[-1])
        return
    members: list[int] = []
    pairs = longest_q = 0
    for r in requests:
        keys, queries = shapes[r]
        if members:
            padded = (len(members) + 1) * max(longest_q, queries) * shapes[members[0]][0]
            if padded * heads > SCORES or padded > PADDING * (pairs + keys * queries):
                yield _group(members, query_offsets, device), _group(members, key_offsets, device)
                members, pairs, longest_q = [], 0, 0
        members.append(r)
        pairs += keys * queries
        longest_q = max(longest_q, queries)
    if members:
        yield _group(members, query_offsets, device), _group(members, key_offsets, device)


def _group(members: list[int], offsets: list[int], device: torch.device) -> Rows:
    if len(members) == 1:
        return Rows(1, offsets[members[0]], offsets[members[0] + 1])
    start = torch.tensor([offsets[r] for r in members], device=device)
    stop = torch.tensor([offsets[r + 1] for r in members], device=device)
    steps = torch.arange(max(offsets[r + 1] - offsets[r] for r in members), device=device)
    index = start[:, None] + steps
    valid = index < stop[:, None]
    return Rows(len(members), 0, 0, torch.minimum(index, stop[:, None] - 1), None if bool(valid.all()) else valid)


def history_forward(q: Tensor, k: Tensor, v: Tensor, candidate_offsets: Tensor, history_offsets: Tensor,
                    weighting: str, scale: float) -> tuple[Tensor, Tensor]:
    """The history's part of the result [C, N, H, D] and, for softmax, its log-sum-exp [C, N, H]: -inf where there is
    no history."""
    queries = q.flatten(0, 1)
    out = torch.zeros_like(queries)
    lse = _sums(queries, weighting)
    for query_rows, key_rows in _groups(q, candidate_offsets, history_offsets):
        part_q, part_k, part_v = query_rows.take(queries), key_rows.take(k), key_rows.take(v)
        if weighting == "softmax" and _fused(q):
            part, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                part_q, part_k, part_v, attn_mask=_mask(key_rows, q.dtype), scale=scale)
        else:
            part, sums = _blocks(part_q, part_k, part_v, key_rows, weighting, scale, lse.dtype)
        query_rows.put(out, part)
        if weighting == "softmax":
            query_rows.put(lse.unsqueeze(-1), sums.unsqueeze(-1))
    return out.view(q.shape), lse.view(q.shape[:3]) if weighting == "softmax" else lse


def history_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                     candidate_offsets: Tensor, history_offsets: Tensor, weighting: str,
                     scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. ``out`` and ``lse`` may be those of a softmax that runs over more than the history."""
    queries, grads, outs = q.flatten(0, 1), grad.flatten(0, 1), out.flatten(0, 1)
    dq, dk, dv = torch.zeros_like(queries), torch.zeros_like(k), torch.zeros_like(v)
    for query_rows, key_rows in _groups(q, candidate_offsets, history_offsets):
        part_q, part_k, part_v, part_grad = (query_rows.take(queries), key_rows.take(k), key_rows.take(v),
                                             query_rows.take(grads))
        if query_rows.valid is not None:  # padding must not reach the keys' gradients
            part_grad = part_grad * query_rows.valid[:, None, :, None]
        if weighting == "softmax":
            part_out = query_rows.take(outs)
            part_lse = query_rows.take(lse.view(len(queries), -1, 1)).squeeze(-1)
            if _fused(q):
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    part_grad, part_q, part_k, part_v, part_out, part_lse.contiguous(), 0.0, False,
                    attn_mask=_mask(key_rows, q.dtype), scale=scale)
            else:
                parts = _blocks_backward(part_grad, part_q, part_k, part_v, part_out, part_lse, key_rows, scale)
        else:
            parts = _blocks_backward(part_grad, part_q, part_k, part_v, None, None, key_rows, scale)
        query_rows.put(dq, parts[0])
        key_rows.put(dk, parts[1])
        key_rows.put(dv, parts[2])
    return dq.view(q.shape), dk, dv


def _fused(q: Tensor) -> bool:
    """Whether torch's fused attention with log-sum-exp, and its backward, run here."""
    return q.device.type == "cpu"


def _groups(q: Tensor, candidate_offsets: Tensor, history_offsets: Tensor) -> Iterator[tuple[Rows, Rows]]:
    per = q.shape[1]
    return groups([per * c for c in candidate_offsets.tolist()], history_offsets.tolist(), q.shape[2], q.device)


def _sums(queries: Tensor, weighting: str) -> Tensor:
    exact = torch.float64 if queries.dtype == torch.float64 else torch.float32
    shape = queries.shape[:2] if weighting == "softmax" else (0,)
    return torch.full(shape, float("-inf"), dtype=exact, device=queries.device)


def _mask(keys: Rows, dtype: torch.dtype) -> Tensor | None:
    """[b, 1, 1, s]: -inf at padding, to be added to scores."""
    if keys.valid is None:
        return None
    hidden = torch.zeros(keys.valid.shape, dtype=dtype, device=keys.valid.device)
    return hidden.masked_fill_(~keys.valid, float("-inf"))[:, None, None, :]


def _spans(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Blocks of queries, of nearly equal size, whose scores fit into the cache."""
    queries = q.shape[2]
    blocks = max(1, -(-q.shape[0] * q.shape[1] * queries * k.shape[2] // SCORES))
    size = -(-queries // blocks)
    return (slice(at, at + size) for at in range(0, queries, size))


def _blocks(q: Tensor, k: Tensor, v: Tensor, keys: Rows, weighting: str, scale: float,
            exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """[b, H, t, D] against [b, H, s, D], blocks of queries at a time: result and log-sum-exp [b, H, t]."""
    keys_t, values = (k * scale).transpose(-1, -2), v.contiguous()
    out, sums = torch.empty_like(q), torch.empty(q.shape[:3], dtype=exact, device=q.device)
    for rows in _spans(q, k):
        scores = torch.matmul(q[:, :, rows], keys_t)
        if weighting == "silu":
            weights = torch.nn.functional.silu(scores, inplace=True)
            if keys.valid is not None:
                weights *= keys.valid[:, None, None, :]
        else:
            mask = _mask(keys, scores.dtype)
            scores = scores if mask is None else scores + mask
            sums[:, :, rows] = torch.logsumexp(scores.to(exact), -1)
            weights = torch.softmax(scores, -1)
        out[:, :, rows] = torch.matmul(weights, values)
    return out, sums


def _blocks_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None,
                     keys: Rows, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of a group; SiLU where there is no ``lse``."""
    scaled, values_t = k * scale, v.transpose(-1, -2).contiguous()
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(scaled), torch.zeros_like(scaled)
    for rows in _spans(q, k):
        part_q, part_grad = q[:, :, rows], grad[:, :, rows]
        scores = torch.matmul(part_q, scaled.transpose(-1, -2))
        dweights = torch.matmul(part_grad, values_t)
        if lse is None or out is None:
            dscores = torch.ops.aten.silu_backward(dweights, scores)
            weights = torch.nn.functional.silu(scores, inplace=True)
        else:
            weights = (scores - lse[:, :, rows, None]).exp().to(q.dtype)
            dscores = weights * (dweights - (part_grad * out[:, :, rows]).sum(-1, keepdim=True))
        if keys.valid is not None:
            weights *= keys.valid[:, None, None, :]
            dscores *= keys.valid[:, None, None, :]
        dq[:, :, rows] = torch.matmul(dscores, scaled)
        dk += torch.matmul(dscores.transpose(-1, -2), part_q)
        dv += torch.matmul(weights.transpose(-1, -2), part_grad)
    return dq, dk * scale, dv

"""Jagged attention of torch operations, for any device: rows of different lengths, in small padded chunks.

Sorted by length, rows that share a chunk are almost equally long, so next to nothing is padding; and a chunk small
enough to stay in cache makes every elementwise pass over the scores cheap. The backward recomputes the scores of a
chunk instead of keeping them, so memory is linear in the length. Axes as in ``semel.models.attention``, and ``b``: rows
of one chunk padded to ``q`` queries and ``k`` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from semel.models.time_bias import time_bucket

CHUNK_SCORES = 1 << 18
"""Padded query-key pairs of a chunk, all rows together: 1 MiB of float32 scores a head, which stays in cache."""

CAUSAL_BLOCK = 64
"""Queries that share a slice of keys in causal attention: later keys than the block's last query are never computed."""

_HIDDEN = -1e4
"""Score of a pair that must not meet: both silu and softmax turn it into exactly 0, with a gradient of exactly 0."""


@dataclass(frozen=True)
class Block:
    """Queries ``start:stop`` of a chunk against its keys ``0:prefix`` and ``first:keys``, one run after the other.
    ``hidden`` broadcasts to [b, q, k]: 0 or
    _HIDDEN, None where all may meet. ``distance`` [q, k] or [b, 1, k]: position bucket; ``time`` [b, q, k]: time
    bucket (int32), or None."""

    start: int
    stop: int
    prefix: int
    first: int
    keys: int
    hidden: Tensor | None
    distance: Tensor | None
    time: Tensor | None

    @property
    def width(self) -> int:
        return self.prefix + self.keys - self.first

    def of(self, x: Tensor) -> Tensor:
        """The block's keys of ``x`` [..., keys, D]: a view where they are one run."""
        near = x[..., self.first : self.keys, :]
        return torch.cat([x[..., : self.prefix, :], near], -2) if self.prefix else near

    def add(self, total: Tensor, part: Tensor) -> None:
        """``total`` [..., keys, D] += ``part`` [..., width, D] at the block's keys."""
        total[..., : self.prefix, :] += part[..., : self.prefix, :]
        total[..., self.first : self.keys, :] += part[..., self.prefix :, :]


@dataclass(frozen=True)
class Chunk:
    """Rows of nearly equal length. ``queries`` [b, q] and ``keys`` [b, k]: token indices, one past the last token
    (a row of zeros) where padded."""

    queries: Tensor
    keys: Tensor
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ChunksPlan:
    """What all layers share: which tokens meet in which chunk, who may see whom, and the buckets of their biases.
    ``covered``: [T] bool, the queries that have keys; None if all have."""

    chunks: tuple[Chunk, ...]
    covered: Tensor | None


def plan_chunks(
    query_offsets: Tensor,
    key_offsets: Tensor,
    causal: bool,
    positions: int,
    query_time: Tensor | None,
    key_time: Tensor | None,
    window: int | None = None,
    prefix: int = 0,
) -> ChunksPlan:
    """The arguments of ``semel.models.attention.AttentionPlan``."""
    device = query_offsets.device
    q_lengths = (query_offsets[1:] - query_offsets[:-1]).cpu()
    k_lengths = (key_offsets[1:] - key_offsets[:-1]).cpu()
    has_keys = k_lengths > 0
    rows = torch.nonzero((q_lengths > 0) & has_keys).flatten()
    order = rows[torch.argsort(k_lengths[rows] * (1 << 20) + q_lengths[rows], descending=True)]
    chunks = []
    for members in _groups(order, q_lengths, k_lengths):
        member = members.to(device)
        queries, _ = _padded(query_offsets, member, int(q_lengths[members].max()))
        keys, widths = _padded(key_offsets, member, int(k_lengths[members].max()))
        spans = _causal_spans(queries.shape[1]) if causal else [(0, queries.shape[1], keys.shape[1])]
        blocks = tuple(
            _block(span, queries, keys, widths, causal, positions, query_time, key_time, window, prefix)
            for span in spans
        )
        chunks.append(Chunk(queries, keys, blocks))
    covered = None if bool(has_keys.all()) else torch.repeat_interleave(has_keys, q_lengths).to(device)
    return ChunksPlan(tuple(chunks), covered)


def _groups(order: Tensor, q_lengths: Tensor, k_lengths: Tensor) -> Sequence[Tensor]:
    """Cuts rows sorted by key length into runs whose padded scores stay within CHUNK_SCORES."""
    groups, start, q_max, k_max = [], 0, 0, 0
    ql, kl = q_lengths[order].tolist(), k_lengths[order].tolist()
    for i in range(len(order)):
        q_new, k_new = max(q_max, ql[i]), max(k_max, kl[i])
        if i > start and (i + 1 - start) * q_new * k_new > CHUNK_SCORES:
            groups.append(order[start:i])
            start, q_new, k_new = i, ql[i], kl[i]
        q_max, k_max = q_new, k_new
    if len(order):
        groups.append(order[start:])
    return groups


def _padded(offsets: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Token indices [b, width] and lengths [b] of some rows."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    steps = torch.arange(width, device=offsets.device)
    return torch.where(steps < lengths[:, None], starts[:, None] + steps, offsets[-1]), lengths


def _causal_spans(width: int) -> list[tuple[int, int, int]]:
    pieces = max(1, round(width / CAUSAL_BLOCK))
    edges = [width * i // pieces for i in range(pieces + 1)]
    return [(a, b, b) for a, b in pairwise(edges)]


def _block(span: tuple[int, int, int], queries: Tensor, keys: Tensor, k_lengths: Tensor, causal: bool, positions: int,
           query_time: Tensor | None, key_time: Tensor | None, window: int | None, prefix: int) -> Block:
    start, stop, k = span
    low, first = 0, 0
    if window is not None:
        low = min(prefix, k)
        first = max(low, (start if causal else int(k_lengths.min())) - window)
    steps = torch.arange(k, device=keys.device)
    steps = torch.cat([steps[:low], steps[first:]])
    hidden = distance = time = None
    if causal:
        gap = torch.arange(start, stop, device=keys.device)[:, None] - steps
        unseen = gap < 0
    else:
        gap = (k_lengths[:, None] - steps)[:, None, :]
        unseen = gap <= 0
    if window is not None:
        unseen = unseen | ((gap > window) & (steps >= prefix))
    if causal or bool(unseen.any()):
        hidden = torch.where(unseen, _HIDDEN, 0.0)
    if positions:
        distance = gap.clamp(0, positions - 1)
    if query_time is not None and key_time is not None:
        # A padding index is one past the end: borrow the last token's time, its scores are hidden or never read.
        tq = query_time[queries[:, start:stop].clamp(max=len(query_time) - 1)]
        tk = key_time[keys[:, steps].clamp(max=len(key_time) - 1)]
        time = time_bucket(tq[:, :, None] - tk[:, None, :])
    return Block(start, stop, low, first, k, hidden, distance, time)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """[N + 1, H, D] tokens at [b, n] -> [b, H, n, D], contiguous for the matrix products."""
    b, n = index.shape
    return x.index_select(0, index.reshape(-1)).view(b, n, *x.shape[1:]).transpose(1, 2).contiguous()


def _put(out: Tensor, index: Tensor, value: Tensor) -> None:
    """[b, H, n, D] -> the rows of ``out`` [N + 1, H, D]; each token is in one chunk only, so this is a copy."""
    out.index_copy_(0, index.reshape(-1), value.transpose(1, 2).reshape(-1, *out.shape[1:]))


def _pad_row(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _scores(q: Tensor, k: Tensor, own_k: Tensor | None, block: Block, position_bias: Tensor,
            time_bias: Tensor) -> Tensor:
    """[b, H, q, k (+ 1 for the own token)] before weighting; ``q`` comes scaled."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    bias = block.hidden
    if bias is not None and bias.dtype != scores.dtype:
        bias = bias.to(scores.dtype)
    if block.distance is not None and len(position_bias):
        position = position_bias[block.distance]
        bias = position if bias is None else position.add_(bias)
    if block.time is not None and len(time_bias):
        time = time_bias.index_select(0, block.time.view(-1)).view(block.time.shape)
        bias = time if bias is None else time.add_(bias)
    if bias is not None:
        scores += bias.unsqueeze(-3)
    if own_k is not None:
        scores = torch.cat([scores, (q * own_k).sum(-1, keepdim=True)], -1)
    return scores


class ChunksAttention(torch.autograd.Function):
    """Weights are kept free of ``1 / norm``: the values carry it, which is a far smaller tensor."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, position_bias: Tensor,
                time_bias: Tensor, plan: ChunksPlan, weighting: str, scale: float, norm: float) -> Tensor:
        ctx.save_for_backward(q, k, v, own_k, own_v, position_bias, time_bias)
        ctx.plan, ctx.weighting, ctx.scale, ctx.norm = plan, weighting, scale, norm
        own = bool(own_k.numel())
        q_, k_, v_ = _pad_row(q * scale), _pad_row(k), _pad_row(v / norm)
        own_k_, own_v_ = (_pad_row(own_k), _pad_row(own_v / norm)) if own else (None, None)
        out = torch.zeros_like(q_)
        if own_k_ is not None and own_v_ is not None and plan.covered is not None:
            out[:-1] = _alone(q_[:-1], own_k_[:-1], own_v_[:-1], weighting)
        for chunk in plan.chunks:
            qc, kc, vc = _take(q_, chunk.queries), _take(k_, chunk.keys), _take(v_, chunk.keys)
            own_kc, own_vc = _maybe_take(own_k_, chunk), _maybe_take(own_v_, chunk)
            result = torch.empty_like(qc)
            for block in chunk.blocks:
                rows = slice(block.start, block.stop)
                n = block.width
                scores = _scores(qc[:, :, rows], block.of(kc), own_kc, block, position_bias, time_bias)
                if weighting == "silu":
                    weights = torch.nn.functional.silu(scores, inplace=True)
                else:
                    weights = torch.softmax(scores, -1)
                result[:, :, rows] = torch.matmul(weights[..., :n], block.of(vc))
                if own_vc is not None:
                    result += weights[..., n:] * own_vc
            _put(out, chunk.queries, result)
        return out[:-1].clone()  # without the padding row, and not as a view of it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, own_k, own_v, position_bias, time_bias = ctx.saved_tensors
        plan, weighting, scale, norm = ctx.plan, ctx.weighting, ctx.scale, ctx.norm
        own = bool(own_k.numel())
        grad = _pad_row(grads[0])
        q_, k_, v_ = _pad_row(q * scale), _pad_row(k), _pad_row(v / norm)
        own_k_, own_v_ = (_pad_row(own_k), _pad_row(own_v / norm)) if own else (None, None)
        dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        down_k, down_v = (torch.zeros_like(q_), torch.zeros_like(q_)) if own else (None, None)
        if own_k_ is not None and own_v_ is not None and plan.covered is not None:
            with torch.enable_grad():
                aq, ak, av = (x[:-1].detach().requires_grad_() for x in (q_, own_k_, own_v_))
                alone = _alone(aq, ak, av, weighting)
            parts = torch.autograd.grad(alone, (aq, ak, av), grads[0], allow_unused=True)
            for total, part in zip((dq, down_k, down_v), parts, strict=True):
                if total is not None and part is not None:
                    total[:-1] = part
        dposition, dtime = torch.zeros_like(position_bias), torch.zeros_like(time_bias)
        for chunk in plan.chunks:
            qc, kc, vc = _take(q_, chunk.queries), _take(k_, chunk.keys), _take(v_, chunk.keys)
            gc = _take(grad, chunk.queries)
            own_kc, own_vc = _maybe_take(own_k_, chunk), _maybe_take(own_v_, chunk)
            dqc, dkc, dvc = torch.empty_like(qc), torch.zeros_like(kc), torch.zeros_like(vc)
            for block in chunk.blocks:
                rows = slice(block.start, block.stop)
                n = block.width
                qb, gb, kb = qc[:, :, rows], gc[:, :, rows], block.of(kc)
                scores = _scores(qb, kb, own_kc, block, position_bias, time_bias)
                dweights = torch.matmul(gb, block.of(vc).transpose(-1, -2))
                if own_vc is not None:
                    dweights = torch.cat([dweights, (gb * own_vc).sum(-1, keepdim=True)], -1)
                if weighting == "silu":
                    dscores = torch.ops.aten.silu_backward(dweights, scores)
                    weights = torch.nn.functional.silu(scores, inplace=True)
                else:
                    weights = torch.softmax(scores, -1)
                    dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
                dqb = torch.matmul(dscores[..., :n], kb)
                block.add(dkc, torch.matmul(dscores[..., :n].transpose(-1, -2), qb))
                block.add(dvc, torch.matmul(weights[..., :n].transpose(-1, -2), gb))
                if own_kc is not None and down_k is not None and down_v is not None:
                    dqb += dscores[..., n:] * own_kc
                    _put(down_k, chunk.queries, dscores[..., n:] * qb)
                    _put(down_v, chunk.queries, weights[..., n:] * gb)
                dqc[:, :, rows] = dqb
                _bias_backward(block, dscores[..., :n], dposition, dtime)
            _put(dq, chunk.queries, dqc)
            _put(dk, chunk.keys, dkc)
            _put(dv, chunk.keys, dvc)
        return (
            dq[:-1] * scale, dk[:-1], dv[:-1] / norm,
            None if down_k is None else down_k[:-1], None if down_v is None else down_v[:-1] / norm,
            dposition if position_bias.numel() else None, dtime if time_bias.numel() else None,
            None, None, None, None,
        )


def _maybe_take(x: Tensor | None, chunk: Chunk) -> Tensor | None:
    return None if x is None else _take(x, chunk.queries)


def _alone(q: Tensor, own_k: Tensor, own_v: Tensor, weighting: str) -> Tensor:
    """What a query without any keys sees: its own token."""
    if weighting == "softmax":
        return own_v * 1.0
    return own_v * torch.nn.functional.silu((q * own_k).sum(-1, keepdim=True))


def _bias_backward(block: Block, dscores: Tensor, dposition: Tensor, dtime: Tensor) -> None:
    """A bias is one number a bucket: its gradient is a weighted count (bincount), far cheaper than a scatter."""
    if not (dposition.numel() or dtime.numel()):
        return
    total = dscores.sum(1)
    if block.time is not None and dtime.numel():
        counts = torch.bincount(block.time.view(-1), total.view(-1), minlength=len(dtime))
        dtime += counts.to(dtime.dtype)
    if block.distance is not None and dposition.numel():
        summed = total.sum(0) if block.distance.dim() == 2 else total.sum(1, keepdim=True)
        counts = torch.bincount(block.distance.reshape(-1), summed.reshape(-1), minlength=len(dposition))
        dposition += counts.to(dposition.dtype)

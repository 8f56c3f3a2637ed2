"""Triton path of ``broadcast_attention``: flash attention (arXiv 2307.08691) in which a tile holds the folded queries
of one request's candidates, with jagged histories, softmax or SiLU weights, and a backward without atomics.

Two kernels backward: one over tiles of queries for dq, one over tiles of keys for dk and dv, which passes over all
queries of the request; sums have one order, so results are the same each time. Axes as in ``broadcast_attention``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semel.sharing.kernels.triton_tiles import INTERPRETED, fitting, precision, tiles


def history_forward(q: Tensor, k: Tensor, v: Tensor, candidate_offsets: Tensor, history_offsets: Tensor,
                    weighting: str, scale: float) -> tuple[Tensor, Tensor]:
    """The history's part of the result [C, N, H, D] and, for softmax, its log-sum-exp [C, N, H] (-inf without)."""
    candidates, per, heads, width = q.shape
    softmax = weighting == "softmax"
    history_offsets = history_offsets.clamp(0, len(k))
    out = torch.empty_like(q)
    lse = q.new_empty((candidates, per, heads) if softmax else (0,), dtype=torch.float32)
    block_d = fitting(width, 16, 256)
    block = _block(block_d, q)
    block_q = fitting(candidates * per // max(1, len(candidate_offsets) - 1), 16, 2 * block)
    cut = tiles(candidate_offsets, candidates * per, block_q, per)
    _forward[(cut.count, heads)](
        q, k, v, out, lse, cut.request, cut.start, cut.stop, history_offsets, scale, heads, width, SOFTMAX=softmax,
        BLOCK_Q=block_q, BLOCK_S=block, BLOCK_D=block_d, PRECISION=precision(q), UPCAST=INTERPRETED,
        num_warps=8 if block_q == 128 else 4, num_stages=3 if q.element_size() == 2 else 2,
    )
    return out, lse


def history_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                     candidate_offsets: Tensor, history_offsets: Tensor, weighting: str,
                     scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. ``out`` and ``lse`` may be those of a softmax that runs over more than the history."""
    candidates, per, heads, width = q.shape
    softmax = weighting == "softmax"
    history_offsets, candidate_offsets = history_offsets.clamp(0, len(k)), candidate_offsets.clamp(0, candidates)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = (grad.float() * out.float()).sum(-1) if softmax else lse
    block_d = fitting(width, 16, 256)
    block = _block(block_d, q)
    block_q = fitting(candidates * per // max(1, len(candidate_offsets) - 1), 16, block)
    how = {"SOFTMAX": softmax, "BLOCK_Q": block_q, "BLOCK_S": block, "BLOCK_D": block_d, "PRECISION": precision(q),
           "UPCAST": INTERPRETED, "num_warps": 4, "num_stages": 2}
    cut = tiles(candidate_offsets, candidates * per, block_q, per)
    _backward_queries[(cut.count, heads)](
        grad, q, k, v, lse, delta, dq, cut.request, cut.start, cut.stop, history_offsets, scale, heads, width, **how)
    if len(k):
        cut = tiles(history_offsets, len(k), block)
        _backward_keys[(cut.count, heads)](
            grad, q, k, v, lse, delta, dk, dv, cut.request, cut.start, cut.stop, candidate_offsets, per, scale, heads,
            width, **how)
    return dq, dk, dv


def _block(width: int, q: Tensor) -> int:
    """Tokens of a tile: 16 KiB of keys, so that all tiles of a program fit on chip."""
    return max(16, min(64, (1 << 14) // (width * q.element_size())))


@triton.jit
def _load(x, rows, last, head, d, H, D, UPCAST: tl.constexpr):
    """[rows, D] of one head; zeros outside."""
    tile = tl.load(x + rows[:, None] * H * D + head * D + d[None, :], mask=(rows < last)[:, None] & (d < D)[None, :],
                   other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(x, tile, rows, last, head, d, H, D):
    tl.store(x + rows[:, None] * H * D + head * D + d[None, :], tile.to(x.dtype.element_ty),
             mask=(rows < last)[:, None] & (d < D)[None, :])


@triton.jit
def _forward(q, k, v, out, lse, request, start, stop, history_offsets, scale, H, D, SOFTMAX: tl.constexpr,
             BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
             UPCAST: tl.constexpr):
    tile, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(start + tile), tl.load(stop + tile)
    if first >= last:
        return
    r = tl.load(request + tile)
    key_first, key_last = tl.load(history_offsets + r).to(tl.int64), tl.load(history_offsets + r + 1).to(tl.int64)
    t, d = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    query = _load(q, t, last, head, d, H, D, UPCAST)
    result = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    top = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    for at in range(key_first, key_last, BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        key = _load(k, s, key_last, head, d, H, D, UPCAST)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if SOFTMAX:
            scores = tl.where((s < key_last)[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            result = result * shrink[:, None]
            top = higher
        else:
            weights = scores * tl.sigmoid(scores)
        value = _load(v, s, key_last, head, d, H, D, UPCAST)
        result = tl.dot(weights.to(value.dtype), value, result, input_precision=PRECISION)
    if SOFTMAX:
        seen = total > 0
        divisor = tl.where(seen, total, 1.0)
        result = result / divisor[:, None]
        tl.store(lse + t * H + head, tl.where(seen, top + tl.log(divisor), float("-inf")), mask=t < last)
    _store(out, result, t, last, head, d, H, D)


@triton.jit
def _gradient(scores, dweights, lse, delta, SOFTMAX: tl.constexpr):
    """Weights and the gradient of scores, from recomputed scores."""
    if SOFTMAX:
        weights = tl.exp(scores - lse)
        dscores = weights * (dweights - delta)
    else:
        chance = tl.sigmoid(scores)
        weights = scores * chance
        dscores = dweights * chance * (1.0 + scores * (1.0 - chance))
    return weights, dscores


@triton.jit
def _backward_queries(grad, q, k, v, lse, delta, dq, request, start, stop, history_offsets, scale, H, D,
                      SOFTMAX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                      PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    tile, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(start + tile), tl.load(stop + tile)
    if first >= last:
        return
    r = tl.load(request + tile)
    key_first, key_last = tl.load(history_offsets + r).to(tl.int64), tl.load(history_offsets + r + 1).to(tl.int64)
    t, d = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    query, down = _load(q, t, last, head, d, H, D, UPCAST), _load(grad, t, last, head, d, H, D, UPCAST)
    sums = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    inner = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    if SOFTMAX:
        sums = tl.load(lse + t * H + head, mask=t < last, other=0.0)
        inner = tl.load(delta + t * H + head, mask=t < last, other=0.0)
    result = tl.zeros((BLOCK_Q, BLOCK_D), dtype=tl.float32)
    for at in range(key_first, key_last, BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        key, value = _load(k, s, key_last, head, d, H, D, UPCAST), _load(v, s, key_last, head, d, H, D, UPCAST)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        dweights = tl.dot(down, tl.trans(value), input_precision=PRECISION)
        _, dscores = _gradient(scores, dweights, sums[:, None], inner[:, None], SOFTMAX)
        dscores = tl.where((s < key_last)[None, :], dscores, 0.0)  # exp(0 - lse) of padding may be infinite
        result = tl.dot(dscores.to(key.dtype), key, result, input_precision=PRECISION)
    _store(dq, result * scale, t, last, head, d, H, D)


@triton.jit
def _backward_keys(grad, q, k, v, lse, delta, dk, dv, request, start, stop, candidate_offsets, per, scale, H, D,
                   SOFTMAX: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                   PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    tile, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(start + tile), tl.load(stop + tile)
    if first >= last:
        return
    r = tl.load(request + tile)
    query_first = tl.load(candidate_offsets + r).to(tl.int64) * per
    query_last = tl.load(candidate_offsets + r + 1).to(tl.int64) * per
    s, d = first + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    key, value = _load(k, s, last, head, d, H, D, UPCAST), _load(v, s, last, head, d, H, D, UPCAST)
    key_total = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    value_total = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    for at in range(query_first, query_last, BLOCK_Q):
        t = at + tl.arange(0, BLOCK_Q)
        query, down = _load(q, t, query_last, head, d, H, D, UPCAST), _load(grad, t, query_last, head, d, H, D, UPCAST)
        sums = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        inner = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        if SOFTMAX:
            sums = tl.load(lse + t * H + head, mask=t < query_last, other=0.0)
            inner = tl.load(delta + t * H + head, mask=t < query_last, other=0.0)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
        dweights = tl.dot(value, tl.trans(down), input_precision=PRECISION)
        weights, dscores = _gradient(scores, dweights, sums[None, :], inner[None, :], SOFTMAX)
        value_total = tl.dot(weights.to(down.dtype), down, value_total, input_precision=PRECISION)
        key_total = tl.dot(dscores.to(query.dtype), query, key_total, input_precision=PRECISION)
    _store(dk, key_total * scale, s, last, head, d, H, D)
    _store(dv, value_total, s, last, head, d, H, D)

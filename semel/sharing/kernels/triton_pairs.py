"""Triton path of ``pair_interaction``: products of a request's matrix with the rows of all of its candidates.

``x`` [C, P, K] are candidates' rows; each request's C_r P rows are multiplied as one matrix, cut into tiles that end
where the request does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from semel.sharing.kernels.triton_tiles import INTERPRETED, fitting, precision, tiles


def multiply(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``x`` [C, P, K], ``y`` [R, K, N] (any strides) -> [C, P, N]: ``x[c] @ y[r(c)]``."""
    candidates, per, depth = x.shape
    width = y.shape[2]
    out = x.new_empty(candidates, per, width)
    block_t, block_n = 64, fitting(width, 16, 128)
    cut = tiles(offsets, candidates * per, block_t, per)
    _multiply[(cut.count, triton.cdiv(width, block_n))](
        x, y, out, cut.request, cut.start, cut.stop, depth, width, *y.stride(), BLOCK_T=block_t, BLOCK_N=block_n,
        BLOCK_K=fitting(depth, 16, 64), PRECISION=precision(x), UPCAST=INTERPRETED,
    )
    return out


def multiply_sum(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``x`` [C, P, N], ``y`` [C, P, K] -> [R, N, K]: ``sum of x[c].T @ y[c]`` over each request's candidates, in their
    order, so that the result is always the same."""
    per, width = x.shape[1:]
    depth = y.shape[2]
    out = x.new_empty(len(offsets) - 1, width, depth)
    block_n, block_k = fitting(width, 16, 64), fitting(depth, 16, 64)
    _multiply_sum[(len(offsets) - 1, triton.cdiv(width, block_n), triton.cdiv(depth, block_k))](
        x, y, out, offsets.clamp(0, len(x)), per, width, depth, BLOCK_T=64, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION=precision(x), UPCAST=INTERPRETED,
    )
    return out


@triton.jit
def _multiply(x, y, out, request, start, stop, K, N, y_r, y_k, y_n, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    tile = tl.program_id(0)
    first, last = tl.load(start + tile), tl.load(stop + tile)
    if first >= last:
        return
    r = tl.load(request + tile).to(tl.int64)
    t = first + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        a = tl.load(x + t[:, None] * K + k[None, :], mask=(t < last)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(y + r * y_r + k[:, None] * y_k + n[None, :] * y_n, mask=(k < K)[:, None] & (n < N)[None, :],
                    other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(out + t[:, None] * N + n[None, :], total.to(out.dtype.element_ty),
             mask=(t < last)[:, None] & (n < N)[None, :])


@triton.jit
def _multiply_sum(x, y, out, offsets, per, N, K, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    first, last = tl.load(offsets + r).to(tl.int64) * per, tl.load(offsets + r + 1).to(tl.int64) * per
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for at in range(first, last, BLOCK_T):
        t = at + tl.arange(0, BLOCK_T)
        a = tl.load(x + t[None, :] * N + n[:, None], mask=(t < last)[None, :] & (n < N)[:, None], other=0.0)
        b = tl.load(y + t[:, None] * K + k[None, :], mask=(t < last)[:, None] & (k < K)[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(out + r * N * K + n[:, None] * K + k[None, :], total.to(out.dtype.element_ty),
             mask=(n < N)[:, None] & (k < K)[None, :])

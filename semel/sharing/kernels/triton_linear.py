"""Triton path of ``linear_compression``: both products by one kernel, the second with the request's part added while
its tile is still in registers, and the weights' gradient as partial sums over runs of candidates.

Columns are pairs (candidate, d): a tile may span candidates, so narrow embeddings fill it too. Tile sizes are fixed
functions of the shape, never tuned at run time: the same shapes give the same bits in every process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semel.sharing.kernels.triton_tiles import INTERPRETED, fitting, precision

PROGRAMS = 512
"""About as many programs as a device needs: candidates are cut into runs whose weight gradients are summed apart."""


def linear_compression(w_candidate: Tensor, w_request: Tensor, e_candidate: Tensor, e_request: Tensor,
                       owner: Tensor) -> Tensor:
    candidates, _, width = e_candidate.shape
    # In float32: the request's part is small, and rounding it to 16 bits would be the largest error of the result.
    part = e_request.new_empty(len(e_request), len(w_request), width, dtype=torch.float32)
    _multiply(w_request, e_request, None, owner, part)
    out = e_candidate.new_empty(candidates, len(w_candidate), width)
    _multiply(w_candidate, e_candidate, part, owner, out)
    return out


def weight_grad(grad: Tensor, e: Tensor) -> Tensor:
    grad, e = grad.contiguous(), e.contiguous()
    rows, m, width = grad.shape
    k = e.shape[1]
    block_m, block_k = fitting(m, 16, 128), fitting(k, 16, 128)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(k, block_k)
    run = triton.cdiv(rows, max(1, PROGRAMS // tiles))
    parts = triton.cdiv(rows, run)
    partial = grad.new_empty(parts, m, k, dtype=torch.float32)
    grid = (triton.cdiv(m, block_m), triton.cdiv(k, block_k), parts)
    _weight_grad[grid](
        grad, e, partial, rows, run, m, k, width, BLOCK_M=block_m, BLOCK_K=block_k,
        BLOCK_D=fitting(width, 16, 128 // e.element_size()), PRECISION=precision(grad), UPCAST=INTERPRETED,
        num_warps=8 if block_m * block_k > 64 * 64 else 4,
    )
    return partial.sum(0).to(grad.dtype)


def _multiply(w: Tensor, e: Tensor, part: Tensor | None, owner: Tensor, out: Tensor) -> None:
    """``out[b] = w @ e[b]`` (+ ``part[owner[b]]``)."""
    w, e = _aligned(w), e.contiguous()
    rows, k, width = e.shape
    m = len(w)
    block_m, block_n = fitting(m, 16, 128), fitting(rows * width, 16, 128)
    grid = triton.cdiv(m, block_m) * triton.cdiv(rows * width, block_n)
    _product[(grid,)](
        w, e, out if part is None else part, owner, out, m, k, width, rows * width, w.stride(0), ADD=part is not None,
        ALIGNED=width % 16 == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=fitting(k, 16, 128 // w.element_size()),
        PRECISION=precision(e), UPCAST=INTERPRETED, num_warps=8 if block_m * block_n > 64 * 64 else 4, num_stages=3,
    )


def _aligned(w: Tensor) -> Tensor:
    """[M, K] padded by zeros to a multiple of 16 columns. With 866 float16 columns rows would start between the 16
    bytes that one load brings, and every load would be split; the same goes for a mask that ends there."""
    width = triton.cdiv(w.shape[1], 16) * 16
    if width == w.shape[1]:
        return w.contiguous()
    padded = w.new_zeros(len(w), width)
    padded[:, : w.shape[1]] = w
    return padded


@triton.jit
def _product(w, e, part, owner, out, M, K, D, columns, w_stride, ADD: tl.constexpr, ALIGNED: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
             UPCAST: tl.constexpr):
    # One after another: all of M for the same columns. What they read of e stays in the cache, and w is small.
    high = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % high * BLOCK_M + tl.arange(0, BLOCK_M)
    base = (tl.program_id(0) // high).to(tl.int64) * BLOCK_N
    n = base + tl.arange(0, BLOCK_N)
    first = (base % D).to(tl.int32)
    if ALIGNED:  # D is a multiple of 16, so 16 columns of a candidate lie side by side: load them at once
        first = tl.multiple_of(first, 16)
    within = first + tl.arange(0, BLOCK_N)  # a 64-bit division an element would be slow
    c, d = base // D + within // D, within % D
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        k = at + steps
        a = tl.load(w + m[:, None] * w_stride + k[None, :], mask=(m < M)[:, None] & (k < w_stride)[None, :], other=0.0)
        b = tl.load(e + c[None, :] * K * D + k[:, None] * D + d[None, :],
                    mask=(k < K)[:, None] & (n < columns)[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    here = (m < M)[:, None] & (n < columns)[None, :]
    if ADD:
        r = tl.load(owner + c, mask=n < columns, other=0)
        total += tl.load(part + r[None, :] * M * D + m[:, None] * D + d[None, :], mask=here, other=0.0)
    tl.store(out + c[None, :] * M * D + m[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _weight_grad(grad, e, partial, rows, run, M, K, D, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    p = tl.program_id(2).to(tl.int64)
    steps = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for row in range(p * run, tl.minimum((p + 1) * run, rows)):
        for at in range(0, D, BLOCK_D):
            d = at + steps
            a = tl.load(grad + row * M * D + m[:, None] * D + d[None, :],
                        mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
            b = tl.load(e + row * K * D + k[None, :] * D + d[:, None],
                        mask=(k < K)[None, :] & (d < D)[:, None], other=0.0)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(partial + p * M * K + m[:, None] * K + k[None, :], total, mask=(m < M)[:, None] & (k < K)[None, :])

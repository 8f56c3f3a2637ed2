"""Triton paths of ``gather_add`` and ``segment_sum``. Rows are flattened to [C, D]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semel.sharing.kernels.triton_tiles import fitting, tiles

TILE_ROWS = 64
"""Candidates that one program sums: enough programs for a single request with thousands of candidates."""


def gather_add(candidate: Tensor, request: Tensor, owner: Tensor) -> Tensor:
    out = torch.empty_like(candidate)
    rows = len(candidate)
    width = candidate.numel() // rows
    block_d = fitting(width, 16, 256)
    block_c = max(1, 4096 // block_d)
    grid = (triton.cdiv(rows, block_c), triton.cdiv(width, block_d))
    _gather_add[grid](candidate, request, owner, out, rows, width, BLOCK_C=block_c, BLOCK_D=block_d)
    return out


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Twice the same kernel: rows into tiles of a request (in float32), then the tiles into requests."""
    rows, width = len(x), x.numel() // len(x)
    cut = tiles(offsets, rows, TILE_ROWS)
    partial = x.new_empty(cut.count, width, dtype=torch.float32)
    _sum(x, cut.start, cut.stop, partial, width)
    out = x.new_empty(len(offsets) - 1, *x.shape[1:])
    _sum(partial, cut.offsets[:-1].contiguous(), cut.offsets[1:].contiguous(), out, width)
    return out


def _sum(x: Tensor, start: Tensor, stop: Tensor, out: Tensor, width: int) -> None:
    block_d = fitting(width, 16, 256)
    _segment_sum[(len(start), triton.cdiv(width, block_d))](x, start, stop, out, width, BLOCK_C=16, BLOCK_D=block_d)


@triton.jit
def _gather_add(candidate, request, owner, out, rows, width, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr):
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    here = (c < rows)[:, None] & (d < width)[None, :]
    r = tl.load(owner + c, mask=c < rows, other=0)
    a = tl.load(candidate + c[:, None] * width + d[None, :], mask=here, other=0.0)
    b = tl.load(request + r[:, None] * width + d[None, :], mask=here, other=0.0)
    total = a.to(tl.float32) + b.to(tl.float32)
    tl.store(out + c[:, None] * width + d[None, :], total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _segment_sum(x, start, stop, out, width, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(start + segment)
    last = tl.load(stop + segment)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for at in range(first, last, BLOCK_C):
        c = at + tl.arange(0, BLOCK_C)
        here = (c < last)[:, None] & (d < width)[None, :]
        total += tl.sum(tl.load(x + c[:, None] * width + d[None, :], mask=here, other=0.0).to(tl.float32), 0)
    tl.store(out + segment * width + d, total.to(out.dtype.element_ty), mask=d < width)

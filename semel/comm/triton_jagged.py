"""The Triton path of ``jagged``: every re-index is a copy of ranges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
SPLIT = 8
"""Programs a row: histories are of very different lengths, and one program must not copy a long one alone."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def copy_ranges(values: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``values[starts[i]:starts[i] + lengths[i]]`` one after the other -> (values, [ranges + 1] offsets)."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    out = values.new_empty(int(offsets[-1]), *values.shape[1:])  # waits for the device: the size is not known before
    if out.numel():
        source = values.detach().contiguous()
        size = values.shape[1:].numel() * values.element_size()
        word = next(w for w in _WORDS if size % w.itemsize == 0 and source.data_ptr() % w.itemsize == 0)
        source, target = (x.reshape(-1).view(torch.int8).view(word) for x in (source, out))
        _copy_ranges[(len(starts), SPLIT)](source, starts, offsets, target, size // word.itemsize, BLOCK=BLOCK,
                                           SPLIT=SPLIT)
    return out, offsets


@triton.jit
def _copy_ranges(source, starts, offsets, out, width, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - first) * width
    start = tl.load(starts + row) * width
    for at in range(tl.program_id(1) * BLOCK, count, SPLIT * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(out + first * width + i, tl.load(source + start + i, mask=i < count), mask=i < count)

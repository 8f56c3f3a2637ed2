"""What the Triton kernels share: tiles of rows that end where a request ends, and how operands are fed to ``tl.dot``.

Imported only when a Triton path runs: importing this imports ``triton``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Under Triton's interpreter matrix products take float32 operands: numpy has no bfloat16 and is bad at float16."""


@dataclass(frozen=True)
class Tiles:
    """Tile t holds rows ``start[t]:stop[t]`` of request ``request[t]``; surplus tiles are empty. ``offsets`` [R + 1]:
    the tiles of each request."""

    request: Tensor
    start: Tensor
    stop: Tensor
    offsets: Tensor

    @property
    def count(self) -> int:
        return len(self.request)


def tiles(offsets: Tensor, rows: int, block: int, per: int = 1) -> Tiles:
    """Cuts each request's rows into tiles of ``block``. ``per`` rows lie at each of the places that ``offsets`` counts;
    ``rows`` in all. How many tiles there are is known to the device only: waiting for it would cost more than the at
    most R surplus ones, which return at once."""
    requests = len(offsets) - 1
    bounds = (offsets.long() * per).clamp(0, rows)
    lengths = bounds[1:] - bounds[:-1]
    counts = (lengths + block - 1) // block
    tile_offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    t = torch.arange(triton.cdiv(rows, block) + requests, device=offsets.device)
    request = torch.searchsorted(tile_offsets[1:], t, right=True)
    mine = request.clamp(max=requests - 1)
    start = torch.minimum(bounds[mine] + (t - tile_offsets[mine]) * block, bounds[mine + 1])
    stop = torch.minimum(start + block, bounds[mine + 1])
    return Tiles(mine.int(), start, torch.where(request < requests, stop, start), tile_offsets)


def precision(x: Tensor) -> str:
    """How ``tl.dot`` multiplies float32: as torch's own matrix products are allowed to on this device."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def fitting(width: int, least: int, most: int) -> int:
    """The power of two that holds ``width``, within bounds: tiles are no larger than what they hold."""
    return max(least, min(most, triton.next_power_of_2(max(width, 1))))

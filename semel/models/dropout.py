"""Dropout whose random bits cost an eighth: a byte an element decides, not a number of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from semel.models.randomness import generator


class Dropout(nn.Module):
    """``nn.Dropout`` with the chance rounded to 1/256. What stays is divided by the share that really stays, so the
    expectation is exact."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"a dropout of {p} is not in [0, 1)")
        self.dropped = min(round(p * 256), 255)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.dropped:
            return x
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device)
        words.random_(-(2 ** 63), None, generator=generator())
        kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= self.dropped
        return x * (kept.to(x.dtype) * (256 / (256 - self.dropped)))

    def extra_repr(self) -> str:
        return f"p={self.dropped / 256}"

"""How the learning rate goes."""

from __future__ import annotations

import math

from semel.training.recipe import OptimizerConfig


def rate_at(config: OptimizerConfig, step: int, done: float) -> float:
    """The share of the learning rate at a step (from 0), when a share ``done`` of all batches lies behind: a linear
    warm-up, times a constant, a line to zero, or half a cosine to zero (Loshchilov & Hutter, ICLR 2017, equation 5,
    without restarts)."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "linear":
        return warm * max(0.0, 1.0 - done)
    if config.schedule == "cosine":
        return warm * (1.0 + math.cos(math.pi * min(done, 1.0))) / 2
    return warm

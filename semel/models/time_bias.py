"""Time buckets: how far apart two events are, in steps that widen with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TIME_BUCKETS = 64

TIME_BOUNDS = (0, *(math.ceil(1e6 * 2 ** (bucket / 1.5)) for bucket in range(1, TIME_BUCKETS)))
"""Least distance of each bucket in microseconds: whole numbers, so that every way to look one up agrees."""


def time_bucket(delta: Tensor) -> Tensor:
    """Microseconds between two events -> int32 bucket ``floor(1.5 * log2(seconds))``, 0 under a second, at most
    TIME_BUCKETS - 1: a minute is 8, an hour 17, a day 24, a year 37."""
    bounds = torch.tensor(TIME_BOUNDS[1:], device=delta.device)
    return torch.bucketize(delta.abs(), bounds, out_int32=True, right=True)

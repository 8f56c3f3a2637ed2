"""What compiled loops on a CPU share: how they are compiled and shared out to threads, and their exponential."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.extending import overload


def kernel(function: Any) -> Any:
    """``function`` compiled at its first call; other threads run meanwhile."""
    # Reassociation and fused multiply-add let sums use whole vectors; infinities and NaN keep their meaning.
    how: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
    try:
        return numba.njit(cache=True, **how)(function)
    except RuntimeError:  # no folder to keep compiled code in: compile once a process
        return numba.njit(**how)(function)


def shared_out(part: Callable[[int], None], threads: int) -> None:
    """``part(0)`` to ``part(threads - 1)`` side by side, the first in the calling thread."""
    running = [_pool(threads).submit(part, number) for number in range(1, threads)]
    part(0)
    for other in running:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="semel-compiled")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind in the parent


def exp(x):
    """For use in a ``kernel``: e to the power x, in whole vectors."""
    return math.exp(x)


@overload(exp, inline="always")
def _exp_by_type(x):
    if x != numba.float32:
        return lambda x: np.exp(x)
    # 2**n * 2**f with n an integer and |f| <= 1/2, 2**f by its power series to f**6. It errs by 3e-7 of itself near 0
    # and 4e-6 at 80 (float32 rounds x / ln 2), and unlike a call of the C library it runs a whole vector at a time.
    f32, i32 = np.float32, np.int32
    per_power, low, high, half = f32(1 / math.log(2)), f32(-126), f32(127), f32(0.5)
    c1, c2, c3, c4, c5, c6 = (f32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))
    one, bias, mantissa = f32(1), i32(127), i32(23)

    def fast(x):
        power = min(max(x * per_power, low), high)
        whole = np.floor(power + half)
        f = power - whole
        series = one + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
        return series * i32((i32(whole) + bias) << mantissa).view(f32)

    return fast

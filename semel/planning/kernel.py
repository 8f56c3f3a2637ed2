"""Compiled loops of this package."""

from __future__ import annotations

from typing import Any

import numba


def kernel(function: Any) -> Any:
    """Compiled at the first call and kept on disk, where there is a folder for it. Divisions are not checked."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def inner(function: Any) -> Any:
    """The same for what only other kernels call: without the code that Python would call it through, it compiles in
    half the time."""
    njit: Any = numba.njit  # its declared types do not know the last two
    return njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)

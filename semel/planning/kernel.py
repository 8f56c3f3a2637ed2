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

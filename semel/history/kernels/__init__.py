"""The compiled loops, over arrays and addresses; they know no files. ``kernel`` compiles one."""

from __future__ import annotations

from typing import Any

import numba


def kernel(function: Any) -> Any:
    """Compiled at the first call, kept on disk, and run without the interpreter's lock."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep compiled code in: compile once a process
        return numba.njit(nogil=True)(function)

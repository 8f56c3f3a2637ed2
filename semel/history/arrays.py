"""Arrays as kernels take them."""

from __future__ import annotations

import numpy as np


def frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view: kernels are compiled for read-only inputs (mapped files are), and nobody may write them."""
    view = array.view()
    view.flags.writeable = False
    return view


def bits(array: np.ndarray) -> np.ndarray:
    """The values, flat, as unsigned integers, so that kernels are compiled once a width and not once a dtype."""
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")

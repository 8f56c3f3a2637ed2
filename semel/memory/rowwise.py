"""Linear maps whose result for a row depends on that row alone, to the bit.

BLAS sums in an order that depends on how many rows a matrix has and on where among them a row stands, so what is
computed once and kept would differ in its last bits from what is computed again beside other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from semel.memory.index import kernel


@kernel()
def _rows_times(x, weight, out):
    """``out[n] += x[n] @ weight`` [K, O], the terms added one after the other."""
    for n in range(len(x)):
        row = out[n]
        for k in range(x.shape[1]):
            value, column = x[n, k], weight[k]
            for o in range(len(row)):
                row[o] += value * column[o]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` on the host, without gradients: ``x`` [..., K], ``weight`` [O, K] -> [..., O]."""
    flat = np.ascontiguousarray(x.detach().reshape(-1, x.shape[-1]).numpy())
    across = np.ascontiguousarray(weight.detach().numpy().T)
    out = np.zeros((len(flat), len(weight)), flat.dtype)
    if bias is not None:
        out += bias.detach().numpy()
    _rows_times(flat, across, out)
    return torch.from_numpy(out).reshape(*x.shape[:-1], len(weight))


class Rowwise(TorchFunctionMode):
    """Within it every ``torch.nn.functional.linear``, those of ``nn.Linear`` among them, is the one of this module."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return linear(*given, **(named or {}))
        return function(*given, **(named or {}))

"""Offsets: who belongs to whom, and the checks of what a caller hands in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def require_alike(kernel: str, **tensors: Tensor | None) -> None:
    """All of one type, on one device: a kernel converts nothing silently."""
    given = {name: x for name, x in tensors.items() if x is not None}
    (first, x), *others = given.items()
    if not x.is_floating_point():
        raise ValueError(f"{kernel}: {first} is {x.dtype}; give a floating-point tensor")
    for name, y in others:
        if y.dtype != x.dtype or y.device != x.device:
            raise ValueError(f"{kernel}: {name} is {y.dtype} on {y.device} but {first} is {x.dtype} on {x.device}; "
                             "convert one")


def require_offsets_shape(kernel: str, name: str, offsets: Tensor, requests: int) -> None:
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{kernel}: {name} is {offsets.dtype} with shape {list(offsets.shape)}; give int64 [R + 1]")
    if offsets.shape[0] != requests + 1:
        raise ValueError(f"{kernel}: {name} has {offsets.shape[0]} entries but there are {requests} requests; "
                         f"give R + 1 = {requests + 1}, the first 0 and the last the number of rows")


def require_offsets(kernel: str, name: str, offsets: Tensor, requests: int, x: Tensor, of: str) -> None:
    """Offsets that rise from 0 to the rows of ``x``. Their values are read where that is free, on a CPU; on a device it
    would wait for all work before it, so there only shape and device are looked at: wrong values give wrong rows, but
    never a row outside of ``x`` (``owners`` and the Triton paths stay within)."""
    require_offsets_shape(kernel, name, offsets, requests)
    if offsets.device != x.device:
        raise ValueError(f"{kernel}: {name} is on {offsets.device} but {of} on {x.device}; move one to the other")
    if offsets.device.type != "cpu":
        return
    rows = len(x)
    bounds = offsets.numpy()
    if bounds[0] != 0:
        raise ValueError(f"{kernel}: {name}[0] is {bounds[0]}; offsets start at 0")
    if bounds[-1] != rows:
        raise ValueError(f"{kernel}: {name} ends at {bounds[-1]} but {of} has {rows} rows; "
                         "the last offset must be the number of rows")
    falls = bounds[1:] < bounds[:-1]
    if falls.any():
        r = int(np.argmax(falls))
        raise ValueError(f"{kernel}: {name} falls from {bounds[r]} to {bounds[r + 1]} at request {r}; "
                         "offsets never fall")


def owners(offsets: Tensor, rows: int) -> Tensor:
    """[rows] int64: the request of each candidate, without a device having to say how many there are."""
    if offsets.device.type == "cpu":
        return torch.repeat_interleave(offsets[1:] - offsets[:-1], output_size=rows).long()
    places = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:], places, right=True).clamp(max=len(offsets) - 2)

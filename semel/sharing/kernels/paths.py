"""Which path a kernel takes, decided in one place."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_TRITON_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def uses_triton(x: Tensor) -> bool:
    """Triton on CUDA (and ROCm) devices, for types that its matrix products take; torch operations elsewhere."""
    return x.is_cuda and x.dtype in _TRITON_TYPES and _triton_serves(x.device)


@cache
def _triton_serves(device: torch.device) -> bool:
    if find_spec("triton") is None:
        warnings.warn("semel.sharing.kernels: no Triton, so CUDA runs plain torch operations; "
                      "pip install 'semel[triton]' for the fused kernels", stacklevel=2)
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 7:
        warnings.warn(f"semel.sharing.kernels: {device} has compute capability {major}.{minor}, Triton needs 7.0: "
                      "it runs plain torch operations", stacklevel=2)
        return False
    return True

"""Kernels against their plain forms, on each path: what all tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from semel.sharing.kernels import paths

EXACT = 1e-12
"""float64 on the plain path: error over the largest value."""

TIMES_OWN = 2.0
"""Triton's error against float64 truth over the plain form's own error in the same type ..."""

FLOOR = 1e-6
"""... or this much of the largest value, where the plain form happens to be exact."""

both_paths = pytest.mark.parametrize("path", [
    "plain",
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
])

counts = st.lists(st.integers(0, 4), min_size=0, max_size=4)
"""Candidates, or history tokens, of each request."""


@contextmanager
def running(path: str) -> Iterator[torch.device]:
    """Where to put tensors so that kernels take this path: Triton runs natively on CUDA, else under its interpreter."""
    if path == "plain":
        yield torch.device("cpu")
        return
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    import triton

    assert triton.knobs.runtime.interpret, "tests/conftest.py sets TRITON_INTERPRET before triton is imported"
    before = paths.uses_triton
    paths.uses_triton = lambda x: x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    try:
        yield torch.device("cpu")
    finally:
        paths.uses_triton = before


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def draw(seed: int, *shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor], offsets: Sequence[Tensor], dtype: torch.dtype,
            device: torch.device) -> list[Tensor]:
    """The output and the gradients of all inputs, for a gradient that is the same for all who ask."""
    leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    out = function(*leaves, *(o.to(device) for o in offsets))
    down = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    grads = [None] * len(leaves)
    if out.requires_grad:
        grads = torch.autograd.grad(out, leaves, down.to(device, dtype), allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach().cpu().double() for x in (out, *filled)]


def assert_equal(path: str, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor],
                 offsets: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Output and gradients: float64 within EXACT on the plain path, else as near to the truth as the plain form is."""
    cpu = torch.device("cpu")
    exact = path == "plain" and dtype == torch.float32
    truth = results(plain, inputs, offsets, torch.float64, cpu)
    with running(path) as device:
        got = results(kernel, inputs, offsets, torch.float64 if exact else dtype, device)
    own = truth if exact else results(plain, inputs, offsets, dtype, cpu)
    for name, x, y, z in zip(["output", *(f"gradient of input {i}" for i in range(len(inputs)))], got, truth, own,
                             strict=True):
        assert x.shape == y.shape, name
        if not x.numel():
            continue
        scale = y.abs().max()
        allowed = EXACT * scale if exact else TIMES_OWN * (z - y).abs().max() + FLOOR * scale
        assert (x - y).abs().max() <= allowed, f"{name}: {(x - y).abs().max():.2e} over {allowed:.2e}"

"""Which path runs: every kernel, forward and backward, reaches Triton where Triton serves."""

from importlib import import_module

import pytest
import torch
from kernel_checks import offsets_of, running

from semel.sharing import kernels
from semel.sharing.kernels import paths


class ReachedError(Exception):
    pass


def reached(*_):
    raise ReachedError


def run(name):
    o = offsets_of([2, 1])
    c, r = torch.ones(3, 2, 4, requires_grad=True), torch.ones(2, 2, 4, requires_grad=True)
    w = torch.ones(5, 2, requires_grad=True)
    out = {
        "gather_add": lambda: kernels.gather_add(c, r, o),
        "linear_compression": lambda: kernels.linear_compression(w, w, c, r, o),
        "pair_interaction": lambda: kernels.pair_interaction(r, c, o).cross,
        "broadcast_attention": lambda: kernels.broadcast_attention(c.unsqueeze(1), c, c, o, o),
    }[name]()
    out.sum().backward()


@pytest.mark.parametrize(("kernel", "room", "function"), [
    ("gather_add", "triton_gather", "gather_add"),
    ("gather_add", "triton_gather", "segment_sum"),
    ("linear_compression", "triton_linear", "linear_compression"),
    ("linear_compression", "triton_linear", "weight_grad"),
    ("pair_interaction", "triton_pairs", "multiply"),
    ("pair_interaction", "triton_pairs", "multiply_sum"),
    ("broadcast_attention", "triton_attention", "history_forward"),
    ("broadcast_attention", "triton_attention", "history_backward"),
])
def test_triton_is_reached_where_it_serves_and_only_there(kernel, room, function, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(import_module(f"semel.sharing.kernels.{room}"), function, reached)
    run(kernel)
    monkeypatch.setattr(paths, "uses_triton", lambda x: True)
    with pytest.raises(ReachedError):
        run(kernel)


def test_a_cpu_runs_torch_operations():
    assert not paths.uses_triton(torch.zeros(1))


def test_doubles_and_wide_heads_run_torch_operations_on_every_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert not paths.uses_triton(torch.zeros(1, dtype=torch.float64, device="cuda"))
    with running("triton") as device:
        q = torch.ones(1, 1, 1, 300, device=device)
        out = kernels.broadcast_attention(q, q[0], q[0], offsets_of([1]).to(device), offsets_of([1]).to(device))
    torch.testing.assert_close(out, q)

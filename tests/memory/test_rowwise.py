"""What is computed of a row has the same bits wherever the row stands and whatever stands beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semel.memory import ItemMemory, MemoryLayer
from semel.memory.folded import fold
from semel.memory.rowwise import Rowwise, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_linear_map(dtype):
    x, weight, bias = torch.randn(5, 3, 7, dtype=dtype), torch.randn(4, 7, dtype=dtype), torch.randn(4, dtype=dtype)
    torch.testing.assert_close(linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(linear(x, weight), nn.functional.linear(x, weight))
    assert linear(x[:0], weight, bias).shape == (0, 3, 4)
    with torch.no_grad(), Rowwise():
        layer = nn.Linear(7, 4).to(dtype)
        assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))


@settings(max_examples=25, deadline=None)
@given(dim=st.integers(1, 20), fuse=st.sampled_from(["gate", "sum", "mlp"]), seed=st.integers(0, 1000),
       rows=st.lists(st.integers(0, 99), min_size=1, max_size=120))
def test_a_folded_row_depends_on_itself_alone(dim, fuse, seed, rows):
    torch.manual_seed(seed)
    always_on = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, dim))
    layer = MemoryLayer(nn.Identity(), ItemMemory(1, dim), always_on, fuse=fuse)
    x, cached, hit = torch.randn(100, 5), 3 * torch.randn(100, dim), torch.rand(100) < 0.7
    whole = fold(layer, lambda: x, cached, hit)
    some = torch.tensor(rows)
    part = fold(layer, lambda: x[some], cached[some], hit[some])
    assert torch.equal(part, whole[some])
    layer.eval()
    with torch.no_grad():
        np.testing.assert_allclose(whole, layer.fused(cached, always_on(x), hit), rtol=0, atol=2e-5)

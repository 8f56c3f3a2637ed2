"""Promise 7, of the memory: every item gets an embedding, whatever the memory lacks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semel.memory import ItemMemory, MemoryLayer

DIM = 4


@settings(max_examples=60, deadline=None)
@given(known=st.lists(st.integers(-5, 20), max_size=12), asked=st.lists(st.integers(-5, 20), max_size=12),
       capacity=st.integers(1, 6), fuse=st.sampled_from(["gate", "sum", "mlp"]),
       reads=st.sampled_from(["live", "cached"]), gone=st.lists(st.integers(-5, 20), max_size=5))
def test_every_item_is_scored(known: list[int], asked: list[int], capacity: int, fuse, reads, gone: list[int]) -> None:
    torch.manual_seed(0)
    layer = MemoryLayer(nn.Linear(2, DIM), ItemMemory(capacity, DIM), nn.Linear(1, DIM), fuse=fuse, reads=reads)
    item = torch.tensor(known, dtype=torch.int64)
    if known:
        layer(item, item[:, None].repeat(1, 2).float(), item[:, None].float())
    layer.memory.delete(gone)
    layer.eval()
    item = torch.tensor(asked, dtype=torch.int64)
    out = layer(item, None, item[:, None].float())
    assert out.shape == (len(asked), DIM) and bool(out.isfinite().all())
    for i, one in enumerate(asked):  # and an item's does not depend on who else is asked for
        alone = layer(item[i:i + 1], None, item[i:i + 1, None].float())
        torch.testing.assert_close(out[i:i + 1], alone)
        assert one == asked[i]

"""``MemoryLayer``: trained with its tower, served from its memory, never without an embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from semel.memory import FoldedMemory, ItemMemory, MemoryLayer, QuantizedMemory, pool

DIM, ITEMS = 6, 20


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(4, DIM), 0

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        self.rows += len(features["x"])
        return self.linear(features["x"])


def made(fuse: str = "gate", reads: str = "live", miss_rate: float = 0.0) -> tuple[MemoryLayer, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = MemoryLayer(Counted(), ItemMemory(50, DIM), nn.Linear(2, DIM), fuse=fuse, reads=reads,  # type: ignore[arg-type]
                        miss_rate=miss_rate)
    return layer, torch.randn(ITEMS, 4), torch.randn(ITEMS, 2)


def call(layer: MemoryLayer, x: Tensor, a: Tensor, item: Tensor) -> Tensor:
    return layer(item, {"x": x[item]} if layer.training else None, a[item])


@pytest.mark.parametrize("fuse", ["gate", "sum", "mlp"])
def test_serving_sees_what_training_wrote(fuse: str) -> None:
    layer, x, a = made(fuse)
    item = torch.tensor([3, 5, 3, 7, 5])
    trained = call(layer, x, a, item)
    assert layer.item_tower.rows == 3 and len(layer.memory) == 3
    layer.eval()
    served = call(layer, x, a, item)
    assert layer.item_tower.rows == 3  # the tower did not run
    assert torch.equal(trained, served)
    assert torch.equal(layer.memory.read([3, 5, 7])[0], layer.item_tower.linear(x[[3, 5, 7]]))


@pytest.mark.parametrize("fuse", ["gate", "sum", "mlp"])
@pytest.mark.parametrize("reads", ["live", "cached"])
def test_gradients_are_those_of_the_formula(fuse: str, reads: str) -> None:
    layer, x, a = made(fuse, reads)
    item = torch.tensor([1, 2, 1])
    call(layer, x, a, item)
    layer.zero_grad()
    call(layer, x, a, item).square().sum().backward()
    got = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    live = layer.item_tower.linear(x[item])
    base = layer.always_on(a[item])
    one = torch.ones(3, 1)
    if fuse == "sum":
        out = live + base
    elif fuse == "mlp":
        out = layer.join(torch.cat([live, base, one], 1))
    else:
        gate = torch.sigmoid(layer.join(torch.cat([live, base, one], 1)))
        out = gate * live + (1 - gate) * base
    out.square().sum().backward()  # the rows were written by the same weights: cached equals live
    expected = [p.grad for p in layer.parameters() if p.grad is not None]
    assert len(got) == len(expected) > 2
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_cached_reads_see_the_row_of_before() -> None:
    layer, x, a = made("sum", "cached")
    item = torch.tensor([4])
    first = call(layer, x, a, item)
    assert torch.equal(first, layer.always_on(a[item]))  # no row yet: what is always on
    before = layer.memory.read(item)[0]
    with torch.no_grad():
        layer.item_tower.linear.weight.mul_(2)
    second = call(layer, x, a, item)
    torch.testing.assert_close(second, before + layer.always_on(a[item]))
    assert not torch.equal(layer.memory.read(item)[0], before)
    second.sum().backward()
    assert layer.item_tower.linear.weight.grad.abs().sum() > 0


def test_a_hidden_row_is_a_miss() -> None:
    layer, x, a = made("gate", miss_rate=1.0)
    item = torch.arange(10)
    torch.testing.assert_close(call(layer, x, a, item), layer.always_on(a[item]))
    assert len(layer.memory) == 10  # written all the same
    half, x, a = made("sum", miss_rate=0.5)
    item = torch.zeros(2000, dtype=torch.int64)
    out = call(half, x, a, item)
    alone = (out - half.always_on(a[item])).abs().sum(1) == 0
    assert 0.45 < alone.float().mean() < 0.55


@pytest.mark.parametrize("fuse", ["gate", "sum", "mlp"])
def test_every_item_has_an_embedding(fuse: str) -> None:
    layer, x, a = made(fuse)
    call(layer, x, a, torch.arange(5))
    layer.eval()
    out = call(layer, x, a, torch.arange(ITEMS))
    assert out.isfinite().all()
    if fuse != "mlp":
        torch.testing.assert_close(out[5:], layer.always_on(a[5:]))


def test_the_pool_takes_new_items_first_then_the_oldest_rows() -> None:
    layer, x, _ = made()
    for now, items in ((100, [3, 1]), (200, [2]), (50, [0])):
        layer.refresh(torch.tensor(items), {"x": x[items]}, now=now)
    catalogue = torch.tensor([0, 1, 2, 3, 9, 8])
    assert pool(layer.memory, catalogue, 5, now=300).tolist() == [9, 8, 0, 1, 3]
    assert pool(layer.memory, catalogue, 0).tolist() == []
    with pytest.raises(ValueError, match="budget must be 0 or more"):
        pool(layer.memory, catalogue, -1)


def test_refreshing_has_no_gradient_and_no_step() -> None:
    layer, x, _ = made()
    layer.refresh(torch.tensor([1, 1, 2]), {"x": x[[1, 1, 2]]})
    assert len(layer.memory) == 2 and int(layer.step) == 0
    layer.refresh(torch.empty(0, dtype=torch.int64), {"x": x[:0]})


def test_save_and_load_gives_the_same_bits(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    layer, x, a = made()
    for step in range(3):
        call(layer, x, a, torch.tensor([step, step + 1]))
    save_file({k: v.clone() for k, v in layer.state_dict().items()}, tmp_path / "m.safetensors")
    other, _, _ = made()
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    layer.eval(), other.eval()
    assert torch.equal(call(layer, x, a, torch.arange(ITEMS)), call(other, x, a, torch.arange(ITEMS)))


@pytest.mark.parametrize(("change", "message"), [
    ({"fuse": "concat"}, 'fuse must be "gate"'), ({"reads": "both"}, 'reads must be "live"'),
    ({"miss_rate": 1.5}, "miss_rate must be from 0 to 1"),
])
def test_bad_settings(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryLayer(nn.Identity(), ItemMemory(2, 2), nn.Identity(), **change)


def test_shapes_that_do_not_fit_are_named() -> None:
    layer, x, a = made()
    with pytest.raises(ValueError, match="2 items need features of as many rows"):
        layer(torch.tensor([1, 2]), None, a[:2])
    with pytest.raises(ValueError, match="2 items need features of as many rows, got"):
        layer(torch.tensor([1, 2]), {"x": x[:3]}, a[:2])
    with pytest.raises(ValueError, match=r"always_on returned \[3, 6\] for 2 rows"):
        layer(torch.tensor([1, 2]), {"x": x[:2]}, a[:3])


def test_quantized_rows_are_off_by_half_a_scale_at_most() -> None:
    torch.manual_seed(0)
    memory = ItemMemory(10_000, 64)
    vectors = torch.randn(9_000, 64) * torch.rand(9_000, 1) * 5
    vectors[7] = 0
    memory.write(torch.arange(9_000) * 3, vectors)
    small = QuantizedMemory(memory)
    out = torch.full((20_000, 64), float("nan"))
    got, hit = small.read(torch.arange(20_000), out)
    assert got is out and torch.equal(hit, (torch.arange(20_000) % 3 == 0))
    off = (got[hit] - vectors[:6_667]).abs().amax(1)
    assert (off <= vectors[:6_667].abs().amax(1) / 254 * 1.001).all() and off.max() <= small.error * 1.001
    assert not got[~hit].any()
    assert small.nbytes < 9_000 * 64 * 4 * 0.5
    empty, nothing = QuantizedMemory(ItemMemory(3, 4)).read([1, 2])
    assert not empty.any() and not nothing.any()


@pytest.mark.parametrize("fuse", ["gate", "sum", "mlp"])
def test_folded_rows_are_what_the_layer_returns(fuse: str) -> None:
    layer, x, a = made(fuse)
    call(layer, x, a, torch.arange(12))
    folded = FoldedMemory(layer, layer.memory, lambda items: a[items])
    layer.memory.changes()
    for change in range(3):
        call(layer, x, a, torch.arange(change, change + 5))
        layer.memory.delete([change])
        folded.update(layer.memory.changes())
        assert layer.training
        layer.eval()
        item = torch.randint(0, ITEMS, (40,))
        for _ in range(2):  # computed, then kept
            torch.testing.assert_close(folded.read(item), call(layer, x, a, item))
        layer.train()


def test_items_without_a_row_are_kept_but_never_in_place_of_rows() -> None:
    layer, x, a = made()
    call(layer, x, a, torch.arange(10))
    asked = []
    folded = FoldedMemory(layer, layer.memory, lambda items: asked.append(len(items)) or a[items % ITEMS], spare=4)
    layer.eval()
    for start in range(10, 40, 3):
        folded.read(torch.arange(start, start + 3))
        folded.read(torch.arange(start, start + 3))
    assert asked == [10, *[3] * 10] and len(folded.rows) <= 14
    torch.testing.assert_close(folded.read(torch.arange(10)), call(layer, x, a, torch.arange(10)))
    assert asked == [10, *[3] * 10]
    folded.forget(torch.tensor([38]))
    folded.read(torch.tensor([38, 39, 38]))
    assert asked[-1] == 1
    folded.read(torch.arange(100, 130))
    assert len(folded.rows) <= 14


def test_training_lowers_the_loss() -> None:
    layer, x, a = made(miss_rate=0.2)
    wanted = torch.randn(ITEMS, DIM)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(150):
        item = torch.randint(0, ITEMS, (32,))
        loss = (call(layer, x, a, item) - wanted[item]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])

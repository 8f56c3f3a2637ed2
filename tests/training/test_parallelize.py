"""Data parallelism for loops of one's own: weights that are copied and weights that are sharded."""

import numpy as np
import pytest
import torch
from torch import nn

from semel.comm.processes import join, spawn
from semel.training import Ranks, parallelize

pytestmark = pytest.mark.timeout(400)


class Blocks(nn.Module):
    """A model with layers in a list, as FSDP shards them one by one; ``forward`` of named inputs, as ``share`` asks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.last = nn.Linear(7, 1)

    def forward(self, user, item):
        x = self.first(user) * item
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.last(x)


def dense_losses(dense, mesh=None):
    """Unequal parts, six steps of AdamW: the losses, and the weights of the first layer."""
    rank = join().rank
    torch.manual_seed(0)
    model = Blocks()
    user, item, label = torch.randn(9, 3), torch.randn(9, 7), torch.randn(9, 1)
    if rank:
        nn.init.zeros_(model.first.weight)
    mine = slice(0, 2) if rank == 0 else slice(2, 9)
    parallel = parallelize(model, mesh, dense=dense)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        loss = ((parallel(user[mine], item[mine]) - label[mine]) ** 2).sum() / 9
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(Ranks().sum([loss.detach()])[0]))
    weight = model.first.weight
    kept = weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return {"losses": losses, "weight": whole.tolist(), "kept": kept}


def both_ways():
    join()
    import semel

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    found = {"ddp": dense_losses("ddp"), "fsdp": dense_losses("fsdp"), "fsdp on a mesh": dense_losses("fsdp", mesh)}
    model = Blocks()
    shared = semel.share(model, {"user": torch.randn(4, 3), "item": torch.randn(4, 7)}, request_inputs=["user"])
    try:
        parallelize(shared, dense="fsdp")
    except ValueError as error:
        found["shared"] = f"{type(error).__name__}: {error}"
    try:
        parallelize(model, dense="zero")
    except ValueError as error:
        found["unknown"] = str(error)
    return found


@pytest.fixture(scope="module")
def two():
    return spawn(both_ways, 2)


def test_weights_that_are_sharded_come_to_what_copies_come_to(two):
    for dense in two:
        assert dense["ddp"]["losses"][-1] < 0.9 * dense["ddp"]["losses"][0] and dense["ddp"]["kept"] == 21
        for way in ("fsdp", "fsdp on a mesh"):
            assert dense[way]["losses"] == pytest.approx(dense["ddp"]["losses"], rel=1e-5)
            np.testing.assert_allclose(dense[way]["weight"], dense["ddp"]["weight"], rtol=0, atol=1e-5)
        assert "SharingError" in dense["shared"] and "as FSDP does" in dense["shared"]
        assert "'zero'" in dense["unknown"]
    assert sum(dense["fsdp"]["kept"] for dense in two) == 21

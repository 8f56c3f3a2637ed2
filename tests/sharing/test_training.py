"""Training through the shared form: the model's gradients, statistics and parameters, in train and eval mode."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_models import MODELS, leaves, shared_of, sides
from torch import Tensor, nn

from semel.batch import RequestBatch
from semel.sharing import SharedModel, SharingError, share

RAGGED = [0, 3, 3, 7]


def loss_of(tree: Any) -> Tensor:
    return sum((leaf * torch.linspace(-1, 2, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)).sum()
               for leaf in leaves(tree))


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_the_models(name: str, train: bool) -> None:
    shared, draw = shared_of(name, train=train)
    for seen, offsets in enumerate(([0, 6], RAGGED, [0, 0, 2])):
        gradients_and_statistics_are_the_models(shared, draw, offsets)
        if name == "batch norm":
            assert int(shared.get_buffer("norm.num_batches_tracked")) == (seen + 1) * train


def gradients_and_statistics_are_the_models(shared: SharedModel, draw: Any, offsets: list[int]) -> None:
    other = copy.deepcopy(shared.original)
    inputs = sides(shared, draw, offsets)
    arguments, keywords = shared.signature.call(shared.repeated(*inputs))
    expected = gradients(other, loss_of(other(*arguments, **keywords)))
    got = gradients(shared, loss_of(shared(*inputs)))
    assert set(got) == set(expected) and sum(float(g.abs().max()) > 0 for g in expected.values()) > len(expected) / 2
    for parameter, gradient in expected.items():
        assert float((got[parameter] - gradient).abs().max()) <= 1e-9 * max(1.0, float(gradient.abs().max())), parameter
    for buffer, value in other.named_buffers():
        assert torch.allclose(shared.get_buffer(buffer).double(), value.double(), rtol=1e-12, atol=0), buffer


def test_losses_are_those_of_the_plain_loop() -> None:
    """Ten steps of Adam, BatchNorm's statistics between them; then both in eval mode."""
    shared, draw = shared_of("batch norm", train=True)
    other = copy.deepcopy(shared.original)
    optimizers = [torch.optim.Adam(m.parameters(), 0.05) for m in (shared, other)]
    losses: list[list[float]] = [[], []]
    for step in range(10):
        inputs = sides(shared, draw, RAGGED, seed=step)
        arguments, keywords = shared.signature.call(shared.repeated(*inputs))
        for i in range(2):
            optimizers[i].zero_grad()
            scores = other(*arguments, **keywords) if i else shared(*inputs)
            loss = ((scores - torch.linspace(0, 1, 7, dtype=torch.float64)) ** 2).mean()
            loss.backward()
            optimizers[i].step()
            losses[i].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-8) and losses[0][-1] < 0.8 * losses[0][0]
    shared.eval()
    other.eval()
    with torch.no_grad():
        assert torch.allclose(shared(*inputs), other(*arguments, **keywords), rtol=1e-9)


def test_modes_switch_and_see_the_same_parameters() -> None:
    shared, draw = shared_of("dropout")
    inputs = sides(shared, draw, RAGGED)
    before = shared(*inputs).detach()
    assert torch.equal(shared(*inputs), before)
    shared.train()
    assert shared.training and shared.original.training
    assert not torch.equal(shared(*inputs), before)
    with torch.no_grad():
        shared.get_parameter("mlp.2.bias").add_(1.0)
    shared.eval()
    assert torch.allclose(shared(*inputs), before + 1.0)
    with torch.no_grad():
        assert torch.allclose(shared.broadcast(*inputs), before + 1.0)


def test_a_state_does_not_outlive_its_mode() -> None:
    shared, draw = shared_of("dropout")
    request, candidate, at = sides(shared, draw, RAGGED)
    state = shared.request(request)
    shared.train()
    with pytest.raises(SharingError, match="before train"):
        shared.score(state, candidate, at)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return torch.cat([self.drop(user * self.scale), self.drop(item * self.scale)], 1)


def test_requests_are_dropped_once_and_candidates_each() -> None:
    """What a request's candidates share is dropped for all of them together; the share dropped is p on both sides."""
    shared = share(Dropped().train(), (torch.ones(4, 20), torch.ones(4, 20)), request_inputs=("user",))
    torch.manual_seed(5)
    inputs = {"user": torch.ones(50, 20)}, {"item": torch.ones(500, 20)}, torch.arange(0, 501, 10)
    user, item = shared(*inputs).split(20, 1)
    by_request = user.reshape(50, 10, 20)
    assert torch.equal(by_request, by_request[:, :1].expand(50, 10, 20))
    assert not torch.equal(by_request[0], by_request[1]) and not torch.equal(item[0], item[1])
    for dropped in (user, item):
        assert set(dropped.unique().tolist()) == {0.0, 2.0}
        assert 0.4 < float((dropped == 0).float().mean()) < 0.6
    assert not torch.equal(shared(*inputs)[:, :20], user)


def test_batch_norm_wants_two_candidates() -> None:
    shared, draw = shared_of("batch norm", train=True)
    before = {name: value.clone() for name, value in shared.named_buffers()}
    with pytest.raises(SharingError, match="one candidate has no variance"):
        shared(*sides(shared, draw, [0, 1]))
    assert shared(*sides(shared, draw, [0, 0])).shape == (0,)
    assert all(torch.equal(value, before[name]) for name, value in shared.named_buffers())


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user).detach() * self.item(item)).sum(1) + self.user(item).sum(1)


def test_detach_stops_gradients() -> None:
    model = Detached().double()
    draw = lambda rows, *_: {"user": torch.randn(rows, 3).double(), "item": torch.randn(rows, 3).double()}  # noqa: E731
    shared = share(model, draw(4), request_inputs=("user",))
    inputs = sides(shared, draw, RAGGED)
    got, expected = (gradients(model, loss_of(call(*inputs))) for call in (shared, shared.broadcast))
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=1e-9), name


# ------------------------------------------------------------------------------------------- parameters and copies
def test_state_dict_is_the_models_and_loads() -> None:
    shared, draw = shared_of("batch norm")
    assert set(shared.state_dict()) == set(shared.original.state_dict())
    inputs = sides(shared, draw, RAGGED)
    other, _ = shared_of("batch norm")
    new = {name: value * 2 for name, value in other.state_dict().items()}
    for assign in (False, True):
        before = shared(*inputs)
        missing = shared.load_state_dict(new, assign=assign)
        assert not missing.missing_keys and not missing.unexpected_keys
        assert not torch.equal(shared(*inputs), before)
        assert torch.allclose(shared(*inputs), shared.broadcast(*inputs), rtol=1e-9)
        new = {name: value / 3 for name, value in new.items()}
        assert all(a is b for a, b in zip(shared.parameters(), shared.original.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"norm\.weight"):
        shared.load_state_dict({k: v for k, v in new.items() if k != "norm.weight"})


def test_dtype_follows() -> None:
    shared, draw = shared_of("batch norm", torch.float32)
    optimizer = torch.optim.SGD(shared.parameters(), 0.1)
    assert shared.double() is shared
    inputs = sides(shared, draw, RAGGED)
    scores = shared(*inputs)
    assert scores.dtype == torch.float64
    assert torch.allclose(scores, shared.broadcast(*inputs), rtol=1e-12)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], shared.parameters(), strict=True))
    with pytest.raises(SharingError, match=r"must be torch\.float64"):
        shared(*sides(shared, draw, RAGGED, torch.float32))
    shared.to(torch.float32)
    inputs = sides(shared, draw, RAGGED, torch.float32)
    assert torch.allclose(shared(*inputs), shared.broadcast(*inputs), rtol=1e-5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
def test_copies_stand_alone(how: str) -> None:
    shared, draw = shared_of("cross")
    inputs = sides(shared, draw, RAGGED)
    before = leaves(shared(*inputs))
    if how == "deepcopy":
        other = copy.deepcopy(shared)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(shared))
    else:
        file = io.BytesIO()
        torch.save(shared, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, SharedModel)
    assert all(torch.equal(a, b) for a, b in zip(leaves(other(*inputs)), before, strict=True))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(leaves(shared(*inputs)), before, strict=True))
    changed = leaves(other(*inputs))
    assert not torch.equal(changed[0], before[0])
    expected = leaves(other.broadcast(*inputs))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(changed, expected, strict=True))


def test_functional_call() -> None:
    shared, draw = shared_of("towers")
    inputs = sides(shared, draw, RAGGED)
    twice = {name: p * 2 for name, p in shared.named_parameters()}
    got = torch.func.functional_call(shared, twice, inputs)
    expected = torch.func.functional_call(shared.original, twice, *_called(shared, inputs))
    assert torch.allclose(got, expected, rtol=1e-9)
    assert not torch.allclose(got, shared(*inputs))


def _called(shared: SharedModel, inputs: Any) -> tuple[Any, Any]:
    return shared.signature.call(shared.repeated(*inputs))


# ------------------------------------------------------------------------------------------------- RequestBatch
def test_a_request_batch_is_a_call() -> None:
    shared, draw = shared_of("pooled")
    request, candidate, at = sides(shared, draw, RAGGED)
    expected = shared(request, candidate, at)
    nested = {"features": {"history": request["features.history"]}, "user_id": torch.arange(3)}
    batch = RequestBatch(torch.arange(3), nested, {"features": {"item": candidate["features.item"]}}, at)
    assert torch.equal(shared(batch), expected)
    with pytest.raises(SharingError, match=r"lacks features.history; it has user_id"):
        shared(RequestBatch(torch.arange(3), {"user_id": torch.arange(3)}, batch.candidate, at))
    with pytest.raises(SharingError, match="pass it alone"):
        shared(batch, candidate)


# ------------------------------------------------------------------------------------------------- processes
DDP = """
import copy, sys, torch
import torch.distributed as dist
from shared_models import shared_of, sides

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
shared, draw = shared_of("layer norm", train=True)
alone = copy.deepcopy(shared)
wrapped = torch.nn.parallel.DistributedDataParallel(shared)
offsets = [[0, 3, 3, 7], [0, 5]]
losses = [(alone(*sides(alone, draw, o, seed=r)) ** 2).mean() for r, o in enumerate(offsets)]
(sum(losses) / 2).backward()
(wrapped(*sides(shared, draw, offsets[rank], seed=rank)) ** 2).mean().backward()
for (name, p), q in zip(shared.named_parameters(), alone.parameters()):
    assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12), name
assert float(shared.get_parameter("user.weight").grad.abs().max()) > 0
print("equal")
dist.destroy_process_group()
"""

FSDP = """
import sys, torch
import torch.distributed as dist
from shared_models import shared_of, sides
from semel.sharing import SharingError

which, port = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
shared, draw = shared_of("towers", torch.float32, train=True)
inputs = sides(shared, draw, [0, 3, 7], torch.float32)
mesh = torch.distributed.init_device_mesh("cpu", (1,))
class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = shared
    def forward(self, *inputs):
        return self.shared(*inputs)
holder = Holder()
try:
    if which == "fully_shard":
        torch.distributed.fsdp.fully_shard(shared, mesh=mesh)
    elif which == "fully_shard around":
        torch.distributed.fsdp.fully_shard(holder, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel
        shared = FullyShardedDataParallel(shared, device_id=torch.device("cpu"), use_orig_params=which == "FSDP1 orig")
    shared(*inputs)
except SharingError as error:
    print("refused:", error)
dist.destroy_process_group()
"""


def processes(script: str, arguments: list[list[str]], folder: Path) -> list[str]:
    (folder / "script.py").write_text(script)
    here = Path(__file__).parent
    running = [subprocess.Popen([sys.executable, "-W", "ignore", str(folder / "script.py"), *each], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env={"PYTHONPATH": f"{here.parents[1]}:{here}", "PATH": "/usr/bin:/bin",
                                     "OMP_NUM_THREADS": "1"}) for each in arguments]
    try:
        outputs = [process.communicate(timeout=110) for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), outputs
    return [out for out, _ in outputs]


def port() -> str:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_distributed_data_parallel(tmp_path: Path) -> None:
    at = port()
    assert processes(DDP, [["0", at], ["1", at]], tmp_path) == ["equal\n", "equal\n"]


@pytest.mark.parametrize("which", ["fully_shard", *(pytest.param(which, marks=pytest.mark.slow) for which in (
    "fully_shard around", "FSDP1", "FSDP1 orig"))])
def test_fsdp_is_refused(which: str, tmp_path: Path) -> None:
    (out,) = processes(FSDP, [[which, port()]], tmp_path)
    assert out.startswith("refused:") and "then wrap in DistributedDataParallel" in out, out

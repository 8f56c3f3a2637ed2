"""An exported graph without in-place operators, without a second trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from semel.sharing import share
from semel.sharing.functional import functional


class RunningSum(nn.Module):
    """What rankers write in place: logits that are added up, and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 1)
        self.relu, self.norm, self.drop = nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        x = torch.cat([u, c], 1).to(torch.float32)
        logit = x.sum(1, keepdim=True)
        before = logit * 2
        logit += self.second(self.drop(self.relu(self.norm(self.first(torch.flatten(x, 1))))))
        logit.add_(1.0)
        return logit.squeeze(1) + before.reshape(-1)


class Masked(nn.Module):
    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        scores = u * c
        scores.masked_fill_(scores < 0, -3.0)
        scores.unsqueeze_(1)
        return scores.sum(-1)


class ThroughView(nn.Module):
    """Writes into a view: the whole changes, also for who took it before."""

    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        x = u * c
        flat = x.view(-1, 4)
        flat += 1.0
        return x.sum(1) + flat.sum(1)


class UnderView(nn.Module):
    """Writes below a view that is read later."""

    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        x = u + c
        view = x[:, 1:]
        x.mul_(2.0)
        return view.sum(1)


class MaybeCopied(nn.Module):
    """Writes into what may or may not be a copy."""

    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        x = (u + c).transpose(0, 1)
        copy = x.contiguous()
        copy.mul_(2.0)
        return x.sum(0) + copy.sum(0)


class Narrow(nn.Module):
    """The sum keeps the dtype of what it is written into."""

    def forward(self, u: Tensor, c: Tensor) -> Tensor:
        x = (u * c).to(torch.float16)
        x += u
        return x.sum(1)


UNDERSTOOD = {"sum": (RunningSum, 3), "mask": (Masked, 4)}
NOT = {"through a view": (ThroughView, 4), "under a view": (UnderView, 4), "maybe copied": (MaybeCopied, 4),
       "narrow": (Narrow, 4)}


def exported(model: nn.Module, width: int) -> fx.Graph:
    rows = {0: torch.export.Dim("rows", min=2)}
    return torch.export.export(model, (torch.randn(3, width), torch.randn(3, width)), dynamic_shapes=(rows, rows),
                               strict=False).graph


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_writes_that_nothing_else_sees_become_functional(name: str) -> None:
    kind, width = UNDERSTOOD[name]
    graph = functional(exported(kind().eval(), width))
    assert graph is not None
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets and not any(getattr(t, "_schema", None) is not None and t._schema.is_mutable for t in targets)
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", NOT)
def test_writes_that_others_see_are_left_to_a_second_trace(name: str) -> None:
    kind, width = NOT[name]
    assert functional(exported(kind().eval(), width)) is None


def test_train_mode_is_left_to_a_second_trace() -> None:
    assert functional(exported(RunningSum().train(), 3)) is None


def test_a_graph_that_is_not_understood_is_left_as_it_was() -> None:
    graph = exported(MaybeCopied(), 4)
    before = [(node.name, node.target) for node in graph.nodes]
    assert functional(graph) is None
    assert [(node.name, node.target) for node in graph.nodes] == before


@pytest.mark.parametrize("name", [*UNDERSTOOD, *NOT])
def test_the_shared_form_is_the_model(name: str) -> None:
    kind, width = (UNDERSTOOD | NOT)[name]
    torch.manual_seed(0)
    model = kind().eval()
    shared = share(model, (torch.randn(3, width), torch.randn(3, width)), request_inputs=("u",), candidates_hint=4)
    shared.choices = {}
    u, c = torch.randn(1, width), torch.randn(5, width)
    torch.testing.assert_close(shared({"u": u}, {"c": c}, [0, 5]), model(u.expand(5, -1).clone(), c.clone()))


class Chunked(nn.Module):
    """As HSTU does it: one projection in chunks, gated. Ten units in four chunks are three, three, three and one."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.project, self.out = nn.Embedding(30, 6), nn.Linear(6, 10), nn.Linear(3, 1)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        x = torch.cat([self.items(history), self.items(candidate)[:, None]], 1)
        u, k, v, gate = torch.chunk(nn.functional.silu(self.project(x)), 4, dim=-1)
        weight = nn.functional.silu(u @ k.transpose(1, 2)) / x.shape[1]
        return self.out((weight @ v * gate)[:, -1]).squeeze(1)


@pytest.mark.parametrize("candidates", [7, 1, 0])
def test_chunks_of_one_request_equal_the_module(candidates: int) -> None:
    torch.manual_seed(0)
    model = Chunked().double().eval()
    form = share(model, (torch.randint(0, 30, (3, 5)), torch.arange(3)), request_inputs=("history",))
    form.choices = {}  # the shared form, however fast the original is at this size
    history, candidate = torch.randint(0, 30, (1, 5)), torch.arange(candidates) + 9
    with torch.no_grad():
        expected = model(history.expand(candidates, -1), candidate)
        found = form({"history": history}, {"candidate": candidate})
    assert found.shape == (candidates,)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_chunk_becomes_a_split_without_a_second_trace() -> None:
    rows = torch.export.Dim("rows", min=2)
    graph = torch.export.export(Chunked().eval(), (torch.randint(0, 30, (3, 5)), torch.arange(3)),
                                dynamic_shapes=({0: rows}, {0: rows}), strict=False).graph
    found = functional(graph)
    assert found is not None
    (split,) = (node for node in found.nodes if node.target is torch.ops.aten.split.Tensor)
    assert split.args[1:] == (3, -1)    # as ``chunk`` counts: 10 in 4 parts, rounded up
    assert all(node.target is not torch.ops.aten.chunk.default for node in found.nodes)

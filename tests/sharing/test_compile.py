"""``SharedModel.compile``: the same numbers and gradients, each stage compiled once whatever R and C."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shared_models import MODELS, leaves, shared_of, sides

from semel.sharing import SharingError


class Counting:
    """A backend that runs the graph as it is and counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled_of(name: str, **options: Any) -> tuple[Any, Any, Any]:
    torch._dynamo.reset()
    shared, draw = shared_of(name, train=name == "batch norm")
    plain = copy.deepcopy(shared)
    shared.compile(**options)
    return shared, plain, draw


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ("towers", "cross") else pytest.mark.slow)
                                  for name in MODELS])
def test_numbers_and_gradients_are_equal(name: str) -> None:
    shared, plain, draw = compiled_of(name, backend="aot_eager")
    for offsets in ([0, 6], [0, 3, 3, 7]):
        inputs = sides(shared, draw, offsets)
        got, expected = leaves(shared(*inputs)), leaves(plain(*inputs))
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-10)
        for module, outputs in ((shared, got), (plain, expected)):
            module.zero_grad()
            sum((out * out).sum() for out in outputs).backward()
        for (parameter, p), q in zip(shared.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-12), parameter
    for a, b in zip(shared.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("name", ["towers", "cross", "pooled"])
def test_each_stage_is_compiled_once(name: str) -> None:
    backend = Counting()
    shared, plain, draw = compiled_of(name, backend=backend)
    shared.eval()
    plain.eval()

    @torch.no_grad()
    def check(offsets: list[int]) -> None:
        inputs = sides(shared, draw, offsets)
        for a, b in zip(leaves(shared(*inputs)), leaves(plain(*inputs)), strict=True):
            assert torch.allclose(a, b, rtol=1e-10)

    check([0, 6])
    one = backend.graphs
    assert 2 <= one <= 3        # constants, request, candidate
    for offsets in ([0, 2], [0, 40], [0, 0]):
        check(offsets)
    assert backend.graphs == one
    check([0, 3, 3, 7])
    many = backend.graphs
    assert many == one + 2
    for offsets in ([0, 2, 9], [0, 0, 5, 30, 31], [0, 0, 0], [0, 1, 10, 20, 25, 26]):
        check(offsets)
    assert backend.graphs == many
    for offsets in ([0, 1], [0, 0, 1], [0, 1, 2], [0, 1, 1]):      # one candidate, one slot
        check(offsets)
    assert backend.graphs <= many + 3


def test_train_and_eval_are_both_compiled() -> None:
    backend = Counting()
    shared, plain, draw = compiled_of("batch norm", backend=backend)
    inputs = sides(shared, draw, [0, 3, 3, 7])
    for mode in (True, False):
        before = backend.graphs
        outputs = [module.train(mode)(*inputs) for module in (shared, plain)]
        assert torch.allclose(*outputs, rtol=1e-10)
        assert backend.graphs > before


def test_compiled_ways_are_timed_anew() -> None:
    backend = Counting()
    shared, plain, draw = compiled_of("cross", backend=backend)
    shared.eval()
    assert not shared.choices
    shared.choose([4])
    assert shared.choices and backend.graphs >= 3       # request, candidate, original
    for way in ("original", "shared"):
        shared.way = lambda *_, way=way: way
        inputs = sides(shared, draw, [0, 3, 3, 7])
        for a, b in zip(leaves(shared(*inputs)), leaves(plain.eval().broadcast(*inputs)), strict=True):
            assert torch.allclose(a, b, rtol=1e-10)
    assert set(shared.state_dict()) == set(shared.original.state_dict())


def test_a_compiled_form_can_be_saved(tmp_path: Any) -> None:
    from semel.sharing import load

    shared, _, draw = compiled_of("towers", backend="eager")
    inputs = sides(shared, draw, [0, 3, 3, 7])
    with torch.no_grad():
        expected = shared(*inputs)
        shared.save(tmp_path / "saved", backend="export")
        assert torch.allclose(load(tmp_path / "saved")(*inputs), expected)
    with pytest.raises(SharingError, match="lack item"):
        shared(inputs[0], {}, inputs[2])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["cross", "batch norm"])
def test_the_default_backend(name: str) -> None:
    shared, plain, draw = compiled_of(name)
    for offsets in ([0, 6], [0, 3, 3, 7], [0, 1]):
        inputs = sides(shared, draw, offsets if name == "cross" or offsets != [0, 1] else [0, 2])
        for a, b in zip(leaves(shared(*inputs)), leaves(plain(*inputs)), strict=True):
            assert torch.allclose(a, b, rtol=1e-9)

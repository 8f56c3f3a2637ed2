"""Promise 3 on models that nobody here wrote: the shared form gives the unmodified model's outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.zoo import zoo
from benchmarks.zoo_model import ZooModel, broadcast, split_inputs
from semel.sharing import SharedModel, SharingError, share
from semel.sharing.choice import Choice

REFUSED = {     # what torch.export does not take, and why
    "deepctr.DIEN": "data-dependent",
    "deepctr.DIEN-AUGRU": "data-dependent",
    "rechub.DIEN": "data-dependent",
}
MODELS = zoo(small=True)
TAKEN = [pytest.param(name, marks=[] if name.startswith("own") else pytest.mark.slow)
         for name in MODELS if name not in REFUSED]
OFFSETS = {"one request": [0, 5], "one candidate": [0, 1], "ragged": [0, 3, 3, 7], "each its own": [0, 1, 2, 3, 4],
           "the first empty": [0, 0, 6]}


@pytest.fixture(scope="module", params=TAKEN)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ZooModel, SharedModel]]:
    model = MODELS[request.param]()
    if model.float64:
        model = model.double()
    yield model, share(model.module, model.example_inputs(4), request_inputs=model.request_inputs, candidates_hint=4)


def taking(shared: SharedModel, way: str) -> SharedModel:
    """Every call is computed in this way, whatever was fastest; else a test might compare the original with itself."""
    shared.choices = {(what, many): (Choice(4, way if many else "shared", {}),)
                      for what in ("call", "score") for many in (False, True)}
    return shared


def inputs(model: ZooModel, offsets: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    request, _ = split_inputs(model, model.example_inputs(len(offsets) - 1, seed=11))
    _, candidate = split_inputs(model, model.example_inputs(int(offsets[-1]), seed=12))
    return request, candidate


def expected_of(model: ZooModel, request: dict[str, Any], candidate: dict[str, Any], offsets: Tensor) -> Tensor:
    naive = broadcast(model, request, candidate, offsets)
    if int(offsets[-1]) > 1 or model.batch_of_one:
        return model.module(*naive)
    twice = torch.utils._pytree.tree_map(lambda x: torch.cat([x, x]), naive)
    return model.module(*twice)[:1]


def close(model: ZooModel, got: Tensor, expected: Tensor, float64: float = 1e-10) -> None:
    scale = float(expected.abs().max().clamp(min=1e-6))
    worst = float((got - expected).abs().max())
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert worst <= (float64 * max(scale, 1.0) if model.float64 else 1e-5 * scale), worst


@pytest.mark.parametrize("way", ["shared", "each"])
@pytest.mark.parametrize("case", OFFSETS)
def test_outputs_equal(pair: tuple[ZooModel, SharedModel], case: str, way: str) -> None:
    model, shared = pair[0], taking(pair[1], way)
    offsets = torch.tensor(OFFSETS[case])
    request, candidate = inputs(model, offsets)
    with torch.no_grad():
        expected = expected_of(model, request, candidate, offsets)
        close(model, shared(request, candidate, offsets), expected)
        close(model, shared.score(shared.request(request), candidate, offsets), expected)
    assert len(expected) == 1 or float(expected.std()) > 1e-4, "equal whatever the inputs: the test would see nothing"


@pytest.mark.parametrize("case", ["one request", "ragged"])
def test_gradients_equal(pair: tuple[ZooModel, SharedModel], case: str) -> None:
    model, shared = pair[0], taking(pair[1], "shared")
    offsets = torch.tensor(OFFSETS[case])
    request, candidate = inputs(model, offsets)
    naive = broadcast(model, request, candidate, offsets)
    weight = torch.randn(model.module(*naive).shape, generator=torch.Generator().manual_seed(3),
                         dtype=next(model.module.parameters()).dtype)

    def gradients(scores: Tensor) -> dict[str, Tensor | None]:
        model.module.zero_grad()
        (scores * weight).sum().backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}

    expected = gradients(model.module(*naive))
    got = gradients(shared(request, candidate, offsets))
    assert sum(g is not None and bool(g.abs().max() > 0) for g in expected.values()) > len(expected) / 2
    for name, gradient in expected.items():
        theirs = got[name]
        if gradient is None or theirs is None:      # a parameter that no output depends on
            assert gradient is None or float(gradient.abs().max()) == 0, name
            assert theirs is None or float(theirs.abs().max()) == 0, name
        else:
            close(model, theirs, gradient, float64=1e-9)


def test_nothing_to_score(pair: tuple[ZooModel, SharedModel]) -> None:
    model, shared = pair[0], taking(pair[1], "shared")
    tail = model.module(*model.example_inputs(2)).shape[1:]
    request, candidate = inputs(model, torch.tensor([0, 3, 5]))
    none = torch.utils._pytree.tree_map(lambda x: x[:0], candidate)
    with torch.no_grad():
        assert shared(request, none, torch.tensor([0, 0, 0])).shape == (0, *tail)
        one = torch.utils._pytree.tree_map(lambda x: x[:1], request)
        assert shared(one, none, torch.tensor([0, 0])).shape == (0, *tail)
        nobody = torch.utils._pytree.tree_map(lambda x: x[:0], request)
        assert shared(nobody, none, torch.tensor([0])).shape == (0, *tail)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name in REFUSED])
def test_the_rest_is_refused_with_a_reason(name: str) -> None:
    model = MODELS[name]()
    with pytest.raises(SharingError, match=REFUSED[name]) as error:
        share(model.module, model.example_inputs(4), request_inputs=model.request_inputs)
    assert "dien.py" in str(error.value)        # the place

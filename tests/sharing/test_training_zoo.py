"""Train mode on models that nobody here wrote: gradients and running statistics are the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import zoo
from benchmarks.zoo_model import ZooModel, broadcast, split_inputs
from semel.sharing import share

pytestmark = pytest.mark.slow

MODELS = zoo(small=True)
TAKEN = [name for name in MODELS if "DIEN" not in name]


def without_dropout(module: nn.Module) -> None:
    """What is drawn at random cannot be compared."""
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        if isinstance(getattr(each, "dropout", None), float):
            each.dropout = 0.0


def learned(model: nn.Module, scores: Tensor) -> dict[str, Tensor]:
    """Gradients and buffers after a step's backward."""
    model.zero_grad()
    (scores * torch.linspace(-1, 2, scores.numel(), dtype=scores.dtype).reshape(scores.shape)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return found | {name: b.double().clone() for name, b in model.named_buffers() if name.endswith(kept)}


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", TAKEN)
def test_a_training_step_is_the_models(name: str) -> None:
    model: ZooModel = MODELS[name]()
    if model.float64:
        model = model.double()
    without_dropout(model.module)
    model.module.train()
    other = copy.deepcopy(model.module)
    shared = share(model.module, model.example_inputs(4), request_inputs=model.request_inputs)
    offsets = torch.tensor([0, 3, 3, 7])
    request, _ = split_inputs(model, model.example_inputs(3, seed=11))
    _, candidate = split_inputs(model, model.example_inputs(7, seed=12))
    expected = learned(other, first(other(*broadcast(model, request, candidate, offsets))))
    got = learned(shared, first(shared(request, candidate, offsets)))
    assert sum(float(value.abs().max()) > 0 for value in expected.values()) > len(expected) / 2
    tolerance = 1e-9 if model.float64 else 1e-4
    for key, value in expected.items():
        theirs = got.get(key, torch.zeros(()))      # a parameter that no output depends on
        assert float((theirs - value).abs().max()) <= tolerance * max(1.0, float(value.abs().max())), key

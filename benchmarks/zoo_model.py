"""What a model of the zoo is, and the naive way to serve it: its request inputs repeated for every candidate.

A model of the zoo is one that nobody here wrote (or a plain one, in ``zoo_own``), unmodified, with weights that are
worth comparing: every parameter and BatchNorm statistic is random, none is zero, and no output is saturated, so that
a difference anywhere shows in the output.

``request_inputs`` names the request side as ``semel.share`` takes it:

* ``("user", "history")``          names of ``forward``'s parameters;
* ``("x.user_id", "x.history")``   leaves of a nested input: the keys that lead to the leaf, joined by dots;
* ``{"X": [0, 1, 5]}``             columns (axis 1) of one wide matrix, in the order of the request side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

RequestInputs = tuple[str, ...] | dict[str, Sequence[int]]
Draw = Callable[[int, torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True)
class Size:
    """Widths of every model of the zoo. The default is the one that Semel's results are stated for."""

    request_fields: int = 80
    candidate_fields: int = 20
    request_dense: int = 6
    candidate_dense: int = 2
    width: int = 32                         # of an embedding, K
    towers: tuple[int, ...] = (512, 256)
    history: int = 50
    vocabulary: int = 1000
    field_aware_vocabulary: int = 100       # models with an embedding for each pair of fields
    maps: tuple[int, int] = (256, 128)      # feature maps of xDeepFM
    heads: int = 4
    experts: int = 4
    low_rank: int = 32
    interest: tuple[int, ...] = (64, 16)    # hidden units of DIN's attention

    @property
    def fields(self) -> int:
        return self.request_fields + self.candidate_fields


SMALL = Size(request_fields=6, candidate_fields=3, request_dense=2, candidate_dense=1, width=4, towers=(16, 8),
             history=5, vocabulary=20, field_aware_vocabulary=20, maps=(8, 6), heads=2, experts=2, low_rank=3,
             interest=(8, 4))


@dataclass(frozen=True)
class ZooModel:
    """An unmodified model, how to draw valid inputs for it, and which of them belong to the request."""

    name: str
    module: nn.Module
    draw: Draw
    request_inputs: RequestInputs
    float64: bool = True                    # False: the model hard-codes float32 somewhere
    batch_of_one: bool = True               # False: the model itself fails at batch size 1
    note: str = ""

    def example_inputs(self, batch: int, seed: int = 0) -> tuple[Any, ...]:
        """Positional inputs of ``batch`` rows; floating-point ones in the dtype of the parameters."""
        inputs = self.draw(batch, torch.Generator().manual_seed(seed))
        dtype = next(p.dtype for p in self.module.parameters())
        return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)

    def double(self) -> ZooModel:
        """The same in float64, in place."""
        self.module.double()
        return replace(self)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return type(tree)(map_tensors(function, value) for value in tree)


def parameter_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def split_inputs(model: ZooModel, inputs: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(request, candidate)``: each a dict by parameter name of what ``inputs`` holds of that side, rows unchanged."""
    request: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    for name, value in zip(parameter_names(model.module), inputs, strict=False):
        if isinstance(model.request_inputs, dict) and name in model.request_inputs:
            columns = list(model.request_inputs[name])
            request[name] = value[:, columns]
            candidate[name] = value[:, [c for c in range(value.shape[1]) if c not in set(columns)]]
        elif isinstance(value, dict):
            for key, leaf in value.items():
                side = request if f"{name}.{key}" in model.request_inputs else candidate
                side.setdefault(name, {})[key] = leaf
        else:
            (request if name in model.request_inputs else candidate)[name] = value
    return request, candidate


def broadcast(model: ZooModel, request: dict[str, Any], candidate: dict[str, Any], offsets: Tensor) -> tuple[Any, ...]:
    """Positional inputs of the unmodified model: every request's row repeated for each of its candidates.

    ``request`` has ``R`` rows, ``candidate`` has ``C``; candidates of request ``r`` are rows ``offsets[r]`` to
    ``offsets[r + 1]``.
    """
    rows = torch.repeat_interleave(offsets[1:] - offsets[:-1])
    repeated = map_tensors(lambda x: x.index_select(0, rows), request)
    inputs = []
    for name in parameter_names(model.module):
        if name in repeated and name in candidate:
            if isinstance(candidate[name], dict):
                inputs.append(repeated[name] | candidate[name])
            else:
                assert isinstance(model.request_inputs, dict)
                columns = list(model.request_inputs[name])
                width = repeated[name].shape[1] + candidate[name].shape[1]
                wide = candidate[name].new_empty(len(candidate[name]), width)
                wide[:, columns] = repeated[name]
                wide[:, [c for c in range(width) if c not in set(columns)]] = candidate[name]
                inputs.append(wide)
        elif name in repeated or name in candidate:
            inputs.append(repeated.get(name, candidate.get(name)))
    return tuple(inputs)


@torch.no_grad()
def settle(model: ZooModel, seed: int = 0) -> ZooModel:
    """Random weights and statistics, in eval mode, scaled so that probabilities are not saturated.

    Embeddings start at standard deviation 1 and are halved until nine in ten outputs lie within 0.02 and 0.98 (models
    that return logits: within 4 of zero).
    """
    generator = torch.Generator().manual_seed(seed)
    module = model.module.eval()
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator)

    for parameter in module.parameters():
        if id(parameter) in embeddings:
            parameter.copy_(normal(parameter.shape))
        elif parameter.dim() < 2:
            parameter.add_(0.1 * normal(parameter.shape))
        else:
            fan = max(parameter.shape[-2:]) if parameter.dim() < 4 else parameter[0].numel()
            parameter.copy_(normal(parameter.shape) / fan**0.5)
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
            assert m.running_var is not None
            m.running_mean.copy_(0.1 * normal(m.running_mean.shape))
            m.running_var.copy_(0.5 + torch.rand(m.running_var.shape, generator=generator))
    for _ in range(12):
        scores = module(*model.example_inputs(64, seed))
        scores = scores[0] if isinstance(scores, tuple) else scores
        if not bool(torch.isfinite(scores).all()):
            inside = 0.0
        elif float(scores.min()) >= 0 and float(scores.max()) <= 1:
            inside = float(((scores > 0.02) & (scores < 0.98)).float().mean())
        else:
            inside = float((scores.abs() < 4).float().mean())
        if inside > 0.9:
            return model
        for m in module.modules():
            if isinstance(m, nn.Embedding):
                m.weight.mul_(0.5)
    raise ValueError(f"{model.name}: outputs stay saturated or not finite, whatever the scale of its embeddings")

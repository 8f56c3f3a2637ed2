"""Small models, and how they are compared with their shared form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from semel.sharing import SharedModel, share

RAGGED = (0, 3, 3, 7)


class Function(nn.Module):
    """``function(module, *inputs)`` as a model, with ``parts`` as its parameters and modules."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) and part.is_floating_point() else part)

    def forward(self, user: Tensor, item: Tensor) -> Any:
        return self.function(self, user, item)


def normal(*shape: int, seed: int = 0, scale: float = 0.5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def spread(rows: Tensor, offsets: Sequence[int]) -> Tensor:
    """A request's row for each of its candidates."""
    return rows.repeat_interleave(torch.tensor(offsets).diff(), 0)


def shared_form(function: Callable[..., Any], user: Tensor, item: Tensor, **parts: Any) -> SharedModel:
    """``function`` as a model, shared from two rows like ``user`` and ``item``, in eval mode."""
    model = Function(function, **parts).to(user.dtype if user.is_floating_point() else torch.float64).eval()
    example = tuple(torch.cat([x[:1], x[:1]]) if len(x) < 2 else x[:2] for x in (user, item))
    return untimed(model, example, request_inputs=("user",))


def untimed(*args: Any, **kwargs: Any) -> SharedModel:
    """``share`` whose result is always computed the shared way, however fast the original is."""
    with mock.patch.object(SharedModel, "choose"):
        return share(*args, **kwargs)


def check(function: Callable[..., Any], user: Tensor, item: Tensor, offsets: Sequence[int] = RAGGED, *,
          tolerance: float = 1e-10, gradients: bool = True, **parts: Any) -> SharedModel:
    """Outputs and gradients of the shared form of ``function`` against its own, many requests and one."""
    shared = shared_form(function, user, item, **parts)
    for requests, at in ((user, offsets), (user[:1], (0, len(item)))):
        outputs = shared({"user": requests}, {"item": item}, torch.tensor(at))
        expected = shared.original(spread(requests, at), item)
        close(outputs, expected, tolerance)
        if gradients and any(p.requires_grad for p in shared.parameters()):
            close(derivatives(shared, outputs), derivatives(shared, expected), tolerance * 10)
    return shared


def close(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    mine, theirs = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = max(float(b.detach().abs().max()), 1.0) if b.numel() else 1.0
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0, equal_nan=True)


def derivatives(shared: SharedModel, outputs: Any) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the outputs, by parameter."""
    names, parameters = zip(*shared.named_parameters(), strict=True)
    total = sum((t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape)).sum()
                for t in torch.utils._pytree.tree_leaves(outputs))
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def costs(shared: SharedModel) -> tuple[float, float, float]:
    """FLOPs per request, per candidate, and per candidate before."""
    total = shared.explain().total
    return total.flops_request, total.flops_candidate, total.flops_before


Inputs = Mapping[str, Any]

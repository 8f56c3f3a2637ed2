"""Promises 3 and 4 on models drawn from a grammar: the shared form is the model, and no candidate knows another.

A model is two sides' fields, joined in any order, and a list of layers, each of which maps fields ``[B, F, D]`` to
fields: linear layers over fields or widths, norms, crosses, attention, gates, pairs folded back. Outputs and gradients
of the shared form are compared with the model's own in float64, for several requests with candidates of any number.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "sharing"))
from models import close, derivatives, normal, spread, untimed

WIDTH = 4
LAYERS = ("relu", "field_linear", "width_linear", "flat_linear", "layer_norm", "field_norm", "batch_norm", "cross",
          "vector_cross", "low_rank_cross", "experts", "attention", "masked_attention", "silu_attention", "gate",
          "scalar_gate", "pairs", "compression", "pool", "softmax", "permute", "conv", "residual")


class Layer(nn.Module):
    """One word of the grammar: ``[B, F, D]`` (and the first fields ``[B, F0, D]``) to ``[B, F', D]``."""

    def __init__(self, kind: str, fields: int, seed: int) -> None:
        super().__init__()
        self.kind, self.fields = kind, fields
        n, d = fields * WIDTH, WIDTH

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(normal(*shape, seed=seed + sum(shape), scale=shape[-1] ** -0.5))

        self.out = {"pool": 2, "compression": 3}.get(kind, fields)
        if kind in ("flat_linear", "cross", "gate", "residual"):
            self.w, self.b = weight(n, n), weight(n)
        elif kind in ("width_linear", "field_linear", "compression"):
            self.b = weight(d)
            self.w = weight(d, d) if kind == "width_linear" else weight(self.out, fields)
        elif kind in ("layer_norm", "field_norm"):
            self.w, self.b = (weight(n), weight(n)) if kind == "layer_norm" else (weight(d), weight(d))
        elif kind == "batch_norm":
            self.norm = nn.BatchNorm1d(fields).double()
            self.norm.running_mean.copy_(normal(fields, seed=seed))     # type: ignore[union-attr]
            self.norm.running_var.copy_(normal(fields, seed=seed).square() + 0.5)   # type: ignore[union-attr]
        elif kind in ("vector_cross", "scalar_gate"):
            self.w, self.b = weight(n), weight(n)
        elif kind == "low_rank_cross":
            self.w, self.b, self.u = weight(2, n), weight(n), weight(n, 2)
        elif kind == "experts":
            self.w, self.b, self.u, self.g = weight(2, n, 2), weight(n), weight(2, 2, n), weight(2, n)
        elif "attention" in kind:
            self.w, self.b, self.u = weight(d, d), weight(d, d), weight(d, d)
        elif kind == "pairs":
            self.w = weight(n, max(fields * (fields - 1) // 2, 1))
        elif kind == "conv":
            self.mix = nn.Conv1d(fields, fields, 1).double()

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return getattr(self, self.kind)(x, x0)

    def relu(self, x: Tensor, x0: Tensor) -> Tensor:
        return torch.relu(x)

    def field_linear(self, x: Tensor, x0: Tensor) -> Tensor:
        return torch.matmul(self.w, x) + self.b

    compression = field_linear

    def width_linear(self, x: Tensor, x0: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w, self.b)

    def flat_linear(self, x: Tensor, x0: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), self.w, self.b).view(-1, self.fields, WIDTH)

    def residual(self, x: Tensor, x0: Tensor) -> Tensor:
        return x + torch.tanh(self.flat_linear(x, x0))

    def layer_norm(self, x: Tensor, x0: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.flatten(1), [self.fields * WIDTH], self.w, self.b).view_as(x)

    def field_norm(self, x: Tensor, x0: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, [WIDTH], self.w, self.b)

    def batch_norm(self, x: Tensor, x0: Tensor) -> Tensor:
        return self.norm(x)

    def _first(self, x: Tensor, x0: Tensor) -> Tensor:
        return (x0 if x0.shape == x.shape else x).flatten(1)

    def cross(self, x: Tensor, x0: Tensor) -> Tensor:
        return (self._first(x, x0) * nn.functional.linear(x.flatten(1), self.w, self.b) + x.flatten(1)).view_as(x)

    def vector_cross(self, x: Tensor, x0: Tensor) -> Tensor:
        flat = x.flatten(1)
        return (self._first(x, x0) * (flat @ self.w)[:, None] + self.b + flat).reshape(x.shape)

    def low_rank_cross(self, x: Tensor, x0: Tensor) -> Tensor:
        flat = x.flatten(1)
        return (self._first(x, x0) * (flat @ self.w.T @ self.u.T + self.b) + flat).unflatten(1, (self.fields, WIDTH))

    def experts(self, x: Tensor, x0: Tensor) -> Tensor:
        flat = x.flatten(1)
        inner = torch.tanh(torch.einsum("bn,enr->ber", flat, self.w))
        outer = torch.einsum("ber,ern->ben", inner, self.u) + self.b
        gate = torch.softmax(flat @ self.g.T, 1)
        return (flat + (gate[:, :, None] * (self._first(x, x0)[:, None] * outer)).sum(1)).view_as(x)

    def attention(self, x: Tensor, x0: Tensor) -> Tensor:
        q, k, v = x @ self.w, x @ self.b, x @ self.u
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def masked_attention(self, x: Tensor, x0: Tensor) -> Tensor:
        """Two heads, put before the batch; a field sees those before it."""
        heads = [torch.stack((x @ w).split(WIDTH // 2, 2)) for w in (self.w, self.b, self.u)]
        scores = heads[0] @ heads[1].transpose(2, 3)
        mask = torch.ones(self.fields, self.fields, dtype=torch.bool).tril()
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        return torch.cat((weights @ heads[2]).unbind(0), 2)

    def silu_attention(self, x: Tensor, x0: Tensor) -> Tensor:
        return nn.functional.silu((x @ self.w) @ (x @ self.b).transpose(1, 2)) @ (x @ self.u) / self.fields

    def gate(self, x: Tensor, x0: Tensor) -> Tensor:
        return x * torch.sigmoid(self.flat_linear(x, x0).mean(2, keepdim=True))

    def scalar_gate(self, x: Tensor, x0: Tensor) -> Tensor:
        return x * torch.sigmoid(x.flatten(1) @ self.w)[:, None, None]

    def pairs(self, x: Tensor, x0: Tensor) -> Tensor:
        if self.fields < 2:
            return x
        i, j = torch.triu_indices(self.fields, self.fields, 1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, i, j]
        return x + nn.functional.linear(dots, self.w).view_as(x)

    def pool(self, x: Tensor, x0: Tensor) -> Tensor:
        return torch.stack([x.mean(1), x.amax(1)], 1)

    def softmax(self, x: Tensor, x0: Tensor) -> Tensor:
        return torch.softmax(x, 1) * x

    def permute(self, x: Tensor, x0: Tensor) -> Tensor:
        return x[:, torch.arange(self.fields - 1, -1, -1)]

    def conv(self, x: Tensor, x0: Tensor) -> Tensor:
        return self.mix(x)


class Grammar(nn.Module):
    """``order``: where the request's fields (0) and the candidate's (1) come, in the joined ones."""

    def __init__(self, order: list[int], layers: list[str], head: bool) -> None:
        super().__init__()
        self.order = order
        fields, made = len(order), []
        for place, kind in enumerate(layers):
            made.append(Layer(kind, fields, 31 * place))
            fields = made[-1].out
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(fields * WIDTH, 1).double() if head else None

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        sides = [iter(user.unbind(1)), iter(item.unbind(1))]
        x = x0 = torch.stack([next(sides[side]) for side in self.order], 1)
        for layer in self.layers:
            x = layer(x, x0)
        return x if self.head is None else self.head(x.flatten(1)).squeeze(1)


@st.composite
def grammars(draw: st.DrawFn, most: int) -> tuple[list[int], list[str], bool]:
    order = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=2, max_size=6).filter(lambda o: len(set(o)) == 2))
    return order, draw(st.lists(st.sampled_from(LAYERS), min_size=1, max_size=most)), draw(st.booleans())


def holds(spec: tuple[list[int], list[str], bool], counts: list[int], chosen: int) -> None:
    """Both promises, of the model of ``spec`` and requests that have ``counts`` candidates."""
    order, layers, head = spec
    torch.manual_seed(0)
    model = Grammar(order, layers, head).eval()
    fields = [order.count(0), order.count(1)]
    user, item = normal(len(counts), fields[0], WIDTH, seed=1), normal(sum(counts), fields[1], WIDTH, seed=2)
    example = tuple(normal(2, f, WIDTH, seed=5) for f in fields)
    shared = untimed(model, example, request_inputs=("user",))
    offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
    at = torch.tensor(offsets)
    got = shared({"user": user}, {"item": item}, at)
    if not len(item):       # some models cannot be asked
        assert got.shape == (0, *model(spread(user, [0, 2]) if len(user) == 1 else user, example[1].expand(
            2 if len(user) == 1 else len(user), -1, -1)).shape[1:])
        return
    expected = model(spread(user, offsets), item)
    close(got, expected)
    if any(True for _ in model.parameters()):
        close(derivatives(shared, got), derivatives(shared, expected), 1e-9)
    # alone and among others
    request = max(range(len(counts)), key=lambda r: counts[r])
    rows = slice(offsets[request], offsets[request + 1])
    if counts[request]:
        one = offsets[request] + chosen % counts[request]
        alone = shared({"user": user[request : request + 1]}, {"item": item[one : one + 1]})
        close(alone, got[one : one + 1])
        changed = item.clone()
        changed[one] += 1.0
        moved = shared({"user": user}, {"item": changed}, at)
        still = torch.arange(len(item)) != one
        close(moved[still], got[still])
        close(shared({"user": user[request : request + 1]}, {"item": item[rows]}), got[rows])


COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(spec=grammars(3), counts=COUNTS, chosen=st.integers(0, 9))
def test_small_models(spec: tuple[list[int], list[str], bool], counts: list[int], chosen: int) -> None:
    holds(spec, counts, chosen)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=grammars(5), counts=COUNTS, chosen=st.integers(0, 9))
def test_many_models(spec: tuple[list[int], list[str], bool], counts: list[int], chosen: int) -> None:
    holds(spec, counts, chosen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", LAYERS)
def test_each_layer_before_and_behind_a_linear_one(kind: str) -> None:
    for layers in ([kind, "flat_linear", "relu"], ["flat_linear", kind], [kind, kind]):
        holds(([0, 1, 0, 0], layers, True), [3, 0, 2], 1)

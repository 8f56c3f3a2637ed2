"""The identities of exact sharing, each as a model given to ``share``: equal outputs and gradients, fewer FLOPs.

Flat vectors of 160 + 12, 20 + 3 fields of width 8, a layer of 6 behind, depth 3, two experts of rank 3. With ``N``
candidates a request, what is done once per request counts for a ``N``-th.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from models import check, costs, normal, untimed
from torch import Tensor, nn

DC, DI, MC, MI, K, H, DEPTH, RANK, EXPERTS = 160, 12, 20, 3, 8, 6, 3, 3, 2
D, M, N = DC + DI, MC + MI, 512


@dataclass(frozen=True)
class Identity:
    """``most``: FLOPs a candidate, a ``N``-th of those a request included, of those before, that may be left."""

    model: Callable[..., Any]
    most: float
    fields: bool = False
    parts: Callable[[], dict[str, Any]] = field(default=dict)


def both(user: Tensor, item: Tensor) -> Tensor:
    return torch.cat([user, item], 1)


def layer(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    with torch.no_grad():
        made.weight.copy_(normal(outputs, inputs, seed=seed, scale=inputs**-0.5))
        made.bias.copy_(normal(outputs, seed=seed + 1, scale=0.1))
    return made


def layers(n: int, inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList(layer(inputs, outputs, seed) for seed in range(n))


def fc(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return w.fc(both(user, item))


def norm_fc(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return w.fc(w.norm(both(user, item)))


def scaled_norm() -> nn.LayerNorm:
    made = nn.LayerNorm(D)
    with torch.no_grad():
        made.weight.copy_(1 + normal(D, seed=3))
        made.bias.copy_(normal(D, seed=4))
    return made


def fm_scalar(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = both(user, item)
    return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1)


def fm_pairs(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = both(user, item)
    i, j = torch.triu_indices(M, M, 1)
    return (x @ x.transpose(1, 2))[:, i, j].sum(1)


def fm_pairs_fc(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = both(user, item)
    i, j = torch.triu_indices(M, M, 1)
    return w.fc((x @ x.transpose(1, 2))[:, i, j])


def wukong(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = both(user, item)
    return w.fc((x @ (x.transpose(1, 2) @ w.p)).flatten(1))


def cross_v1(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = x0 = both(user, item)
    for k in range(DEPTH):
        x = x0 * (x @ w.w[k])[:, None] + w.b[k] + x
    return w.fc(x)


def cross_v2_first(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = both(user, item)
    return x * w.cross[0](x) + x


def cross_v2(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = x0 = both(user, item)
    for cross in w.cross:
        x = x0 * cross(x) + x
    return w.fc(x)


def cross_mix(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = x0 = both(user, item)
    for k in range(DEPTH):
        gate = torch.softmax(x @ w.g[k].T, 1)
        inner = torch.tanh(torch.einsum("bd,edr->ber", x, w.v[k]))
        inner = torch.tanh(torch.einsum("ber,ers->bes", inner, w.c[k]))
        outer = torch.einsum("bes,eds->bed", inner, w.u[k])
        x = x + (gate[:, :, None] * (x0[:, None] * (outer + w.b[k]))).sum(1)
    return x


def cross_mix_fc(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return w.fc(cross_mix(w, user, item))


def mix_parts() -> dict[str, Any]:
    return {"u": normal(DEPTH, EXPERTS, D, RANK, seed=1, scale=RANK**-0.5),
            "v": normal(DEPTH, EXPERTS, D, RANK, seed=2, scale=D**-0.5),
            "c": normal(DEPTH, EXPERTS, RANK, RANK, seed=3, scale=RANK**-0.5), "b": normal(DEPTH, D, seed=4, scale=0.1),
            "g": normal(DEPTH, EXPERTS, D, seed=5, scale=D**-0.5), "fc": layer(D, H)}


def isolated_cross(w: Any, user: Tensor, item: Tensor) -> Tensor:
    """rDCN: request rows see request rows only."""
    c, i = user, item
    for own, mixed in zip(w.request, w.candidate, strict=True):
        c, i = user * own(c) + c, item * mixed(torch.cat([c, i], 1)) + i
    return w.fc(torch.cat([c, i], 1))


def attend(w: Any, queries: Tensor, tokens: Tensor) -> Tensor:
    scores = w.q(queries) @ w.k(tokens).transpose(1, 2) * K**-0.5
    return torch.softmax(scores, 2) @ w.v(tokens)


def attention(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return attend(w.attention[0], both(user, item), both(user, item))


def isolated_attention(w: Any, user: Tensor, item: Tensor) -> Tensor:
    c, i = user, item
    for block in w.attention:
        c, i = c + attend(block, c, c), i + attend(block, i, both(c, i))
    return i.flatten(1)


def cross_attention(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return attend(w.attention[0], item, user)


def silu_attention(w: Any, user: Tensor, item: Tensor) -> Tensor:
    tokens, block = both(user, item), w.attention[0]
    return torch.nn.functional.silu(block.q(item) @ block.k(tokens).transpose(1, 2)) @ block.v(tokens)


class Projections(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.q, self.k, self.v = layer(K, K, seed), layer(K, K, seed + 1), layer(K, K, seed + 2)


def attention_parts() -> dict[str, Any]:
    return {"attention": nn.ModuleList([Projections(0), Projections(3)])}


IDENTITIES = {
    "FC": Identity(fc, 0.10, parts=lambda: {"fc": layer(D, H)}),
    "FC behind LayerNorm": Identity(norm_fc, 0.10, parts=lambda: {"fc": layer(D, H), "norm": scaled_norm()}),
    "FM, scalar form": Identity(fm_scalar, 0.20, True),
    "FM, explicit pairs": Identity(fm_pairs, 0.20, True),
    "FM, pairs and FC": Identity(fm_pairs_fc, 0.40, True, lambda: {"fc": layer(M * (M - 1) // 2, H)}),
    "Wukong": Identity(wukong, 0.30, True, lambda: {"p": normal(M, 3, seed=5), "fc": layer(3 * M, H)}),
    "DCN v1, all depths": Identity(cross_v1, 0.22, parts=lambda: {
        "w": normal(DEPTH, D, seed=1, scale=D**-0.5), "b": normal(DEPTH, D, seed=2, scale=0.1), "fc": layer(D, H)}),
    "DCNv2, first layer": Identity(cross_v2_first, 0.10, parts=lambda: {"cross": layers(1, D, D)}),
    "DCNv2, all depths": Identity(cross_v2, 0.05, parts=lambda: {"cross": layers(DEPTH, D, D), "fc": layer(D, H)}),
    "DCN-Mix, all depths": Identity(cross_mix, 0.60, parts=mix_parts),
    "DCN-Mix, all depths, and FC": Identity(cross_mix_fc, 0.20, parts=mix_parts),
    "rDCN": Identity(isolated_cross, 0.02, parts=lambda: {
        "request": layers(DEPTH, DC, DC), "candidate": layers(DEPTH, D, DI), "fc": layer(D, H)}),
    "self-attention, first layer": Identity(attention, 0.55, True, attention_parts),
    "isolated attention, two layers": Identity(isolated_attention, 0.40, True, attention_parts),
    "attention to the request": Identity(cross_attention, 0.35, True, attention_parts),
    "SiLU attention": Identity(silu_attention, 0.45, True, attention_parts),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_equal_and_cheaper(name: str) -> None:
    identity = IDENTITIES[name]
    user = normal(3, MC, K, seed=8) if identity.fields else normal(3, DC, seed=8)
    item = normal(7, MI, K, seed=9) if identity.fields else normal(7, DI, seed=9)
    shared = check(identity.model, user, item, **identity.parts())
    request, candidate, before = costs(shared)
    left = (candidate + request / N) / before
    assert candidate > 0 and (request > 0 or name == "FM, scalar form")
    assert left <= identity.most, f"{left:.3f} of the FLOPs are left"


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(800, 800) for _ in range(3))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = x0 = torch.cat([user, item], 1)
        for cross in self.cross:
            x = x0 * cross(x) + x
        return x.sum(1)


def test_the_cost_of_crossing_is_that_of_the_derivation() -> None:
    """640 + 160 columns, three layers: 3.84 M before; by the derivation 0.92 M, and 0.49 G once a request."""
    torch.manual_seed(0)
    example = (torch.randn(2, 640), torch.randn(2, 160))
    shared = untimed(Cross(), example, request_inputs=("user",), candidates_hint=1000)
    request, candidate, before = costs(shared)
    products = 3 * 2 * 800**2
    assert products <= before <= products * 1.01
    assert (candidate + request / 1000) / before <= 0.39
    few = untimed(Cross(), example, request_inputs=("user",), candidates_hint=16)
    assert few.explain().ratio(16) >= 1.0       # it does not pay then, and is not done
    assert few.explain().ratio(1000) < shared.explain().ratio(1000)

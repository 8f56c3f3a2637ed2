"""Plain models in the form in which rankers are usually written: every input at the batch size of the candidates.

They know nothing of requests and use nothing of Semel. Sources: DLRM, Naumov et al. 2019 (as TorchRec lays it out:
dense architecture, sparse architecture, dot interaction, over architecture); DCNv2, Wang et al. 2021; a transformer
with a causal mask, the request's tokens first; HSTU, Zhai et al. 2024 (SiLU attention); Wukong, Zhang et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo_model import Size, ZooModel

CROSS_REQUEST, CROSS_CANDIDATE = 1600, 160      # widths of DCNv2's two inputs at the stated configuration


def mlp(width: int, hidden: tuple[int, ...], out: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, out))


class DLRM(nn.Module):
    """``dense`` ``[B, features]`` and ``ids`` ``[B, fields]`` -> logits ``[B]``; request and candidate by column."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size.vocabulary, size.width) for _ in range(size.fields))
        self.dense = mlp(size.request_dense + size.candidate_dense, size.towers[-1:], size.width)
        fields = size.fields + 1
        self.register_buffer("pairs", torch.triu_indices(fields, fields, offset=1), persistent=False)
        self.over = mlp(size.width + fields * (fields - 1) // 2, size.towers)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.dense(dense)
        sparse = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        fields = torch.stack([bottom, *sparse], dim=1)
        dots = torch.bmm(fields, fields.transpose(1, 2))
        return self.over(torch.cat([bottom, dots[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


class DCNv2(nn.Module):
    """Stacked: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, then an MLP; two inputs ``[B, width]`` -> ``[B]``."""

    def __init__(self, request: int, candidate: int, towers: tuple[int, ...], layers: int = 3) -> None:
        super().__init__()
        width = request + candidate
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = mlp(width, towers)

    def forward(self, request: Tensor, candidate: Tensor) -> Tensor:
        x0 = x = torch.cat([request, candidate], dim=1)
        for linear in self.cross:
            x = x0 * linear(x) + x
        return self.mlp(x).squeeze(1)


class ParallelDCNv2(nn.Module):
    """The same cross layers beside the MLP, not under it, and a linear readout of both: DCN V2's other structure."""

    def __init__(self, request: int, candidate: int, towers: tuple[int, ...], layers: int = 3) -> None:
        super().__init__()
        width = request + candidate
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = mlp(width, towers[:-1], towers[-1])
        self.readout = nn.Linear(width + towers[-1], 1)

    def forward(self, request: Tensor, candidate: Tensor) -> Tensor:
        x0 = x = torch.cat([request, candidate], dim=1)
        for linear in self.cross:
            x = x0 * linear(x) + x
        return self.readout(torch.cat([x, torch.relu(self.mlp(x0))], dim=1)).squeeze(1)


class RDCN(nn.Module):
    """``DCNv2`` whose request rows never see the candidate (``W_l`` block lower triangular), written compactly.

        r_{l+1} = r_0 * (W_rr r_l + b_r) + r_l
        c_{l+1} = c_0 * (W_cr r_l + W_cc c_l + b_c) + c_l
    """

    def __init__(self, request: int, candidate: int, towers: tuple[int, ...], layers: int = 3) -> None:
        super().__init__()
        self.request = nn.ModuleList(nn.Linear(request, request) for _ in range(layers))
        self.candidate = nn.ModuleList(nn.Linear(request + candidate, candidate) for _ in range(layers))
        self.mlp = mlp(request + candidate, towers)

    def forward(self, request: Tensor, candidate: Tensor) -> Tensor:
        r, c = request, candidate
        for own, both in zip(self.request, self.candidate, strict=True):
            r, c = request * own(r) + r, candidate * both(torch.cat([r, c], dim=1)) + c
        return self.mlp(torch.cat([r, c], dim=1)).squeeze(1)


class Transformer(nn.Module):
    """Pre-norm, causal, over ``history`` ``[B, L]`` then ``candidate`` ``[B]``; logits from the last token."""

    def __init__(self, size: Size, layers: int = 2) -> None:
        super().__init__()
        self.heads = size.heads
        width = size.heads * max(4, size.width // 2)
        self.items = nn.Embedding(size.vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(size.history + 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.feed_forward = nn.ModuleList(mlp(width, (4 * width,), width) for _ in range(layers))
        self.head = mlp(width, size.towers[-1:])

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        x = self.items(torch.cat([history, candidate[:, None]], dim=1)) + self.positions
        batch, tokens, width = x.shape
        for i, (qkv, out, feed_forward) in enumerate(zip(self.qkv, self.out, self.feed_forward, strict=True)):
            q, k, v = qkv(self.norms[2 * i](x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(attended.transpose(1, 2).reshape(batch, tokens, width))
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return self.head(x[:, -1]).squeeze(1)


class HSTU(nn.Module):
    """SiLU attention over a padded ``history`` ``[B, L]`` of ``length`` ``[B]`` steps, then ``candidate`` ``[B]``."""

    def __init__(self, size: Size, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.steps = size.heads, size.history
        width = size.heads * max(4, size.width // 2)
        self.items = nn.Embedding(size.vocabulary, width)
        self.bias = nn.Parameter(torch.zeros(layers, 1, size.history + 1, size.history + 1))
        self.before = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.after = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.uvqk = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = mlp(width, size.towers[-1:])
        self.register_buffer("causal", torch.ones(size.history + 1, size.history + 1).tril().bool(), persistent=False)

    def forward(self, history: Tensor, length: Tensor, candidate: Tensor) -> Tensor:
        x = self.items(torch.cat([history, candidate[:, None]], dim=1))
        batch, tokens, width = x.shape
        steps = torch.arange(tokens, device=x.device)
        valid = (steps < length[:, None]) | (steps == self.steps)
        seen = (self.causal & valid[:, None, :]).unsqueeze(1)
        for i in range(len(self.uvqk)):
            projected = F.silu(self.uvqk[i](self.before[i](x)))
            u, v, q, k = projected.chunk(4, dim=-1)
            q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            weights = F.silu(q @ k.transpose(-1, -2) + self.bias[i]) / tokens
            attended = (weights.masked_fill(~seen, 0.0) @ v).transpose(1, 2).reshape(batch, tokens, width)
            x = x + self.out[i](self.after[i](attended) * u)
        return self.head(x[:, -1]).squeeze(1)


class WukongLayer(nn.Module):
    """``LayerNorm(cat(FMB(X), LCB(X)) + residual(X))`` on ``[B, fields, D]``; FMB is an MLP over ``X (X^T P)``."""

    def __init__(self, fields: int, out: int, width: int, rank: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        made = out // 2
        self.project = nn.Parameter(torch.empty(fields, rank))
        self.norm = nn.LayerNorm(fields * rank)
        self.mlp = mlp(fields * rank, hidden, made * width)
        self.compress = nn.Linear(fields, out - made, bias=False)
        self.residual = nn.Linear(fields, out, bias=False) if fields != out else nn.Identity()
        self.after = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, width = x.shape
        interactions = x @ (x.transpose(1, 2) @ self.project)
        made = self.mlp(self.norm(interactions.flatten(1))).view(batch, -1, width)
        compressed = self.compress(x.transpose(1, 2)).transpose(1, 2)
        residual = self.residual(x.transpose(1, 2)).transpose(1, 2)
        return self.after(torch.cat([made, compressed], dim=1) + residual)


class Wukong(nn.Module):
    """``user`` ``[B, request fields]`` and ``item`` ``[B, candidate fields]`` of ids -> logits ``[B]``."""

    def __init__(self, size: Size, layers: int = 2) -> None:
        super().__init__()
        self.user = nn.ModuleList(nn.Embedding(size.vocabulary, size.width) for _ in range(size.request_fields))
        self.item = nn.ModuleList(nn.Embedding(size.vocabulary, size.width) for _ in range(size.candidate_fields))
        fields, out = size.fields, max(4, size.fields // 3)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(WukongLayer(fields, out, size.width, max(2, size.width // 4), size.towers[-1:]))
            fields = out
        self.head = mlp(fields * size.width, size.towers)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = torch.stack([table(user[:, i]) for i, table in enumerate(self.user)] +
                        [table(item[:, i]) for i, table in enumerate(self.item)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1)).squeeze(1)


def own_zoo(size: Size) -> dict[str, Callable[[], ZooModel]]:
    """Name -> a function that builds the model; nothing is built before it is called."""
    stated = size.request_fields * size.width > CROSS_REQUEST
    cross = (CROSS_REQUEST, CROSS_CANDIDATE) if stated else (16, 5)

    def ids(batch: int, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, size.vocabulary, (batch, *shape), generator=generator)

    def dlrm() -> ZooModel:
        # candidate columns in the middle: sides must not be assumed to be contiguous
        half_dense, half = size.request_dense // 2, size.request_fields // 2
        dense = [*range(half_dense),
                 *range(half_dense + size.candidate_dense, size.request_dense + size.candidate_dense)]
        sparse = [*range(half), *range(half + size.candidate_fields, size.fields)]

        def draw(batch: int, generator: torch.Generator) -> tuple[Any, ...]:
            return (torch.randn(batch, size.request_dense + size.candidate_dense, generator=generator),
                    ids(batch, size.fields, generator=generator))

        return ZooModel("own.DLRM", DLRM(size), draw, {"dense": dense, "ids": sparse})

    def crossed(name: str, build: Callable[..., nn.Module]) -> ZooModel:
        def draw(batch: int, generator: torch.Generator) -> tuple[Any, ...]:
            return tuple(0.5 * torch.randn(batch, width, generator=generator) for width in cross)

        return ZooModel(name, build(*cross, size.towers), draw, ("request",))

    def transformer() -> ZooModel:
        def draw(batch: int, generator: torch.Generator) -> tuple[Any, ...]:
            return ids(batch, size.history, generator=generator), ids(batch, generator=generator)

        return ZooModel("own.Transformer", Transformer(size), draw, ("history",))

    def hstu() -> ZooModel:
        def draw(batch: int, generator: torch.Generator) -> tuple[Any, ...]:
            return (ids(batch, size.history, generator=generator),
                    torch.randint(0, size.history + 1, (batch,), generator=generator), ids(batch, generator=generator))

        return ZooModel("own.HSTU", HSTU(size), draw, ("history", "length"))

    def wukong() -> ZooModel:
        def draw(batch: int, generator: torch.Generator) -> tuple[Any, ...]:
            return (ids(batch, size.request_fields, generator=generator),
                    ids(batch, size.candidate_fields, generator=generator))

        return ZooModel("own.Wukong", Wukong(size), draw, ("user",))

    return {"own.DLRM": dlrm, "own.DCNv2": lambda: crossed("own.DCNv2", DCNv2),
            "own.ParallelDCNv2": lambda: crossed("own.ParallelDCNv2", ParallelDCNv2),
            "own.RDCN": lambda: crossed("own.RDCN", RDCN), "own.Transformer": transformer, "own.HSTU": hstu,
            "own.Wukong": wukong}

"""Small rankers for the tests of saving, compiling and training: each takes request and candidate tensors by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Towers(nn.Module):
    """Embeddings of both sides, normalised, dropped, through two layers."""

    def __init__(self, norm: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 6)
        self.item = nn.Embedding(60, 5)
        self.norm = {"batch": nn.BatchNorm1d(14), "layer": nn.LayerNorm(14), "none": nn.Identity()}[norm]
        self.drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(14, 12), nn.SiLU(), nn.Linear(12, 1))

    def forward(self, user: Tensor, item: Tensor, dense: Tensor) -> Tensor:
        x = torch.cat([self.user(user), dense, self.item(item)], 1)
        return self.mlp(self.drop(self.norm(x))).squeeze(-1)


class Cross(nn.Module):
    """Two cross layers over one wide tensor (DCNv2), and a tuple of outputs."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state = x
        for layer in self.layers:
            state = x * layer(state) + state
        both = self.out(state)
        return both[:, 0], {"other": both[:, 1:]}


class Pooled(nn.Module):
    """A target attention over a history, in a dict of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(40, 8)
        self.query = nn.Linear(8, 8)
        self.out = nn.Linear(16, 1)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        history, item = self.items(features["history"]), self.items(features["item"])
        weights = torch.softmax(history @ self.query(item).unsqueeze(-1), 1)
        return torch.sigmoid(self.out(torch.cat([(weights * history).sum(1), item], 1)))


def towers(norm: str = "none", dropout: float = 0.0) -> tuple[nn.Module, Any, Any]:
    return Towers(norm, dropout), towers_inputs, ("user", "dense")


def towers_inputs(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"user": torch.randint(50, (rows,), generator=g), "item": torch.randint(60, (rows,), generator=g),
            "dense": torch.randn(rows, 3, generator=g, dtype=dtype)}


def cross() -> tuple[nn.Module, Any, Any]:
    return Cross(), cross_inputs, {"x": [0, 2, 3, 6]}


def cross_inputs(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {"x": torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed), dtype=dtype)}


def pooled() -> tuple[nn.Module, Any, Any]:
    return Pooled(), pooled_inputs, ("features.history",)


def pooled_inputs(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"features": {"history": torch.randint(40, (rows, 5), generator=g),
                         "item": torch.randint(40, (rows,), generator=g)}}


MODELS = {"towers": towers, "batch norm": lambda: towers("batch"), "layer norm": lambda: towers("layer"),
          "cross": cross, "pooled": pooled}


def shared_of(name: str, dtype: torch.dtype = torch.float64, train: bool = False, **options: Any) -> tuple[Any, Any]:
    """A shared model and the function that draws inputs of it."""
    from semel.sharing import share

    torch.manual_seed(1)
    model, draw, request_inputs = (MODELS | {"dropout": lambda: towers("none", 0.5)})[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    model = model.to(dtype).train(train)
    return share(model, draw(4, dtype=dtype), request_inputs=request_inputs, **options), draw


def sides(shared: Any, draw: Any, offsets: list[int], dtype: torch.dtype = torch.float64,
          seed: int = 7) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """``(request, candidate, offsets)`` by path."""
    from semel.sharing.emission import Stage
    from semel.sharing.inputs import flattened

    requests, candidates = len(offsets) - 1, offsets[-1]
    first, second = flattened(draw(requests, seed, dtype)), flattened(draw(candidates, seed + 1, dtype))
    request, candidate = {}, {}
    for item in shared.signature.inputs:
        if item.columns is not None:
            request[item.name] = first[item.name][:, item.columns]
            candidate[item.name] = second[item.name][:, item.others]
        elif item.stage == Stage.REQUEST:
            request[item.name] = first[item.name]
        else:
            candidate[item.name] = second[item.name]
    return request, candidate, torch.tensor(offsets)


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]

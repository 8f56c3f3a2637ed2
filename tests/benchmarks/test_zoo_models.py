"""The zoo's models are what the benchmarks take them for, and "embeddings once" gives the unmodified scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.sharing import tile_of
from benchmarks.zoo import chosen, zoo
from benchmarks.zoo_model import broadcast, map_tensors, split_inputs

MODELS = zoo(small=True)
EVERY = [pytest.param(name, marks=[] if name.startswith("own") else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", EVERY)
def test_the_request_side_is_the_request_side(name: str) -> None:
    """Both sides matter to the output; splitting and repeating give the inputs back."""
    model = MODELS[name]()
    inputs = model.example_inputs(6)
    request, candidate = split_inputs(model, inputs)
    each = torch.arange(7)
    again = broadcast(model, request, candidate, each)
    leaves = [dict(torch.utils._pytree.tree_flatten_with_path(x)[0]) for x in (inputs, again)]
    assert leaves[0].keys() == leaves[1].keys()
    assert all(torch.equal(value, leaves[1][path]) for path, value in leaves[0].items())

    def scores(*arguments: object) -> torch.Tensor:
        with torch.no_grad():
            out = model.module(*arguments)
        return out[0] if isinstance(out, tuple) else out

    before = scores(*inputs)
    turned = [map_tensors(lambda x: x.roll(1, 0), side) for side in (request, candidate)]
    assert not torch.allclose(scores(*broadcast(model, turned[0], candidate, each)), before, atol=1e-5)
    assert not torch.allclose(scores(*broadcast(model, request, turned[1], each)), before, atol=1e-5)


@pytest.mark.parametrize("name", [p for p in EVERY if p.values[0] in ("own.DLRM", "own.Wukong") or p.marks])
def test_embeddings_once_gives_the_same_scores(name: str) -> None:
    model = MODELS[name]()
    if "DIEN" in name:
        assert tile_of(model) is None
        return
    tile = tile_of(model)
    assert tile is not None and tile.lookups >= 2
    offsets = torch.tensor([0, 3, 3, 9])
    request, _ = split_inputs(model, model.example_inputs(3, seed=5))
    _, candidate = split_inputs(model, model.example_inputs(9, seed=6))
    inputs = broadcast(model, request, candidate, offsets)
    with torch.no_grad():
        torch.testing.assert_close(tile(*tile.plan(inputs, offsets)), model.module(*inputs), rtol=0, atol=1e-6)


def test_a_wrong_name_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"no model of the zoo is called 'own\.DLMR'; there are: .*own\.DLRM"):
        chosen(MODELS, ["own.DLMR"])


@pytest.mark.timeout(110)
def test_the_census_prints_one_document(printed: Callable[..., Any]) -> None:
    rows = printed("zoo", "--models", "own.DLRM", "own.HSTU")["models"]
    assert list(rows) == ["own.DLRM", "own.HSTU"]
    assert rows["own.DLRM"]["operators"]["aten.embedding.default"] == 9
    assert rows["own.HSTU"]["operators"]["aten.layer_norm.default"] == 4

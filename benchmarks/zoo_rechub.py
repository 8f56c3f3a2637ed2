"""Every ranker of torch-rechub, unmodified. Each takes one dict ``x``: a tensor for each feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_deepctr import interleave
from benchmarks.zoo_model import Size, ZooModel
from semel.sharing.adapters import rechub_request_paths


def sparse_features(size: Size, interleaved: bool, vocabulary: int | None = None, rows: int = 1) -> list[Any]:
    """One ``SparseFeature`` a field; ``rows`` embeddings for each value (field-aware models look up that many)."""
    from torch_rechub.basic.features import SparseFeature

    vocabulary = vocabulary or size.vocabulary
    request = [SparseFeature(f"u{i}", vocabulary * rows, size.width) for i in range(size.request_fields)]
    candidate = [SparseFeature(f"c{i}", vocabulary * rows, size.width) for i in range(size.candidate_fields)]
    return interleave(request, candidate) if interleaved else request + candidate


def dense_features(size: Size) -> list[Any]:
    from torch_rechub.basic.features import DenseFeature

    return [DenseFeature(f"u_dense{i}") for i in range(size.request_dense)] + \
        [DenseFeature(f"c_dense{i}") for i in range(size.candidate_dense)]


def with_history(size: Size) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """``(features, history, negative history, target)`` of DIN, DIEN and BST."""
    from torch_rechub.basic.features import SequenceFeature, SparseFeature

    other = sparse_features(size, interleaved=True)
    other = [f for f in other if f.name not in ("c0", "c1")]
    target = [SparseFeature(n, size.vocabulary, size.width, padding_idx=0) for n in ("c_item", "c_category")]

    def steps(prefix: str) -> list[Any]:
        return [SequenceFeature(prefix + f.name[2:], size.vocabulary, size.width, pooling="concat",
                                shared_with=f.name, padding_idx=0) for f in target]

    return other, steps("u_history_"), steps("u_negative_"), target


def model(name: str, module: nn.Module, features: list[Any], size: Size, rows: int = 1, **facts: Any) -> ZooModel:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature

    features = list({f.name: f for f in features}.values())

    def draw(batch: int, generator: torch.Generator) -> tuple[dict[str, Tensor]]:
        x: dict[str, Tensor] = {}
        length = torch.randint(0, size.history + 1, (batch, 1), generator=generator)
        for feature in features:
            if isinstance(feature, DenseFeature):
                x[feature.name] = torch.randn(batch, generator=generator)
            elif isinstance(feature, SequenceFeature):
                ids = torch.randint(1, feature.vocab_size, (batch, size.history), generator=generator)
                x[feature.name] = ids * (torch.arange(size.history) < length)
            else:
                x[feature.name] = torch.randint(1, feature.vocab_size // rows, (batch,), generator=generator)
        return (x,)

    request = rechub_request_paths(module, [f.name for f in features if f.name.startswith("u")])
    return ZooModel(f"rechub.{name}", module, draw, request, **facts)


def rechub_zoo(size: Size) -> dict[str, Callable[[], ZooModel]]:
    """Name -> a function that builds the model; nothing is built before it is called."""
    from torch_rechub.models import multi_task as t
    from torch_rechub.models import ranking as m

    def mlp(**more: Any) -> dict[str, Any]:
        return {"dims": list(size.towers), "dropout": 0.1, **more}

    tower = {"dims": [size.towers[-1]]}
    two = ["classification", "classification"]
    built: dict[str, Callable[[], ZooModel]] = {}

    def add(name: str, build: Callable[[list[Any]], nn.Module], interleaved: bool = True, dense: bool = True,
            **facts: Any) -> None:
        def make() -> ZooModel:
            features = sparse_features(size, interleaved) + (dense_features(size) if dense else [])
            return model(name, build(features), features, size, **facts)
        built[f"rechub.{name}"] = make

    def is_sparse(feature: Any) -> bool:
        return "dense" not in feature.name

    def sparse_only(features: list[Any]) -> list[Any]:
        return [f for f in features if is_sparse(f)]

    def dense_only(features: list[Any]) -> list[Any]:
        return [f for f in features if not is_sparse(f)]

    add("WideDeep", lambda f: m.WideDeep(f, f, mlp()), interleaved=False)
    add("DeepFM", lambda f: m.DeepFM(f, sparse_only(f), mlp()))
    add("DCN", lambda f: m.DCN(f, 3, mlp()))
    add("DCNv2", lambda f: m.DCNv2(f, 3, mlp(), use_low_rank_mixture=False))
    add("DCNv2-stacked", lambda f: m.DCNv2(f, 3, mlp(), model_structure="stacked", use_low_rank_mixture=False),
        interleaved=False)
    add("DCNv2-mixture", lambda f: m.DCNv2(f, 3, mlp(), low_rank=size.low_rank, num_experts=size.experts),
        batch_of_one=False)
    add("EDCN", lambda f: m.EDCN(f, 2, {"dropout": 0.1}), dense=False)
    add("AFM", lambda f: m.AFM(f, size.width, t=2 * size.width), dense=False)
    add("FiBiNet", lambda f: m.FiBiNet(f, mlp(), bilinear_type="field_each"), dense=False)
    add("FiBiNet-interaction", lambda f: m.FiBiNet(f, mlp()), dense=False)
    add("AutoInt", lambda f: m.AutoInt(sparse_only(f), dense_only(f), num_layers=3, num_heads=2, mlp_params=mlp()),
        float64=False)

    def field_aware(name: str, build: Callable[[list[Any], list[Any]], nn.Module]) -> None:
        def make() -> ZooModel:
            linear = sparse_features(size, False, size.field_aware_vocabulary)
            crossed = sparse_features(size, False, size.field_aware_vocabulary, rows=size.fields)
            return model(name, build(linear, crossed), crossed, size, rows=size.fields)
        built[f"rechub.{name}"] = make

    field_aware("DeepFFM", lambda linear, crossed: m.DeepFFM(linear, crossed, size.width, mlp()))
    field_aware("FatDeepFFM", lambda linear, crossed: m.FatDeepFFM(linear, crossed, size.width, 2, mlp()))

    def sequential(name: str, build: Callable[..., nn.Module], negative: bool = False, **facts: Any) -> None:
        def make() -> ZooModel:
            other, history, unseen, target = with_history(size)
            module = build(other, history, unseen, target) if negative else build(other, history, target)
            used = [*other, *history, *(unseen if negative else []), *target]
            return model(name, module, used, size, **facts)
        built[f"rechub.{name}"] = make

    sequential("DIN", lambda f, h, t: m.DIN(f, h, t, mlp(), {"dims": list(size.interest)}))
    sequential("DIN-softmax", lambda f, h, t: m.DIN(f, h, t, mlp(), {"dims": list(size.interest),
                                                                      "use_softmax": True}))
    sequential("BST", lambda f, h, t: m.BST(f, h, t, mlp(), nhead=size.heads, max_seq_len=size.history + 1))
    sequential("DIEN", lambda f, h, n, t: m.DIEN(f, h, n, t, mlp()), negative=True, float64=False)

    add("SharedBottom", lambda f: t.SharedBottom(f, two, mlp(), [tower, tower]))
    add("ESMM", lambda f: t.ESMM([x for x in f if x.name.startswith("u")], [x for x in f if x.name.startswith("c")],
                                 mlp(), mlp()), dense=False)
    add("MMOE", lambda f: t.MMOE(f, two, size.experts, mlp(), [tower, tower]))
    add("PLE", lambda f: t.PLE(f, two, 2, 1, 1, mlp(), [tower, tower]))
    add("AITM", lambda f: t.AITM(f, 2, mlp(), [tower, tower]))
    return built

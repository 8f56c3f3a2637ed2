"""Every ranker of deepctr-torch, unmodified. Each takes one matrix ``X``: a column a field, step, length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_model import Size, ZooModel
from semel.sharing.adapters import deepctr_request_columns, import_deepctr


def columns(size: Size, interleaved: bool, vocabulary: int | None = None, history: str = "") -> list[Any]:
    """Feature columns: ``u*`` of the request, ``c*`` of the candidate; interleaved: a candidate field every few.

    ``history``: "" none, "pooled" one that is averaged, "attended" two that belong to ``item_id`` and ``category_id``.
    """
    inputs = import_deepctr().inputs
    vocabulary = vocabulary or size.vocabulary
    attended = ["item_id", "category_id"] if history == "attended" else []
    request = [inputs.SparseFeat(f"u{i}", vocabulary, size.width) for i in range(size.request_fields)]
    candidate = [inputs.SparseFeat(name, vocabulary, size.width) for name in
                 attended + [f"c{i}" for i in range(size.candidate_fields - len(attended))]]
    out = interleave(request, candidate) if interleaved else request + candidate
    for name in attended:
        step = inputs.SparseFeat(f"hist_{name}", vocabulary, size.width, embedding_name=name)
        out.append(inputs.VarLenSparseFeat(step, size.history, length_name="history_length"))
    if history == "pooled":
        step = inputs.SparseFeat("u_history", vocabulary, size.width)
        out.append(inputs.VarLenSparseFeat(step, size.history, combiner="mean", length_name="history_length"))
    out += [inputs.DenseFeat(f"u_dense{i}", 1) for i in range(size.request_dense)]
    out += [inputs.DenseFeat("c_dense", size.candidate_dense)]
    return out


def interleave(request: list[Any], candidate: list[Any]) -> list[Any]:
    """Candidate fields spread evenly between the request's."""
    out, stride = [], -(-len(request) // len(candidate))
    for i, field in enumerate(candidate):
        out += [*request[i * stride:(i + 1) * stride], field]
    return out


def request_names(features: list[Any]) -> list[str]:
    """The request side by the names that ``columns`` gave: all but the candidate's own."""
    names = [f.name for f in features] + [f.length_name for f in features if getattr(f, "length_name", None)]
    return [n for n in dict.fromkeys(names) if not n.startswith("c") and n != "item_id"]


def model(name: str, module: nn.Module, features: list[Any], **facts: Any) -> ZooModel:
    index = module.feature_index
    by_name = {f.name: f for f in features}

    def draw(batch: int, generator: torch.Generator) -> tuple[Tensor]:
        parts = []
        for feature, (start, end) in index.items():
            shape = (batch, end - start)
            if feature == "history_length":
                steps = max(f.maxlen for f in features if hasattr(f, "maxlen"))
                parts.append(torch.randint(0, steps + 1, shape, generator=generator).float())
            elif "dense" in feature:
                parts.append(torch.randn(shape, generator=generator))
            else:
                parts.append(torch.randint(0, by_name[feature].vocabulary_size, shape, generator=generator).float())
        return (torch.cat(parts, dim=1),)

    request = {"X": deepctr_request_columns(module, request_names(features))}
    return ZooModel(f"deepctr.{name}", module, draw, request, **facts)


def deepctr_zoo(size: Size) -> dict[str, Callable[[], ZooModel]]:
    """Name -> a function that builds the model; nothing is built before it is called."""
    m = import_deepctr().models
    plain = columns(size, interleaved=False)
    mixed = columns(size, interleaved=True)
    pooled = columns(size, interleaved=True, history="pooled")
    attended = columns(size, interleaved=True, history="attended")
    field_aware = columns(size, interleaved=False, vocabulary=size.field_aware_vocabulary)
    sparse = [f for f in mixed if "dense" not in f.name]
    towers = {"dnn_hidden_units": size.towers}
    expert = {"expert_dnn_hidden_units": size.towers}

    def make(name: str, build: Callable[..., nn.Module], features: list[Any], *rest: Any, linear: bool = True,
             facts: dict[str, Any] | None = None, **options: Any) -> tuple[str, Callable[[], ZooModel]]:
        def built() -> ZooModel:
            first = (features, features) if linear else (features,)
            return model(name, build(*first, *rest, **options), features, **(facts or {}))
        return f"deepctr.{name}", built

    return dict([
        make("WDL", m.WDL, plain, **towers),
        make("WDL-batch-norm", m.WDL, mixed, dnn_use_bn=True, **towers),
        make("WDL-pooled-history", m.WDL, pooled, **towers),
        make("DeepFM", m.DeepFM, mixed, **towers),
        make("DCN-vector", m.DCN, mixed, cross_num=3, **towers),
        make("DCN-matrix", m.DCN, mixed, cross_num=3, cross_parameterization="matrix", **towers),
        make("DCNMix", m.DCNMix, plain, cross_num=3, low_rank=size.low_rank, num_experts=size.experts, **towers,
             facts={"batch_of_one": False}),
        make("xDeepFM", m.xDeepFM, mixed, cin_layer_size=size.maps, **towers),
        make("AutoInt", m.AutoInt, mixed, att_head_num=2, **towers),
        make("PNN-inner", m.PNN, mixed, linear=False, **towers),
        make("PNN-outer", m.PNN, mixed, linear=False, use_inner=False, use_outter=True, kernel_type="vec", **towers),
        make("PNN-outer-matrix", m.PNN, sparse, linear=False, use_inner=False, use_outter=True, kernel_type="mat",
             **towers),
        make("NFM", m.NFM, mixed, **towers),
        make("FiBiNET", m.FiBiNET, mixed, **towers),
        make("FiBiNET-each", m.FiBiNET, plain, bilinear_type="each", **towers),
        make("FiBiNET-all", m.FiBiNET, plain, bilinear_type="all", **towers),
        make("AFM", m.AFM, sparse),
        make("AFN", m.AFN, mixed, afn_dnn_hidden_units=size.towers, ltl_hidden_size=size.towers[0] // 4),
        make("IFM", m.IFM, mixed, **towers),
        make("DIFM", m.DIFM, mixed, att_head_num=2, **towers),
        make("ONN", m.ONN, field_aware, **towers),
        make("MLR", m.MLR, mixed, linear=False),
        make("CCPM", m.CCPM, sparse, **towers),
        make("DIN", m.DIN, attended, ["item_id", "category_id"], linear=False, att_hidden_size=size.interest,
             **towers),
        make("DIN-softmax", m.DIN, attended, ["item_id", "category_id"], linear=False, att_hidden_size=size.interest,
             att_weight_normalization=True, **towers),
        make("DIEN", m.DIEN, attended, ["item_id", "category_id"], linear=False, att_hidden_units=size.interest,
             **towers, facts={"float64": False}),
        make("DIEN-AUGRU", m.DIEN, attended, ["item_id", "category_id"], linear=False, gru_type="AUGRU",
             att_hidden_units=size.interest, **towers, facts={"float64": False}),
        make("SharedBottom", m.SharedBottom, mixed, linear=False, bottom_dnn_hidden_units=size.towers),
        make("ESMM", m.ESMM, mixed, linear=False, tower_dnn_hidden_units=size.towers),
        make("MMOE", m.MMOE, mixed, linear=False, num_experts=size.experts, **expert),
        make("PLE", m.PLE, mixed, linear=False, **expert),
    ])

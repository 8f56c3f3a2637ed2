"""Models of deepctr-torch and torch-rechub: example inputs and the request side, by the names of features.

    from semel.sharing.adapters import deepctr_inputs
    example_inputs, request_inputs = deepctr_inputs(model, ["user_id", "hist_item_id", "history_length"])
    shared = semel.share(model, example_inputs, request_inputs=request_inputs)

Neither library is imported here before it is needed, and neither is modified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def import_deepctr() -> Any:
    """``deepctr_torch`` with ``.models`` and ``.inputs``, without the thread that asks a package registry for news.

    Importing the package starts a thread that requests its newest version over the network and prints what it finds.
    The part that does so is replaced before the import; if ``deepctr_torch`` was imported already, it is returned.
    """
    if "deepctr_torch" not in sys.modules:
        quiet = ModuleType("deepctr_torch.utils")
        quiet.check_version = lambda version: None  # type: ignore[attr-defined]
        sys.modules["deepctr_torch.utils"] = quiet
        try:
            import deepctr_torch
        except BaseException:
            del sys.modules["deepctr_torch.utils"]
            raise
    import deepctr_torch
    import deepctr_torch.inputs
    import deepctr_torch.models

    return deepctr_torch


def deepctr_request_columns(model: nn.Module, request_features: Iterable[str]) -> list[int]:
    """Columns of ``X`` that hold ``request_features``, in the order of the columns.

    Raises:
        KeyError: a name that the model does not have; the names it has are listed.
        ValueError: no request feature, or no candidate feature left.
    """
    index = deepctr_columns(model)
    names = check_names(request_features, list(index), type(model).__name__)
    return sorted(c for name in names for c in range(*index[name]))


def deepctr_columns(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Feature -> ``(first, last + 1)`` of its columns of ``X``."""
    index: Any = getattr(model, "feature_index", None)
    if not index:
        raise TypeError(f"{type(model).__name__} has no feature_index: it is not a model of deepctr-torch")
    return dict(index)


def deepctr_inputs(model: nn.Module, request_features: Iterable[str], batch: int = 4,
                   ) -> tuple[tuple[Tensor], dict[str, list[int]]]:
    """``(example_inputs, request_inputs)`` for ``semel.share`` of a model of deepctr-torch.

    The request side of the shared form is then ``{"X": [R, request columns]}`` and the candidate side
    ``{"X": [C, the others]}``, both in the order of the model's columns. Columns of ``model.feature_index`` are given
    by ``deepctr_request_columns``. Example values are ones: an id and a length that every table and history has
    (a vocabulary of one value: zeros).
    """
    columns = deepctr_request_columns(model, request_features)
    width = max(end for _, end in deepctr_columns(model).values())
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    value = 1.0 if min(tables, default=2) > 1 else 0.0
    return (torch.full((batch, width), value, dtype=dtype_of(model)),), {"X": columns}


def rechub_request_paths(model: nn.Module, request_features: Iterable[str]) -> tuple[str, ...]:
    """``request_features`` as paths into ``forward``'s one dict: ``"x.user_id"``.

    Raises:
        KeyError: a name that the model does not have; the names it has are listed.
        ValueError: no request feature, or no candidate feature left.
    """
    return tuple(f"x.{name}" for name in check_names(request_features, list(rechub_features(model)),
                                                     type(model).__name__))


def rechub_inputs(model: nn.Module, request_features: Iterable[str], history: int | dict[str, int] = 50,
                  batch: int = 4) -> tuple[tuple[dict[str, Tensor]], tuple[str, ...]]:
    """``(example_inputs, request_inputs)`` for ``semel.share`` of a ranker of torch-rechub.

    ``history``: the padded length of the sequence features, one for all or by name: the model does not know it.
    """
    from torch_rechub.basic.features import DenseFeature, SequenceFeature

    paths = rechub_request_paths(model, request_features)
    x: dict[str, Tensor] = {}
    for name, feature in rechub_features(model).items():
        if isinstance(feature, DenseFeature):
            shape = (batch,) if feature.embed_dim == 1 else (batch, feature.embed_dim)
            x[name] = torch.ones(shape, dtype=dtype_of(model))
        elif isinstance(feature, SequenceFeature):
            steps = history if isinstance(history, int) else history[name]
            x[name] = torch.ones(batch, steps, dtype=torch.int64)
        else:
            x[name] = torch.ones(batch, dtype=torch.int64)
        if not isinstance(feature, DenseFeature) and feature.vocab_size < 2:
            x[name] = torch.zeros_like(x[name])
    return (x,), paths


def rechub_features(model: nn.Module) -> dict[str, Any]:
    """Every feature that the model reads, by name: those of its embedding layers and those in lists of its own."""
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature

    found: dict[str, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for feature in value if isinstance(value, (list, tuple)) else ():
                if isinstance(feature, (DenseFeature, SequenceFeature, SparseFeature)):
                    found.setdefault(feature.name, feature)
    if not found:
        raise TypeError(f"{type(model).__name__} holds no features: it is not a ranker of torch-rechub")
    return found


def check_names(names: Iterable[str], known: list[str], model: str) -> list[str]:
    """``names`` in the order of ``known``, each once.

    Raises:
        KeyError: a name that is not known.
        ValueError: none is named, or all are.
    """
    if isinstance(names, str):
        raise TypeError(f"request features are a list of names, not the one string {names!r}")
    wanted = set(names)
    unknown = sorted(wanted - set(known))
    if unknown:
        shown = ", ".join(known[:12]) + (f", ... ({len(known)} in all)" if len(known) > 12 else "")
        raise KeyError(f"{model} has no feature {', '.join(map(repr, unknown))}; it has {shown}")
    if not wanted:
        raise ValueError(f"no feature of {model} belongs to the request: there is nothing to share")
    if len(wanted) == len(known):
        raise ValueError(f"every feature of {model} belongs to the request: name the request's only")
    return [name for name in known if name in wanted]


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

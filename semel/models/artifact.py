"""A trained model on disk: ``model.safetensors`` (weights and vocabularies) and ``model.json`` (what to build)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from semel.features import FeatureSpec
from semel.models.config import ModelConfig, ModelKind
from semel.models.dcn import RDCN, DCNv2
from semel.models.deep_cross_attention import DeepCrossAttention
from semel.models.dhen import DHEN, IsolatedDHEN
from semel.models.dlrm import DLRM
from semel.models.final_mlp import FinalMLP, IsolatedFinalMLP
from semel.models.next_item import NextItem
from semel.models.sequence_ranker import SequenceRanker
from semel.models.vocabulary import Scale, Vocabulary
from semel.models.wukong import IsolatedWukong, Wukong

FORMAT_VERSION = 1

Model = (SequenceRanker | DLRM | DCNv2 | RDCN | Wukong | IsolatedWukong | FinalMLP | IsolatedFinalMLP | DHEN
         | IsolatedDHEN | DeepCrossAttention | NextItem)
_KINDS: dict[ModelKind, type[Any]] = {
    "sequence_ranker": SequenceRanker, "dlrm": DLRM, "dcnv2": DCNv2, "rdcn": RDCN, "wukong": Wukong,
    "isolated_wukong": IsolatedWukong, "final_mlp": FinalMLP, "isolated_final_mlp": IsolatedFinalMLP, "dhen": DHEN,
    "isolated_dhen": IsolatedDHEN, "deep_cross_attention": DeepCrossAttention, "next_item": NextItem,
}


@dataclass(frozen=True)
class ModelArtifact:
    """``model`` is in eval mode. ``version``: names these very weights. ``kind``: what its logits mean."""

    model: Model
    features: FeatureSpec
    version: str
    config: ModelConfig
    kind: Literal["ranking", "next_item"]


def make_model(config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> Model:
    """The untrained model. ``encoders``: a Vocabulary or Scale by feature name."""
    return _KINDS[config.kind](config, features, encoders)


def save_model(run: str | Path, model: Model, config: ModelConfig, features: FeatureSpec, name: str = "model") -> str:
    """Write ``model`` into the folder ``run``; returns its version, ``NAME-`` and a hash of what was saved.

    The weights are written first and both files are renamed into place, so a reader finds the old model or the new one.
    """
    from safetensors.torch import save

    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    described: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "config": config.to_json(),
        "features": features.to_json(),
        "encoders": {key: len(encoder) if isinstance(encoder, Vocabulary) else None
                     for key, encoder in model.tables.encoders.items()},
    }
    data = save(weights)
    digest = blake2b(data + json.dumps(described, sort_keys=True).encode(), digest_size=6).hexdigest()
    described["version"] = f"{name}-{digest}"
    described["weights"] = f"model-{digest}.safetensors"
    _write(run / described["weights"], data)
    _write(run / "model.json", json.dumps(described, indent=1).encode())
    for old in run.glob("model-*.safetensors"):
        if old.name != described["weights"]:
            old.unlink()
    return described["version"]


def load_model(run: str | Path) -> ModelArtifact:
    """Read what ``save_model`` wrote. FileNotFoundError without it, ValueError for an unknown or damaged file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(run) / "model.json"
    if not path.exists():
        raise FileNotFoundError(f"{run} holds no model ({path.name} is missing); name a run folder that training wrote")
    try:
        described = json.loads(path.read_text())
        found = described["format_version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if found != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {found}, this version of semel reads {FORMAT_VERSION}")
    config, features = ModelConfig.from_json(described["config"]), FeatureSpec.from_json(described["features"])
    encoders: dict[str, nn.Module] = {
        name: Scale() if size is None else Vocabulary(torch.arange(size))
        for name, size in described["encoders"].items()
    }
    model = make_model(config, features, encoders)
    try:
        model.load_state_dict(load_file(Path(run) / described["weights"]))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{Path(run) / described['weights']} does not fit {path}: {error}") from None
    return ModelArtifact(model.eval(), features, described["version"], config, config.objective)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

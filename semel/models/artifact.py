"""A trained model on disk, in versions.

``model-DIGEST.safetensors`` (weights and vocabularies) and ``model-DIGEST.json`` (what to build) are one version, never
changed; ``model.json`` says the same as the latest one's and is replaced in one step, so a reader finds the version
before or the one after. Older ones stay for a while: what was served by them can be computed again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from semel.features import FeatureSpec
from semel.memory.table import ItemMemory
from semel.models.config import ModelConfig, ModelKind
from semel.models.dcn import RDCN, DCNv2
from semel.models.deep_cross_attention import DeepCrossAttention
from semel.models.dhen import DHEN, IsolatedDHEN
from semel.models.dlrm import DLRM
from semel.models.early_ranker import EarlyRanker
from semel.models.final_mlp import FinalMLP, IsolatedFinalMLP
from semel.models.next_item import NextItem
from semel.models.sequence_dcnv2 import SequenceDCNv2
from semel.models.sequence_ranker import SequenceRanker
from semel.models.vocabulary import Scale, Vocabulary
from semel.models.wukong import IsolatedWukong, Wukong

FORMAT_VERSION = 1
KEEP = 5
"""Versions that a run keeps, unless its recipe says otherwise."""

Model = (SequenceRanker | DLRM | DCNv2 | RDCN | Wukong | IsolatedWukong | FinalMLP | IsolatedFinalMLP | DHEN
         | IsolatedDHEN | DeepCrossAttention | SequenceDCNv2 | NextItem | EarlyRanker)
_KINDS: dict[ModelKind, type[Any]] = {
    "sequence_ranker": SequenceRanker, "dlrm": DLRM, "dcnv2": DCNv2, "rdcn": RDCN, "wukong": Wukong,
    "isolated_wukong": IsolatedWukong, "final_mlp": FinalMLP, "isolated_final_mlp": IsolatedFinalMLP, "dhen": DHEN,
    "isolated_dhen": IsolatedDHEN, "deep_cross_attention": DeepCrossAttention,
    "sequence_dcnv2": SequenceDCNv2, "next_item": NextItem,
    "early_ranker": EarlyRanker,
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


@dataclass(frozen=True)
class ModelVersion:
    """One that a run keeps. ``number`` counts what the run has saved; ``saved_at``: microseconds since 1970."""

    version: str
    number: int
    saved_at: int
    path: Path


def save_model(run: str | Path, model: Model, config: ModelConfig, features: FeatureSpec, name: str = "model",
               keep: int = KEEP) -> str:
    """Write ``model`` into the folder ``run`` as its latest version, of which the last ``keep`` stay; returns the
    version, ``NAME-`` and a hash of what was saved.

    The weights are written first and all files are renamed into place, so a reader finds the old model or the new one.
    What a model keeps of items (``semel.memory.ItemMemory``) is not part of it: that travels as deltas.
    """
    from safetensors.torch import save

    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    apart = kept_apart(model)
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()
               if not key.startswith(apart)}
    described: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "config": config.to_json(),
        "features": features.to_json(),
        "encoders": {key: len(encoder) if isinstance(encoder, Vocabulary) else None
                     for key, encoder in model.tables.encoders.items()},
    }
    data = save(weights)
    digest = blake2b(data + json.dumps(described, sort_keys=True).encode(), digest_size=6).hexdigest()
    before = model_versions(run)
    described["version"] = f"{name}-{digest}"
    described["weights"] = f"model-{digest}.safetensors"
    described["number"] = max((one.number for one in before), default=0) + 1
    described["saved_at"] = time.time_ns() // 1000
    content = json.dumps(described, indent=1).encode()
    _install(run, described, content, data, keep)
    return described["version"]


def _install(run: Path, described: dict[str, Any], content: bytes, weights: bytes, keep: int) -> None:
    """As the latest version of ``run``, of which the last ``keep`` stay."""
    path = run / described["weights"]
    before = model_versions(run)
    _write(path, weights)
    _write(path.with_suffix(".json"), content)
    _write(run / "model.json", content)
    others = [one.version for one in before[::-1] if one.version != described["version"]]
    stay = {described["version"], *others[: keep - 1]}
    for old in model_versions(run):
        if old.version not in stay:
            old.path.unlink(missing_ok=True)
            old.path.with_suffix(".safetensors").unlink(missing_ok=True)


def exported(run: str | Path, version: str) -> tuple[bytes, bytes]:
    """A version that ``run`` keeps, to be installed elsewhere: its description (JSON) and its weights (safetensors).
    Raises what ``load_model`` raises."""
    run = Path(run)
    described = _described(run, version)
    return json.dumps(described, indent=1).encode(), (run / described["weights"]).read_bytes()


def install(run: str | Path, description: bytes, weights: bytes, keep: int = KEEP) -> str:
    """What ``exported`` gave, into the folder ``run`` as its latest version; where ``run`` keeps it already nothing
    changes. Returns the version. Raises ValueError for what was not exported."""
    run = Path(run)
    try:
        described = json.loads(description)
        version, name = str(described["version"]), str(described["weights"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"no description of a model version: {error}") from None
    if not re.fullmatch(r"model-[0-9a-f]+\.safetensors", name):
        raise ValueError(f"a model version keeps its weights in model-DIGEST.safetensors, this one in {name!r}")
    if all(one.version != version for one in model_versions(run)):
        run.mkdir(parents=True, exist_ok=True)
        _install(run, described, description, weights, keep)
    return version


def model_versions(run: str | Path) -> list[ModelVersion]:
    """Those that the folder ``run`` keeps, in the order in which they were saved; empty where there is none."""
    found = []
    for path in Path(run).glob("model-*.json"):
        try:
            found.append(_version_in(path, path.stat().st_mtime_ns))
        except FileNotFoundError:  # it has just been taken away
            continue
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}; remove it, or train anew") from None
    return sorted(found, key=lambda one: one.number)


@lru_cache(maxsize=1 << 16)  # a run that follows keeps thousands, and lists them at each save
def _version_in(path: Path, written: int) -> ModelVersion:
    """``written``: when, in nanoseconds, so that what was read is known again."""
    one = json.loads(path.read_text())
    return ModelVersion(one["version"], int(one["number"]), int(one["saved_at"]), path)


def restore_version(run: str | Path, version: str | None = None) -> str:
    """Make an older version that ``run`` keeps its latest again, the one saved before the present one if none is named;
    returns it. Whoever follows the run moves to it; what is saved next is the latest then. Raises FileNotFoundError
    where there is none, ValueError for damaged files."""
    run = Path(run)
    current, kept = current_version(run), model_versions(run)
    if version is None:
        numbers = {one.version: one.number for one in kept}
        older = [one for one in kept if one.number < numbers.get(current, 0)]
        if not older:
            raise FileNotFoundError(f"{run} keeps no version before {current}")
        version = older[-1].version
    load_model(run, version)  # that it can be served is seen before anybody does
    _write(run / "model.json", json.dumps(_described(run, version), indent=1).encode())
    return version


def current_version(run: str | Path) -> str:
    """The version that ``load_model(run)`` gives. Raises what it raises."""
    return _described(Path(run), None)["version"]


def load_model(run: str | Path, version: str | None = None) -> ModelArtifact:
    """Read what ``save_model`` wrote last, or the ``version`` that is named. FileNotFoundError without it (or where it
    is no longer kept), ValueError for an unknown or damaged file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    run = Path(run)
    described = _described(run, version)
    config, features = ModelConfig.from_json(described["config"]), FeatureSpec.from_json(described["features"])
    encoders: dict[str, nn.Module] = {
        name: Scale() if size is None else Vocabulary(torch.arange(size))
        for name, size in described["encoders"].items()
    }
    model = make_model(config, features, encoders)
    apart = kept_apart(model)
    weights = run / described["weights"]
    try:
        lacking, unknown = model.load_state_dict(load_file(weights), strict=False)
        lacking = [name for name in lacking if not name.startswith(apart)]
        if lacking or unknown:
            raise RuntimeError(f"without {', '.join(lacking) or 'nothing'}, with {', '.join(unknown) or 'nothing'} "
                               "beside what it should hold")
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights} does not fit {run / 'model.json'}: {error}") from None
    return ModelArtifact(model.eval(), features, described["version"], config, config.objective)


def _described(run: Path, version: str | None) -> dict[str, Any]:
    path = run / "model.json"
    if not path.exists():
        raise FileNotFoundError(f"{run} holds no model ({path.name} is missing); name a run folder that training wrote")
    described = _read(path)
    if version is None or described["version"] == version:
        return described
    digest = version.rpartition("-")[2]
    if re.fullmatch(r"[0-9a-f]+", digest) and (path := run / f"model-{digest}.json").exists():
        described = _read(path)
        if described["version"] == version:
            return described
    kept = ", ".join(one.version for one in model_versions(run)) or described["version"]
    raise FileNotFoundError(f"{run} does not keep model {version}; it has {kept}")


def _read(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text())
        found = described["format_version"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if found != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {found}, this version of semel reads {FORMAT_VERSION}")
    return described


def kept_apart(model: Any) -> tuple[str, ...]:
    """What the names of a model's item memories begin with."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, ItemMemory))


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # workers may install the same version at once
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

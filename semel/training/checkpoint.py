"""Checkpoints: everything that the next step depends on, as safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semel.models.artifact import kept_apart

FORMAT_VERSION = 1
KEEP = 2


def save_checkpoint(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                    others: dict[str, Tensor], state: dict[str, Any], parts: Mapping[str, Path | None]) -> Path:
    """``folder/step-N/``: ``tensors.safetensors`` (weights, optimizer moments, ``others``: generator
    states, running sums) and ``state.json``. ``parts``: folders in which all ranks have saved theirs, of sharded tables
    and of an item memory, which become folders of these names in it."""
    from safetensors.torch import save_file

    apart = kept_apart(model)
    tensors = {f"model.{name}": value.detach().contiguous() for name, value in model.state_dict().items()
               if not name.startswith(apart)}
    groups = optimizer.state_dict()
    for index, moments in groups["state"].items():
        for name, value in moments.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value).detach().contiguous()
    tensors |= {f"generator.{name}": value for name, value in others.items()}
    final = folder / f"step-{step:09d}"
    part = folder / f".part-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file({name: value.clone() for name, value in tensors.items()}, part / "tensors.safetensors")
    described = {"format_version": FORMAT_VERSION, "step": step, "groups": groups["param_groups"], **state}
    (part / "state.json").write_text(json.dumps(described))
    for name, saved in parts.items():
        if saved is not None:
            os.replace(saved, part / name)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    found = sorted(folder.glob("step-*"))
    return found[-1] if found else None


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
                    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Restores weights and moments in place; returns the ``others`` and what ``state`` was saved. Raises ValueError for
    a checkpoint of another model."""
    from safetensors.torch import load_file

    state = json.loads((path / "state.json").read_text())
    if state["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {state['format_version']}, this version of semel reads "
                         f"{FORMAT_VERSION}; train anew")
    tensors = load_file(path / "tensors.safetensors")
    lacking, unknown = model.load_state_dict(_under(tensors, "model."), strict=False)
    lacking = [name for name in lacking if not name.startswith(kept_apart(model))]
    if lacking or unknown:
        raise ValueError(f"{path} is of another model: it lacks {', '.join(lacking) or 'nothing'}, and has "
                         f"{', '.join(unknown) or 'nothing'} beside what it should hold")
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _under(tensors, "optimizer.").items():
        index, field = name.split(".", 1)
        moments.setdefault(int(index), {})[field] = value
    optimizer.load_state_dict({"state": moments, "param_groups": state["groups"]})
    return _under(tensors, "generator."), state


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

"""A run: the folder that training writes and everything after it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semel.training.recipe import Recipe


@dataclass(frozen=True)
class Run:
    """``path`` holds ``recipe.json``, the best model (``model.json`` and weights), ``run.json`` (how it went),
    ``metrics.jsonl`` (learning curves), ``timeline.json`` (where the last steps' time went), ``tensorboard/`` and
    ``checkpoints/``."""

    path: Path
    recipe: Recipe

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """FileNotFoundError if ``path`` is no run, ValueError if its recipe cannot be read."""
        path = Path(path)
        file = path / "recipe.json"
        if not file.exists():
            raise FileNotFoundError(f"{path} is not a run: it has no recipe.json")
        try:
            return cls(path, Recipe.from_json(json.loads(file.read_text())))
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``: ``{"kind": "train", step, epoch, loss, samples_per_s, wait_s,
        seconds}`` (of a step, by stage and bubble) and
        ``{"kind": "validation", step, epoch, ...}``."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """The last steps of all ranks as events of the Chrome trace format (``timeline.json``); empty where there are
        none."""
        file = self.path / "timeline.json"
        return json.loads(file.read_text())["traceEvents"] if file.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        """How the run went (``run.json``), empty while it trains."""
        file = self.path / "run.json"
        return json.loads(file.read_text()) if file.exists() else {}

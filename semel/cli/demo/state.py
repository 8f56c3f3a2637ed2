"""What the steps of a demo hand to each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from semel.cli import output
from semel.cli.demo.folder import fresh

if TYPE_CHECKING:
    from semel.training import Recipe

RECIPES = {"rank": "ml1m_rank", "next": "ml1m_next"}
FIELDS: dict[str, dict[str, Any]] = {
    "rank": {"epochs": 3},
    "next": {"epochs": 12, "validate_every": 3, "examples.validate": True},
}
"""What differs from the recipes, so that the whole demo takes minutes; docs/results.md has what they reach in full."""
QUICK_FIELDS: dict[str, dict[str, Any]] = {
    "rank": {"epochs": 2, "batch": 16, "optimizer.warmup_steps": 20},
    "next": {"epochs": 6, "validate_every": 2, "examples.validate": True, "batch": 32, "optimizer.warmup_steps": 20},
}
"""For a sample of the users: few epochs, and smaller batches, so that they hold enough steps to learn anything."""


@dataclass
class Demo:
    """``folder`` holds everything that a demo makes. ``run``: the runs, by kind. ``facts``: what the steps measured, as
    plain data, of which the closing table, the JSON and the report are made. ``seconds``: how long each step took."""

    folder: Path
    quick: bool
    data: Path | None
    started: float
    run: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def recipe(self, kind: Literal["rank", "next"]) -> Recipe:
        """The recipe of one of the two models, with this demo's folders and number of epochs."""
        from semel import recipes
        from semel.training import override, with_paths

        recipe = override(recipes.get(RECIPES[kind]), (QUICK_FIELDS if self.quick else FIELDS)[kind])
        return with_paths(recipe, self.store, self.folder / "runs")

    def say(self, text: str) -> None:
        """One line about what a step found, under its title."""
        output.remark(f"   {text}")


def start(folder: Path, quick: bool, data: Path | None) -> Demo:
    """A demo in a fresh folder. ValueError for a folder that holds something else, FileNotFoundError without data."""
    if data is not None and not data.exists():
        raise FileNotFoundError(f"--data {data}: no such file or folder")
    replaced = fresh(folder)
    output.remark(f"working in {folder}" + (", in place of the last demo's files" if replaced else ""))
    return Demo(folder, quick, data, time.perf_counter())

"""What a loop is, as data that stays the same over restarts, and where everything of it lies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.features import FeatureSpec
from semel.history.durable import replace_file

if TYPE_CHECKING:
    from semel.training import Recipe

FORMAT = 1
LEAST_RETENTION_S = 60.0


@dataclass(frozen=True)
class LoopConfig:
    """``data``: a data set (as ``semel ingest`` takes it) whose events are replayed by time; None: the simulated site.
    ``speedup``: seconds of that time in one second. ``rate``: requests a second of the simulated site, which has
    ``users`` and ``past_hours`` of history; a replay asks when its users did, from ``begin_share`` of all events on.
    ``window``: seconds in which an outcome counts. ``retention``: seconds for which what was served can be computed
    again; what is older and needed no more is removed (``semel.loop.retention``), 0: nothing is. ``assign``: (field,
    value) pairs that override the recipe's."""

    recipe: str = "site_rank"
    data: str | None = None
    speedup: float = 600.0
    rate: float = 20.0
    users: int = 600
    past_hours: int = 24 * 14
    begin_share: float = 0.6
    window: float = 15.0
    retention: float = 86_400.0
    seed: int = 0
    assign: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("speedup", "rate", "window"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.retention and not LEAST_RETENTION_S <= self.retention < float("inf"):
            raise ValueError(f"retention must be 0 (nothing is removed) or at least {LEAST_RETENTION_S:g} seconds, got "
                             f"{self.retention:g}")
        if self.rate > 5000:
            raise ValueError(f"rate must be at most 5000 requests a second, got {self.rate}")
        if not 0 < self.begin_share < 1:
            raise ValueError(f"begin_share must lie between 0 and 1, got {self.begin_share}")
        if self.users < 8 or self.past_hours < 1 or self.seed < 0:
            raise ValueError(f"users must be at least 8, past_hours at least 1, seed not negative, got {self.users}, "
                             f"{self.past_hours}, {self.seed}")

    def make_recipe(self, folder: LoopFolder) -> Recipe:
        """The recipe with its overrides, on the loop's own folders. ValueError for what is none."""
        from semel import recipes
        from semel.training import override

        recipe = override(recipes.get(self.recipe), dict(self.assign))
        if recipe.model.objective != "ranking":
            raise ValueError(f"recipe {self.recipe!r} predicts the next item; a loop trains ranking recipes")
        return replace(recipe, store=str(folder.store), out=str(folder.runs))


@dataclass(frozen=True)
class Served:
    """What the driver and the joiner need to know of the recipe, who would import torch for all of it. The rest: how
    events become requests, as of ``ExampleConfig``."""

    recipe: str
    features: FeatureSpec
    gap_minutes: float
    like_threshold: float
    max_candidates: int | None

    @classmethod
    def of(cls, recipe: Recipe) -> Served:
        examples = recipe.examples
        return cls(recipe.name, recipe.features, examples.gap_minutes, examples.like_threshold, examples.max_candidates)


class LoopFolder:
    """The folder of a loop: its files, by name. ``loop.json`` holds the configuration and ``key``, which makes the keys
    of this loop's events and outcomes its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.store = self.path / "store"
        self.runs = self.path / "runs"
        self.rows = self.path / "rows"
        self.status = self.path / "status"
        self.logs = self.path / "logs"
        self.ledger = self.path / "ledger.sqlite"
        self.samples = self.path / "samples.jsonl"
        self.report = self.path / "report.html"
        self._file = self.path / "loop.json"

    def settle(self, config: LoopConfig) -> LoopConfig:
        """Make the folder a loop's, or find that it is this one's. ValueError where it is another's, FileExistsError
        where something else lies there."""
        if self._file.exists():
            found, _ = self.load()
            for field in fields(LoopConfig):
                old, new = getattr(found, field.name), getattr(config, field.name)
                if old != new:
                    raise ValueError(f"{self.path} holds a loop with {field.name} {_shown(old)}, not {_shown(new)}; go "
                                     "on with what it has, or choose another --dir")
            return found
        if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            raise FileExistsError(f"{self.path} is there and holds no loop; choose another --dir")
        for folder in (self.path, self.rows, self.status, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "key": uuid.uuid4().hex[:12], "config": asdict(config)}
        replace_file(self._file, json.dumps(document, indent=1).encode())
        return config

    def abandon(self) -> None:
        """Take away what ``settle`` made, of a loop that could not begin."""
        for folder in (self.rows, self.status, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("loop.json", "served.json", "loop.lock"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def load(self) -> tuple[LoopConfig, str]:
        """The configuration and the key. FileNotFoundError where no loop is, ValueError for a damaged file."""
        try:
            document = json.loads(self._file.read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path} holds no loop; start one with semel loop") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._file} is damaged: {error}") from None
        if document.get("format") != FORMAT:
            raise ValueError(f"{self._file}: format {document.get('format')}, this Semel reads {FORMAT}")
        values = document["config"]
        values["assign"] = tuple((name, value) for name, value in values["assign"])
        return LoopConfig(**values), document["key"]

    @property
    def settled(self) -> bool:
        """Whether a loop lies here."""
        return self._file.exists()

    def write_served(self, served: Served) -> None:
        document = {**asdict(served), "features": served.features.to_json()}
        replace_file(self.path / "served.json", json.dumps(document, indent=1).encode())

    def read_served(self) -> Served:
        document = json.loads((self.path / "served.json").read_text())
        return Served(**{**document, "features": FeatureSpec.from_json(document["features"])})

    def write_status(self, name: str, status: dict[str, Any]) -> None:
        """What a process says of itself; not synced: it is told again in a second."""
        path = self.status / f"{name}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(status))
        os.replace(beside, path)

    def read_status(self, name: str) -> dict[str, Any]:
        """The last one; empty before the first."""
        try:
            return dict(json.loads((self.status / f"{name}.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}


def _shown(value: Any) -> str:
    if value is None:
        return "--simulate"
    if isinstance(value, tuple):
        return ", ".join(f"{name}={text}" for name, text in value) or "none"
    return str(value)

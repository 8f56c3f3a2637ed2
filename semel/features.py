"""What a model reads and predicts: the names and kinds of its features and tasks. Data only, no torch.

The same ``FeatureSpec`` is used by the loader that trains, the server that scores and the replay that checks both, so
that a feature has one meaning everywhere.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

MISSING = int(np.iinfo(np.int64).min)
"""The stable id of a categorical value that is null or was not sent."""

Kind = Literal["categorical", "multi", "numeric"]


@dataclass(frozen=True)
class Feature:
    """One column. ``categorical``: integers or strings -> one int64 stable id; ``multi``: a string of values joined by
    ``|`` -> a Jagged of stable ids; ``numeric``: float32, NaN where null."""

    name: str
    kind: Kind = "categorical"

    def __post_init__(self) -> None:
        if self.kind not in ("categorical", "multi", "numeric"):
            raise ValueError(f"feature {self.name!r}: kind {self.kind!r} is none of categorical, multi, numeric")


@dataclass(frozen=True)
class Task:
    """One thing to predict. ``unobserved``: the label of a candidate that was shown and got no outcome within the join
    window (0.0 for a click, None for a rating: no label). ``weight``: its share of the training loss."""

    name: str
    kind: Literal["binary", "regression"] = "binary"
    unobserved: float | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class FeatureSpec:
    """``history``: columns of a user's events (``event_time`` is always read); ``request``: context sent with a
    request; ``candidate``: columns of the catalogue; ``tasks``: the first one is what candidates are ranked by;
    ``history_last``: how many of the last events a model reads; ``item``: the history column that holds the item id."""

    history: tuple[Feature, ...] = (Feature("item_id"),)
    request: tuple[Feature, ...] = ()
    candidate: tuple[Feature, ...] = ()
    tasks: tuple[Task, ...] = (Task("like"),)
    history_last: int = 200
    item: str = "item_id"

    def __post_init__(self) -> None:
        if self.item not in [feature.name for feature in self.history]:
            raise ValueError(f"the item column {self.item!r} is not among the history features")
        if self.history_last < 1:
            raise ValueError(f"history_last must be at least 1, got {self.history_last}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FeatureSpec:
        def features(items: Any) -> tuple[Feature, ...]:
            return tuple(Feature(**item) for item in items)

        return cls(features(value["history"]), features(value["request"]), features(value["candidate"]),
                   tuple(Task(**task) for task in value["tasks"]), value["history_last"], value["item"])


@lru_cache(maxsize=1 << 20)
def _of_text(text: str) -> int:
    number = _NUMBER.fullmatch(text)
    if number is not None:
        value = float(text) if number[1] else int(text)
        if str(value) == text and abs(value) < 2**63:
            return _of_float(value) if isinstance(value, float) else value
    # The top bit is cleared, so that no string can meet MISSING.
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & 0x7FFF_FFFF_FFFF_FFFF


_NUMBER = re.compile(r"-?[0-9]+([.][0-9]+)?")


def _of_float(value: float) -> int:
    return int(stable_id(np.asarray(value)))


def stable_id(values: Any) -> np.ndarray:
    """Categorical values -> int64 that mean the same in every process: integers and booleans stand for themselves,
    other floats for their bit pattern, strings for 63 bits of their BLAKE2b, None and NaN for ``MISSING``.

    A number is itself however it is written: 4, 4.0, "4" and "4.0" are one value, so a client that sends 25 meets what
    a table holds as "25" ("025" is a string). Shape is kept.
    """
    array = np.asarray(values)
    if array.dtype.kind in "iub":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)
        whole = np.isfinite(wide) & (wide == np.floor(wide)) & (np.abs(wide) < 2.0**53)
        integers = np.where(whole, wide, 0.0).astype(np.int64)
        return np.where(whole, integers, np.where(np.isnan(wide), MISSING, wide.view(np.int64)))
    flat = array.reshape(-1)
    out = np.fromiter((_stable_one(value) for value in flat), dtype=np.int64, count=len(flat))
    return out.reshape(array.shape)


def _stable_one(value: Any) -> int:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return _of_text(value)
    return int(stable_id(np.asarray(value)))

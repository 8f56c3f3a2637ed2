"""What a ranked request gives back. No dependencies, so that a client needs neither torch nor pyarrow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from semel.serving.requests import Filters

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

Id: TypeAlias = int | str


class ScoredItem(NamedTuple):
    """One candidate and what it was ranked by: a probability for a binary task, the value for a regression."""

    item_id: Id
    score: float


class Pointer(NamedTuple):
    """The history that a request saw: events of ``user_id`` with ``event_time < as_of`` (us) and a version up to
    ``version``."""

    user_id: Id
    as_of: int
    version: int


@dataclass(frozen=True)
class RankRequest:
    """What ``Predictor.rank`` is asked."""

    user_id: Id
    candidates: Sequence[Id] | np.ndarray
    context: dict[str, Any] | None = None
    limit: int | None = None
    as_of: int | None = None
    filters: Filters = Filters()


@dataclass(frozen=True)
class RankResult:
    """``results``: best first, ties in the order of the request's candidates (of a retrieval: of the ids); at most
    ``limit`` of them. ``timings_ms``: ``history``, ``features``, ``scan`` (of a retrieval), ``model``, ``total`` (and
    ``queue`` over HTTP). ``counts``: items that came ``in`` (candidates, or the catalogue), were ``scored`` (the others
    were filtered, or there was no time for them) and went ``out``."""

    request_id: str
    model_version: str
    pointer: Pointer
    results: list[ScoredItem]
    timings_ms: dict[str, float]
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The body of the answer to ``POST /v1/rank``, ``/v1/prerank`` and ``/v1/retrieve``."""
        return {
            "request_id": self.request_id,
            "model_version": self.model_version,
            "pointer": self.pointer._asdict(),
            "results": [{"item_id": item, "score": score} for item, score in self.results],
            "timings_ms": self.timings_ms,
            "counts": self.counts,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankResult:
        """The inverse of ``to_json``; KeyError names a missing field."""
        return cls(value["request_id"], value["model_version"], Pointer(**value["pointer"]),
                   [ScoredItem(item["item_id"], item["score"]) for item in value["results"]], value["timings_ms"],
                   value.get("counts", {}))


@dataclass(frozen=True)
class StageCost:
    """What one stage of a recommendation did: by which model, on how many items (``counts`` as of RankResult), how long
    it took (``timings_ms``, likewise). ``cut``: how many more it would have got, had its budget been larger."""

    stage: str
    model_version: str
    counts: dict[str, int]
    timings_ms: dict[str, float]
    cut: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "model_version": self.model_version, "counts": self.counts,
                "timings_ms": self.timings_ms, "cut": self.cut}


@dataclass(frozen=True)
class RecommendResult:
    """``results``: best first by the last stage, ties in the order of the stage before; ``stages``: in order.
    ``timings_ms``: each stage by name, and ``total`` (and ``queue`` over HTTP)."""

    request_id: str
    model_version: str
    pointer: Pointer
    results: list[ScoredItem]
    stages: list[StageCost]
    timings_ms: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The body of the answer to ``POST /v1/recommend``."""
        return {
            "request_id": self.request_id,
            "model_version": self.model_version,
            "pointer": self.pointer._asdict(),
            "results": [{"item_id": item, "score": score} for item, score in self.results],
            "stages": [stage.to_json() for stage in self.stages],
            "timings_ms": self.timings_ms,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RecommendResult:
        """The inverse of ``to_json``; KeyError names a missing field."""
        return cls(value["request_id"], value["model_version"], Pointer(**value["pointer"]),
                   [ScoredItem(item["item_id"], item["score"]) for item in value["results"]],
                   [StageCost(**stage) for stage in value["stages"]], value["timings_ms"])

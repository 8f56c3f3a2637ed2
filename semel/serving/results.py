"""What a ranked request gives back. No dependencies, so that a client needs neither torch nor pyarrow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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


@dataclass(frozen=True)
class RankResult:
    """``results``: best first, ties in the order of the request's candidates; at most ``limit`` of them.
    ``timings_ms``: ``history``, ``features``, ``model``, ``total`` (and ``queue`` over HTTP)."""

    request_id: str
    model_version: str
    pointer: Pointer
    results: list[ScoredItem]
    timings_ms: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The body of the answer to ``POST /v1/rank``."""
        return {
            "request_id": self.request_id,
            "model_version": self.model_version,
            "pointer": self.pointer._asdict(),
            "results": [{"item_id": item, "score": score} for item, score in self.results],
            "timings_ms": self.timings_ms,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankResult:
        """The inverse of ``to_json``; KeyError names a missing field."""
        return cls(value["request_id"], value["model_version"], Pointer(**value["pointer"]),
                   [ScoredItem(item["item_id"], item["score"]) for item in value["results"]], value["timings_ms"])

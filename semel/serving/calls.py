"""The HTTP calls of a server as data: what both clients send, and what they make of the answer. No dependencies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar

from semel.serving.requests import Diversity, Stage, StageSize
from semel.serving.results import Id, RankResult, RecommendResult

if TYPE_CHECKING:
    import numpy as np

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """``body`` None: a GET. ``safe``: an attempt whose answer was lost can be made again, and changes nothing more."""

    path: str
    read: Callable[[dict[str, Any]], Answer]
    body: dict[str, Any] | None = None
    safe: bool = False


@dataclass(frozen=True)
class WriteResult:
    """``accepted``, ``duplicates``: rows (labels for outcomes). ``version``: of the store, None for outcomes."""

    accepted: int
    duplicates: int
    version: int | None = None


class Health(TypedDict):
    """The server runs: its version of Semel, and the model that ranks."""

    status: Literal["ok"]
    version: str
    model_version: str


@dataclass(frozen=True)
class ServedModel:
    """A version of a model, the ``run`` it is of, and ``since`` when it has served (microseconds since 1970)."""

    version: str
    run: str
    since: int


@dataclass(frozen=True)
class StageModels:
    """What serves a stage: the ``current`` version, those ``before`` it (oldest first), and whether it is ``pinned``
    or makes room for the next version that the run saves."""

    current: ServedModel
    before: list[ServedModel]
    pinned: bool


@dataclass(frozen=True)
class AvailableModel:
    """A version that could serve: ``kind`` of model, ``saved_at`` microseconds since 1970."""

    version: str
    run: str
    kind: str
    saved_at: int


@dataclass(frozen=True)
class Models:
    """What ``/v1/models`` says. A stage without a model of its own is not there: ``rank``'s does it."""

    stages: dict[str, StageModels]
    available: list[AvailableModel] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Models:
        """The inverse of ``to_json``; KeyError names a missing field."""
        return cls({name: StageModels(ServedModel(**stage["current"]), [ServedModel(**one) for one in stage["before"]],
                                      stage["pinned"]) for name, stage in value["stages"].items()},
                   [AvailableModel(**one) for one in value["available"]])


def rank(stage: Stage, user_id: Id, candidates: Sequence[Id] | np.ndarray, said: dict[str, Any]) -> Call[RankResult]:
    """``POST /v1/rank`` and ``/v1/prerank``; ``said``: the fields that may be left out."""
    body = {"user_id": _json(user_id), "candidates": _json(candidates), **_options(said)}
    return Call(f"/v1/{stage}", RankResult.from_json, body)


def retrieve(user_id: Id, said: dict[str, Any]) -> Call[RankResult]:
    """``POST /v1/retrieve``."""
    return Call("/v1/retrieve", RankResult.from_json, {"user_id": _json(user_id), **_options(said)})


def recommend(user_id: Id, said: dict[str, Any]) -> Call[RecommendResult]:
    """``POST /v1/recommend``."""
    return Call("/v1/recommend", RecommendResult.from_json, {"user_id": _json(user_id), **_options(said)})


def events(rows: Iterable[dict[str, Any]]) -> Call[WriteResult]:
    """``POST /v1/events``. Rows without a key get one: however often it is sent, it counts once."""
    return _write("events", [row if "event_key" in row else {**row, "event_key": uuid.uuid4().hex} for row in rows])


def items(rows: Iterable[dict[str, Any]]) -> Call[WriteResult]:
    """``POST /v1/items``; the same row twice changes nothing."""
    return _write("items", list(rows))


def outcomes(rows: Iterable[dict[str, Any]]) -> Call[WriteResult]:
    """``POST /v1/outcomes``, with keys as for events."""
    return _write("outcomes", [row if "outcome_key" in row else {**row, "outcome_key": uuid.uuid4().hex}
                               for row in rows])


def health() -> Call[Health]:
    """``GET /healthz``."""
    return Call("/healthz", lambda answer: Health(**answer), safe=True)  # type: ignore[typeddict-item]


def models() -> Call[Models]:
    """``GET /v1/models``."""
    return Call("/v1/models", Models.from_json, safe=True)


def serve(stage: str, version: str | None, run: str | None) -> Call[Models]:
    """``POST /v1/models``. Going back once more is not the same as going back: "previous" is not tried twice."""
    body = {"stage": stage, **_options({"version": version, "run": run})}
    return Call("/v1/models", Models.from_json, body, safe=version != "previous")


def _write(kind: str, rows: list[dict[str, Any]]) -> Call[WriteResult]:
    return Call(f"/v1/{kind}", _written, {kind: rows}, safe=True)


def _written(answer: dict[str, Any]) -> WriteResult:
    return WriteResult(answer["accepted"], answer["duplicates"], answer.get("version"))


def _options(said: dict[str, Any]) -> dict[str, Any]:
    """What was said, in JSON's types; what was not is the server's to choose."""
    return {name: _json(value) for name, value in said.items()
            if value is not None and not (name == "exclude_seen" and value is False)
            and not (name == "blocked" and not len(value))}


def _json(value: Any) -> Any:
    """In JSON's types: numpy arrays, scalars and the request's own dataclasses are not."""
    if isinstance(value, (Diversity, StageSize)):
        return {name: _json(part) for name, part in asdict(value).items() if part is not None}
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    return value if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable) else list(value)

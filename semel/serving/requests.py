"""What a server is asked, as data: filters, the sizes of the stages, and the requests. No dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from semel.serving.results import Id

Stage = Literal["retrieve", "prerank", "rank"]
STAGES: tuple[Stage, ...] = ("retrieve", "prerank", "rank")
MOST_RETRIEVED = 1 << 16
"""Most candidates that one retrieval gives."""
RETRIEVED, PRERANKED, RECOMMENDED = 1000, 200, 20
"""How many candidates each stage of ``recommend`` passes on, unless it is told."""


@dataclass(frozen=True)
class Diversity:
    """At most ``most`` items of one value of the catalogue's ``column`` (an author) in an answer. Items without a value
    are not counted together."""

    column: str
    most: int = 1


@dataclass(frozen=True)
class Filters:
    """What an answer must not hold: items of the user's own history (``exclude_seen``: all of it, however little the
    model reads), ``blocked`` ids, too many of a kind."""

    exclude_seen: bool = False
    blocked: Sequence[Id] | np.ndarray = ()
    diversity: Diversity | None = None


@dataclass(frozen=True)
class RetrieveRequest:
    """What ``Predictor.retrieve`` is asked."""

    user_id: Id
    limit: int = RETRIEVED
    context: dict[str, Any] | None = None
    as_of: int | None = None
    filters: Filters = Filters()
    budget_ms: float | None = None


@dataclass(frozen=True)
class StageSize:
    """``candidates``: how many a stage passes on, at most. ``budget_ms``: how long it may take; retrieval then stops
    looking, the others score as many as they are expected to manage."""

    candidates: int | None = None
    budget_ms: float | None = None


@dataclass(frozen=True)
class RecommendRequest:
    """What ``Predictor.recommend`` is asked. None leaves a stage its defaults; ``prerank`` needs a
    model of its own."""

    user_id: Id
    limit: int = RECOMMENDED
    context: dict[str, Any] | None = None
    as_of: int | None = None
    filters: Filters = Filters()
    retrieve: StageSize | None = None
    prerank: StageSize | None = None
    rank: StageSize | None = None

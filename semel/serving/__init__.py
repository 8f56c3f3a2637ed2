"""Serving: a predictor in process, an HTTP server around it, a client, and the replay that checks what was served.

Names are imported when first asked for, so that a client pays neither for torch nor for a web framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "AsyncClient": "semel.serving.client",
    "Client": "semel.serving.client",
    "Diversity": "semel.serving.requests",
    "Filters": "semel.serving.requests",
    "InvalidRequest": "semel.serving.errors",
    "NonFiniteScore": "semel.serving.errors",
    "Overloaded": "semel.serving.errors",
    "Pointer": "semel.serving.results",
    "Predictor": "semel.serving.predictor",
    "RankRequest": "semel.serving.results",
    "RankResult": "semel.serving.results",
    "RecommendRequest": "semel.serving.requests",
    "RecommendResult": "semel.serving.results",
    "ReplayReport": "semel.serving.replays",
    "RetrieveRequest": "semel.serving.requests",
    "ScoredItem": "semel.serving.results",
    "ServerError": "semel.serving.client",
    "SkewReport": "semel.serving.skews",
    "StageCost": "semel.serving.results",
    "StageSize": "semel.serving.requests",
    "VersionWatch": "semel.serving.versions",
    "create_app": "semel.serving.server",
    "replay": "semel.serving.replays",
    "run_server": "semel.serving.process",
    "skew": "semel.serving.skews",
}

__all__ = [
    "AsyncClient", "Client", "Diversity", "Filters", "InvalidRequest", "NonFiniteScore", "Overloaded", "Pointer",
    "Predictor", "RankRequest", "RankResult", "RecommendRequest", "RecommendResult", "ReplayReport", "RetrieveRequest",
    "ScoredItem", "ServerError", "SkewReport", "StageCost", "StageSize", "VersionWatch", "create_app", "replay",
    "run_server", "skew",
]

if TYPE_CHECKING:
    from semel.serving.client import AsyncClient, Client, ServerError
    from semel.serving.errors import InvalidRequest, NonFiniteScore, Overloaded
    from semel.serving.predictor import Predictor
    from semel.serving.process import run_server
    from semel.serving.replays import ReplayReport, replay
    from semel.serving.requests import Diversity, Filters, RecommendRequest, RetrieveRequest, StageSize
    from semel.serving.results import Pointer, RankRequest, RankResult, RecommendResult, ScoredItem, StageCost
    from semel.serving.server import create_app
    from semel.serving.skews import SkewReport, skew
    from semel.serving.versions import VersionWatch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.serving' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value

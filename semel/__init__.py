"""Semel ("once"): sequence recommenders from event to score, in which each thing is done once.

The names below are the public ones; each is imported when it is first asked for, so that ``import semel`` costs
neither torch nor pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Jagged": "semel.batch",
    "JaggedTable": "semel.batch",
    "Pointers": "semel.batch",
    "RequestBatch": "semel.batch",
    "RequestRows": "semel.batch",
    "EventSchema": "semel.history",
    "HistoryStore": "semel.history",
    "Projection": "semel.history",
    "ItemMemory": "semel.memory",
    "isolate": "semel.sharing",
    "share": "semel.sharing",
    "Trainer": "semel.training",
    "Predictor": "semel.serving",
    "Client": "semel.serving",
}

__all__ = [
    "Client", "EventSchema", "HistoryStore", "ItemMemory", "Jagged", "JaggedTable", "Pointers", "Predictor",
    "Projection", "RequestBatch", "RequestRows", "Trainer", "__version__", "isolate", "share",
]

if TYPE_CHECKING:
    from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows
    from semel.history import EventSchema, HistoryStore, Projection
    from semel.memory import ItemMemory
    from semel.serving import Client, Predictor
    from semel.sharing import isolate, share
    from semel.training import Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel' has no attribute {name!r}; it offers {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""Plan once: placement x schedule x network of a training job over racks, buildings and regions, searched together.

Knows nothing else of Semel. ``load_cluster`` and ``load_job`` read small TOML files or ready ones (``ready``);
``workload`` says what one step of a layout consists of, ``search`` finds the best layouts::

    plans = search(load_cluster("meta-region-16k"), load_job("llama3-405b"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from semel.planning.cluster import Cluster, Device, Level, Technology, Unit
from semel.planning.estimate import Estimate, estimate
from semel.planning.files import ready
from semel.planning.job import Job, Recommender, Transformer, load_job
from semel.planning.layout import AXES, Layout
from semel.planning.load import load_cluster
from semel.planning.validate import validate
from semel.planning.workload import Chunk, Infeasible, Transfer, Workload, workload

if TYPE_CHECKING:
    from semel.planning.explorer import explore, search
    from semel.planning.options import Options, load_search
    from semel.planning.plan import Plan
    from semel.planning.simulate import Trace

_LATER = {"search": "explorer", "explore": "explorer", "Options": "options", "load_search": "options",
          "Plan": "plan", "Trace": "simulate"}
"""Names that need compiled loops, and where they live: imported when they are asked for."""

__all__ = [
    "AXES", "Chunk", "Cluster", "Device", "Estimate", "Infeasible", "Job", "Layout", "Level", "Options", "Plan",
    "Recommender", "Technology", "Trace", "Transfer", "Transformer", "Unit", "Workload", "estimate", "explore",
    "load_cluster", "load_job", "load_search", "ready", "search", "validate", "workload",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'semel.planning' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"semel.planning.{_LATER[name]}"), name)

"""Plan once: placement x schedule x network of a training job over racks, buildings and regions, searched together.

Knows nothing else of Semel. ``load_cluster`` and ``load_job`` read small TOML files or ready ones (``ready``);
``workload`` says what one step of a layout consists of.
"""

from semel.planning.cluster import Cluster, Device, Level, Technology, Unit
from semel.planning.estimate import Estimate, estimate
from semel.planning.files import ready
from semel.planning.job import Job, Recommender, Transformer, load_job
from semel.planning.layout import AXES, Layout
from semel.planning.load import load_cluster
from semel.planning.validate import validate
from semel.planning.workload import Chunk, Infeasible, Transfer, Workload, workload

__all__ = [
    "AXES", "Chunk", "Cluster", "Device", "Estimate", "Infeasible", "Job", "Layout", "Level", "Recommender",
    "Technology", "Transfer", "Transformer", "Unit", "Workload", "estimate", "load_cluster", "load_job", "ready",
    "validate", "workload",
]

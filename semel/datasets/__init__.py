"""Readers of public data sets and of your own tables, ``fetch`` to bring one here, ``ingest`` to store it once.

``semel.datasets.simulate`` makes a data set with known truth.
"""

from semel.datasets.dataset import Dataset, Progress, Tables
from semel.datasets.fetch import DatasetNotFound, fetch
from semel.datasets.layouts import LAYOUTS, Layout, detect, read
from semel.datasets.published import PUBLISHED
from semel.datasets.table import EventColumns, read_events

__all__ = [
    "LAYOUTS", "PUBLISHED", "Dataset", "DatasetNotFound", "EventColumns", "Layout", "Progress", "Tables", "detect",
    "fetch", "read", "read_events",
]

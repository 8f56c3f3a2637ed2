"""Readers of public data sets and of your own tables, ``fetch`` to bring one here, ``ingest`` to store it once.

    dataset = fetch("ml-1m")                 # or read("folder"), or read("events.parquet", columns=EventColumns(...))
    report = ingest(dataset, "store")
    report = ingest_files(["events/"], "store")          # tables of your own, larger than memory, or into a store again
    report = ingest_kafka("kafka://broker/topic", "store", until_end=True)

``semel.datasets.simulate`` makes a data set with known truth.
"""

from semel.datasets.dataset import Dataset, Progress, Tables
from semel.datasets.fetching import DatasetNotFound, fetch
from semel.datasets.ingestion import IngestReport, ingest
from semel.datasets.kafka_ingestion import KafkaReport, ingest_kafka
from semel.datasets.layouts import LAYOUTS, Layout, detect, read
from semel.datasets.own_events import ingest_files
from semel.datasets.published import PUBLISHED
from semel.datasets.table import EventColumns

__all__ = [
    "LAYOUTS", "PUBLISHED", "Dataset", "DatasetNotFound", "EventColumns", "IngestReport", "KafkaReport", "Layout",
    "Progress", "Tables", "detect", "fetch", "ingest", "ingest_files", "ingest_kafka", "read",
]

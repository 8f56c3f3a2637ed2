"""``ingest``: a data set into a history store with its catalogue, in one step that is seen whole or not at all."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semel.datasets.dataset import Dataset, Progress
from semel.history import EventSchema, HistoryStore
from semel.history.durable import whole_folder

CHUNK_ROWS = 100_000
CATALOGUE_SHARDS = 1
"""A request reads hundreds of items at once: in one shard they are one gather. A user's shard is for writers."""
DATASET_FORMAT = 1


@dataclass(frozen=True)
class IngestReport:
    """``events`` appended, by ``users``; ``items`` in the catalogue; ``seconds`` of appending and compacting, events
    and items; ``events_per_second`` = events / seconds; ``bytes`` of all files of the store; ``version`` after the
    last append of events; ``appended``: the events of these that the store did not have before; ``notes``: what was
    decided or left out."""

    events: int
    users: int
    items: int
    seconds: float
    events_per_second: float
    bytes: int
    version: int
    appended: int
    notes: tuple[str, ...] = ()


def ingest(dataset: Dataset, store: Path, progress: Progress | None = None, shards: int = 16) -> IngestReport:
    """Makes the store at ``store``: the events in file order, ``catalogue/`` keyed by ``item_id``, ``dataset.json``,
    and ``users.parquet`` and ``impressions.parquet`` where the data set has such.

    An item's features count from its own ``event_time``; where the data set does not say when an item appeared, from 0,
    so that every request sees them. Items that have events but no features are in the catalogue too, with nulls.
    Everything is made in a hidden folder beside and renamed at the end. Raises FileExistsError where ``store`` is
    there and not empty, ValueError for a data set that cannot be stored.
    """
    store = Path(store)
    with whole_folder(store, "--store") as building:
        return _build(dataset, building, progress, shards)


def _build(dataset: Dataset, path: Path, progress: Progress | None, shards: int) -> IngestReport:
    items = catalogue_of(dataset)
    events = events_of(dataset)
    users = len(pc.unique(events["user_id"]))
    began = time.perf_counter()
    version = fill(path, events, "user_id", shards, "events", progress)
    catalogue_version = fill(path / "catalogue", items, "item_id", CATALOGUE_SHARDS, "items", progress)
    seconds = time.perf_counter() - began
    for name, table in (("users", dataset.users), ("impressions", dataset.impressions)):
        if table is not None:
            pq.write_table(table, path / f"{name}.parquet", compression="zstd")
    times = pc.min_max(dataset.events["event_time"])
    note: dict[str, Any] = {
        "format": DATASET_FORMAT, "name": dataset.name, "licence": dataset.licence, "source": dataset.source,
        "action": dataset.action, "notes": list(dataset.notes),
        "events": dataset.events.num_rows, "users": users, "items": items.num_rows,
        "first_event_time": times["min"].as_py(), "last_event_time": times["max"].as_py(),
        "version": version, "catalogue_version": catalogue_version,
        "users_file": "users.parquet" if dataset.users is not None else None,
        "impressions_file": "impressions.parquet" if dataset.impressions is not None else None,
        "ingested": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (path / "dataset.json").write_text(json.dumps(note, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return IngestReport(dataset.events.num_rows, users, items.num_rows, seconds,
                        dataset.events.num_rows / seconds, size, version, dataset.events.num_rows, dataset.notes)


def fill(path: Path, table: pa.Table, key: str, shards: int, what: str, progress: Progress | None) -> int:
    """Creates a store of the table's rows, in their order, and compacts it; the version of the last append."""
    columns = {field.name: field.type for field in table.schema if field.name not in (key, "event_time")}
    group = "action" if "action" in columns else None
    schema = EventSchema(columns, user_id=table.schema.field(key).type, group=group, key=key)
    with HistoryStore.create(path, schema, shards=shards) as store:
        for low in range(0, table.num_rows, CHUNK_ROWS):
            chunk = table.slice(low, CHUNK_ROWS)
            store.append(chunk)
            if progress:
                progress(f"append {what}", low + chunk.num_rows, table.num_rows)
        if progress:
            progress(f"compact {what}", 0, None)
        store.compact()
        return store.version


def events_of(dataset: Dataset) -> pa.Table:
    """The events with a column ``action``: where a data set has one kind of event only, every row says which, so that a
    live site may append others beside them."""
    events = dataset.events
    if dataset.action is None or "action" in events.column_names:
        return events
    codes = pa.array(np.zeros(events.num_rows, dtype=np.int8))
    return events.append_column("action", pa.DictionaryArray.from_arrays(codes, [dataset.action]))


def catalogue_of(dataset: Dataset) -> pa.Table:
    """The catalogue's rows for a whole data set."""
    return catalogue_rows(dataset.items, pc.unique(dataset.events["item_id"]))


def catalogue_rows(items: pa.Table | None, seen: pa.Array) -> pa.Table:
    """The rows of the catalogue: every item with features, then every other item that has events, with nulls."""
    if items is None:
        items = pa.table({"item_id": pa.array([], seen.type)})
    if items.schema.field("item_id").type != seen.type:
        raise ValueError(f"items have {items.schema.field('item_id').type} ids, events {seen.type}; make them the same")
    missing = pc.filter(seen, pc.invert(pc.is_in(seen, value_set=items["item_id"].combine_chunks())))
    items = pa.concat_tables([items, pa.table({"item_id": missing})], promote_options="default")
    if "event_time" not in items.column_names:
        return items.append_column("event_time", pa.array(np.zeros(items.num_rows, dtype=np.int64)))
    index = items.column_names.index("event_time")
    return items.set_column(index, "event_time", pc.fill_null(items["event_time"], 0))

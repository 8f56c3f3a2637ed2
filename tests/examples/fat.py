"""Fat rows made by hand or from a store, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.history import HistoryStore, Pointers, Projection


def write(path: Path, rows: list[dict[str, Any]], **types: pa.DataType) -> Path:
    """Rows as Parquet: ``user``, ``at`` (request time), ``events`` as (time, item, ...) tuples, in three columns or as
    many as ``types`` names."""
    names = ["event_time", "item_id", *types]
    kinds = {"event_time": pa.int64(), "item_id": types.get("item_id", pa.int64()), **types}
    columns = {"user_id": [row["user"] for row in rows],
               "request_time": pa.array([row["at"] for row in rows], pa.int64())}
    for number, name in enumerate(dict.fromkeys(names)):
        columns[f"history_{name}"] = pa.array([[event[number] for event in row["events"]] for row in rows],
                                              pa.list_(kinds[name]))
    if "version" in rows[0]:
        columns["store_version"] = [row["version"] for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def rows_of(store: HistoryStore, pointers: Pointers, last: int | None, *columns: str) -> list[dict[str, Any]]:
    """What a server would have written at these pointers."""
    found = store.read(pointers, Projection(("event_time", *columns), last=last))
    values = [found.columns["event_time"].tolist(), *(plain(found, name) for name in columns)]
    events = list(zip(*values, strict=True))
    users = [user.item() if isinstance(user, np.generic) else user for user in pointers.user_id]
    return [{"user": user, "at": int(at), "events": events[low:high], "version": int(version)}
            for user, at, version, low, high in zip(users, pointers.as_of, pointers.version, found.offsets[:-1],
                                                    found.offsets[1:], strict=True)]


def plain(found: Any, name: str) -> list[Any]:
    if name in (found.dictionaries or {}):
        return list(found.strings(name))
    values = found.columns[name].tolist()
    valid = (found.validity or {}).get(name)
    return values if valid is None else [v if ok else None for v, ok in zip(values, valid, strict=True)]


def events_in(path: Path, *columns: str) -> dict[Any, list[tuple[Any, ...]]]:
    """user -> all events of a store as (time, *columns)."""
    with HistoryStore.open(path) as store:
        keys = store.keys()
        pointers = store.point(keys, as_of=2**62)
        return {row["user"]: row["events"] for row in rows_of(store, pointers, None, *columns)}

"""An example set: the request rows of a store, split by time, as Parquet files under ``STORE/examples/NAME``.

Events are read through the store itself, so that the rows' pointers and what they were made from are one view.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semel.batch import Pointers, RequestRows
from semel.examples.logs import write_atomic
from semel.examples.rows import column_to_numpy, read_rows, rows_to_table
from semel.examples.sessionize import GAP_US, Label, label_values, session_rows
from semel.examples.splits import SPLITS, time_boundaries, time_split
from semel.features import FeatureSpec
from semel.history import HistoryStore, Projection

FORMAT_VERSION = 1
EVERYTHING = int(np.iinfo(np.int64).max)
ROW_GROUP = 16_384
"""Requests of a row group: what a loader reads at once. A window of it is some of these."""
_USERS_AT_ONCE = 16_384


@dataclass(frozen=True)
class ExampleSet:
    """Files of request rows. ``paths[split]``: Parquet (splits: train, validation, test); ``counts[split]``:
    ``requests`` and ``candidates``; ``boundaries``: the ``validation`` and ``test`` begin times in microseconds;
    ``meta``: what it was built from; ``reused``: whether it was there already."""

    paths: dict[str, Path]
    counts: dict[str, dict[str, int]]
    boundaries: dict[str, int]
    meta: dict[str, Any]
    reused: bool = False

    def rows(self, split: str) -> RequestRows:
        """The request rows of one split. Raises KeyError for another name."""
        if split not in self.paths:
            raise KeyError(f"no split {split!r}; there are {', '.join(self.paths)}")
        return read_rows(self.paths[split])


def build_examples(
    store: str | Path, name: str, features: FeatureSpec, *, gap_us: int = GAP_US, like_threshold: float = 4.0,
    labels: Sequence[Label] | None = None, max_candidates: int | None = None, validation_fraction: float = 0.1,
    test_fraction: float = 0.1, validation_from: int | None = None, test_from: int | None = None,
) -> ExampleSet:
    """Makes sessions of all events of the store and splits them by time, or reuses a set made the same way before.

    The last ``test_fraction`` of events test, the ``validation_fraction`` before them validate, or the dates
    ``validation_from`` and ``test_from`` (microseconds) decide. ``labels``: by default a task "like" is ``rating >=
    like_threshold`` and any other task is the event column of its name. Request features come from the store's
    ``users.parquet``. Raises FileNotFoundError without a store, ValueError for an empty store, a bad name, and for
    labels or features that the store lacks.
    """
    folder = example_folder(store, name)
    labels = tuple(labels) if labels is not None else labels_of(features, like_threshold)
    with_dates = validation_from is not None or test_from is not None
    if with_dates and (validation_from is None or test_from is None):
        raise ValueError("give both validation_from and test_from, or neither")
    handle = HistoryStore.open(str(store))
    try:
        users = Path(store) / "users.parquet"
        made_from: dict[str, Any] = {
            "format_version": FORMAT_VERSION, "version": int(handle.version),
            "catalogue_version": _catalogue_version(store), "gap_us": gap_us, "max_candidates": max_candidates,
            "labels": [vars(label) for label in labels],
            "split": [validation_from, test_from] if with_dates else [validation_fraction, test_fraction],
            "request": [vars(feature) for feature in features.request], "item": features.item,
            "users": blake2b(users.read_bytes(), digest_size=8).hexdigest() if users.exists() else None,
        }
        digest = blake2b(json.dumps(made_from, sort_keys=True).encode(), digest_size=16).hexdigest()
        found = _open(folder)
        if found is not None and found.meta["digest"] == digest:
            return ExampleSet(found.paths, found.counts, found.boundaries, found.meta, reused=True)
        events = _all_events(handle, features, labels)
    finally:
        handle.close()
    rows = session_rows(
        *events, gap_us=gap_us, version=made_from["version"], catalogue_version=made_from["catalogue_version"],
        max_candidates=max_candidates)
    if features.request:
        rows = _with_context(rows, users, features)
    if validation_from is None or test_from is None:
        validation_from, test_from = time_boundaries(events[2], validation_fraction, test_fraction)
    return _write(folder, time_split(rows, validation_from, test_from), {
        **made_from, "digest": digest, "boundaries": {"validation": validation_from, "test": test_from}})


def open_examples(store: str | Path, name: str) -> ExampleSet:
    """A set that was built before. Raises FileNotFoundError where there is none, ValueError for an unknown format."""
    folder = example_folder(store, name)
    found = _open(folder)
    if found is None:
        raise FileNotFoundError(f"no example set at {folder}; build it first (semel train does)")
    if found.meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{folder}: format {found.meta.get('format_version')}, this version of semel reads "
                         f"{FORMAT_VERSION}; build the set again")
    return found


def example_folder(store: str | Path, name: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"an example set's name may hold letters, digits, '_', '-' and '.', got {name!r}")
    return Path(store) / "examples" / name


def labels_of(features: FeatureSpec, like_threshold: float) -> tuple[Label, ...]:
    """How events label the tasks of a model, where nobody says otherwise."""
    return tuple(Label("like", "rating", like_threshold) if task.name == "like" else Label(task.name, task.name)
                 for task in features.tasks)


def _catalogue_version(store: str | Path) -> int:
    folder = Path(store) / "catalogue"
    if not folder.exists():
        return 0
    catalogue = HistoryStore.open(str(folder))
    try:
        return int(catalogue.version)
    finally:
        catalogue.close()


def _all_events(store: HistoryStore, features: FeatureSpec, labels: Sequence[Label]) -> tuple[Any, ...]:
    """All histories of the store: users, offsets, event times, items, label values."""
    columns = dict.fromkeys([features.item, *(label.column for label in labels if label.column)])
    for column in columns:
        if column not in store.schema.columns:
            raise ValueError(f"the store at {store.path} has no column {column!r} to make labels of; it has "
                             f"{', '.join(store.schema.columns)}")
    users = store.keys()
    if not len(users):
        raise ValueError(f"the store at {store.path} has no events; ingest some first")
    lengths, times, items = [], [], []
    values: dict[str, list[np.ndarray]] = {label.task: [] for label in labels}
    for begin in range(0, len(users), _USERS_AT_ONCE):
        part = users[begin : begin + _USERS_AT_ONCE]
        table = store.read(Pointers(part, np.full(len(part), EVERYTHING), np.full(len(part), store.version)),
                           Projection(columns=("event_time", *columns)))
        lengths.append(np.diff(table.offsets))
        times.append(table.columns["event_time"])
        valid = (table.validity or {}).get(features.item)
        if valid is not None and not valid.all():
            raise ValueError(f"{int((~valid).sum())} events have no {features.item}, the candidate of their request")
        coded = features.item in (table.dictionaries or {})
        items.append(table.strings(features.item) if coded else table.columns[features.item])
        for label in labels:
            values[label.task].append(label_values(label, _numbers(table, label), len(times[-1])))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return (users, offsets, np.concatenate(times), np.concatenate(items),
            {task: np.concatenate(parts) for task, parts in values.items()})


def _numbers(table: Any, label: Label) -> dict[str, np.ndarray]:
    """The label's column with NaN for null."""
    if label.column is None:
        return {}
    if label.column in (table.dictionaries or {}):
        return {label.column: table.strings(label.column)}
    column = table.columns[label.column].astype(np.float64)
    valid = (table.validity or {}).get(label.column)
    return {label.column: column if valid is None else np.where(valid, column, np.nan)}


def _with_context(rows: RequestRows, users: Path, features: FeatureSpec) -> RequestRows:
    if not users.exists():
        raise ValueError(f"request feature {features.request[0].name!r} is to come from {users}, which does not exist")
    table = pq.read_table(users)
    ids = pa.array(rows.pointers.user_id)
    if len(ids) and table["user_id"].type != ids.type:
        raise ValueError(f"{users}: user_id is {table['user_id'].type}, the store's users are {ids.type}")
    place = pc.index_in(ids, value_set=table["user_id"].combine_chunks())
    context = {}
    for feature in features.request:
        if feature.name not in table.column_names:
            raise ValueError(f"request feature {feature.name!r} is not a column of {users}; it has "
                             f"{', '.join(table.column_names)}")
        column = table[feature.name].take(place)
        context[feature.name] = column_to_numpy(column.cast(pa.float32()) if feature.kind == "numeric" else column)
    return RequestRows(rows.request_id, rows.pointers, rows.catalogue_version, context, rows.candidates, rows.label,
                       rows.label_mask, rows.weight)


def _write(folder: Path, splits: dict[str, RequestRows], meta: dict[str, Any]) -> ExampleSet:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)  # a crash from here on leaves a set that is built anew
    counts = {name: {"requests": len(rows), "candidates": len(rows.candidates.values)} for name, rows in splits.items()}
    for name, rows in splits.items():
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        pq.write_table(rows_to_table(rows), temporary, row_group_size=ROW_GROUP, compression="zstd")
        os.replace(temporary, folder / f"{name}.parquet")
    meta = {**meta, "counts": counts}
    write_atomic(folder / "meta.json", json.dumps(meta, indent=1).encode())
    return _example_set(folder, meta)


def _open(folder: Path) -> ExampleSet | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'meta.json'} is damaged ({error}); delete it and build the set again") from None
    return _example_set(folder, meta)


def _example_set(folder: Path, meta: dict[str, Any]) -> ExampleSet:
    return ExampleSet({name: folder / f"{name}.parquet" for name in SPLITS}, meta["counts"], meta["boundaries"], meta)

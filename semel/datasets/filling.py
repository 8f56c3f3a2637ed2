"""Events that come in pieces into a store: each piece is appended once, however often this is interrupted and repeated.

A new store is filled in a hidden folder beside and renamed when it is complete. A store that is there is appended to.
``ingested.json`` in its folder says which files went in, so that a file that has changed since is not taken for a new
one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from semel.datasets.dataset import Progress
from semel.datasets.ingestion import CATALOGUE_SHARDS, CHUNK_ROWS, DATASET_FORMAT, IngestReport, catalogue_rows
from semel.history import EventSchema, HistoryStore
from semel.history.storage.locking import WriterLock

JOURNAL = "ingested.json"
JOURNAL_FORMAT = 1
COMPACT_EVENTS = 32_000_000
"""The log takes some fifty bytes an event, on the disk and of whoever reads it; more is compacted on the way."""


@dataclass(frozen=True)
class Origin:
    """Where pieces come from. ``files``: path -> digest; ``columns``: how they were read (any text, compared);
    ``events``: how many there will be, if known; ``first``/``last``: their event times; ``extends``: whether they may
    join a store that has other events."""

    name: str
    source: str
    licence: str
    files: dict[Path, str]
    columns: str
    extends: bool
    events: int | None = None
    first: int | None = None
    last: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Features:
    """A table of item features; ``token`` names its content, so that it is appended once."""

    table: pa.Table
    token: str


def existing_schema(store: Path, key: str = "user_id") -> EventSchema | None:
    """The schema of the store at ``store``, None where there is none. FileExistsError for a folder or file that is
    something else."""
    if (store / "manifest.json").is_file():
        with HistoryStore.open(store) as handle:
            schema = handle.schema
        if schema.key != key:
            raise ValueError(f"{store} is keyed by {schema.key}, not by {key}; choose another --store")
        return schema
    if store.is_file() or (store.is_dir() and any(store.iterdir())):
        raise FileExistsError(f"{store} exists already and is no history store; choose another --store")
    return None


def fill_store(store: Path, schema: EventSchema, pieces: Iterable[tuple[str, pa.Table]], origin: Origin,
               progress: Progress | None = None, *, items: Features | None = None, users: pa.Table | None = None,
               shards: int = 16) -> IngestReport:
    """Appends ``pieces`` ((token, events), each token once), completes the catalogue, compacts.

    Run again with the same files after an interruption, it goes on where it was: what has been appended is not appended
    again. Raises ValueError, before anything is appended, for files that were ingested before and have changed or were
    read by other columns, and where ``origin`` does not extend a store that has other events.
    """
    store = Path(store)
    new = existing_schema(store) is None
    work = store
    if new:
        store.parent.mkdir(parents=True, exist_ok=True)
        work = store.with_name(f".{store.name}.ingesting")
        if work.exists() and not _continues(work, origin):
            WriterLock(work / "writer.lock").release()  # StoreLocked where it is still going on
            shutil.rmtree(work)  # of an ingest that was given up
    else:
        _join(store, origin)
    began = time.perf_counter()
    with _open_or_create(work, schema, shards) as handle:
        if handle.schema != schema:
            raise ValueError(f"{work}: left by an ingest with another schema; remove it (rm -r {work})")
        _note_files(work, origin)
        before = handle.event_count
        appended, events, seen = _append(handle, pieces, origin.events, progress)
        if handle.uncompacted:
            if progress:
                progress("compact events", 0, None)
            handle.compact()
        version, known_users, total = handle.version, handle.stats()["users"], handle.event_count
    catalogue_version, known_items = _catalogue(work / "catalogue", items, seen, progress, anew=new)
    seconds = time.perf_counter() - began
    if before and appended and not new:
        origin.notes.append(f"{store} was there; events before: {before:,}, joined them: {appended:,}")
    if users is not None:
        pq.write_table(users, work / "users.parquet", compression="zstd")
    _describe(work, origin, version, catalogue_version, events=total, users=known_users, items=known_items)
    if new:
        os.rename(work, store)  # also over an empty folder
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    return IngestReport(events, known_users, known_items, seconds, events / seconds, size, version, appended,
                        tuple(origin.notes))


def _open_or_create(path: Path, schema: EventSchema, shards: int) -> HistoryStore:
    if (path / "manifest.json").is_file():
        return HistoryStore.open(path, mode="a")
    shutil.rmtree(path, ignore_errors=True)  # a create that did not come to its manifest
    return HistoryStore.create(path, schema, shards=shards)


def _append(handle: HistoryStore, pieces: Iterable[tuple[str, pa.Table]], total: int | None,
            progress: Progress | None) -> tuple[int, int, pa.Array]:
    """(events appended now, events in all pieces, their distinct items)."""
    appended = events = 0
    in_log = handle.uncompacted
    seen: list[pa.Array] = []
    for token, piece in pieces:
        before = handle.version
        if handle.append(piece, token=token) > before:
            appended += piece.num_rows
            in_log += piece.num_rows
        if in_log >= COMPACT_EVENTS:
            handle.compact()
            in_log = 0
        events += piece.num_rows
        seen.append(pc.unique(piece["item_id"]))
        if sum(map(len, seen[1:])) > max(1_000_000, len(seen[0])):
            seen = [distinct(seen)]
        if progress:
            progress("append events", events, total)
    return appended, events, distinct(seen)


def distinct(parts: Sequence[pa.Array]) -> pa.Array:
    """The distinct values of parts of an id column, int64 or strings, without nulls."""
    whole = pa.chunked_array(parts) if parts else pa.array([], pa.int64())
    kind = whole.type
    if pa.types.is_dictionary(kind):
        whole, kind = whole.cast(kind.value_type), kind.value_type
    return pc.unique(whole.cast(pa.int64() if pa.types.is_integer(kind) else pa.string())).drop_null()


def _catalogue(path: Path, features: Features | None, seen: pa.Array, progress: Progress | None, *,
               anew: bool) -> tuple[int, int]:
    """Item features, once, and every other item that has events, with nulls; (version, items)."""
    items = None if features is None else features.table
    if anew:
        shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        columns = catalogue_rows(items, seen).drop_columns(["item_id", "event_time"])
        schema = EventSchema(dict(zip(columns.schema.names, columns.schema.types, strict=True)), user_id=seen.type,
                             key="item_id")
        HistoryStore.create(path, schema, shards=CATALOGUE_SHARDS).close()
    with HistoryStore.open(path, mode="a") as handle:
        want = handle.schema.arrow
        if seen.type != want.field("item_id").type:
            raise ValueError(f"{path}: items there have {want.field('item_id').type} ids, these events {seen.type}")
        if items is not None:
            unknown = sorted(set(items.column_names) - set(want.names))
            if unknown:
                raise ValueError(f"{path}: the catalogue has no column {unknown[0]!r}; it has {', '.join(want.names)}")
            rows = as_schema(catalogue_rows(items, seen[:0]), want)
            for low in range(0, rows.num_rows, CHUNK_ROWS):
                handle.append(rows.slice(low, CHUNK_ROWS), token=f"{features.token}:{low}" if features else None)
        known = pa.array(handle.keys(), seen.type)
        rows = as_schema(catalogue_rows(None, pc.filter(seen, pc.invert(pc.is_in(seen, value_set=known)))), want)
        for low in range(0, rows.num_rows, CHUNK_ROWS):
            handle.append(rows.slice(low, CHUNK_ROWS))
        if handle.uncompacted:
            if progress:
                progress("compact items", 0, None)
            handle.compact()
        return handle.version, handle.stats()["users"]


def as_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the columns of ``schema``; those that they lack are null."""
    return pa.table({field.name: rows[field.name].cast(field.type) if field.name in rows.column_names
                     else pa.nulls(rows.num_rows, field.type) for field in schema})


def _journal(folder: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads((folder / JOURNAL).read_text(encoding="utf8"))
    except FileNotFoundError:
        return []
    if document.get("format") != JOURNAL_FORMAT:
        raise ValueError(f"{folder / JOURNAL}: format {document.get('format')}, this Semel reads {JOURNAL_FORMAT}")
    return list(document["files"])


def _continues(folder: Path, origin: Origin) -> bool:
    """Whether an unfinished store holds nothing but pieces of these files, read in the same way."""
    digests, known = set(origin.files.values()), _journal(folder)
    return (all(entry["digest"] in digests and entry["columns"] == origin.columns for entry in known)
            and (origin.extends or {entry["digest"] for entry in known} == digests))


def _join(store: Path, origin: Origin) -> None:
    """Whether these files may go into a store that is there: ValueError, FileExistsError where not."""
    known = _journal(store)
    if not known and (store / "dataset.json").is_file():
        raise FileExistsError(f"{store} exists already and holds a data set; choose another --store")
    paths = {str(path.resolve()): digest for path, digest in origin.files.items()}
    for entry in known:
        if paths.get(entry["path"], entry["digest"]) != entry["digest"]:
            raise ValueError(f"{entry['path']} was ingested into {store} before and has changed since; events are "
                             "never rewritten: put the new ones into a file of their own")
        if entry["digest"] in origin.files.values() and entry["columns"] != origin.columns:
            raise ValueError(f"{entry['path']} was ingested into {store} before, read as {entry['columns']}; its "
                             "events are there")
    if not origin.extends and {entry["digest"] for entry in known} != set(origin.files.values()):
        raise FileExistsError(f"{store} exists already, made of other files; recover all fat rows together into a new "
                              "--store")


def _note_files(folder: Path, origin: Origin) -> None:
    """Before the first event of a file goes in, so that there is no moment at which it is in and not noted."""
    files = _journal(folder)
    known = {entry["digest"] for entry in files}
    files += [{"path": str(path.resolve()), "digest": digest, "columns": origin.columns}
              for path, digest in origin.files.items() if digest not in known]
    _write_json(folder / JOURNAL, {"format": JOURNAL_FORMAT, "files": files})


def _describe(folder: Path, origin: Origin, version: int, catalogue_version: int, **counts: int) -> None:
    path = folder / "dataset.json"
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    times = [time for time in (before.get("first_event_time"), origin.first) if time is not None]
    ends = [time for time in (before.get("last_event_time"), origin.last) if time is not None]
    _write_json(path, {
        "format": DATASET_FORMAT, "name": origin.name, "licence": origin.licence, "source": origin.source,
        "action": None, "impressions_file": None, **before, "notes": [*before.get("notes", []), *origin.notes],
        **counts, "first_event_time": min(times, default=None), "last_event_time": max(ends, default=None),
        "version": version, "catalogue_version": catalogue_version,
        "users_file": "users.parquet" if (folder / "users.parquet").exists() else None,
        "ingested": datetime.now(UTC).isoformat(timespec="seconds"),
    })


def _write_json(path: Path, document: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "w", encoding="utf8") as file:
        json.dump(document, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)

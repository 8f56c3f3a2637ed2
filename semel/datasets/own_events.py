"""``ingest_files``: tables of your own, one file or a folder of them larger than memory, into a new store or one that
is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from semel.datasets.dataset import Progress
from semel.datasets.event_files import EventFile, check_file, plan, read_file
from semel.datasets.filling import Features, Origin, existing_schema, fill_store
from semel.datasets.ingestion import IngestReport
from semel.datasets.layouts import OWN, detect
from semel.datasets.table import ENDINGS as FEATURE_ENDINGS
from semel.datasets.table import EventColumns, read_features
from semel.history import EventSchema
from semel.table_files import ENDINGS, digest, find_files, in_pieces

PIECE_ROWS = 100_000
"""Part of the tokens: another number would append again what an interrupted ingest has appended."""


@dataclass(frozen=True)
class Found:
    """What lies at some paths: files of events in order, and a table of item and of user features, or None."""

    events: list[Path]
    items: Path | None = None
    users: Path | None = None


def find_events(paths: Sequence[Path]) -> Found:
    """The event files at ``paths``. A folder (or the only folder below it) with ``events.*`` has its events there, and
    features in ``items.*`` and ``users.*``; of any other folder all tables are events, in the order of their paths."""
    if len(paths) == 1 and paths[0].is_dir():
        folders = {file.parent for file in paths[0].rglob("events.*") if file.name.lower() in _names("events")}
        folder = paths[0] if paths[0] in folders else next(iter(folders)) if len(folders) == 1 else None
        if folder is not None:
            found = {what: next((folder / name for name in _names(what) if (folder / name).is_file()), None)
                     for what in ("events", "items", "users")}
            assert found["events"] is not None
            return Found([found["events"]], found["items"], found["users"])
    return Found(find_files(paths))


def looks_like_events(path: Path) -> bool:
    """Whether ``path`` is a table of events, or a folder of such, rather than a data set in a layout of its own."""
    try:
        return detect(path)[0].name == "events"
    except ValueError:
        if not any(file.name.lower().endswith(ENDINGS) for file in ([path] if path.is_file() else path.rglob("*"))):
            raise
        return True


def ingest_files(paths: Sequence[Path], store: Path, columns: EventColumns | None = None,
                 progress: Progress | None = None, shards: int = 16) -> IngestReport:
    """Appends the events of Parquet, Arrow (IPC file or stream), CSV and TSV files to the store at ``store``, which is
    made where there is none, with ``catalogue/`` and ``dataset.json`` as ``ingest`` makes them.

    All files are checked first, batch by batch; ValueError names the file and line of what cannot be stored, and
    nothing is appended then. Types are kept where a store has them; where files differ, the widest. The same bytes are
    the same events: a file that went in before, whole or in part, is only completed, so that the call may be repeated
    after an interruption. FileNotFoundError, FileExistsError where ``store`` is something else, StoreLocked.
    """
    columns = columns or EventColumns()
    paths = [Path(path) for path in paths]
    found = find_events(paths)
    files: list[EventFile] = []
    notes: list[str] = []
    for path in found.events:
        if progress:
            progress("check files", len(files), len(found.events))
        file = check_file(path, columns)
        same = next((other for other in files if other.digest == file.digest and file.rows), None)
        if same is not None:
            notes.append(f"{path} has the bytes of {same.path}: its events are stored once")
        else:
            files.append(file)
    where = ", ".join(map(str, paths))
    if not any(file.rows for file in files):
        raise ValueError(f"{where}: no events in it")
    items = None
    if found.items:
        items = Features(read_features(found.items, columns.item_id, "item_id"), f"items:{digest(found.items)}")
    users = read_features(found.users, columns.user_id, "user_id") if found.users else None
    schema, remarks = plan(files, existing_schema(Path(store)))
    item_kind = pa.int64() if pa.types.is_integer(schema.columns["item_id"]) else pa.string()
    if items is not None and items.table.schema.field("item_id").type != item_kind:
        raise ValueError(f"{found.items} has {items.table.schema.field('item_id').type} ids, the events {item_kind}; "
                         "make them the same")
    origin = Origin(
        paths[0].stem, where, OWN, {file.path: file.digest for file in files}, _as_text(columns), extends=True,
        events=sum(file.rows for file in files), first=min(file.first for file in files),
        last=max(file.last for file in files), notes=notes + remarks)
    return fill_store(Path(store), schema, _pieces(files, columns, schema), origin, progress, items=items, users=users,
                      shards=shards)


def _pieces(files: Sequence[EventFile], columns: EventColumns, schema: EventSchema) -> Iterator[tuple[str, pa.Table]]:
    for file in files:
        first = 0
        for piece in in_pieces(read_file(file, columns, schema), PIECE_ROWS):
            yield f"file:{file.digest}:{first}-{first + piece.num_rows}", piece
            first += piece.num_rows
        if first != file.rows:
            raise ValueError(f"{file.path} had {file.rows} rows when it was checked and has {first} now; ingest it "
                             "when it is complete, into a new store")


def _as_text(columns: EventColumns) -> str:
    names = {**columns.keys, "unit": columns.unit or "by name", **(columns.others or {})}
    return ", ".join(f"{name}={source}" for name, source in names.items())


def _names(what: str) -> list[str]:
    return [f"{what}{ending}" for ending in (ENDINGS if what == "events" else FEATURE_ENDINGS)]

"""Fat rows: training rows that carry a copy of their user's history as lists, read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import JaggedTable
from semel.datasets.dataset import LATEST_TIME, Progress, check_ids, check_times, first_true
from semel.datasets.delimited import UNITS, missing_column
from semel.datasets.event_files import EventFile, as_type, look, plan, stored_type, widen_range
from semel.datasets.table import integer_or_string, to_time
from semel.history import EventSchema
from semel.history.schema import RESERVED, Column, to_numpy
from semel.table_files import digest, file_schema, find_files, read_batches

ENDINGS = (".parquet", ".arrow", ".arrows", ".feather", ".ipc")  # text has no lists
PREFIXES = ("", "history_", "history.", "hist_")
BATCH_EVENTS = 1_000_000
_CHECK_ROWS = 256


@dataclass(frozen=True)
class FatRowColumns:
    """What the columns of fat rows are called. ``user_id``, ``request_time``, ``version``: one value a row (``version``
    None: rows have none). ``item_id``, ``event_time``: lists, oldest event first; None: ``item_id``, ``event_time``
    with or without ``history_``, ``history.`` (a list of structs called history) or ``hist_`` before. ``others``:
    further lists, stored name -> column; None: all that have the same prefix and always as many values as there are
    items. ``unit``: of times that are numbers, as in ``EventColumns``."""

    user_id: str = "user_id"
    request_time: str = "request_time"
    item_id: str | None = None
    event_time: str | None = None
    version: str | None = None
    unit: str | None = None
    others: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.unit not in (None, "iso", *UNITS):
            raise ValueError(f"time unit {self.unit!r} is none of {', '.join(UNITS)}, iso")


@dataclass
class FatFile:
    """What a look through one file found. ``events``: its events as if they were a table; ``rows``; ``longest``
    history; ``backward``: newest event first; ``unsorted`` rows in neither order."""

    events: EventFile
    columns: FatRowColumns
    rows: int = 0
    longest: int = 0
    backward: bool = False
    unsorted: int = 0


@dataclass(frozen=True)
class FatRows:
    """Some rows of a file, from row ``first`` on: ``user_id`` [R], ``request_time`` [R] int64 microseconds, ``version``
    [R] int64 or None, ``events``: all histories' events (event_time, item_id, ...), oldest first, cut by ``offsets``
    [R + 1]."""

    first: int
    user_id: np.ndarray
    request_time: np.ndarray
    version: np.ndarray | None
    events: pa.Table
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.user_id)


@dataclass(frozen=True)
class FatTable:
    """Fat rows in files, looked through. ``schema``: that of a store of their events."""

    files: list[FatFile]
    schema: EventSchema
    notes: list[str]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def listed(self) -> int:
        """Events in all rows, each as often as it is listed."""
        return sum(file.events.rows for file in self.files)

    @property
    def longest(self) -> int:
        return max((file.longest for file in self.files), default=0)

    def batches(self, file: FatFile, schema: EventSchema | None = None) -> Iterator[FatRows]:
        """The rows of one of the files, their events cast to ``schema`` (default: the table's own)."""
        return _batches(file, schema or self.schema, max(1, BATCH_EVENTS // max(file.longest, 1)))


def open_fat_rows(paths: Sequence[Path], columns: FatRowColumns = FatRowColumns(),
                  progress: Progress | None = None) -> FatTable:
    """Looks through Parquet or Arrow files, or folders of such. Raises FileNotFoundError, and ValueError naming the
    file, and the row where it is one, for columns that are missing or no lists, lists of different lengths in one row,
    ids and times that are null or none, types that differ between files."""
    found = find_files(paths, ENDINGS)
    files: list[FatFile] = []
    for number, path in enumerate(found):
        if progress:
            progress("check files", number, len(found))
        files.append(_check(path, columns))
    if not any(file.rows for file in files):
        raise ValueError(f"{', '.join(map(str, paths))}: no rows in it")
    dropped = {name for file in files if file.rows for name in _all_lists(file) - set(file.events.types)}
    for file in files:
        for name in dropped & set(file.events.types):
            del file.events.types[name], file.events.sources[name]
    if not any(file.events.rows for file in files):
        raise ValueError(f"{', '.join(map(str, paths))}: all histories in it are empty")
    schema, notes = plan([file.events for file in files], None)
    notes += [f"{file.events.path}: histories are listed newest first, and read backwards"
              for file in files if file.backward]
    return FatTable(files, schema, notes)


def to_histories(events: pa.Table, offsets: np.ndarray, schema: EventSchema, names: Sequence[str]) -> JaggedTable:
    """``names`` of flat events as histories, as ``HistoryStore.read`` gives them."""
    columns, validity, dictionaries = {}, {}, {}
    for name in names:
        array = events[name].combine_chunks()
        column = Column(name, pa.int64()) if name == "event_time" else schema.layout[name]
        if column.is_dictionary:
            encoded = array.dictionary_encode()
            dictionaries[name] = np.array(encoded.dictionary.to_pylist(), object)
            array, column = encoded.indices, Column(name, pa.int32())
        values, valid = to_numpy(array, column)
        columns[name] = values
        if valid is not None:
            validity[name] = valid
    return JaggedTable(columns, offsets, validity or None, dictionaries or None)


def _check(path: Path, columns: FatRowColumns) -> FatFile:
    schema = file_schema(path)
    names = _resolve(schema, columns, str(path))
    file = FatFile(EventFile(path, digest(path), False), names)
    events = file.events
    assert names.item_id is not None and names.event_time is not None and names.others is not None
    events.sources = {"event_time": names.event_time, "item_id": names.item_id}
    for name, source in names.others.items():
        kind = stored_type(_lists(schema)[source])
        if kind is None or name in RESERVED or name in ("user_id", "item_id"):
            events.notes.append(f"column {source!r} ({_lists(schema)[source]} in lists) is left out")
        else:
            events.sources[name], events.types[name] = source, kind
    ids = {"user_id": [True, True], "item_id": [True, True]}
    forward = backward = True
    for table in read_batches(path, _needed(names, events), _CHECK_ROWS):
        users, _, lengths, lists = _cut(table, file, columns.others is not None)
        times = _times(pa.chunked_array([lists["event_time"]]), names.event_time, names.unit, str(path))
        _check_times(times, lengths, file)
        for name, column in (("user_id", users), ("item_id", lists["item_id"])):
            if pa.types.is_int64(column.type):
                ids[name][1] = False
                widen_range(events, name, pa.chunked_array([column]))
            else:
                ids[name][0] = False
        for name in set(lists) - {"event_time", "item_id"}:
            look(events, name, pa.chunked_array([lists[name]]), [], file.rows + 1)
        steps = np.diff(times.to_numpy())
        inside = np.ones(len(steps), bool)
        ends = np.cumsum(lengths)[:-1]
        inside[ends[(ends > 0) & (ends <= len(steps))] - 1] = False
        up, down = not (steps[inside] < 0).any(), not (steps[inside] > 0).any()
        forward, backward = forward and up, backward and down
        if not up:
            row_of = np.repeat(np.arange(len(lengths)), lengths)
            file.unsorted += len(np.unique(row_of[1:][inside & (steps < 0)]))
        if len(times):
            events.first = min(events.first, pc.min(times).as_py())
            events.last = max(events.last, pc.max(times).as_py())
        file.rows += table.num_rows
        file.longest = max(file.longest, int(lengths.max(initial=0)))
        events.rows += len(times)
    if not forward and backward:
        file.backward, file.unsorted = True, 0
    for name, (integers, _) in ids.items():
        events.types[name] = pa.int64() if integers else pa.string()
    return file


def _batches(file: FatFile, schema: EventSchema, rows: int) -> Iterator[FatRows]:
    names, first = file.columns, 0
    assert names.event_time is not None
    for table in read_batches(file.events.path, _needed(names, file.events), min(rows, 10_000)):
        users, request_time, lengths, lists = _cut(table, file, False)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        out = {"event_time": _times(pa.chunked_array([lists["event_time"]]), names.event_time, names.unit, "")}
        for name in lists:
            if name in schema.columns:
                out[name] = as_type(pa.chunked_array([lists[name]]), schema.columns[name], file.events, name)
        for name in set(schema.columns) - set(out):
            out[name] = pa.nulls(int(offsets[-1]), schema.columns[name])
        events = pa.table(out)
        if file.backward:
            flip = np.repeat(offsets[:-1] + offsets[1:] - 1, lengths) - np.arange(offsets[-1])
            events = events.take(flip)
        version = None
        if names.version is not None:
            version = _scalar(table[names.version], names.version, str(file.events.path)).to_numpy()
        ids = users.to_numpy(zero_copy_only=False)
        yield FatRows(first, ids, request_time.to_numpy(), version, events, offsets)
        first += table.num_rows


def _cut(table: pa.Table, file: FatFile, strict: bool,
         ) -> tuple[pa.Array, pa.ChunkedArray, np.ndarray, dict[str, pa.Array]]:
    """Of a batch: users [R], request times [R], lengths [R], flat lists by stored name. A list that was chosen by
    default (not ``strict``) and has another length somewhere is no part of the history: it leaves ``file``'s types."""
    events, names, where = file.events, file.columns, str(file.events.path)
    users = integer_or_string(table[names.user_id], names.user_id, where).combine_chunks()
    check_ids(pa.chunked_array([users]), names.user_id, where, file.rows + 1)
    request_time = _times(table[names.request_time], names.request_time, names.unit, where, file.rows + 1)
    check_times(request_time, where, file.rows + 1)
    lengths: np.ndarray | None = None
    lists: dict[str, pa.Array] = {}
    for name in ("item_id", "event_time", *(n for n in events.types if n not in ("user_id", "item_id"))):
        source = events.sources[name]
        outer, _, inner = source.partition(".") if source not in table.column_names else (source, "", "")
        column = table[outer].combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        flat = column.flatten()
        if inner:
            flat = pc.struct_field(flat, inner)
        if pa.types.is_null(flat.type) and not len(flat):  # lists that are empty in every row
            flat = flat.cast(pa.int64())
        count = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        if lengths is None:
            lengths = count
        bad = np.flatnonzero(count != lengths)
        if len(bad) and not strict and name != "event_time":
            events.notes.append(f"list {source!r} is left out: row {file.rows + bad[0] + 1} has {count[bad[0]]} values "
                                f"for {lengths[bad[0]]} items")
            del events.types[name], events.sources[name]
            continue
        if len(bad):
            raise ValueError(f"{where}, row {file.rows + bad[0] + 1}: {source!r} has {count[bad[0]]} values for "
                             f"{lengths[bad[0]]} items in {events.sources['item_id']!r}")
        lists[name] = flat
    assert lengths is not None
    lists["item_id"] = pa.array(integer_or_string(lists["item_id"], events.sources["item_id"], where))
    empty = pc.is_null(lists["item_id"])
    if pa.types.is_string(lists["item_id"].type):
        empty = pc.or_kleene(empty, pc.equal(lists["item_id"], ""))
    _refuse(empty, lengths, file, "an item without an id")
    return users, request_time, lengths, lists


def _times(column: pa.ChunkedArray, name: str, unit: str | None, where: str, line: int = 1) -> pa.ChunkedArray:
    """int64 microseconds. Numbers in a column that is called as it is by default are microseconds."""
    if unit is None and name.endswith(("event_time", "event_times", "request_time")):
        kind = column.type
        unit = "us" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None
    return to_time(column, name, unit, where, line)


def _check_times(times: pa.ChunkedArray, lengths: np.ndarray, file: FatFile) -> None:
    _refuse(pc.is_null(times), lengths, file, "an event without a time")
    _refuse(pc.less(times, 0), lengths, file, "an event time before 1970; times must be >= 0")
    _refuse(pc.greater(times, LATEST_TIME), lengths, file, "an event time after 2200; is the unit right?")


def _refuse(mask: pa.Array, lengths: np.ndarray, file: FatFile, what: str) -> None:
    at = first_true(mask)
    if at is not None:
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise ValueError(f"{file.events.path}, row {file.rows + row + 1}: {what}")


def _scalar(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise ValueError(f"{where}: column {name!r} holds {column.type}, {column.null_count} of them null; versions "
                         "are integers")
    return column.cast(pa.int64())


def _resolve(schema: pa.Schema, columns: FatRowColumns, where: str) -> FatRowColumns:
    """The same with every name found."""
    scalars = {"--user": columns.user_id, "--request-time": columns.request_time, "--version": columns.version}
    for option, name in scalars.items():
        if name is not None and name not in schema.names:
            raise ValueError(f"{missing_column(where, name, schema.names)} ({option} names it)")
    lists = _lists(schema)
    chosen = {}
    for option, name, given in (("--item", "item_id", columns.item_id), ("--time", "event_time", columns.event_time)):
        if given is not None and given not in lists:
            have = f"; the lists are {', '.join(map(repr, lists)) or 'none'}"
            if given in schema.names:
                raise ValueError(f"{where}: column {given!r} holds {schema.field(given).type}, no list{have}")
            raise ValueError(f"{missing_column(where, given, schema.names)}{have}")
        found = given or next((prefix + name + end for end in ("", "s") for prefix in PREFIXES
                               if prefix + name + end in lists), None)
        if found is None:
            raise ValueError(f"{where}: no list column {name!r} or 'history_{name}'; name the list ({option} COLUMN); "
                             f"the lists are {', '.join(map(repr, lists)) or 'none'}")
        chosen[name] = found
    others = columns.others
    if others is None:
        item = chosen["item_id"]
        prefix = next((p for p in reversed(PREFIXES) if p and item.startswith(p)), item.rpartition(".")[0])
        others = {name.removeprefix(prefix): name for name in lists
                  if name.startswith(prefix) and name not in chosen.values()}
    for source in others.values():
        if source not in lists:
            raise ValueError(f"{where}: no list {source!r}; the lists are {', '.join(map(repr, lists))}")
    return FatRowColumns(columns.user_id, columns.request_time, chosen["item_id"], chosen["event_time"],
                         columns.version, columns.unit, dict(others))


def _lists(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Lists in a schema and the type of their values; a list of structs is one list a field, ``name.field``."""
    out: dict[str, pa.DataType] = {}
    for field in schema:
        kind = field.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            continue
        if pa.types.is_struct(kind.value_type):
            out.update({f"{field.name}.{inner.name}": inner.type for inner in kind.value_type})
        else:
            out[field.name] = kind.value_type
    return out


def _needed(names: FatRowColumns, events: EventFile) -> list[str]:
    """The columns to read of a file."""
    lists = [source if source in file_schema(events.path).names else source.partition(".")[0]
             for source in events.sources.values()]
    scalars = [names.user_id, names.request_time, *([names.version] if names.version else [])]
    return list(dict.fromkeys([*scalars, *lists]))


def _all_lists(file: FatFile) -> set[str]:
    return {"item_id", "user_id", *(file.columns.others or {})}

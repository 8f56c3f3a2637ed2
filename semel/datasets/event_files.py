"""Your own events in files, checked before anything is stored: every file is read through once, batch by batch, so that
a value that cannot be stored is found while the store is untouched, and so that text gets types from all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.datasets.dataset import check_ids, check_times, first_true
from semel.datasets.delimited import missing_column
from semel.datasets.ids import encoded, numbers
from semel.datasets.table import EventColumns, integer_or_string, to_time
from semel.history import EventSchema
from semel.history.export import schema_in
from semel.history.schema import RESERVED, Column, numpy_dtype, to_numpy
from semel.table_files import digest, file_schema, is_text, read_batches

_READINGS = (pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
_WHOLE = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}  # up to here a float holds every integer


@dataclass
class EventFile:
    """What a look through one file found. ``sources``: stored name -> its column; ``types``: stored name -> type, null
    where there is no value; ``ranges``: of integer columns; ``plain``: text ids that are all plain numbers (so either
    kind); ``schema``: what Semel wrote into the file, or None; ``first``/``last``: event times; ``notes``: left out."""

    path: Path
    digest: str
    text: bool
    rows: int = 0
    sources: dict[str, str] = field(default_factory=dict)
    types: dict[str, pa.DataType] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    schema: EventSchema | None = None
    first: int = 2**63 - 1
    last: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def first_line(self) -> int:
        return 2 if self.text else 1


def check_file(path: Path, columns: EventColumns) -> EventFile:
    """Look through a file. Raises ValueError naming it, and the line and column, for what cannot be stored: a missing
    column, ids that are null or neither integers nor strings, times that are none, damage."""
    schema = file_schema(path)
    written = schema_in(schema.metadata)
    file = EventFile(path, digest(path), is_text(path),
                     schema=written if written is not None and written.key == "user_id" else None)
    where = str(path)
    for name in (*columns.keys.values(), *(columns.others or {}).values()):
        if name not in schema.names:
            raise ValueError(missing_column(where, name, schema.names))
    file.sources = columns.keys
    readings: dict[str, list[pa.DataType]] = {}
    for name, source in columns.further(schema.names).items():
        kind = stored_type(schema.field(source).type)
        if kind is None or name in RESERVED or name in columns.keys:
            if file.schema is None or name != "version":  # what export wrote beside the events
                file.notes.append(f"column {source!r} ({schema.field(source).type}) is left out")
            continue
        file.sources[name], file.types[name] = source, pa.null()
        if not file.text:
            file.types[name] = kind
        readings[name] = list(_READINGS)
    ids = {name: [True, True] for name in ("user_id", "item_id")}  # whether all are integers, all are strings
    for table in read_batches(path, list(file.sources.values())):
        line = file.first_line + file.rows
        for name in ids:
            column = integer_or_string(table[file.sources[name]], file.sources[name], where)
            check_ids(column, name, where, line)
            if pa.types.is_int64(column.type):
                ids[name][1] = False
                widen_range(file, name, column)
            elif not file.text or numbers(encoded(column).dictionary) is None:
                ids[name][0] = False
        times = event_times(table, file, columns, line)
        span = pc.min_max(times)
        file.first, file.last = min(file.first, span["min"].as_py()), max(file.last, span["max"].as_py())
        for name in readings:
            look(file, name, table[file.sources[name]], readings[name], line)
        file.rows += table.num_rows
    for name, (integers, strings) in ids.items():
        file.types[name] = pa.null() if not file.rows else pa.int64() if integers else pa.string()
        if file.rows and integers and strings:
            file.plain.add(name)
    return file


def look(file: EventFile, name: str, column: pa.ChunkedArray, readings: list[pa.DataType], line: int) -> None:
    """Learn from a batch of one further column: what text can be read as, the range of integers."""
    if file.text:
        if column.null_count == len(column):
            return
        for kind in list(readings):
            try:
                from_text(column, kind)
            except pa.ArrowInvalid:
                readings.remove(kind)
        kind = file.types[name] = readings[0] if readings else pa.string()
        if not pa.types.is_integer(kind):
            return
        column = from_text(column, kind)
    kind = column.type
    if pa.types.is_integer(kind):
        widen_range(file, name, column)
    elif pa.types.is_fixed_size_list(kind):
        for chunk in column.chunks:
            try:
                to_numpy(chunk, Column(file.sources[name], kind))
            except ValueError as error:
                raise ValueError(f"{file.path}, in {len(chunk)} rows from line {line} on: {error}") from None


def widen_range(file: EventFile, name: str, column: pa.ChunkedArray) -> None:
    span = pc.min_max(column)
    if span["min"].is_valid:
        low, high = file.ranges.get(name, (span["min"].as_py(), span["max"].as_py()))
        file.ranges[name] = min(low, span["min"].as_py()), max(high, span["max"].as_py())


def plan(files: Sequence[EventFile], schema: EventSchema | None) -> tuple[EventSchema, list[str]]:
    """The schema that all files fit (``schema``: that of a store which is there already), and notes. ValueError naming
    the files where none does."""
    by_note: dict[str, list[EventFile]] = {}
    for file in files:
        for note in file.notes:
            by_note.setdefault(note, []).append(file)
    notes = [f"{where[0].path}{f' and {len(where) - 1} more' if where[1:] else ''}: {note}"
             for note, where in by_note.items()]
    files = [file for file in files if file.rows]
    written = [file.schema for file in files]
    if schema is None and written and written[0] is not None and all(other == written[0] for other in written) and all(
            set(written[0].columns) == set(file.types) - {"user_id"} for file in files):
        schema = written[0]
    if schema is None:
        schema = _widest_schema(files, notes)
    for file in files:
        if file.schema == schema:
            continue
        for name in file.types:
            if name not in ("user_id", *schema.columns) and not pa.types.is_null(file.types[name]):
                raise ValueError(f"{file.path}: the store has no column {name!r}; it has {', '.join(schema.columns)}; "
                                 "name the columns to keep (--column NAME)")
        for name, want in (("user_id", schema.user_id), *schema.columns.items()):
            require(file, name, want)
    for name in schema.columns:
        without = [file for file in files if name not in file.types]
        if without:
            notes.append(f"column {name!r} is not in {len(without)} of {len(files)} files ({without[0].path}, ...): "
                         "null there")
    return schema, notes


def _widest_schema(files: Sequence[EventFile], notes: list[str]) -> EventSchema:
    columns: dict[str, pa.DataType] = {}
    of: dict[str, EventFile] = {}
    for file in files:
        for name, kind in file.types.items():
            if name in ("user_id", "item_id") and name in file.plain:
                kind = pa.null()  # fits either
            known = columns.get(name, pa.null())
            if not pa.types.is_null(kind) and kind != known:
                columns[name] = kind if pa.types.is_null(known) else _wider(name, known, kind, of[name], file)
                of.setdefault(name, file)
            else:
                columns.setdefault(name, known)
    for name, kind in list(columns.items()):
        if pa.types.is_null(kind) and name in ("user_id", "item_id"):
            columns[name] = pa.int64()
        elif pa.types.is_null(kind):
            notes.append(f"column {name!r} has no value in any file and is left out")
            del columns[name]
    user = columns.pop("user_id")
    columns = {"item_id": columns.pop("item_id"), **columns}
    action = columns.get("action")
    groups = action is not None and (pa.types.is_integer(action) or _is_string(action)) and action != pa.uint64()
    return EventSchema(columns, user_id=user, group="action" if groups else None)


def _wider(name: str, a: pa.DataType, b: pa.DataType, first: EventFile, second: EventFile) -> pa.DataType:
    """The type that holds the values of both."""
    if _is_string(a) and _is_string(b):
        return pa.string()
    numeric = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in (a, b))
    times = pa.types.is_timestamp(a) and pa.types.is_timestamp(b) and (a.tz is None) == (b.tz is None)
    if numeric or times:
        fields = [pa.schema([("x", kind)]) for kind in (a, b)]
        try:
            return pa.unify_schemas(fields, promote_options="permissive").field("x").type
        except pa.ArrowException:
            pass
    if name not in ("user_id", "item_id") and (first.text or _is_string(a)) and (second.text or _is_string(b)):
        return pa.string()  # what text says may be read as text
    raise ValueError(f"column {name!r} is {a} in {first.path} and {b} in {second.path}; write it as one type")


def require(file: EventFile, name: str, want: pa.DataType) -> None:
    """ValueError where the file's values of a column do not fit the store's type."""
    have = file.types.get(name)
    if have is None or pa.types.is_null(have) or have == want or (_is_string(have) and _is_string(want)):
        return
    fits = False
    if pa.types.is_integer(have):
        low, high = file.ranges.get(name, (0, 0))
        if pa.types.is_integer(want):
            limits = np.iinfo(numpy_dtype(want))
            if not (limits.min <= low and high <= limits.max):
                raise ValueError(f"{file.path}: column {name!r} has values from {low} to {high}, too large for "
                                 f"{want}, which the store keeps")
            fits = True
        elif pa.types.is_floating(want):
            most = _WHOLE[want]
            if low < -most or high > most:
                raise ValueError(f"{file.path}: column {name!r} has values from {low} to {high}, which {want}, the "
                                 "type of the other files or of the store, does not hold exactly")
            fits = True
    if pa.types.is_floating(have) and pa.types.is_floating(want):
        fits = file.text or want.bit_width >= have.bit_width  # text has no type of its own
    if pa.types.is_timestamp(have) and pa.types.is_timestamp(want):
        units = ("s", "ms", "us", "ns")
        fits = file.text or units.index(have.unit) <= units.index(want.unit)
    if pa.types.is_fixed_size_list(have) and pa.types.is_fixed_size_list(want):
        fits = have.list_size == want.list_size and have.value_type == want.value_type
    if name in ("user_id", "item_id"):
        fits = fits or name in file.plain
    elif file.text:
        fits = fits or _is_string(want)
    if not fits:
        kinds = f"holds {have}, the store keeps {want}"
        raise ValueError(f"{file.path}: column {file.sources[name]!r} {kinds}; cast it")


def read_file(file: EventFile, columns: EventColumns, schema: EventSchema) -> Iterator[pa.Table]:
    """The file's events as tables that ``HistoryStore.append`` takes, in the file's order."""
    rows = 0
    for table in read_batches(file.path, list(file.sources.values())):
        out: dict[str, Any] = {}
        for name, want in (("user_id", schema.user_id), *schema.columns.items()):
            if name in file.types:
                out[name] = as_type(table[file.sources[name]], want, file, name)
            else:
                out[name] = pa.nulls(table.num_rows, pa.string() if _is_string(want) else want)
        out["event_time"] = event_times(table, file, columns, file.first_line + rows)
        rows += table.num_rows
        yield pa.table({name: out[name] for name in schema.arrow.names})


def event_times(table: pa.Table, file: EventFile, columns: EventColumns, line: int) -> pa.ChunkedArray:
    """[rows] int64 microseconds, checked."""
    column, where = table[columns.event_time], str(file.path)
    if file.text and columns.unit != "iso":
        for kind in (pa.int64(), pa.float64()):
            try:
                column = from_text(column, kind)
                break
            except pa.ArrowInvalid:
                continue
    missing = first_true(pc.is_null(column))
    if missing is not None:
        raise ValueError(f"{where}, line {missing + line}: no event time")
    times = to_time(column, columns.event_time, columns.unit, where, line)
    check_times(times, where, line)
    return times


def from_text(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Strings read as ``kind``; pa.ArrowInvalid where one of them is none."""
    if pa.types.is_string(kind):
        return column
    column = pc.utf8_trim_whitespace(column)
    if pa.types.is_floating(kind) and not pa.types.is_float64(kind):
        return column.cast(pa.float64()).cast(kind, safe=False)
    return column.cast(kind)


def stored_type(kind: pa.DataType) -> pa.DataType | None:
    """The type as which a store keeps a column of type ``kind``: the same where it can; None where it cannot."""
    if pa.types.is_dictionary(kind):
        strings = _is_string(kind)
        return pa.dictionary(kind.index_type, pa.string()) if strings else stored_type(kind.value_type)
    if _is_string(kind):
        return pa.string()
    if pa.types.is_date(kind):
        return pa.timestamp("us")
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_null(kind):
        return kind
    try:
        return Column("", kind).type
    except ValueError:
        return None


def as_type(column: pa.ChunkedArray, want: pa.DataType, file: EventFile, name: str) -> pa.ChunkedArray:
    """The column as a store of type ``want`` takes it (strings plain); ValueError naming the file where it is not."""
    if column.type == want:
        return column
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if _is_string(want):  # the store makes its own dictionaries
            return column.cast(pa.string())
        return from_text(column, want) if file.text else column.cast(want, safe=not pa.types.is_decimal(column.type))
    except pa.ArrowException as error:
        raise ValueError(f"{file.path}: column {name!r}: {str(error).splitlines()[0]}") from None


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))

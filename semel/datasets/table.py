"""Your own events: a Parquet or CSV table and the names of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from semel.datasets.dataset import Tables, build_events, build_features
from semel.datasets.delimited import UNITS, microseconds, missing_column, read_header
from semel.datasets.ids import compact_ids

RESERVED = ("version",)  # every store has it
ENDINGS = (".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")


@dataclass(frozen=True)
class EventColumns:
    """Which columns of a table are the user, the item and the time, and the time's unit.

    ``unit``: of times that are numbers since 1970: ``s``, ``ms``, ``us`` or ``ns``; ``iso`` for text. None: by the
    column's name (``event_time`` is in microseconds, ``..._s``, ``..._ms``, ``..._us``, ``..._ns`` say so); a number
    whose name says nothing is refused rather than guessed. Timestamps, dates and ISO 8601 text need no unit; without
    an offset they are UTC. ``others``: further columns to keep, stored name -> name in the table; None: all, as they
    are called.
    """

    user_id: str = "user_id"
    item_id: str = "item_id"
    event_time: str = "event_time"
    unit: str | None = None
    others: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.unit not in (None, "iso", *UNITS):
            raise ValueError(f"time unit {self.unit!r} is none of {', '.join(UNITS)}, iso")
        if len({self.user_id, self.item_id, self.event_time}) < 3:
            raise ValueError(f"user, item and time must be three columns, got {self.user_id!r}, {self.item_id!r} and "
                             f"{self.event_time!r}")

    @property
    def keys(self) -> dict[str, str]:
        """Stored name -> name in the table, of the three that every event has."""
        return {"user_id": self.user_id, "item_id": self.item_id, "event_time": self.event_time}

    def further(self, names: Sequence[str]) -> dict[str, str]:
        """Stored name -> name in the table, of the columns to keep beside these, where the table has ``names``."""
        if self.others is not None:
            return dict(self.others)
        return {name: name for name in names if name not in self.keys.values()}


def read_events(path: Path, columns: EventColumns = EventColumns()) -> Tables:
    """The events of ``path``: a Parquet or CSV file, or a folder with ``events.parquet`` (or .csv) and, where there are
    such, ``items`` and ``users`` files keyed by the same column names. Other columns are kept where they are numbers,
    booleans, strings or timestamps (then int64 us), and named in ``notes`` where not."""
    items = users = None
    if path.is_dir():
        found = {name: _one(path, name) for name in ("events", "items", "users")}
        events_path, items_path, users_path = found["events"], found["items"], found["users"]
        if events_path is None:
            raise FileNotFoundError(f"{path}: no events.parquet or events.csv in it")
        items = read_features(items_path, columns.item_id, "item_id") if items_path else None
        users = read_features(users_path, columns.user_id, "user_id") if users_path else None
    else:
        events_path = path
    raw, first_line = _read(events_path, (columns.user_id, columns.item_id))
    for name in (*columns.keys.values(), *(columns.others or {}).values()):
        if name not in raw.column_names:
            raise ValueError(missing_column(str(events_path), name, raw.column_names))
    if not raw.num_rows:  # before types are looked at: those of no rows mean nothing
        raise ValueError(f"{events_path}: no events in it")
    where = str(events_path)
    out: dict[str, Any] = {
        "user_id": integer_or_string(raw[columns.user_id], columns.user_id, where),
        "item_id": integer_or_string(raw[columns.item_id], columns.item_id, where),
        "event_time": to_time(raw[columns.event_time], columns.event_time, columns.unit, where, first_line)}
    notes = []
    for name, source in columns.further(raw.column_names).items():
        column = storable(raw[source])
        if column is None or name in out or name in RESERVED:
            notes.append(f"column {source!r} ({raw.schema.field(source).type}) is left out")
        else:
            out[name] = column
    return Tables(build_events(out, where, first_line), items, users, None, tuple(notes))


def to_time(column: pa.ChunkedArray, name: str, unit: str | None, where: str, first_line: int = 1) -> pa.ChunkedArray:
    """A column of times -> int64 microseconds; see ``EventColumns.unit``."""
    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("us")), pa.timestamp("us")
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _iso(column, name, where, first_line)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"{where}: column {name!r} holds {kind}, which is no time")
    if unit is None:
        unit = next((u for u in UNITS if name.endswith(f"_{u}")), "us" if name == "event_time" else None)
    if unit in (None, "iso"):
        raise ValueError(f"{where}: column {name!r} holds numbers; say their unit: {', '.join(UNITS)}")
    return microseconds(column, unit, where, first_line)


def storable(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """The column as a type that a store keeps, or None for nested and other values."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return storable(column.cast(kind.value_type))
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return to_time(column, "", None, "")
    if pa.types.is_boolean(kind):
        return column.cast(pa.int8())
    if pa.types.is_uint64(kind) or pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return column.cast(pa.float64())
    if pa.types.is_unsigned_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    keep = pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return column if keep else None


def _iso(column: pa.ChunkedArray, name: str, where: str, first_line: int) -> pa.ChunkedArray:
    text = pc.utf8_trim_whitespace(column)
    zoned = pc.match_substring_regex(text, r"([Zz]|[+-][0-9]{2}:?[0-9]{2})$")
    zoned = pc.and_(zoned, pc.match_substring_regex(text, r"[T ][0-9]{2}:"))
    text = pc.if_else(zoned, text, pc.binary_join_element_wise(text, "Z", ""))
    # a bare date has no place for an offset
    text = pc.replace_substring_regex(text, r"^([0-9]{4}-[0-9]{2}-[0-9]{2})Z$", r"\1T00:00:00Z")
    try:
        return text.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    except pa.ArrowInvalid:
        for row, value in enumerate(text):
            try:
                pa.array([value.as_py()]).cast(pa.timestamp("us", "UTC"))
            except pa.ArrowInvalid:
                raise ValueError(f"{where}, line {row + first_line}: column {name!r} holds {column[row].as_py()!r}, "
                                 "which is neither a number nor an ISO 8601 time") from None
        raise


def integer_or_string(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray | pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return integer_or_string(column.cast(kind.value_type), name, where)
    if pa.types.is_uint64(kind):
        top = pc.max(column).as_py() or 0
        if top > 2**63 - 1:
            raise ValueError(f"{where}: {name} {top} does not fit int64; write ids of that size as strings")
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    raise ValueError(f"{where}: column {name!r} holds {kind}; ids must be integers or strings")


def _read(path: Path, id_columns: tuple[str, ...]) -> tuple[pa.Table, int]:
    """The table and the line of its first row (a Parquet file's rows count from 1)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            return pq.read_table(path), 1
        if not name.endswith(ENDINGS):
            raise ValueError(f"{path}: expected a name that ends in {', '.join(ENDINGS)}")
        delimiter = "\t" if ".tsv" in name else ","
        if not name.endswith(".gz"):
            read_header(path)  # says clearly that a file is empty
        # ids are read as text, so that 007 stays what it is
        options = csv.ConvertOptions(column_types=dict.fromkeys(id_columns, pa.string()), null_values=[""],
                                     strings_can_be_null=True)
        raw = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                           convert_options=options)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    for column in id_columns:
        if column in raw.column_names:
            compact = compact_ids(raw[column])
            raw = raw.set_column(raw.column_names.index(column), column, compact)
    return raw, 2


def read_features(path: Path, key: str, name: str) -> pa.Table:
    """The features in a Parquet or CSV table, one row a ``key``, which is called ``name`` in the result."""
    raw, first_line = _read(path, (key,))
    if key not in raw.column_names:
        raise ValueError(missing_column(str(path), key, raw.column_names))
    columns: dict[str, Any] = {name: integer_or_string(raw[key], key, str(path))}
    for other in raw.column_names:
        if other == key:
            continue
        kept = storable(raw[other])
        if kept is not None and other not in RESERVED:
            columns[other] = kept
    return build_features(name, columns, str(path), first_line)


def _one(folder: Path, name: str) -> Path | None:
    return next((folder / f"{name}{ending}" for ending in ENDINGS if (folder / f"{name}{ending}").is_file()), None)

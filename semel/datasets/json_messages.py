"""Messages that are JSON objects -> events. A message that cannot be stored is named with the reason, and those beside
it are not held up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from semel.datasets.dataset import check_ids, check_times
from semel.datasets.delimited import UNITS
from semel.datasets.table import EventColumns, to_time
from semel.history import EventSchema
from semel.history.schema import RESERVED

Row = dict[str, Any]
_ARE_BAD = (ValueError, TypeError, OverflowError, pa.ArrowException)


class NoTimeUnit(Exception):
    """Times are numbers and nobody said in which unit: the fault of the options, not of a message."""


def parse(value: bytes | None) -> Row:
    """The object that a message holds. ValueError with the reason where it holds none."""
    if value is None:
        raise ValueError("it has no value")
    try:
        row = json.loads(str(value, "utf8"))  # of bytes it would first guess the encoding
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"it is JSON, but no object: {value[:40]!r}")
    return row


def infer_schema(rows: Sequence[Row], columns: EventColumns,
                 types: Mapping[str, pa.DataType]) -> tuple[EventSchema, list[str]]:
    """The schema of a new store from its first messages, and notes of what is left out. ``types``: of columns whose
    type is known; the others have that of their values. ValueError for a column with values of several types."""
    notes: list[str] = []
    ids: dict[str, pa.DataType] = {}
    for name in ("user_id", "item_id"):
        kind = ids[name] = types.get(name) or _type_of(values_at(rows, columns.keys[name]), name, len(rows))
        if not (pa.types.is_int64(kind) or pa.types.is_string(kind)) and (name == "user_id" or name not in types):
            raise ValueError(f"{name} ({columns.keys[name]!r} in messages) holds {kind}; ids are integers or strings")
    kinds = {"item_id": ids["item_id"]}
    unknown = sorted(set(types) - {"user_id", "item_id", *(types if columns.others is None else columns.others)})
    if unknown:
        raise ValueError(f"{unknown[0]!r} has a type, but is none of the columns to keep; add --column {unknown[0]}")
    sources = columns.further([*{key: None for row in rows for key in row}])
    for name in dict.fromkeys([*sources, *types]):
        if name in columns.keys:
            if name in sources:
                notes.append(f"key {name!r} is left out: {columns.keys[name]!r} is stored under that name")
            continue
        source = sources.get(name, name)
        kind = types.get(name) or _type_of(values_at(rows, source), name, len(rows))
        nested = pa.types.is_nested(kind) and name not in types
        if nested or name in RESERVED:
            notes.append(f"key {source!r} ({kind}) is left out")
        elif pa.types.is_null(kind):
            notes.append(f"key {source!r} has no value in the first {len(rows):,} messages and is left out")
        else:
            kinds[name] = kind
    action = kinds.get("action", pa.null())
    text = pa.types.is_string(action) or pa.types.is_dictionary(action)
    groups = text or (pa.types.is_integer(action) and not pa.types.is_uint64(action))
    return EventSchema(kinds, user_id=ids["user_id"], group="action" if groups else None), notes


class EventReader:
    """Parsed messages -> tables that a store of ``schema`` takes. ``columns`` says which key is which column; a name
    with dots (``payload.price``) reaches into nested objects. ValueError for a column that the store lacks."""

    def __init__(self, schema: EventSchema, columns: EventColumns) -> None:
        self.schema = schema
        others = columns.further([name for name in schema.columns if name != "item_id"])
        for name in ("item_id", *others):
            if name not in schema.columns:
                raise ValueError(f"the store has no column {name!r}; it has {', '.join(schema.columns)}")
        self.sources = {**columns.keys, **others}
        self._unit = columns.unit or next((unit for unit in UNITS if columns.event_time.endswith(f"_{unit}")),
                                          "us" if columns.event_time == "event_time" else None)

    def read(self, rows: Sequence[Row]) -> tuple[list[pa.Table], list[tuple[int, str]]]:
        """(the events of the rows that can be stored, in order; (index, reason) of each of the others). Raises
        NoTimeUnit."""
        tables: list[pa.Table] = []
        bad: list[tuple[int, str]] = []
        self._read(rows, 0, tables, bad)
        return tables, bad

    def _read(self, rows: Sequence[Row], first: int, tables: list[pa.Table], bad: list[tuple[int, str]]) -> None:
        """All at once; where that fails, each half alone, down to the rows that are the reason."""
        if not rows:
            return
        try:
            tables.append(self.table(rows))
        except _ARE_BAD as error:
            if len(rows) == 1:
                bad.append((first, re.sub(r"^message(, line 1)?: ", "", str(error).splitlines()[0])))
                return
            half = len(rows) // 2
            self._read(rows[:half], first, tables, bad)
            self._read(rows[half:], first + half, tables, bad)

    def table(self, rows: Sequence[Row]) -> pa.Table:
        """The events of ``rows``, all of them or an error."""
        out: dict[str, Any] = {}
        for name, want in {"user_id": self.schema.user_id, **self.schema.columns}.items():
            source = self.sources.get(name)
            values = [None] * len(rows) if source is None else values_at(rows, source)
            try:
                out[name] = column_of(values, want)
            except _ARE_BAD as error:
                raise ValueError(f"{source!r}: {error}") from None
        for name in ("user_id", "item_id"):
            check_ids(pa.chunked_array([out[name]]), self.sources[name], "message")
        out["event_time"] = self._times(rows)
        return pa.table({name: out[name] for name in self.schema.arrow.names})

    def _times(self, rows: Sequence[Row]) -> pa.ChunkedArray:
        source = self.sources["event_time"]
        try:
            times = pa.chunked_array([pa.array(values_at(rows, source))])
        except _ARE_BAD as error:
            raise ValueError(f"{source!r}: {error}") from None
        if pa.types.is_null(times.type):
            times = times.cast(pa.int64())
        elif self._unit is None and not pa.types.is_string(times.type):
            raise NoTimeUnit(f"{source!r} holds numbers; say their unit (--time-unit): {', '.join(UNITS)}")
        times = to_time(times, source, self._unit, "message")
        check_times(times, "message")
        return times


def values_at(rows: Sequence[Row], source: str) -> list[Any]:
    """The value of a key in each row, None where it is missing."""
    if "." not in source:
        return [row.get(source) for row in rows]
    return [_inside(row, source) for row in rows]


def _inside(row: Any, source: str) -> Any:
    if source in row:
        return row[source]
    for key in source.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(key)
    return row


def column_of(values: Sequence[Any], want: pa.DataType) -> pa.Array:
    """JSON values as a column of type ``want`` (strings plain). No fraction is cut off, nothing but times is read out
    of strings; ValueError or TypeError for a value that does not fit."""
    if pa.types.is_dictionary(want) or pa.types.is_string(want):
        return pa.array(values, pa.string())
    if pa.types.is_boolean(want):
        return pa.array(values, want)
    if pa.types.is_uint64(want) and not any(isinstance(value, float | bool) for value in values):
        return pa.array(values, want)  # beyond int64 too
    array = pa.array(values)
    have = array.type
    if pa.types.is_null(have):
        return pa.nulls(len(values), want)
    if pa.types.is_timestamp(want) and pa.types.is_string(have):
        times = to_time(pa.chunked_array([array]), "", None, "message").combine_chunks()
        return times.cast(pa.timestamp("us", want.tz)).cast(want, safe=False)
    inner = have.value_type if pa.types.is_list(have) and pa.types.is_fixed_size_list(want) else have
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        raise ValueError(f"it holds {have}, the store keeps {want}")
    return array.cast(want)


def _type_of(values: Sequence[Any], name: str, count: int) -> pa.DataType:
    try:
        return pa.array(values).type
    except _ARE_BAD:
        raise ValueError(f"{name!r} has values of several types in the first {count:,} messages; say which one the "
                         f"store keeps (--type {name}=string), or name the columns to keep (--column NAME)") from None

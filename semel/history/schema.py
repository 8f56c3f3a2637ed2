"""What a store keeps and what a reader asks for: ``EventSchema``, ``Projection``, ``Status``; Arrow in, numpy out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

RESERVED = ("event_time", "version")
_NUMBERS = (int, float, np.integer, np.floating)
_MOST = 1 << 61  # events: no history has more, and kernels may add to it
_SIMPLE = {
    str(t): t for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
                        pa.uint64(), pa.bool_(), pa.string())
} | {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


class Status(IntEnum):
    """Why a history may differ from what the request saw. ``SCRUBBED``: events that it may have seen were deleted
    since. ``EXPIRED``: retention took events that it may have seen, and what is left is shorter than was asked for.
    ``UNKNOWN_USER``: no event of the user had arrived by the pointer's version, or all were deleted before it (the row
    is empty, as it was then)."""

    OK = 0
    SCRUBBED = 1
    EXPIRED = 2
    UNKNOWN_USER = 3


def numpy_dtype(kind: pa.DataType) -> np.dtype:
    """Of a number or a boolean; ``to_pandas_dtype`` of older pyarrow asks for pandas."""
    return np.dtype(pa.array([], kind).to_numpy(zero_copy_only=False).dtype)


@dataclass(frozen=True)
class Projection:
    """What a model reads of a history: ``columns`` (schema columns, ``event_time``, ``version``), events of ``groups``
    only (values of the schema's group column), with ``event_time >= since``, and of these the ``last`` ones.
    ``allow_backfill``: pointers older than a column read what it was filled with later, rather than null: values that
    the request did not see."""

    columns: tuple[str, ...]
    last: int | None = None
    groups: tuple[Any, ...] | None = None
    since: int | None = None
    allow_backfill: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            raise ValueError(f"Projection.columns must be a sequence of names, got the string {self.columns!r}")
        if not isinstance(self.columns, Iterable):
            raise ValueError(f"Projection.columns must be a sequence of names, got {self.columns!r}")
        object.__setattr__(self, "columns", tuple(self.columns))
        if self.groups is not None:
            if isinstance(self.groups, str):
                raise ValueError(f"Projection.groups must be a sequence of values, got the string {self.groups!r}")
            object.__setattr__(self, "groups", tuple(self.groups))
            for value in self.groups:
                if not isinstance(value, str | int | np.integer):
                    raise ValueError(f"Projection.groups must hold strings or integers, got {value!r}")
        if self.last is not None:
            if isinstance(self.last, bool) or not isinstance(self.last, _NUMBERS) or not (self.last >= 1) or (
                    self.last % 1 != 0):
                raise ValueError(f"Projection.last must be at least 1 or None, got {self.last!r}")
            object.__setattr__(self, "last", min(int(self.last), _MOST))
        if self.since is not None:
            if not isinstance(self.since, _NUMBERS) or not (abs(self.since) < 1 << 63) or self.since % 1 != 0:
                raise ValueError("Projection.since must be microseconds (an integer of 64 bits) or None, got "
                                 f"{self.since!r}")
            object.__setattr__(self, "since", int(self.since))


@dataclass(frozen=True)
class Column:
    """A schema column as it lies in memory and on disk: rows of ``shape`` values of ``dtype``. ``since_version``: the
    first version whose pointers see it (0: there from the start)."""

    name: str
    type: pa.DataType
    since_version: int = 0
    dtype: np.dtype = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    is_dictionary: bool = field(init=False)

    def __post_init__(self) -> None:
        kind: pa.DataType = self.type
        if not isinstance(kind, pa.DataType):
            raise ValueError(f"column {self.name!r}: the type must be a pyarrow type such as pa.int64(), got {kind!r}")
        shape: tuple[int, ...] = ()
        if pa.types.is_fixed_size_list(kind):
            shape = (kind.list_size,)
            kind = kind.value_type
            if shape[0] < 1 or _short(kind) not in _SIMPLE or pa.types.is_string(kind):
                raise ValueError(f"column {self.name!r}: lists must be of numbers and not empty, got {self.type}")
        dictionary = pa.types.is_string(kind) or (
            pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type))
        if dictionary:
            dtype: np.dtype = np.dtype(np.int32)
        elif pa.types.is_timestamp(kind):
            dtype = np.dtype(np.int64)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            dtype = numpy_dtype(kind)
        else:
            raise ValueError(f"column {self.name!r}: type {self.type} is not supported; use integers, floats, bool, "
                             "string, dictionary<string>, timestamp or a fixed-size list of numbers")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "is_dictionary", dictionary)

    @property
    def stored(self) -> pa.DataType:
        """The Arrow type in the log: dictionary columns as int32 codes."""
        return pa.int32() if self.is_dictionary else self.type


@dataclass(frozen=True)
class EventSchema:
    """The columns of an event beside its key (``key``: "user_id", or "item_id" for a catalogue) and ``event_time``
    (int64 microseconds, never negative). ``user_id``: the key's type, int64 or string. ``group``: the column (strings
    or integers) whose values are event groups. ``since``: of columns that were added to a store later, the first
    version whose pointers see them. Raises ValueError for a type, name or group that cannot be kept."""

    columns: Mapping[str, pa.DataType]
    user_id: pa.DataType = field(default_factory=pa.int64)
    group: str | None = None
    key: str = "user_id"
    since: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", dict(self.columns))
        if not (pa.types.is_int64(self.user_id) or pa.types.is_string(self.user_id)):
            raise ValueError(f"the key {self.key!r} must be int64 or string, got {self.user_id}")
        for name in self.columns:
            if not isinstance(name, str) or not name:
                raise ValueError(f"column names must be strings, got {name!r}")
            if name in RESERVED or name == self.key:
                raise ValueError(f"column {name!r} is there in every store; leave it out of the schema's columns")
        if self.key in RESERVED or not self.key:
            raise ValueError(f"{self.key!r} cannot be the key column")
        layout = {name: Column(name, kind, self.since.get(name, 0)) for name, kind in self.columns.items()}
        object.__setattr__(self, "layout", layout)
        if self.group is not None:
            if self.group not in layout:
                raise ValueError(f"group column {self.group!r} is not among {', '.join(layout) or 'no columns'}")
            column = layout[self.group]
            if column.shape or column.dtype.kind not in "iub" or column.dtype == np.uint64:
                raise ValueError(f"group column {self.group!r} must hold strings or integers, not {column.type}")

    layout: dict[str, Column] = field(init=False, repr=False, compare=False)

    @cached_property
    def widths(self) -> list[int]:
        """Bytes of a row of each column, its validity included."""
        return [column.dtype.itemsize * int(np.prod(column.shape)) + 1 for column in self.layout.values()]

    @cached_property
    def string_keys(self) -> bool:
        return pa.types.is_string(self.user_id)

    @cached_property
    def dictionaries(self) -> list[str]:
        """The columns that are kept as codes."""
        return [name for name, column in self.layout.items() if column.is_dictionary]

    def with_column(self, name: str, kind: pa.DataType, since: int) -> EventSchema:
        """The same and one more column, seen from version ``since`` on."""
        return replace(self, columns={**self.columns, name: kind}, since={**self.since, name: since})

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema of a table that ``append`` takes."""
        return pa.schema([(self.key, self.user_id), ("event_time", pa.int64()), *self.columns.items()])

    @cached_property
    def stored(self) -> pa.Schema:
        """The schema of the log's batches."""
        return pa.schema([(self.key, self.user_id), ("event_time", pa.int64()),
                          *((name, column.stored) for name, column in self.layout.items())])

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key, "key_type": type_name(self.user_id), "group": self.group,
            "columns": [{"name": name, "type": type_name(kind), "since_version": self.since.get(name, 0)}
                        for name, kind in self.columns.items()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EventSchema:
        columns = {column["name"]: parse_type(column["type"]) for column in value["columns"]}
        since = {column["name"]: column["since_version"] for column in value["columns"] if column["since_version"]}
        return cls(columns, parse_type(value["key_type"]), value["group"], value["key"], since)


def _short(kind: pa.DataType) -> str:
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))


def type_name(kind: pa.DataType) -> str:
    """The name of a type in manifests: ``int64``, ``dictionary<int8>`` (of strings), ``timestamp[us,UTC]``,
    ``list<float32>[16]``."""
    if pa.types.is_fixed_size_list(kind):
        return f"list<{type_name(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_dictionary(kind):
        return f"dictionary<{kind.index_type}>"
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit},{kind.tz or ''}]"
    return _short(kind)


def parse_type(name: str) -> pa.DataType:
    if name in _SIMPLE:
        return _SIMPLE[name]
    if match := re.fullmatch(r"list<(.+)>\[(\d+)\]", name):
        return pa.list_(parse_type(match[1]), int(match[2]))
    if match := re.fullmatch(r"dictionary<(.+)>", name):
        return pa.dictionary(parse_type(match[1]), pa.string())
    if match := re.fullmatch(r"timestamp\[(\w+),(.*)\]", name):
        return pa.timestamp(match[1], match[2] or None)
    raise ValueError(f"unknown column type {name!r}")


def as_table(data: Any) -> pa.Table:
    """A Table, RecordBatch or anything with the Arrow C stream or array interface, as a table."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
        return pa.table(data)
    raise ValueError(f"append takes an Arrow table or anything with __arrow_c_stream__, got {type(data).__name__}")


def check_events(data: Any, schema: EventSchema) -> dict[str, pa.Array]:
    """The columns of ``data`` in the schema's order, one array each (null for a column that was added later and is
    missing); ValueError naming the column and the remedy for a missing or extra column, a wrong type, a null or
    negative ``event_time``, a null key."""
    table = as_table(data)
    added = [name for name, column in schema.layout.items() if column.since_version and name not in table.column_names]
    arrays = _check(table, schema, [name for name in schema.arrow.names if name not in added])
    for name in added:
        arrays[name] = pa.nulls(table.num_rows, schema.layout[name].type)
    return {name: arrays[name] for name in schema.arrow.names} if added else arrays


def check_named_events(data: Any, schema: EventSchema) -> dict[str, pa.Array]:
    """The columns of a table that names events of the store: the key, ``event_time``, and of the schema's columns as
    many as it takes. ValueError as for ``check_events``."""
    table = as_table(data)
    needed = (schema.key, "event_time")
    return _check(table, schema, [name for name in schema.arrow.names if name in needed or name in table.column_names])


def _check(table: pa.Table, schema: EventSchema, names: list[str]) -> dict[str, pa.Array]:
    have = table.column_names  # pyarrow makes such lists anew each time
    missing = [name for name in names if name not in have]
    extra = [name for name in have if name not in names]
    if missing or extra or len(have) != len(names):
        raise ValueError(f"events do not fit the store's schema: missing {missing or 'none'}, unknown {extra or 'none'}"
                         f"; the columns are {', '.join(schema.arrow.names)}, each once")
    arrays = {}
    want = schema.arrow
    for field_ in (want.field(name) for name in names):
        column = table.column(field_.name)
        array = pa.concat_arrays(column.chunks) if column.num_chunks > 1 else (
            column.chunk(0) if column.num_chunks else pa.array([], column.type))
        arrays[field_.name] = check_column(array, field_.name, field_.type, not (
            field_.name in schema.layout and schema.layout[field_.name].is_dictionary))
    for name in (schema.key, "event_time"):
        if arrays[name].null_count:
            raise ValueError(f"column {name!r} has {arrays[name].null_count} nulls; an event needs a key and a time")
    for name, column in schema.layout.items():
        if column.shape and name in arrays:
            to_numpy(arrays[name], column)  # refuses nulls inside lists
    times = to_numpy(arrays["event_time"], Column("event_time", pa.int64()))[0]
    if len(times) and times.min() < 0:
        row = int(times.argmin())
        raise ValueError(f"event_time {times[row]} in row {row} is negative; times are microseconds since 1970")
    if len(times) and times.max() == np.iinfo(np.int64).max:
        raise ValueError(f"event_time {times.max()} in row {int(times.argmax())} is too large: no as_of lies behind it")
    return arrays


def check_column(array: pa.Array, name: str, kind: pa.DataType, cast: bool) -> pa.Array:
    """``array``, sound and of type ``kind``; with ``cast`` False in whatever layout its strings have. Raises ValueError
    for another type."""
    if not _fits(array.type, kind, time=name == "event_time"):
        raise ValueError(f"column {name!r} has type {array.type}, the store keeps {kind}; cast it")
    array.validate(full=True)  # foreign memory; after this nothing in it can fail halfway
    if name == "event_time" and pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    return array.cast(kind) if cast and array.type != kind else array  # lists whose inner field is named otherwise


def _fits(have: pa.DataType, want: pa.DataType, time: bool) -> bool:
    if have == want or (time and pa.types.is_timestamp(have)):
        return True
    if pa.types.is_string(want) or pa.types.is_dictionary(want):
        have = have.value_type if pa.types.is_dictionary(have) else have
        return pa.types.is_string(have) or pa.types.is_large_string(have) or str(have) == "string_view"
    # the name of a list's inner field carries no meaning
    return (pa.types.is_fixed_size_list(have) and pa.types.is_fixed_size_list(want)
            and have.list_size == want.list_size and have.value_type == want.value_type)


def to_numpy(array: pa.Array, column: Column) -> tuple[np.ndarray, np.ndarray | None]:
    """([rows, *shape] values, [rows] bool validity or None where nothing is null). Null values are zero.

    Without nulls the values share the array's memory where Arrow's layout allows it."""
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    if column.shape:
        child = array.values.slice(array.offset * column.shape[0], len(array) * column.shape[0])
        values, inside = to_numpy(child, Column(column.name, child.type))
        values = values.reshape(len(array), *column.shape)
        if inside is not None:
            whole = np.all(inside.reshape(values.shape), axis=1)
            if not (whole if valid is None else whole | ~valid).all():
                raise ValueError(f"column {column.name!r}: a list holds a null; make the whole list null or fill it")
    elif pa.types.is_boolean(array.type):
        filled = array.fill_null(False) if valid is not None else array
        return filled.to_numpy(zero_copy_only=False), valid
    else:
        buffer = array.buffers()[1]
        if buffer is None or not len(array):
            values = np.zeros(len(array), column.dtype)
        else:
            size = column.dtype.itemsize
            values = np.frombuffer(buffer, column.dtype, len(array), array.offset * size)
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return values, valid


def from_numpy(values: np.ndarray, valid: np.ndarray | None, column: Column, kind: pa.DataType,
               strings: pa.Array | None) -> pa.Array:
    """The inverse: an array of type ``kind``. ``strings``: what the codes of a dictionary column stand for."""
    missing = None if valid is None else ~valid
    if column.is_dictionary:
        codes = pa.array(values, pa.int32(), mask=missing)
        if pa.types.is_dictionary(kind):
            return pa.DictionaryArray.from_arrays(codes.cast(kind.index_type), strings)
        return pc.take(strings, codes).cast(kind)
    if column.shape:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kind, mask=(
            None if missing is None else pa.array(missing)))
    array = pa.array(values, mask=missing)
    return array.view(kind) if pa.types.is_timestamp(kind) else array

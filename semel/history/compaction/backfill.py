"""Values of a column that is added to a store: for the events that are there already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.history.log.tail import Dictionaries
from semel.history.schema import Column, EventSchema, check_column, from_numpy, to_numpy

ROWS = 1 << 18
"""Events that a backfill function is given at a time."""

Values = tuple[np.ndarray, np.ndarray]
Backfill: TypeAlias = Callable[[pa.Table], Any] | pa.Table | None


class AddedColumn:
    """``column`` and what fills it. ``backfill``: a function of a table of events (the key, ``event_time`` and the
    other columns) that returns as many values; or a table of the new column beside one or more of those, by which each
    event finds its value; or None for null."""

    def __init__(self, column: Column, backfill: Backfill, schema: EventSchema, dictionaries: Dictionaries) -> None:
        self.column, self._schema, self._dictionaries = column, schema, dictionaries
        self.words: dict[str, int] = {}  # of a dictionary column: word -> code
        self._lock = threading.Lock()
        self._fill = self._joining(backfill) if isinstance(backfill, pa.Table) else backfill
        if self._fill is not None and not callable(self._fill):
            raise ValueError(f"backfill must be a function, a pyarrow.Table or None, got {type(backfill).__name__}")

    def row_bytes(self, schema: EventSchema) -> int:
        """Bytes that ``values`` takes for a row of a shard: its own, and all other columns where it computes them."""
        own = self.column.dtype.itemsize * int(np.prod(self.column.shape)) + 1
        return own if self._fill is None else own + 16 + sum(schema.widths)

    def values(self, users: np.ndarray | list[bytes], offsets: np.ndarray, column: Callable[[str], Values]) -> Values:
        """([rows, ...] values, [rows] validity or empty) of a bucket: ``users`` [U], ``offsets`` [U + 1] of their rows,
        ``column(name)`` the other columns."""
        rows = int(offsets[-1])
        out = np.zeros((rows, *self.column.shape), self.column.dtype)
        if self._fill is None:
            return out, np.zeros(rows, bool)
        valid = np.ones(rows, bool)
        old = {name: column(name) for name in ("event_time", *self._schema.layout)}
        keys = pa.array([user.decode() for user in users] if isinstance(users, list) else users, self._schema.user_id)
        of = np.repeat(np.arange(len(keys)), np.diff(offsets))
        for start in range(0, rows, ROWS):
            some = slice(start, start + ROWS)
            table = pa.table({
                self._schema.key: keys.take(pa.array(of[some])), "event_time": pa.array(old["event_time"][0][some]),
                **{name: self._arrow(name, old[name], some) for name in self._schema.layout}})
            array = self._checked(self._fill(table), table.num_rows)
            found, present = to_numpy(self._codes(array), self.column)
            out[some] = found
            if present is not None:
                valid[some] = present
        return out, valid

    def _arrow(self, name: str, column: Values, some: slice) -> pa.Array:
        values, valid = column
        layout = self._schema.layout[name]
        strings = pa.array(self._dictionaries.array(name), pa.string()) if layout.is_dictionary else None
        kind = pa.string() if layout.is_dictionary else layout.type
        return from_numpy(values[some], valid[some] if len(valid) else None, layout, kind, strings)

    def _checked(self, values: Any, rows: int) -> pa.Array:
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        if not isinstance(array, pa.Array):
            try:
                array = pa.array(array, pa.string() if self.column.is_dictionary else self.column.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
                raise ValueError(f"the backfill of {self.column.name!r} returned values that are not "
                                 f"{self.column.type}: {error}") from None
        if len(array) != rows:
            raise ValueError(f"the backfill of {self.column.name!r} returned {len(array)} values for {rows} events")
        return check_column(array, self.column.name, self.column.type, cast=not self.column.is_dictionary)

    def _codes(self, array: pa.Array) -> pa.Array:
        """Strings as codes."""
        if not self.column.is_dictionary:
            return array
        encoded = array.cast(pa.string()).dictionary_encode()
        with self._lock:
            codes = [self.words.setdefault(word, len(self.words)) for word in encoded.dictionary.to_pylist()]
        return pa.array(codes, pa.int32()).take(encoded.indices)

    def _joining(self, table: pa.Table) -> Callable[[pa.Table], pa.Array]:
        name = self.column.name
        by = [other for other in table.column_names if other != name]
        known = (self._schema.key, "event_time", *self._schema.layout)
        if name not in table.column_names or not by or any(other not in known for other in by):
            raise ValueError(f"a backfill table needs the new column {name!r} and one or more of {', '.join(known)}; "
                             f"it has {', '.join(table.column_names) or 'no columns'}")
        keys = {other: self._key_type(other) for other in by}
        try:
            table = pa.table({other: table[other].cast(kind) for other, kind in keys.items()} | {name: table[name]})
        except pa.ArrowInvalid as error:
            raise ValueError(f"a backfill table's columns must have the types of the store's: {error}") from None
        if table.group_by(by).aggregate([]).num_rows < table.num_rows:
            raise ValueError(f"the backfill table has several values of {name!r} for one {', '.join(by)}")

        def fill(events: pa.Table) -> pa.Array:
            row = pa.array(np.arange(events.num_rows))
            wanted = pa.table({**{other: events[other].cast(keys[other]) for other in by}, "": row})
            found = wanted.join(table, keys=by, join_type="left outer")
            return found[name].take(pc.sort_indices(found[""]))

        return fill

    def _key_type(self, name: str) -> pa.DataType:
        if name == self._schema.key:
            return self._schema.user_id
        if name == "event_time":
            return pa.int64()
        column = self._schema.layout[name]
        if column.shape:
            raise ValueError(f"a backfill table cannot be joined by {name!r}, a list")
        return pa.string() if column.is_dictionary else column.type

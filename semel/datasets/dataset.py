"""What every reader returns: a data set's events, items and users as Arrow tables, checked once on the way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from semel.datasets.ids import encoded

Progress = Callable[[str, int, int | None], None]
"""Called as ``progress(what, done, total)``: rows or bytes, as ``what`` says; ``total`` is None where not known."""

LATEST_TIME = 7_258_118_400_000_000
"""2200-01-01 in microseconds: a later event time is a wrong unit, not a fact."""


@dataclass(frozen=True)
class Dataset:
    """Events with what is known of their items and users.

    ``events``: ``user_id`` and ``item_id`` (int64 or string), ``event_time`` (int64, microseconds since 1970), further
    columns; rows are in file order, which decides ties, and repeated rows are kept: each is an event. ``items``:
    ``item_id`` and features (``genres`` and other sets are one string, joined by ``|``), optionally ``event_time``
    (when the item appeared). ``users``: ``user_id`` and features. ``impressions``: what was shown
    (``semel.datasets.impressions``), or None. ``action``: what one event is ("rating"), or None where the events have a
    column ``action``. ``source``: where the data came from. ``licence``: the terms, in a line. ``notes``: what a reader
    had to decide or leave out.
    """

    name: str
    events: pa.Table
    items: pa.Table | None
    users: pa.Table | None
    licence: str
    source: str
    impressions: pa.Table | None = None
    action: str | None = None
    notes: tuple[str, ...] = field(default=())


class Tables(NamedTuple):
    """What a reader finds in a folder; the fields are those of ``Dataset``."""

    events: pa.Table
    items: pa.Table | None = None
    users: pa.Table | None = None
    impressions: pa.Table | None = None
    notes: tuple[str, ...] = ()


def build_events(columns: Mapping[str, Any], where: str, first_line: int = 1) -> pa.Table:
    """The events table from its columns, checked. ``where``: the file, for errors; ``first_line``: the line of row 0.

    Raises ValueError for no rows, null or empty ids, and times that are null, negative or after 2200.
    """
    table = pa.table({name: _plain(column) for name, column in columns.items()})
    for name in ("user_id", "item_id", "event_time"):
        if name not in table.column_names:
            raise ValueError(f"{where}: events need a column {name!r}; there are {', '.join(table.column_names)}")
    if table.num_rows == 0:
        raise ValueError(f"{where}: no events in it")
    for name in ("user_id", "item_id"):
        check_ids(table[name], name, where, first_line)
    check_times(table["event_time"], where, first_line)
    order = ["user_id", "item_id", "event_time"]
    return table.select(order + [name for name in table.column_names if name not in order])


def build_features(key: str, columns: Mapping[str, Any], where: str, first_line: int = 1) -> pa.Table:
    """The items or users table, one row a ``key``; the last row of a repeated key wins, in the first one's place."""
    table = pa.table({name: _plain(column) for name, column in columns.items()})
    check_ids(table[key], key, where, first_line)
    codes = encoded(table[key])
    if len(codes.dictionary) == table.num_rows:
        return table
    last = {code: row for row, code in enumerate(codes.indices.to_pylist())}
    return table.take(pa.array(list(last.values()), pa.int64()))


def check_ids(column: pa.ChunkedArray, name: str, where: str, first_line: int = 1) -> None:
    """ValueError naming the first line whose id is null or an empty string."""
    missing = pc.is_null(column)
    if pa.types.is_string(column.type):
        missing = pc.or_kleene(missing, pc.fill_null(pc.equal(column, ""), True))
    row = first_true(missing)
    if row is not None:
        raise ValueError(f"{where}, line {row + first_line}: no {name}; give every row an id or leave the row out")


def check_times(column: pa.ChunkedArray, where: str, first_line: int = 1) -> None:
    """ValueError naming the first line whose time (microseconds) is null, negative or after 2200."""
    row = first_true(pc.is_null(column))
    if row is not None:
        raise ValueError(f"{where}, line {row + first_line}: no event time")
    row = first_true(pc.less(column, 0))
    if row is not None:
        value = column[row].as_py()
        raise ValueError(f"{where}, line {row + first_line}: event time {value} us is before 1970; times must be >= 0")
    row = first_true(pc.greater(column, LATEST_TIME))
    if row is not None:
        value = column[row].as_py()
        raise ValueError(f"{where}, line {row + first_line}: event time {value} us is after 2200; is the unit right?")


def first_true(mask: Any) -> int | None:
    """The first row at which a boolean column is true, or None."""
    row = pc.index(mask, True).as_py()
    return None if row < 0 else row


def joined(values: list[list[str]]) -> pa.Array:
    """Sets of words -> one string each, joined by ``|``; null for an empty set."""
    return pa.array(["|".join(words) if words else None for words in values], pa.string())


def _plain(column: Any) -> Any:
    """Without dictionary encoding and large offsets, so that stores and joins meet one type for strings."""
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        kind = column.type
        if pa.types.is_dictionary(kind):
            return _plain(column.cast(kind.value_type))
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            return column.cast(pa.string())
    return column

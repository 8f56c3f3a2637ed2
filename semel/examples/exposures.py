"""What the server logs of a request (exposure) and what the user then did (outcome): the schemas.

``docs/formats/exposures.md`` explains each column. Ids are int64 or strings, as in the store that was served from.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.examples.rows import list_values

MEMORY_TYPE = pa.list_(pa.struct([("epoch", pa.int64()), ("shard", pa.int32()), ("sequence", pa.int64())]))
SHOWN = "shown"
"""The task name under which a client reports, as an outcome, that a candidate was (1) or was not (0) shown."""

_BY_CANDIDATE = ("scored", "returned", "shown", "position", "scores")


def exposure_schema(user_id: pa.DataType | None = None, item_id: pa.DataType | None = None) -> pa.Schema:
    """The schema of exposures whose user and item ids have these types (int64 or string; int64 where None)."""

    def field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
        return pa.field(name, kind, nullable=nullable)

    return pa.schema([
        field("request_id", pa.string()),
        field("user_id", user_id or pa.int64()),
        field("as_of", pa.int64()),
        field("version", pa.int64()),
        field("catalogue_version", pa.int64()),
        field("surface", pa.string(), nullable=True),
        field("context", pa.string()),
        field("candidates", pa.list_(item_id or pa.int64())),
        field("scored", pa.list_(pa.bool_())),
        field("returned", pa.list_(pa.bool_())),
        field("shown", pa.list_(pa.bool_()), nullable=True),
        field("position", pa.list_(pa.int32()), nullable=True),
        field("scores", pa.list_(pa.float32())),
        field("task_scores", pa.list_(pa.float32()), nullable=True),
        field("model_version", pa.string()),
        field("memory", MEMORY_TYPE, nullable=True),
        field("history_checksum", pa.uint64()),
        field("history_length", pa.int32()),
        field("history_status", pa.uint8()),
        field("batch_id", pa.string(), nullable=True),
        field("batch_index", pa.int32(), nullable=True),
        field("batch_requests", pa.int32()),
        field("batch_candidates", pa.int32()),
        field("device", pa.string()),
        field("path", pa.string()),
        field("served_at", pa.int64()),
        field("stage", pa.string(), nullable=True),
        field("part_of", pa.string(), nullable=True),
    ])


def outcome_schema(user_id: pa.DataType | None = None, item_id: pa.DataType | None = None) -> pa.Schema:
    """The schema of outcomes: a row is one task's label of one candidate of one request. ``user_id`` is not used (an
    outcome names its request)."""
    return pa.schema([
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("item_id", item_id or pa.int64(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("value", pa.float32(), nullable=False),
        pa.field("received_at", pa.int64(), nullable=False),
        pa.field("outcome_key", pa.string(), nullable=True),
    ])


EXPOSURE_SCHEMA = exposure_schema()
OUTCOME_SCHEMA = outcome_schema()


def conform(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """``table`` with exactly ``schema``'s columns and types; nullable ones may be absent. Raises ValueError with the
    column's name for anything else: an unknown or missing column, a null, a type that does not fit."""
    unknown = [name for name in table.column_names if name not in schema.names]
    if unknown:
        raise ValueError(f"{where}: no column {', '.join(unknown)} in this format; it has {', '.join(schema.names)}")
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            if not field.nullable:
                raise ValueError(f"{where}: column {field.name} is missing")
            columns.append(pa.nulls(len(table), field.type))
            continue
        column = table[field.name]
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(f"{where}: column {field.name} must be {field.type}, got {column.type}: {error}") from None
        if column.null_count and not field.nullable:
            raise ValueError(f"{where}: column {field.name} has {column.null_count} nulls")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def check_exposures(table: pa.Table, where: str) -> None:
    """Raises ValueError if a list of a row is not as long as its candidates, or the context is not text of JSON."""
    offsets = list_values(table["candidates"], "candidates")[1]
    lengths = np.diff(offsets)
    for name in _BY_CANDIDATE:
        own = table[name]
        expected = lengths
        if own.null_count:  # a nullable list that is absent for some requests
            present = np.asarray(own.is_valid())
            own, expected = own.filter(pa.array(present)), lengths[present]
        found = np.asarray(pc.list_value_length(own), dtype=np.int64)
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            raise ValueError(f"{where}: {name} has {found[wrong[0]]} values for {expected[wrong[0]]} candidates")


def id_type(column: pa.Array | pa.ChunkedArray, where: str) -> pa.DataType:
    """int64 or string, whichever holds these ids (lists of ids count by their values)."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.string()
    raise ValueError(f"{where}: ids must be integers or strings, got {kind}")

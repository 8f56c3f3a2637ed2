"""Request rows as an Arrow table: one row is one request that holds a pointer, never a history.

Columns: ``request_id``, the pointer (``user_id``, ``as_of``, ``version``), ``catalogue_version``, ``context.NAME`` for
each request feature, ``candidates`` (list), ``label.TASK`` (list, null where a candidate has no label) and ``weight``
(list, absent where all weights are 1). A row's size does not depend on the length of the history.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.batch import Jagged, Pointers, RequestRows, offsets_of

CONTEXT = "context."
LABEL = "label."
_FIXED = ("request_id", "user_id", "as_of", "version", "catalogue_version", "candidates")


def rows_to_table(rows: RequestRows) -> pa.Table:
    """``rows`` as a table of ``len(rows)`` rows. Raises ValueError for a context column that mixes types."""
    columns: dict[str, pa.Array] = {
        "request_id": pa.array(rows.request_id, pa.string()),
        "user_id": _ids_to_arrow(rows.pointers.user_id),
        "as_of": pa.array(rows.pointers.as_of, pa.int64()),
        "version": pa.array(rows.pointers.version, pa.int64()),
        "catalogue_version": pa.array(rows.catalogue_version, pa.int64()),
    }
    for name, values in rows.context.items():
        try:
            column = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"context column {name!r} mixes types and cannot be stored: {error}") from None
        columns[CONTEXT + name] = column.cast(pa.string()) if pa.types.is_null(column.type) else column
    if rows.candidates.offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{rows.candidates.offsets[-1]} candidates do not fit one table; write the rows in parts")
    offsets = pa.array(np.asarray(rows.candidates.offsets, dtype=np.int32))

    def by_request(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values)

    columns["candidates"] = by_request(_ids_to_arrow(rows.candidates.values))
    for task, label in rows.label.items():
        mask = ~np.asarray(rows.label_mask[task], dtype=bool)
        columns[LABEL + task] = by_request(pa.array(np.asarray(label, dtype=np.float32), mask=mask))
    if rows.weight is not None:
        columns["weight"] = by_request(pa.array(np.asarray(rows.weight, dtype=np.float32)))
    return pa.table(columns)


def rows_from_table(table: pa.Table) -> RequestRows:
    """The inverse of ``rows_to_table``. A missing label is 0.0 under a False mask. Raises ValueError for a table that
    lacks a column, or whose label or weight lists do not fit its candidates."""
    missing = [name for name in _FIXED if name not in table.column_names]
    if missing:
        raise ValueError(f"not a table of request rows: no column {', '.join(missing)}; it has {table.column_names}")
    candidates, offsets = lists_to_numpy(table["candidates"], "candidates")
    label: dict[str, np.ndarray] = {}
    mask: dict[str, np.ndarray] = {}
    weight = None
    for name in table.column_names:
        if name.startswith(LABEL) or name == "weight":
            flat, own = list_values(table[name], name)
            if not np.array_equal(own, offsets):
                raise ValueError(f"column {name}: its lists are not as long as those of candidates")
            valid = np.asarray(flat.is_valid())
            values = np.asarray(flat.cast(pa.float32()).fill_null(0.0))
            if name == "weight":
                weight = np.where(valid, values, np.float32(1.0))
            else:
                label[name[len(LABEL):]], mask[name[len(LABEL):]] = values, valid
    return RequestRows(
        request_id=column_to_numpy(table["request_id"]),
        pointers=Pointers(column_to_numpy(table["user_id"]), column_to_numpy(table["as_of"]),
                          column_to_numpy(table["version"])),
        catalogue_version=column_to_numpy(table["catalogue_version"]),
        context={name[len(CONTEXT):]: column_to_numpy(table[name])
                 for name in table.column_names if name.startswith(CONTEXT)},
        candidates=Jagged(candidates, offsets), label=label, label_mask=mask, weight=weight,
    )


def read_rows(path: str | Path) -> RequestRows:
    """The request rows of one Parquet file. Raises FileNotFoundError, and ValueError for another kind of file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no examples at {path}; build them first (semel.examples.build_examples)")
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    return rows_from_table(table)


def concat_rows(parts: list[RequestRows]) -> RequestRows:
    """Rows one after the other. All parts must have the same context columns; a task that a part lacks is unlabelled
    there. Raises ValueError for no parts."""
    if not parts:
        raise ValueError("no request rows to put together")
    tasks = list(dict.fromkeys(task for part in parts for task in part.label))
    counts = [len(part.candidates.values) for part in parts]

    def labels(kind: str, dtype: Any) -> dict[str, np.ndarray]:
        return {task: np.concatenate([getattr(part, kind).get(task, np.zeros(count, dtype))
                                      for part, count in zip(parts, counts, strict=True)]) for task in tasks}

    weighted = any(part.weight is not None for part in parts)
    return RequestRows(
        np.concatenate([part.request_id for part in parts]),
        Pointers(*(np.concatenate([getattr(part.pointers, name) for part in parts])
                   for name in ("user_id", "as_of", "version"))),
        np.concatenate([part.catalogue_version for part in parts]),
        {name: np.concatenate([part.context[name] for part in parts]) for name in parts[0].context},
        Jagged(np.concatenate([part.candidates.values for part in parts]),
               offsets_of(np.concatenate([part.candidates.lengths for part in parts]))),
        labels("label", np.float32), labels("label_mask", bool),
        np.concatenate([np.ones(count, np.float32) if part.weight is None else part.weight
                        for part, count in zip(parts, counts, strict=True)]) if weighted else None,
    )


def column_to_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A column as numpy: strings as objects (None where null), floats with NaN where null, integers and booleans with
    nulls as objects (so that null stays apart from every number)."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # of zero chunks, in older pyarrow
            column = pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count and not pa.types.is_floating(column.type):
        out = np.empty(len(column), dtype=object)
        out[:] = column.to_pylist()
        return out
    return column.to_numpy(zero_copy_only=False)


def list_values(column: pa.Array | pa.ChunkedArray, name: str) -> tuple[pa.Array, np.ndarray]:
    """The values of a list column and [rows + 1] int64 offsets into them. Raises ValueError for a null list."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.array([], column.type)
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise ValueError(f"column {name} must hold lists, it holds {column.type}")
    if column.null_count:
        raise ValueError(f"column {name} has {column.null_count} null lists; an empty list means no values")
    offsets = np.asarray(column.offsets, dtype=np.int64)
    return column.flatten(), offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)


def lists_to_numpy(column: pa.Array | pa.ChunkedArray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """``list_values`` with the values as numpy."""
    values, offsets = list_values(column, name)
    return column_to_numpy(values), offsets


def _ids_to_arrow(ids: np.ndarray) -> pa.Array:
    return pa.array(ids, pa.string() if ids.dtype == object else pa.int64())

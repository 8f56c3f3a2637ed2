"""What was shown to whom: one row a request, lists over its candidates.

Columns: ``request_id`` (string), ``user_id``, ``as_of`` (int64 us: the request saw events strictly before it),
``surface`` (string), ``candidates`` (list of item ids), ``shown`` (list of bool), ``position`` (list of int32, null
where not known or not shown), and a list of numbers for each label
(``click``, ...), null where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import offsets_of


def group_impressions(events: pa.Table, surface: str, labels: Mapping[str, str]) -> pa.Table:
    """One request from each user's events of one instant on one ``surface`` (a column), in order of time.

    For logs that keep every impression but no request id, such as KuaiRand's. ``labels``: name of the label -> column
    of the events. All candidates count as shown; where on the page they stood is not known.
    """
    user, time, place = (codes_of(events[name]) for name in ("user_id", "event_time", surface))
    order = np.lexsort((place, user, time))  # stable: equal keys keep the order of the log
    first = np.ones(len(order), dtype=bool)
    for key in (user, time, place):
        first[1:] &= key[order][1:] == key[order][:-1]
    first[1:] = ~first[1:]
    starts = np.flatnonzero(first)
    heads = events.select(["user_id", "event_time", surface]).take(pa.array(order[starts]))
    offsets = offsets_of(np.diff(np.append(starts, len(order))))
    where = pa.array(order)
    rows = len(order)
    text = [heads[name].cast(pa.string()) for name in ("user_id", "event_time", surface)]
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        "request_id": pc.binary_join_element_wise(*text, "-"),
        "user_id": heads["user_id"],
        "as_of": heads["event_time"],
        "surface": text[2],
        "candidates": lists(offsets, events["item_id"].take(where)),
        "shown": lists(offsets, pa.array(np.ones(rows, dtype=bool))),
        "position": lists(offsets, pa.nulls(rows, pa.int32())),
    }
    for name, column in labels.items():
        columns[name] = lists(offsets, events[column].take(where).cast(pa.float32()))
    return pa.table(columns)


def lists(offsets: np.ndarray, values: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    """Offsets [R + 1] and values [C] -> R lists. ValueError beyond 2^31 values, which a list column cannot address."""
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} candidates are more than one table can hold; read fewer files at a time")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def codes_of(column: pa.ChunkedArray) -> np.ndarray:
    """Integers that are equal where the column's values are (integers stand for themselves)."""
    if pa.types.is_integer(column.type):
        return column.to_numpy()
    codes = pc.dictionary_encode(column).unify_dictionaries()
    return np.concatenate([chunk.indices.to_numpy() for chunk in codes.chunks] or [np.empty(0, np.int32)])

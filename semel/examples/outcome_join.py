"""Exposures + outcomes -> request rows that can be trained on.

An outcome counts if it was received within the window after its request was served. Requests whose window is still open
are held back, so that a join at a later time, or over overlapping data, never gives a request other labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import Jagged, Pointers, RequestRows
from semel.examples.context import parse_contexts
from semel.examples.exposures import SHOWN
from semel.examples.rows import column_to_numpy, list_values
from semel.features import Feature, Task

_YES, _NO, _UNKNOWN = 1, 0, -1


@dataclass(frozen=True)
class JoinReport:
    """What became of every request and of every outcome (each outcome is in exactly one of the counts).

    ``rows``: the requests whose window has closed, in the order of the log. ``watermark``: every request served at or
    before it (microseconds) is in ``rows``.
    """

    rows: RequestRows
    watermark: int
    held_back: int              # requests whose window is open
    duplicate_exposures: int    # the same request_id again
    used: int                   # outcomes that became a label, or a report of being shown
    pending: int                # of requests held back
    late: int                   # received after the window
    duplicates: int             # same request, item and task: the one received last counts
    unshown: int                # of candidates known not to have been shown
    other_tasks: int            # of tasks that were not asked for
    unmatched_requests: int     # of requests that were never logged
    unmatched_items: int        # of items that were not candidates of their request


def join(
    exposures: pa.Table, outcomes: pa.Table, window_us: int, tasks: Sequence[Task], now: int,
    request: Sequence[Feature] = (),
) -> JoinReport:
    """Labels exposures with outcomes as known at ``now`` (microseconds).

    All candidates of a request are kept. A candidate has a label of a task if it got an outcome in time, or else, if it
    was shown, ``Task.unobserved`` where that is not None. It was shown if the exposure or an outcome of the task
    ``shown`` says so; where neither says anything, an outcome in time shows it. What was not shown has no label.
    ``request``: the features to take out of the context. Raises ValueError for a negative window and unlike item ids.
    """
    if window_us < 0:
        raise ValueError(f"window_us must not be negative, got {window_us}")
    exposures, duplicate_exposures = _first_by_request(exposures)
    closed = column_to_numpy(exposures["served_at"]) + window_us <= now if len(exposures) else np.empty(0, bool)
    held_back = exposures.filter(pa.array(~closed))
    exposures = exposures.filter(pa.array(closed))
    rows = exposure_rows(exposures, request)
    item_type, found_type = exposures["candidates"].type.value_type, outcomes["item_id"].type
    if len(outcomes) and len(exposures) and item_type != found_type:
        raise ValueError(f"candidates of exposures are {item_type}, item_id of outcomes is {found_type}")

    # A key stands for one (request, item): a candidate listed twice in a request shares one.
    values, offsets = list_values(exposures["candidates"], "candidates")
    request_of = np.repeat(np.arange(len(exposures)), np.diff(offsets))
    items = values.dictionary_encode()
    keys, key_of = np.unique(request_of * max(len(items.dictionary), 1) + np.asarray(items.indices, np.int64),
                             return_inverse=True)

    counts: dict[str, int] = {}
    kept = np.arange(len(outcomes))

    def drop(name: str, mask: np.ndarray) -> None:
        """Counts the outcomes at ``mask`` under ``name`` and goes on with the others."""
        nonlocal kept
        counts[name] = counts.get(name, 0) + int(mask.sum())
        kept = kept[~mask]

    row = _index_in(outcomes["request_id"], exposures["request_id"])
    drop("pending", (row[kept] < 0) & (_index_in(outcomes["request_id"], held_back["request_id"]) >= 0)[kept])
    drop("unmatched_requests", row[kept] < 0)
    if len(kept):
        code = _index_in(outcomes["item_id"], items.dictionary)
        wanted = row * max(len(items.dictionary), 1) + code
        place = np.searchsorted(keys, wanted)
        hit = (code >= 0) & (place < len(keys)) & (keys[np.minimum(place, len(keys) - 1)] == wanted) \
            if len(keys) else np.zeros(len(outcomes), bool)
        drop("unmatched_items", ~hit[kept])
    names = column_to_numpy(outcomes["task"])
    task_names = [SHOWN, *(task.name for task in tasks)]
    task_code = _index_in(outcomes["task"], pa.array(task_names, pa.string()))
    drop("other_tasks", task_code[kept] < 0)
    received = column_to_numpy(outcomes["received_at"])
    deadline = column_to_numpy(exposures["served_at"]) + window_us
    drop("late", received[kept] > deadline[row[kept]])
    if len(kept):  # the last received of each (key, task)
        slot = place[kept] * len(task_names) + task_code[kept]
        order = np.lexsort((kept, received[kept], slot))
        last = np.ones(len(order), dtype=bool)
        last[:-1] = slot[order[1:]] != slot[order[:-1]]
        superseded = np.ones(len(kept), dtype=bool)
        superseded[order[last]] = False
        drop("duplicates", superseded)

    shown = np.full(len(keys), _UNKNOWN, dtype=np.int8)
    np.maximum.at(shown, key_of, _shown(exposures, offsets))
    reports = kept[names[kept] == SHOWN] if len(kept) else kept
    amount = column_to_numpy(outcomes["value"])
    if len(reports):
        shown[place[reports]] = np.where(amount[reports] > 0, _YES, _NO)
        labels = kept[names[kept] != SHOWN]
        hidden = shown[place[labels]] == _NO
        counts["unshown"] = int(hidden.sum())
        kept = labels[~hidden]
    elif len(kept):
        drop("unshown", shown[place[kept]] == _NO)
    if len(kept):
        shown[place[kept]] = _YES

    label, mask = {}, {}
    for number, task in enumerate(tasks, start=1):
        value = np.zeros(len(keys), dtype=np.float32)
        known = np.zeros(len(keys), dtype=bool)
        if task.unobserved is not None:
            known[:] = shown == _YES
            value[known] = task.unobserved
        if len(kept):
            own = kept[task_code[kept] == number]
            value[place[own]], known[place[own]] = amount[own], True
        label[task.name], mask[task.name] = value[key_of], known[key_of]
    return JoinReport(
        rows=dataclasses.replace(rows, label=label, label_mask=mask),
        watermark=now - window_us, held_back=len(held_back), duplicate_exposures=duplicate_exposures,
        used=len(kept) + len(reports),
        **{name: counts.get(name, 0) for name in ("pending", "late", "duplicates", "unshown", "other_tasks",
                                                  "unmatched_requests", "unmatched_items")},
    )


def exposure_rows(exposures: pa.Table, request: Sequence[Feature] = ()) -> RequestRows:
    """The requests of exposures as they were received, without labels: what replay materializes and scores again."""
    values, offsets = list_values(exposures["candidates"], "candidates")
    return RequestRows(
        column_to_numpy(exposures["request_id"]),
        Pointers(*(column_to_numpy(exposures[name]) for name in ("user_id", "as_of", "version"))),
        column_to_numpy(exposures["catalogue_version"]),
        parse_contexts(exposures["context"].to_pylist(), request) if request else {},
        Jagged(column_to_numpy(values), offsets), {}, {},
    )


def _first_by_request(exposures: pa.Table) -> tuple[pa.Table, int]:
    """One exposure a request (the one logged first) and how many were dropped."""
    ids = exposures["request_id"].combine_chunks()
    first = np.unique(np.asarray(ids.dictionary_encode().indices), return_index=True)[1] if len(ids) else ids
    if len(first) == len(ids):
        return exposures, 0
    return exposures.take(np.sort(first)), len(ids) - len(first)


def _index_in(values: pa.ChunkedArray, among: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """[len(values)] the place of each value among ``among``, -1 where it is not there."""
    if isinstance(among, pa.ChunkedArray):
        among = among.combine_chunks()
    if not len(values) or not len(among):
        return np.full(len(values), -1, dtype=np.int64)
    return np.asarray(pc.index_in(values, value_set=among).fill_null(-1).combine_chunks(), dtype=np.int64)


def _shown(exposures: pa.Table, offsets: np.ndarray) -> np.ndarray:
    """[C] int8: what the exposures say of each candidate, where the list or its value may be null."""
    out = np.full(offsets[-1], _UNKNOWN, dtype=np.int8)
    column = exposures["shown"].combine_chunks()
    if not len(column):
        return out
    present = np.repeat(np.asarray(column.is_valid()), np.diff(offsets))
    flat = column.flatten()
    out[present] = np.asarray(flat.cast(pa.int8()).fill_null(_UNKNOWN))
    return out

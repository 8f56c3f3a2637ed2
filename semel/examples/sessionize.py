"""Events -> requests: what a user did within one sitting becomes one request with several candidates.

Where no impressions were logged, a session stands in for one: a user of MovieLens rates a page of films within
seconds. The history of the request is what the user had done before the session's first event; events that share that
first timestamp belong to the session, never to the history (a pointer sees ``event_time < as_of``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from semel.batch import Jagged, Pointers, RequestRows, ids_array, offsets_of
from semel.examples.rows import column_to_numpy

GAP_US = 600_000_000
"""Ten minutes without an event end a session."""


@dataclass(frozen=True)
class Label:
    """How an event labels its item for ``task``: ``column >= at_least`` as 0/1, the column's value where ``at_least``
    is None, and 1 for every event where ``column`` is None. A null value is no label."""

    task: str
    column: str | None = None
    at_least: float | None = None


RATING_LABELS = (Label("like", "rating", 4.0), Label("rating", "rating"))


def sessions(
    events: pa.Table, gap_us: int = GAP_US, labels: tuple[Label, ...] = RATING_LABELS, *, version: int = 0,
    catalogue_version: int = 0, max_candidates: int | None = None,
) -> RequestRows:
    """Request rows of an events table (``user_id``, ``item_id``, ``event_time`` in microseconds, label columns).

    A session ends before an event that comes more than ``gap_us`` after the one before. Rows are ordered by user, then
    time; candidates by time (ties: as they lie in the table); an item seen again in a session stays at its first place
    with its last label. ``max_candidates`` cuts a longer session into requests of their own, each with the ``as_of`` of
    its own first event. ``request_id`` is ``USER-AS_OF`` (``-2``, ``-3`` ... where a cut falls between tied events).
    ``version`` and ``catalogue_version`` go into every pointer. Raises ValueError for a missing or null column.
    """
    needed = ["user_id", "item_id", "event_time", *(label.column for label in labels if label.column)]
    columns = {}
    for name in dict.fromkeys(needed):
        if name not in events.column_names:
            raise ValueError(f"events have no column {name!r}; they have {', '.join(events.column_names)}")
        columns[name] = column_to_numpy(events[name])
    users, codes = np.unique(ids_array(columns["user_id"], "user_id"), return_inverse=True)
    times = columns["event_time"]
    if times.dtype.kind not in "iu":
        raise ValueError(f"event_time must be integer microseconds without nulls, got {events['event_time'].type}")
    order = np.lexsort((times, codes))  # stable: ties keep the order of the table
    return session_rows(
        users, offsets_of(np.bincount(codes, minlength=len(users))), times[order].astype(np.int64),
        ids_array(columns["item_id"], "item_id")[order],
        {label.task: label_values(label, columns, len(times))[order] for label in labels},
        gap_us=gap_us, version=version, catalogue_version=catalogue_version, max_candidates=max_candidates,
    )


def session_rows(
    users: np.ndarray, offsets: np.ndarray, times: np.ndarray, items: np.ndarray, values: dict[str, np.ndarray], *,
    gap_us: int = GAP_US, version: int = 0, catalogue_version: int = 0, max_candidates: int | None = None,
) -> RequestRows:
    """``sessions`` over arrays already in history order: ``users`` [U], ``offsets`` [U + 1] into ``times``, ``items``
    and ``values[task]`` (float32, NaN: no label) of all events."""
    if gap_us < 0:
        raise ValueError(f"gap_us must not be negative, got {gap_us}")
    if max_candidates is not None and max_candidates < 1:
        raise ValueError(f"max_candidates must be at least 1, got {max_candidates}")
    user_of = np.repeat(np.arange(len(users)), np.diff(offsets))
    starts = np.ones(len(times), dtype=bool)
    starts[1:] = (user_of[1:] != user_of[:-1]) | (times[1:] - times[:-1] > gap_us)
    session = np.cumsum(starts) - 1
    first, last = _first_and_last(session, items)
    # From here on: one entry for each (session, item), at the place of its first event, with its last label.
    user_of, times, items, session = user_of[first], times[first], items[first], session[first]
    new = np.ones(len(times), dtype=bool)
    new[1:] = session[1:] != session[:-1]
    if max_candidates is not None:
        begin = np.flatnonzero(new)
        place = np.arange(len(times)) - np.repeat(begin, np.diff(np.append(begin, len(times))))
        new |= place % max_candidates == 0
    begin = np.flatnonzero(new)
    as_of, who = times[begin], users[user_of[begin]] if len(users) else users[:0]
    label = {task: np.asarray(value[last], dtype=np.float32) for task, value in values.items()}
    mask = {task: ~np.isnan(value) for task, value in label.items()}
    return RequestRows(
        request_id=_request_ids(user_of[begin], who, as_of),
        pointers=Pointers(who, as_of, np.full(len(begin), version, dtype=np.int64)),
        catalogue_version=np.full(len(begin), catalogue_version, dtype=np.int64),
        context={},
        candidates=Jagged(items, np.append(begin, len(times)).astype(np.int64)),
        label={task: np.where(mask[task], value, np.float32(0)) for task, value in label.items()},
        label_mask=mask,
    )


def label_values(label: Label, columns: dict[str, Any], length: int) -> np.ndarray:
    """[length] float32 of one label over event columns, NaN where there is none."""
    if label.column is None:
        return np.ones(length, dtype=np.float32)
    raw = np.asarray(columns[label.column])
    try:
        value = np.asarray([np.nan if v is None else v for v in raw] if raw.dtype == object else raw, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"label {label.task!r} needs numbers in column {label.column!r}, it holds strings") from None
    if label.at_least is not None:
        value = np.where(np.isnan(value), np.nan, value >= label.at_least)
    return value.astype(np.float32)


def _first_and_last(session: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each (session, item): the index of its first event, ascending, and beside it that of its last one."""
    if not len(items):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    unique, codes = np.unique(items, return_inverse=True)
    key = session.astype(np.int64) * len(unique) + codes
    order = np.argsort(key, kind="stable")
    edge = np.ones(len(key), dtype=bool)
    edge[1:] = key[order[1:]] != key[order[:-1]]
    begin = np.flatnonzero(edge)
    first, last = order[begin], order[np.append(begin[1:], len(key)) - 1]
    rank = np.argsort(first)
    return first[rank], last[rank]


def _request_ids(user_of: np.ndarray, who: np.ndarray, as_of: np.ndarray) -> np.ndarray:
    out = np.empty(len(who), dtype=object)
    out[:] = [f"{user}-{time}" for user, time in zip(who.tolist(), as_of.tolist(), strict=True)]
    again = np.zeros(len(who), dtype=bool)
    again[1:] = (user_of[1:] == user_of[:-1]) & (as_of[1:] == as_of[:-1])
    place = 1
    for row in np.flatnonzero(again):
        place = place + 1 if again[row - 1] else 2
        out[row] = f"{out[row]}-{place}"
    return out

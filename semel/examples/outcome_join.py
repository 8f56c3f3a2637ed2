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
_USED, _PENDING, _UNMATCHED_REQUEST, _UNMATCHED_ITEM, _OTHER_TASK, _LATE, _DUPLICATE, _UNSHOWN = range(_FATES := 8)


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
    Stages of a recommendation before its last (``part_of``) were shown to nobody: their rows have no labels.
    ``request``: the features to take out of the context. Raises ValueError for a negative window and unlike item ids.
    """
    if window_us < 0:
        raise ValueError(f"window_us must not be negative, got {window_us}")
    if SHOWN in [task.name for task in tasks]:
        raise ValueError(f"no task may be called {SHOWN!r}: outcomes of that name report what was shown")
    exposures, duplicate_exposures = _first_by_request(exposures)
    closed = column_to_numpy(exposures["served_at"]) <= now - window_us
    held_back, exposures = exposures.filter(pa.array(~closed)), exposures.filter(pa.array(closed))
    rows = exposure_rows(exposures, request)
    pairs = _Pairs(exposures)
    row, place = pairs.find(outcomes)
    task_names = [SHOWN, *(task.name for task in tasks)]
    task = _index_in(outcomes["task"], pa.array(task_names, pa.string()))
    received, amount = column_to_numpy(outcomes["received_at"]), column_to_numpy(outcomes["value"])
    deadline = np.append(column_to_numpy(exposures["served_at"]) + window_us, 0)  # row -1: none

    # The fate of each outcome: the first reason not to use it, from the outside in.
    fate = np.select(
        [_index_in(outcomes["request_id"], held_back["request_id"]) >= 0, row < 0, place < 0, task < 0,
         received > deadline[row]],
        [_PENDING, _UNMATCHED_REQUEST, _UNMATCHED_ITEM, _OTHER_TASK, _LATE], _USED)
    used = np.flatnonzero(fate == _USED)
    fate[used[_superseded(place[used] * len(task_names) + task[used], received[used])]] = _DUPLICATE

    shown = pairs.shown(exposures)
    reports = np.flatnonzero((fate == _USED) & (task == 0))
    shown[place[reports]] = np.where(amount[reports] > 0, _YES, _NO)
    labels = np.flatnonzero((fate == _USED) & (task > 0))
    fate[labels[shown[place[labels]] == _NO]] = _UNSHOWN
    labels = labels[fate[labels] == _USED]
    shown[place[labels]] = _YES

    label, mask = {}, {}
    for number, each in enumerate(tasks, start=1):
        known = (shown == _YES) & (each.unobserved is not None)
        value = np.where(known, np.float32(each.unobserved or 0.0), np.float32(0.0))
        own = labels[task[labels] == number]
        value[place[own]], known[place[own]] = amount[own], True
        label[each.name], mask[each.name] = value[pairs.of_candidate], known[pairs.of_candidate]
    count = np.bincount(fate, minlength=_FATES).tolist()
    return JoinReport(
        rows=dataclasses.replace(rows, label=label, label_mask=mask), watermark=now - window_us,
        held_back=len(held_back), duplicate_exposures=duplicate_exposures, used=count[_USED], pending=count[_PENDING],
        late=count[_LATE], duplicates=count[_DUPLICATE], unshown=count[_UNSHOWN], other_tasks=count[_OTHER_TASK],
        unmatched_requests=count[_UNMATCHED_REQUEST], unmatched_items=count[_UNMATCHED_ITEM],
    )


class _Pairs:
    """The (request, item) pairs of exposures, each once: an item listed twice in a request shares one.

    ``of_candidate`` [C]: the pair of each candidate.
    """

    def __init__(self, exposures: pa.Table) -> None:
        values, self._offsets = list_values(exposures["candidates"], "candidates")
        encoded = values.dictionary_encode()
        self._requests, self._items = exposures["request_id"], encoded.dictionary
        request = np.repeat(np.arange(len(exposures)), np.diff(self._offsets))
        self._keys, self.of_candidate = np.unique(
            request * len(self._items) + np.asarray(encoded.indices, np.int64), return_inverse=True)

    def find(self, outcomes: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """The request [O] and the pair [O] of each outcome, -1 where there is none."""
        if len(self._items) and len(outcomes) and self._items.type != outcomes["item_id"].type:
            raise ValueError(f"candidates of exposures are {self._items.type}, item_id of outcomes is "
                             f"{outcomes['item_id'].type}")
        row = _index_in(outcomes["request_id"], self._requests)
        if not len(self._keys):
            return row, np.full(len(outcomes), -1)
        item = _index_in(outcomes["item_id"], self._items)
        wanted = row * len(self._items) + item
        place = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return row, np.where((row >= 0) & (item >= 0) & (self._keys[place] == wanted), place, -1)

    def shown(self, exposures: pa.Table) -> np.ndarray:
        """[pairs] int8: what the exposures say of each, where the list or its value may be null."""
        by_candidate = np.full(self._offsets[-1], _UNKNOWN, dtype=np.int8)
        column = exposures["shown"].combine_chunks()
        if len(column):
            told = np.repeat(np.asarray(column.is_valid()), np.diff(self._offsets))
            by_candidate[told] = np.asarray(column.flatten().cast(pa.int8()).fill_null(_UNKNOWN))
        out = np.full(len(self._keys), _UNKNOWN, dtype=np.int8)
        np.maximum.at(out, self.of_candidate, by_candidate)
        return out


def _superseded(slot: np.ndarray, received: np.ndarray) -> np.ndarray:
    """[n] bool: False for the one of each slot that was received last (of equal times, the one logged last)."""
    order = np.lexsort((received, slot))  # stable: equal times stay in the order of the log
    out = np.zeros(len(slot), dtype=bool)
    out[order[:-1]] = slot[order[1:]] == slot[order[:-1]]
    return out


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

"""What a log of exposures holds of some models, in parts that fit into memory: a log outgrows it in an hour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.examples.logs import ExposureLog

CANDIDATES_A_PART = 1 << 18
"""Some 40 MB with all that is made of them to score them again."""
RECORDS_JOINED = 256
"""A record holds a few exposures, and what lies around its columns takes more than they do."""


@dataclass(frozen=True)
class Survey:
    """Of a log: the ``places`` [E] (rows from 0 on, in order) of the exposures that are wanted, each request once, and
    for each the place of the last one of its batch (``closes`` [E]). ``versions``: of models, sorted; ``served_at``:
    the latest (us). ``total``: exposures of all models, ``others``: of those not wanted, with up to three
    ``other_versions``."""

    places: np.ndarray
    closes: np.ndarray
    versions: list[str]
    served_at: int
    total: int
    others: int
    other_versions: list[str]


def survey(log: ExposureLog, versions: set[str], limit: int | None = None) -> Survey:
    """Look through ``log`` for what models of ``versions`` served; ``limit``: the last so many requests."""
    wanted = pa.array(sorted(versions), pa.string())
    seen: set[str] = set()
    batches: dict[Any, int] = {}
    places, batch_of, others, served_at, total, number_others = [], [], set(), 0, 0, 0
    version_of: list[str] = []
    last: list[int] = []
    names: dict[str, str] = {}  # one text for all exposures of a version
    for table in log.tables():
        own = np.asarray(pc.is_in(table["model_version"], value_set=wanted))
        version = table["model_version"].to_pylist()
        served = table["served_at"].to_numpy()
        for row, (request, batch) in enumerate(zip(table["request_id"].to_pylist(), table["batch_id"].to_pylist(),
                                                   strict=True)):
            if not own[row]:
                number_others += 1
                others.add(version[row])
                continue
            if request in seen:
                continue
            seen.add(request)
            place = total + row
            number = batches.setdefault(place if batch is None else batch, len(last))
            if number == len(last):
                last.append(place)
            last[number] = place
            places.append(place)
            batch_of.append(number)
            version_of.append(names.setdefault(version[row], version[row]))
            served_at = max(served_at, int(served[row]))
        total += len(table)
    keep = slice(None if limit is None else max(0, len(places) - limit), None)
    return Survey(np.array(places[keep], np.int64), np.array(last, np.int64)[np.array(batch_of[keep], np.int64)],
                  sorted(set(version_of[keep])), served_at, total, number_others, sorted(others)[:3])


def parts(log: ExposureLog, found: Survey, candidates: int = CANDIDATES_A_PART
          ) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """The wanted exposures, some ``candidates`` at a time, all of a batch in one part, with the places [rows] of each.
    Within a part they are in the order of the log."""
    waiting: list[tuple[pa.Table, np.ndarray]] = []  # exposures, and where they are in ``found``
    count = start = joined = 0
    for table in log.tables():
        low, high = np.searchsorted(found.places, [start, start + len(table)])
        start += len(table)
        if low == high:
            continue
        own = table.take(found.places[low:high] - (start - len(table)))
        waiting.append((own, np.arange(low, high)))
        count += _candidates(own)
        if len(waiting) - joined == RECORDS_JOINED:
            waiting[joined:] = [_together(waiting[joined:])]
            joined += 1
        if count < candidates:
            continue
        whole, rows = _together(waiting)
        done = found.closes[rows] < start
        if done.any():
            yield whole.filter(pa.array(done)), found.places[rows[done]]
        left = whole.filter(pa.array(~done))
        waiting, count, joined = [(left, rows[~done])], _candidates(left), 1
    if waiting:
        whole, rows = _together(waiting)
        if len(whole):
            yield whole, found.places[rows]


def _candidates(exposures: pa.Table) -> int:
    return int(pc.sum(pc.list_value_length(exposures["candidates"])).as_py() or 0)


def _together(waiting: list[tuple[pa.Table, np.ndarray]]) -> tuple[pa.Table, np.ndarray]:
    tables, rows = zip(*waiting, strict=True)
    return pa.concat_tables(tables).combine_chunks(), np.concatenate(rows)

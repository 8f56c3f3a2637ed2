"""Events out of fat rows: the same event is listed in many rows, and is one event in the store.

What one row lists at one instant is a *tie* (mostly of one event): its order is known. Ties that are equal in two rows
are one, so all but a few instants are settled by a comparison of checksums; where rows list an instant differently (one
was cut, or was written before an event arrived) their ties are merged. Users are spread over buckets on disk, so that
memory holds a batch of rows and one bucket.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import offsets_of
from semel.datasets.dataset import Progress
from semel.datasets.filling import Origin, existing_schema, fill_store
from semel.datasets.ids import encoded
from semel.datasets.ingestion import IngestReport
from semel.datasets.layouts import OWN
from semel.examples.checksum import history_checksum
from semel.examples.fat_rows import FatRowColumns, FatRows, FatTable, open_fat_rows, to_histories
from semel.features import stable_id
from semel.table_files import in_pieces

PIECE_ROWS = 100_000  # this and the next two decide what a token names
BUCKET_EVENTS = 8_000_000
MOST_BUCKETS = 256
SHOWN = 5


@dataclass
class RecoveryReport:
    """``rows`` and the events they ``listed``, of which ``events`` are distinct. ``future``: listed at or after their
    row's request; ``unsorted``: rows out of the order of time. Conflicts, each settled by the row of the latest
    request: ``order``: instants that rows list in orders that exclude each other; ``values``: events of one user, item
    and instant that rows give different values. ``shown``: some of them, for people."""

    rows: int = 0
    listed: int = 0
    events: int = 0
    future: int = 0
    unsorted: int = 0
    order: int = 0
    values: int = 0
    shown: list[str] = field(default_factory=list)

    def conflict(self, kind: str, user: Any, time: int) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.shown) < SHOWN:
            what = "order" if kind == "order" else "values of one item"
            self.shown.append(f"rows disagree on the {what} at {time} of user {user!r}; the latest request's is kept")


def ingest_fat_rows(paths: Sequence[Path], store: Path, columns: FatRowColumns | None = None,
                    progress: Progress | None = None, shards: int = 16) -> tuple[IngestReport, RecoveryReport]:
    """Makes the store of the events in fat rows, as ``semel.datasets.ingest_files`` makes one of events; repeated after
    an interruption it goes on. Raises what ``open_fat_rows`` raises, before anything is made, and FileExistsError where
    ``store`` holds other files' events: all fat rows are recovered together, since each may list what others cut."""
    table = open_fat_rows(paths, columns or FatRowColumns(), progress)
    store = Path(store)
    existing_schema(store)
    report = RecoveryReport()
    names = table.files[0].columns
    spans = [file.events for file in table.files if file.events.rows]
    origin = Origin(
        Path(paths[0]).stem, ", ".join(map(str, paths)), OWN, {f.events.path: f.events.digest for f in table.files},
        f"fat rows: {names}", extends=False, first=min(f.first for f in spans), last=max(f.last for f in spans),
        notes=list(table.notes))
    filled = fill_store(store, table.schema, _noted(recover(table, store.parent, report, progress), report, origin),
                        origin, progress, shards=shards)
    return filled, report


def _noted(pieces: Iterator[tuple[str, pa.Table]], report: RecoveryReport,
           origin: Origin) -> Iterator[tuple[str, pa.Table]]:
    """The pieces; at their end what was found joins the notes."""
    yield from pieces
    found = {"events are listed at or after their row's request": report.future,
             "rows are not in the order of time, and were sorted": report.unsorted,
             "instants are listed in orders that contradict each other; the latest request's is kept": report.order,
             "times rows give other values to an event; the latest request's are kept": report.values}
    origin.notes.extend([f"{count:,} {what}" for what, count in found.items() if count] + report.shown)


def recover(table: FatTable, scratch: Path, report: RecoveryReport,
            progress: Progress | None = None) -> Iterator[tuple[str, pa.Table]]:
    """(token, events) pieces for ``HistoryStore.append``, each user's events in order of time and, within an instant,
    in the order in which the rows list them. The same files give the same pieces with the same tokens.

    An event counts as often as the row that lists it most often lists it. ``scratch``: a folder for temporary files.
    ``report`` is filled in on the way.
    """
    buckets = int(np.clip(table.listed // BUCKET_EVENTS, 1, MOST_BUCKETS))
    whole = stable_id(np.array(["".join(file.events.digest for file in table.files)], object))[0]
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".recover.") as folder:
        spills = _spill(table, Path(folder), buckets, report, progress)
        for number, spill in enumerate(spills):
            first = 0
            for piece in in_pieces([_settle(_read(spill), table, report)], PIECE_ROWS):
                report.events += piece.num_rows
                yield f"fat-rows:{whole:016x}:{number}/{buckets}:{first}-{first + piece.num_rows}", piece
                first += piece.num_rows
            spill.unlink(missing_ok=True)


def _spill(table: FatTable, folder: Path, buckets: int, report: RecoveryReport,
           progress: Progress | None) -> list[Path]:
    """The distinct ties of every batch of rows, by bucket of the user."""
    paths = [folder / f"{number:03d}.arrow" for number in range(buckets)]
    writers: list[Any] = [None] * buckets
    try:
        for file in table.files:
            report.unsorted += file.unsorted
            for rows in table.batches(file):
                report.rows += len(rows)
                report.listed += rows.events.num_rows
                ties = _ties(rows, table, report)
                place = _bucket(ties["user_id"], buckets)
                for number in np.unique(place):
                    part = ties.filter(pa.array(place == number))
                    if writers[number] is None:
                        writers[number] = pa.ipc.new_stream(str(paths[number]), part.schema)
                    writers[number].write_table(part)
                if progress:
                    progress("read fat rows", report.rows, table.rows)
    finally:
        for writer in writers:
            if writer is not None:
                writer.close()
    return [path for path, writer in zip(paths, writers, strict=True) if writer is not None]


def _ties(rows: FatRows, table: FatTable, report: RecoveryReport) -> pa.Table:
    """The events of a batch, a tie once: user_id, the events' columns, ``tie`` (checksum), ``request`` (the latest
    that lists it), ``place`` (of the event in its tie)."""
    events, lengths = rows.events, np.diff(rows.offsets)
    row = np.repeat(np.arange(len(rows)), lengths)
    times = events["event_time"].to_numpy()
    report.future += int((times >= rows.request_time[row]).sum())
    if ((np.diff(times) < 0) & (np.diff(row) == 0)).any():
        order = np.lexsort((times, row))  # stable: what ties keeps its order
        events, times, row = events.take(order), times[order], row[order]
    start = np.ones(len(times), bool)
    start[1:] = (np.diff(row) != 0) | (np.diff(times) != 0)
    starts = np.flatnonzero(start)
    offsets = np.append(starts, len(times))
    names = list(table.schema.columns)
    checksum = history_checksum(to_histories(events, offsets, table.schema, names))
    codes = rows.user_id
    if codes.dtype == object:
        codes = np.unique(codes.astype(str), return_inverse=True)[1]
    request = rows.request_time[row[starts]]
    order = np.lexsort((-request, checksum, times[starts], codes[row[starts]]))
    chosen = order[_first_of(codes[row[starts]][order], times[starts][order], checksum[order])]
    chosen.sort()
    return _tie_events(rows.user_id[row[starts]], events, offsets, checksum, request, chosen, table)


def _tie_events(users: np.ndarray, events: pa.Table, offsets: np.ndarray, checksum: np.ndarray, request: np.ndarray,
                 chosen: np.ndarray, table: FatTable) -> pa.Table:
    lengths = offsets[chosen + 1] - offsets[chosen]
    place = np.arange(lengths.sum()) - np.repeat(offsets_of(lengths)[:-1], lengths)
    taken = events.take(pa.array(np.repeat(offsets[chosen], lengths) + place))
    user = pa.array(users[chosen], table.schema.user_id).take(pa.array(np.repeat(np.arange(len(chosen)), lengths)))
    out = {"user_id": user, **dict(zip(taken.column_names, taken.columns, strict=True))}
    return pa.table({**out, "tie": np.repeat(checksum[chosen], lengths),
                     "request": np.repeat(request[chosen], lengths), "place": place})


def _first_of(*keys: np.ndarray) -> np.ndarray:
    """Where, in sorted keys, one differs from the row before."""
    first = np.ones(len(keys[0]), bool)
    if len(first):
        first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(first)


def _bucket(users: pa.ChunkedArray, buckets: int) -> np.ndarray:
    codes = encoded(users)
    ids = stable_id(np.array(codes.dictionary.to_pylist(), object if pa.types.is_string(users.type) else np.int64))
    mixed = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    return (mixed % np.uint64(buckets)).astype(np.int64)[codes.indices.to_numpy()]


def _read(path: Path) -> pa.Table:
    with pa.ipc.open_stream(str(path)) as reader:
        return reader.read_all()


def _settle(spilled: pa.Table, table: FatTable, report: RecoveryReport) -> pa.Table:
    """A bucket's ties -> its events, each once, by user and time."""
    users = encoded(spilled["user_id"])
    rank = np.empty(len(users.dictionary), np.int64)
    rank[pc.sort_indices(users.dictionary).to_numpy()] = np.arange(len(rank))
    starts = np.flatnonzero(spilled["place"].to_numpy() == 0)
    offsets = np.append(starts, spilled.num_rows)
    user = rank[users.indices.to_numpy()[starts]]
    time, tie = spilled["event_time"].to_numpy()[starts], spilled["tie"].to_numpy()[starts]
    request = spilled["request"].to_numpy()[starts]
    order = np.lexsort((-request, tie, time, user))
    order = order[_first_of(user[order], time[order], tie[order])]
    instants = np.append(_first_of(user[order], time[order]), len(order))
    several = np.flatnonzero(np.diff(instants) > 1)
    pick: list[np.ndarray] = []
    done = 0
    if len(several):
        names = list(table.schema.columns)
        every = np.arange(spilled.num_rows + 1)
        whole = history_checksum(to_histories(spilled, every, table.schema, names))
        item = history_checksum(to_histories(spilled, every, table.schema, ["item_id"]))
    for at in several:
        low, high = instants[at], instants[at + 1]
        pick.append(_rows_of(order[done:low], offsets))
        latest_first = order[low:high][np.argsort(-request[order[low:high]], kind="stable")]
        ties = [np.arange(offsets[t], offsets[t + 1]) for t in latest_first]
        merged, conflicts = merge(ties, whole, item)
        for kind in conflicts:
            report.conflict(kind, spilled["user_id"][int(offsets[latest_first[0]])].as_py(), int(time[latest_first[0]]))
        pick.append(np.array(merged, np.int64))
        done = high
    pick.append(_rows_of(order[done:], offsets))
    return spilled.select(table.schema.arrow.names).take(pa.array(np.concatenate(pick)))


def _rows_of(ties: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    lengths = offsets[ties + 1] - offsets[ties]
    return np.repeat(offsets[ties], lengths) + np.arange(lengths.sum()) - np.repeat(
        offsets_of(lengths)[:-1], lengths)


def merge(ties: Sequence[np.ndarray], event: np.ndarray, item: np.ndarray) -> tuple[list[int], list[str]]:
    """Lists of rows of one user and instant, that of the latest request first -> the rows that stand for their union,
    in an order that agrees with each list where there is one, and the conflicts (``values``, ``order``).

    ``event``, ``item``: [rows] what makes two rows the same event, the same item. Equal events are told apart by their
    number from the end, since lists are cut at their beginning.
    """
    conflicts: list[str] = []
    lists = [_numbered([(int(event[row]), int(row)) for row in tie]) for tie in ties]
    of_item: dict[int, set[int]] = {}
    for tie in ties:
        for row in tie:
            of_item.setdefault(int(item[row]), set()).add(int(event[row]))
    gone: set[int] = set()
    for which, events in of_item.items():
        listed = [{int(event[row]) for row in tie if int(item[row]) == which} for tie in ties]
        if len(events) > 1 and events not in listed:  # no row says that they are different events
            conflicts.append("values")
            gone |= events - next(one for one in listed if one)
    lists = [[node for node in nodes if node[0][0] not in gone] for nodes in lists]
    rows: dict[tuple[int, int], int] = {}
    after: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for nodes in lists:
        for key, row in nodes:
            rows.setdefault(key, row)
            after.setdefault(key, set())
        for (first, _), (second, _) in pairwise(nodes):
            after[first].add(second)
    waiting = Counter(key for followers in after.values() for key in followers)
    out: list[int] = []
    left = list(rows)  # the latest request's first
    while left:
        free = next((key for key in left if not waiting[key]), None)
        if free is None:  # the lists contradict each other
            conflicts.append("order")
        key = left[0] if free is None else free
        left.remove(key)
        out.append(rows[key])
        for other in after[key]:
            waiting[other] = max(0, waiting[other] - 1)
    return out, list(dict.fromkeys(conflicts))


def _numbered(nodes: list[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    seen: Counter[int] = Counter()
    out = []
    for event, row in reversed(nodes):
        out.append(((event, seen[event]), row))
        seen[event] += 1
    return out[::-1]

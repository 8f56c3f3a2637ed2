"""Fat rows against the store: each row's history is rebuilt from the store and compared, and what differs is sorted by
cause, so that a team can leave the copies on evidence."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from semel.batch import JaggedTable, Pointers
from semel.datasets.dataset import Progress
from semel.datasets.event_files import require
from semel.examples.checksum import history_checksum
from semel.examples.fat_rows import BATCH_EVENTS, FatFile, FatRows, FatTable, to_histories
from semel.history import EventSchema, HistoryStore, Projection, Status

CAUSES = ("other", "schema", "deleted", "late", "tie", "truncation")
"""Gravest first: a row with several causes counts for the first of them."""
EXPLAINED = ("schema", "deleted", "late", "tie", "truncation")
SHOWN = 3


@dataclass
class ShadowReport:
    """``rows`` compared, of which ``equal``; ``causes``: cause -> {``rows``: whose gravest cause it is, ``events``: in
    which they differ}; ``columns`` compared; ``unmatched``: columns of the fat rows that the store cannot give, and
    why; ``last``: at how many events histories were cut; ``examples``: a few differences of each cause;
    ``explained``: the causes that are; ``passed``: whether all that differs has such a cause and nothing is unmatched.
    """

    last: int
    version: int
    columns: list[str]
    explained: list[str]
    unmatched: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    equal: int = 0
    causes: dict[str, dict[str, int]] = field(default_factory=lambda: {
        cause: {"rows": 0, "events": 0} for cause in CAUSES})
    examples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.unmatched and all(
            not count["rows"] or cause in self.explained for cause, count in self.causes.items())


@dataclass(frozen=True)
class Difference:
    """A cause, in how many events, and one of them in words."""

    cause: str
    events: int
    what: str


def compare_fat_rows(table: FatTable, store: HistoryStore, last: int | None = None,
                     explained: Sequence[str] = EXPLAINED, progress: Progress | None = None) -> ShadowReport:
    """Rebuilds the history of every fat row through the pointer (its user, its request time, its version or, where rows
    have none, the store's current one) and compares it, value by value, with the row's lists.

    ``last``: at how many events the rows were cut (default: the longest of them). Causes, of a row that differs:

    - ``late``: the store has an event that the row could list and does not: it arrived after the row was written. Where
      rows have versions that would be ``other``; there late is an event that the row lists before the store knew it.
    - ``tie``: the same events in another order at one instant, a cut inside an instant, or an event at the very instant
      of the request.
    - ``deleted``: the row lists what the store withholds, and the status of the read says so.
    - ``schema``: an event's column is null on one side only.
    - ``truncation``: the row is cut shorter than ``last``, and agrees as far as it goes.
    - ``other``: anything else: an event that the store does not have or has twice, another value, lists out of the
      order of time.

    Raises ValueError for an unknown cause, ``last`` below 1 or users of another kind than the store's,
    VersionNotVisible for a row whose version is newer than the store.
    """
    unknown = sorted(set(explained) - set(CAUSES))
    if unknown:
        raise ValueError(f"cause {unknown[0]!r} is none of {', '.join(CAUSES)}")
    last = table.longest if last is None else last
    names, unmatched = _columns(table, store.schema)
    if "item_id" in unmatched:
        raise ValueError(f"item_id: {unmatched['item_id']}; these rows are not of this store")
    report = ShadowReport(last, store.version, names, list(explained), unmatched)
    projection = Projection(("event_time", *names), last=last)
    for file in table.files:
        for rows in table.batches(file, _cast_schema(table, store.schema, names)):
            version = rows.version if rows.version is not None else np.array(report.version)
            pointers = Pointers(rows.user_id, rows.request_time, version)
            fat = _cut(to_histories(rows.events, rows.offsets, store.schema, ["event_time", *names]), last)
            rebuilt = store.read(pointers, projection)
            equal = history_checksum(fat) == history_checksum(rebuilt)
            report.rows += len(rows)
            report.equal += int(equal.sum())
            if not equal.all():
                _explain(report, fat, rows, np.flatnonzero(~equal), pointers, store, file)
            if progress:
                progress("compare rows", report.rows, table.rows)
    return report


def _columns(table: FatTable, schema: EventSchema) -> tuple[list[str], dict[str, str]]:
    """Columns that both have with types that compare, and why the others do not."""
    names, unmatched = [], {}
    for name, kind in table.schema.columns.items():
        if name not in schema.columns:
            unmatched[name] = "the store has no such column"
            continue
        try:
            for file in table.files:
                if file.events.rows:
                    require(file.events, name, schema.columns[name])
            names.append(name)
        except ValueError:
            unmatched[name] = f"{kind} in the fat rows, {schema.columns[name]} in the store"
    return names, unmatched


def _cast_schema(table: FatTable, schema: EventSchema, names: Sequence[str]) -> EventSchema:
    return EventSchema({name: schema.columns[name] for name in names}, user_id=table.schema.user_id)


def _cut(histories: JaggedTable, last: int) -> JaggedTable:
    """The last ``last`` events of each."""
    lengths = histories.lengths
    if not (lengths > last).any():
        return histories
    at = np.arange(len(next(iter(histories.columns.values()))))
    keep = at >= np.repeat(histories.offsets[1:] - last, lengths)
    offsets = np.concatenate(([0], np.cumsum(np.minimum(lengths, last)))).astype(np.int64)
    return JaggedTable({name: column[keep] for name, column in histories.columns.items()}, offsets,
                       None if histories.validity is None else {n: v[keep] for n, v in histories.validity.items()},
                       histories.dictionaries)


class Side:
    """Histories taken apart for comparison: by event a checksum of all its values, and one of its item and time."""

    def __init__(self, histories: JaggedTable) -> None:
        self.histories = histories
        single = np.arange(int(histories.offsets[-1]) + 1)
        self.whole = history_checksum(dataclasses.replace(histories, offsets=single, status=None))
        keys = {name: histories.columns[name] for name in ("event_time", "item_id")}
        self.item = history_checksum(JaggedTable(keys, single, histories.validity, histories.dictionaries))

    def __getitem__(self, row: int) -> Events:
        low, high = int(self.histories.offsets[row]), int(self.histories.offsets[row + 1])
        return Events(self, low, self.histories.columns["event_time"][low:high], self.whole[low:high].tolist(),
                      self.item[low:high].tolist())


@dataclass(frozen=True)
class Events:
    """One history of a side: by event its time and its two checksums."""

    side: Side
    first: int
    time: np.ndarray
    whole: list[int]
    item: list[int]

    def __len__(self) -> int:
        return len(self.whole)

    def value(self, name: str, at: int) -> Any:
        """A column's value of an event, None where null."""
        table, row = self.side.histories, self.first + at
        valid = (table.validity or {}).get(name)
        if valid is not None and not valid[row]:
            return None
        value = table.columns[name][row]
        strings = (table.dictionaries or {}).get(name)
        return strings[value] if strings is not None else value.tolist()


def _explain(report: ShadowReport, fat: JaggedTable, rows: FatRows, chosen: np.ndarray, pointers: Pointers,
             store: HistoryStore, file: FatFile) -> None:
    """Counts why the ``chosen`` rows differ. Whole histories are read, of about ``BATCH_EVENTS`` events at a time."""
    projection = Projection(("event_time", *report.columns))
    lengths, _ = store.lengths(pointers[chosen], projection)
    edges = np.flatnonzero(np.diff((np.cumsum(lengths) - lengths) // BATCH_EVENTS)) + 1
    ours = Side(fat)
    for part in np.split(chosen, edges):
        seen = store.read(pointers[part], projection)
        theirs = Side(seen)
        assert seen.status is not None
        for at, row in enumerate(part.tolist()):
            one = pointers[row]
            now = partial(_events, store, Pointers(one.user_id, one.as_of + 1, np.array(report.version)), projection)
            found = differences(ours[row], theirs[at], now, int(one.as_of[0]), Status(int(seen.status[at])),
                                report.last, report.columns, rows.version is not None)
            _count(report, found, file, rows, row)


def _events(store: HistoryStore, pointer: Pointers, projection: Projection) -> Events:
    return Side(store.read(pointer, projection))[0]


def differences(fat: Events, seen: Events, later: Callable[[], Events], as_of: int, status: Status, last: int,
                names: Sequence[str], versioned: bool = False) -> list[Difference]:
    """The causes for which a row's events differ from the store's. ``seen``: all events that the row's pointer sees;
    ``later()``: those up to and including the instant of the request that are known now. ``versioned``: whether the row
    says which version it saw."""
    if (np.diff(fat.time) < 0).any():
        return [Difference("other", len(fat), "the row's lists are not in the order of time")]
    found: list[Difference] = []
    first = int(fat.time[0]) if len(fat) else -1
    older = int(np.searchsorted(seen.time, first)) if len(fat) else 0
    here = int(np.searchsorted(seen.time, first, side="right")) if len(fat) else 0
    own = fat.whole[: int(np.searchsorted(fat.time, first, side="right"))] if len(fat) else []
    cut = 0  # events of the first instant that the row was cut off from
    if own and seen.whole[here - len(own) : here] == own and here - len(own) >= older:
        cut = here - len(own) - older
    if older + cut and len(fat) < last:
        found.append(Difference("truncation", older + cut, f"the row is cut at {len(fat)} events, {older + cut} older "
                                                           "ones are in the store"))
    start = older + cut
    missing, extra = _unmatched(fat.whole, seen.whole[start:])
    extra = [start + at for at in extra]
    found += _changed_values(fat, seen, missing, extra, names)
    known_later = Counter(later().whole if missing else ())
    listed = Counter(fat.whole)
    by_cause: dict[str, list[str]] = {}
    for at in missing:
        time, what = int(fat.time[at]), f"the row lists item {fat.value('item_id', at)!r} at {int(fat.time[at])}"
        if status in (Status.SCRUBBED, Status.EXPIRED):
            by_cause.setdefault("deleted", []).append(f"{what}, the store withholds it ({status.name})")
        elif time == as_of and known_later[fat.whole[at]]:
            by_cause.setdefault("tie", []).append(f"{what}, the instant of the request; a pointer sees what was before")
        elif time < as_of and known_later[fat.whole[at]]:
            by_cause.setdefault("late", []).append(f"{what}, the store knew of it after the row's version")
        elif time > as_of:
            by_cause.setdefault("other", []).append(f"{what}, which is after the request at {as_of}")
        else:
            by_cause.setdefault("other", []).append(f"{what}, which the store does not have")
    for at in extra:
        what = f"the store has item {seen.value('item_id', at)!r} at {int(seen.time[at])}"
        if int(seen.time[at]) == first and (older or len(fat) >= last):
            by_cause.setdefault("tie", []).append(f"the row is cut inside the instant {first}, in another order")
        elif versioned:
            by_cause.setdefault("other", []).append(f"{what}, known at the row's version, and the row does not list it")
        elif listed[seen.whole[at]]:
            by_cause.setdefault("other", []).append(f"{what} more often than the row lists it")
        else:
            by_cause.setdefault("late", []).append(f"{what}, which the row does not list")
    found += [Difference(cause, len(texts), texts[0]) for cause, texts in by_cause.items()]
    if not missing and not extra and not any(one.cause in ("schema", "other") for one in found):
        rest = seen.whole[start:]
        moved = [at for at, (a, b) in enumerate(zip(fat.whole, rest, strict=True)) if a != b]
        if moved:
            found.append(Difference("tie", len(moved), f"the events at {int(fat.time[moved[0]])} are in another order"))
    return found or [Difference("other", 0, "the histories differ in length only")]


def _unmatched(a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
    """Places in ``a`` of what ``b`` lacks, and the other way round; both count repeats, older ones as matched."""
    in_a, in_b = Counter(a), Counter(b)
    return _beyond(a, in_b), _beyond(b, in_a)


def _beyond(values: list[int], other: Counter[int]) -> list[int]:
    left = Counter(other)
    out = []
    for at, value in enumerate(values):
        if left[value]:
            left[value] -= 1
        else:
            out.append(at)
    return out


def _changed_values(fat: Events, seen: Events, missing: list[int], extra: list[int],
                    names: Sequence[str]) -> list[Difference]:
    """Events that both have with other values; they leave ``missing`` and ``extra``."""
    by_item: dict[int, list[int]] = {}
    for at in extra:
        by_item.setdefault(seen.item[at], []).append(at)
    counts: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for at in list(missing):
        pairs = by_item.get(fat.item[at])
        if not pairs:
            continue
        other = pairs.pop(0)
        missing.remove(at)
        extra.remove(other)
        values = ((name, fat.value(name, at), seen.value(name, other)) for name in names)
        changed = [(name, a, b) for name, a, b in values if a != b]
        cause = "schema" if changed and all((a is None) != (b is None) for _, a, b in changed) else "other"
        counts[cause] += 1
        if changed and cause not in texts:
            name, a, b = changed[0]
            texts[cause] = (f"{name} of item {fat.value('item_id', at)!r} at {int(fat.time[at])} is {a!r} in the "
                            f"row, {b!r} in the store")
    return [Difference(cause, count, texts.get(cause, "values differ")) for cause, count in counts.items()]


def _count(report: ShadowReport, found: list[Difference], file: FatFile, rows: FatRows, row: int) -> None:
    gravest = min((one.cause for one in found), key=CAUSES.index)
    report.causes[gravest]["rows"] += 1
    for one in found:
        report.causes[one.cause]["events"] += one.events
    if report.causes[gravest]["rows"] <= SHOWN:
        what = next(one.what for one in found if one.cause == gravest)
        user = rows.user_id[row]
        report.examples.append({"cause": gravest, "file": str(file.events.path), "row": rows.first + row + 1,
                                "user_id": user.item() if isinstance(user, np.generic) else user,
                                "request_time": int(rows.request_time[row]), "what": what})



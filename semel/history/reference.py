"""The same contract, written as it reads: a list of events, filtered and sorted. What ``HistoryStore`` is tested
against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semel.history.schema import Projection, Status


@dataclass
class Event:
    """One event and its two clocks; ``position``: its row in the append. ``deleted``: the version that took it away."""

    user_id: Any
    event_time: int
    version: int
    position: int
    values: dict[str, Any]
    deleted: int | None = None
    expired: bool = False

    @property
    def gone(self) -> bool:
        return self.deleted is not None or self.expired


@dataclass
class Mark:
    """What is remembered of a user's events that are gone: the lowest version and time of them, and the version that
    took them away (None: retention)."""

    user_id: Any
    first: int
    time: int
    until: int | None

    def seen(self, version: int) -> bool:
        return self.first <= version and (self.until is None or version < self.until)


@dataclass
class ReferenceStore:
    """``group``: the group column's name. Values are Python objects, None where null. ``since``: of columns that were
    added, the first version whose pointers see them."""

    group: str | None = None
    events: list[Event] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    version: int = 0
    expired_before: int = 0

    @property
    def alive(self) -> list[Event]:
        return [event for event in self.events if not event.gone]

    def append(self, rows: list[dict[str, Any]], token: str | None = None, key: str = "user_id") -> int:
        if token is not None and token in self.tokens:
            return self.tokens[token]
        if not rows and token is None:
            return self.version
        self.version += 1
        if token is not None:
            self.tokens[token] = self.version
        for position, row in enumerate(rows):
            values = {name: value for name, value in row.items() if name != key}
            self.events.append(Event(row[key], row["event_time"], self.version, position, values))
        return self.version

    def delete(self, users: list[Any]) -> int:
        """All events of these users."""
        taken = {user: [e for e in self.alive if e.user_id == user] for user in users}
        expired = [mark for mark in self.marks if mark.until is None and mark.user_id in users]
        self.marks = [mark for mark in self.marks if mark not in expired]
        return self._take(taken, expired)

    def delete_events(self, named: list[dict[str, Any]], key: str = "user_id") -> int:
        """The events that agree with one of ``named`` in all that it says."""
        taken: dict[Any, list[Event]] = {}
        for event in self.alive:
            if any(event.user_id == one[key] and all(event.values[name] == value for name, value in one.items()
                                                      if name != key) for one in named):
                taken.setdefault(event.user_id, []).append(event)
        return self._take(taken, [])

    def _take(self, taken: dict[Any, list[Event]], expired: list[Mark]) -> int:
        marks = []
        for user, events in taken.items():
            mine = [mark for mark in expired if mark.user_id == user]
            if events or mine:
                marks.append(Mark(user, min([e.version for e in events] + [m.first for m in mine]),
                                  min([e.event_time for e in events] + [m.time for m in mine]), self.version + 1))
        if marks:
            self.version += 1
            self.marks += marks
            for event in (event for events in taken.values() for event in events):
                event.deleted = self.version
        return self.version

    def expire(self, before: int) -> None:
        """Retention: events of an earlier time go."""
        for event in self.alive:
            if event.event_time < before:
                event.expired = True
                self.expired_before = max(self.expired_before, before)
                mark = next((m for m in self.marks if m.until is None and m.user_id == event.user_id), None)
                if mark is None:
                    self.marks.append(Mark(event.user_id, event.version, event.event_time, None))
                else:
                    mark.first, mark.time = min(mark.first, event.version), min(mark.time, event.event_time)

    def add_column(self, name: str, backfill: Callable[[Event], Any]) -> int:
        self.version += 1
        self.since[name] = self.version
        for event in self.events:
            event.values[name] = backfill(event)
        return self.version

    def read(self, pointers: list[tuple[Any, int, int]], projection: Projection) -> list[list[tuple[Any, ...]]]:
        """For each (user, as_of, version) its events, each a tuple of the projected columns."""
        return [self._history(user, as_of, version, projection) for user, as_of, version in pointers]

    def _history(self, user: Any, as_of: int, version: int, projection: Projection) -> list[tuple[Any, ...]]:
        seen = [e for e in self.alive if e.user_id == user and e.version <= version and e.event_time < as_of]
        if projection.since is not None:
            seen = [e for e in seen if e.event_time >= projection.since]
        if projection.groups is not None:
            assert self.group is not None
            seen = [e for e in seen if e.values[self.group] is not None and e.values[self.group] in projection.groups]
        seen.sort(key=lambda e: (e.event_time, e.version, e.position))
        if projection.last is not None:
            seen = seen[-projection.last :]
        return [tuple(self._value(e, name, version, projection.allow_backfill) for name in projection.columns)
                for e in seen]

    def _value(self, event: Event, name: str, version: int, allow_backfill: bool) -> Any:
        if name == "version":
            return event.version
        if version < self.since.get(name, 0) and not allow_backfill:
            return None
        return event.values.get(name)

    def status(self, pointers: list[tuple[Any, int, int]], projection: Projection) -> list[Status]:
        return [self._status(user, as_of, version, projection) for user, as_of, version in pointers]

    def _status(self, user: Any, as_of: int, version: int, projection: Projection) -> Status:
        marks = [mark for mark in self.marks if mark.user_id == user and mark.seen(version)]
        if not marks and not any(e.user_id == user and e.version <= version for e in self.alive):
            return Status.UNKNOWN_USER
        lost = [mark for mark in marks if mark.time < as_of]
        if any(mark.until is not None for mark in lost):
            return Status.SCRUBBED
        short = projection.last is None or len(self._history(user, as_of, version, projection)) < projection.last
        if lost and short and (projection.since is None or projection.since < self.expired_before):
            return Status.EXPIRED
        return Status.OK

    def keys(self) -> list[Any]:
        return sorted({e.user_id for e in self.alive})

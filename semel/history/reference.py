"""The same contract, written as it reads: a list of events, filtered and sorted. What ``HistoryStore`` is tested
against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from semel.history.schema import Projection, Status


@dataclass(frozen=True)
class Event:
    """One event and its two clocks; ``position``: its row in the append."""

    user_id: Any
    event_time: int
    version: int
    position: int
    values: dict[str, Any]


@dataclass
class ReferenceStore:
    """``group``: the group column's name. Values are Python objects, None where null."""

    group: str | None = None
    events: list[Event] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    version: int = 0

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

    def read(self, pointers: list[tuple[Any, int, int]], projection: Projection) -> list[list[tuple[Any, ...]]]:
        """For each (user, as_of, version) its events, each a tuple of the projected columns."""
        return [self._history(user, as_of, version, projection) for user, as_of, version in pointers]

    def _history(self, user: Any, as_of: int, version: int, projection: Projection) -> list[tuple[Any, ...]]:
        seen = [e for e in self.events if e.user_id == user and e.version <= version and e.event_time < as_of]
        if projection.since is not None:
            seen = [e for e in seen if e.event_time >= projection.since]
        if projection.groups is not None:
            assert self.group is not None
            seen = [e for e in seen if e.values[self.group] is not None and e.values[self.group] in projection.groups]
        seen.sort(key=lambda e: (e.event_time, e.version, e.position))
        if projection.last is not None:
            seen = seen[-projection.last :]
        return [tuple(e.version if name == "version" else e.values[name] for name in projection.columns)
                for e in seen]

    def status(self, pointers: list[tuple[Any, int, int]]) -> list[Status]:
        return [Status.OK if any(e.user_id == user and e.version <= version for e in self.events)
                else Status.UNKNOWN_USER for user, _, version in pointers]

    def keys(self) -> list[Any]:
        return sorted({e.user_id for e in self.events})

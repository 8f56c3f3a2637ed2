"""How far a source that is read in order (a Kafka topic) has got, kept in the store with the events themselves.

An append takes a source on from one position to the next: its token says so. It is committed only where the source
stands where the token says, so that of two processes that read one source one is refused, and nothing is in the store
twice. Of a source's positions only the last is kept, which is all that a restart needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "position:"


@dataclass(frozen=True)
class Position:
    """Where ``source`` stands: ``state`` is any JSON value that the source understands (None: nowhere yet), since the
    append that got ``version`` (0: none)."""

    source: str
    version: int = 0
    state: Any = None

    def then(self, state: Any) -> str:
        """The token of an append that takes the source from here to ``state``."""
        step = {"source": self.source, "after": self.version, "state": state}
        return PREFIX + json.dumps(step, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Step:
    """What a position's token says: from the one of version ``after`` to ``state``."""

    source: str
    after: int
    state: Any


def step_of(token: str | None) -> Step | None:
    """The step that a token stands for, None for any other token. ValueError where it only begins like one."""
    if token is None or not token.startswith(PREFIX):
        return None
    try:
        step = json.loads(token[len(PREFIX) :])
        return Step(str(step["source"]), int(step["after"]), step["state"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"token {token!r}: tokens that begin with {PREFIX!r} are made by Position.then") from None


class Tokens(dict[str, int]):
    """The version of each append that had a token; of a source's positions only that of the last."""

    def __init__(self, versions: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._last: dict[str, str] = {}  # source -> token
        for token, version in (versions or {}).items():
            self.add(token, version)

    def add(self, token: str, version: int) -> None:
        try:
            step = step_of(token)
        except ValueError:  # of a log that somebody else wrote: a token like others
            step = None
        if step is not None:
            before = self._last.get(step.source)
            if before is not None:
                if self[before] >= version:
                    return
                del self[before]
            self._last[step.source] = token
        self[token] = version

    def position(self, source: str) -> Position:
        token = self._last.get(source)
        step = step_of(token)
        return Position(source) if token is None or step is None else Position(source, self[token], step.state)

"""Group commit: appends that arrive while the disk is busy share its next fsync."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from semel.history.errors import StoreError
from semel.history.log.positions import Step

GROUP_ROWS = 1 << 18  # a group takes no further append beyond this, which bounds the wait of its first


@dataclass(eq=False)
class Append:
    """An append on its way to the log: checked ``arrays`` by column, strings dictionary-encoded. ``done`` once it has
    a ``version`` or an ``error``."""

    arrays: dict[str, pa.Array]
    rows: int
    token: str | None
    step: Step | None = None  # what the token says of a source's position
    version: int = 0
    error: BaseException | None = None
    done: bool = False
    turn: threading.Event = field(default_factory=threading.Event)  # set when done, or when it is to lead a group


class GroupCommit:
    """``commit(group)`` writes several appends at once and gives each a version or an error. One thread is in it at a
    time: that of the group's first append; the other appends that wait meanwhile are the next group."""

    def __init__(self, commit: Callable[[Sequence[Append]], Any]) -> None:
        self._commit = commit
        self._lock = threading.Lock()  # held for moments only
        self._waiting: deque[Append] = deque()
        self._busy = False

    def __call__(self, append: Append) -> int:
        """The version of ``append``, on disk. Raises what its commit raised."""
        with self._lock:
            self._waiting.append(append)
            if not self._busy:
                self._busy = True
                append.turn.set()
        try:
            append.turn.wait()
            if not append.done:
                self._lead()
        except BaseException:  # a signal: what nobody waits for is not begun
            self._give_up(append)
            raise
        if append.error is not None:
            raise append.error
        return append.version

    @property
    def waiting(self) -> int:
        """How many appends wait for the next group."""
        return len(self._waiting)

    def _lead(self) -> None:
        group: list[Append] = []
        failure: BaseException | None = None
        try:
            with self._lock:
                rows = 0
                while self._waiting and (not group or rows + self._waiting[0].rows <= GROUP_ROWS):
                    group.append(self._waiting.popleft())
                    rows += group[-1].rows
            self._commit(group)
        except BaseException as error:
            failure = error
            raise
        finally:
            for append in group:
                if not append.done and append is not group[0]:  # the first raises what happened itself
                    append.error = _copy(failure)
                append.done = True
                append.turn.set()
            with self._lock:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._busy = False

    def _give_up(self, append: Append) -> None:
        with self._lock:
            if append in self._waiting:
                led = append is self._waiting[0] and append.turn.is_set()
                self._waiting.remove(append)
                if led:
                    self._pass_on()


def _copy(error: BaseException | None) -> BaseException:
    """An error for another thread than the one that met it (an exception object carries one traceback)."""
    if isinstance(error, OSError) and not isinstance(error, StoreError):
        return OSError(*error.args)
    if isinstance(error, StoreError | ValueError):
        return type(error)(*error.args)
    return StoreError(f"a commit together with other appends was broken off ({error!r}); reopen the store")

"""Compaction beside the server: what the log of a store holds in memory stays bounded, however long the server runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.history import HistoryStore

log = logging.getLogger("semel.serving")

COMPACT_ROWS = 50_000
MOST_TIMES = 40
"""A large store is rewritten after an eighth of it, but after so many times ``rows`` at the latest."""
LOOK_S = 1.0
AFTER_FAILURE_S = 60.0
MEMORY_LIMIT = "256MiB"


class Compactor:
    """A thread that compacts each of ``stores`` (open for appending) when its log has ``rows`` events or, of a large
    store, an eighth of what is compacted; 0: never. ``failure``: what the last
    compaction raised, None after a good one: the store goes on as it was, and it is tried again in a minute.
    """

    def __init__(self, stores: Sequence[HistoryStore], rows: int = COMPACT_ROWS, look: float = LOOK_S):
        if rows < 0:
            raise ValueError(f"a store cannot be compacted after {rows} rows; 0 never compacts")
        self.failure: Exception | None = None
        self.compacted = 0
        """How often it has compacted a store."""
        self._stores, self._rows, self._look = stores, rows, look
        self._working = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if rows:
            self._thread = threading.Thread(target=self._run, name="semel-compactor", daemon=True)
            self._thread.start()

    def due(self, store: HistoryStore) -> bool:
        """Whether the log of ``store`` has grown enough."""
        waiting = store.uncompacted
        return waiting >= min(max(self._rows, (store.event_count - waiting) // 8), MOST_TIMES * self._rows)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is compacted meanwhile."""
        with self._working:
            yield

    def close(self) -> None:
        """Safe to call again. A compaction that has begun is given up, which leaves the store as it was."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        wait = self._look
        while not self._closed.wait(wait):
            wait = self._look
            for store in self._stores:
                try:
                    with self._working:
                        if self.due(store):
                            store.compact(workers=1, memory_limit=MEMORY_LIMIT, progress=self._between_shards)
                            self.compacted += 1
                            self.failure = None
                except GivenUp:
                    return
                except Exception as error:  # whatever it is, the store serves on as it was
                    self.failure, wait = error, AFTER_FAILURE_S
                    log.error({"event": "compaction failed", "store": str(store.path), "error": str(error)})

    def _between_shards(self, done: int, shards: int) -> None:
        if self._closed.is_set() and done < shards:
            raise GivenUp


class GivenUp(Exception):
    """The server ends before the compaction does."""


"""All that writes beside one store: events, items, outcomes and exposures, under one roof."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from semel.examples.recent_keys import REMEMBERED, RecentKeys, digest_of
from semel.history import read_segments
from semel.serving.compactor import Compactor
from semel.serving.writes import OutcomeWriter, RowWriter

if TYPE_CHECKING:
    from semel.examples.logs import ExposureLog
    from semel.history import HistoryStore

REMEMBERED_REQUESTS = 100_000
"""Of which a second exposure is dropped: one that was sent again because its answer was lost."""


class ExposureWriter:
    """Appends exposures to the log, each request once: groups that processes send again are recognised by their
    ``request_id``, over a restart too (by what the last segment holds). ``remember``: so many of the last."""

    def __init__(self, log: ExposureLog, remember: int = REMEMBERED_REQUESTS):
        self.log, self._remember, self._writing = log, remember, threading.Lock()
        self._seen: RecentKeys | None = None

    def append(self, table: pa.Table) -> None:
        """Durable on return. Raises what the log raises; the same may then be appended again."""
        with self._writing:
            if self._seen is None:
                self._seen = RecentKeys(self._remember)
                for one, at in _last_requests(self.log.path):
                    self._seen.add([digest_of(one)], at)
            ids = [digest_of(one) for one in table["request_id"].to_pylist()]
            fresh = [row for row, known in enumerate(self._seen.known(ids)) if not known]
            self.log.append(table if len(fresh) == len(ids) else table.take(pa.array(fresh, pa.int64())))
            self._seen.add(ids, int(table["served_at"].to_numpy().max()))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is logged meanwhile; what is on disk may change."""
        with self._writing:
            self.log.close()
            yield

    def close(self) -> None:
        with self._writing:
            self.log.close()


def _last_requests(folder: Path) -> list[tuple[str, int]]:
    """Request ids of the last segment, and when they were served."""
    segments = sorted(path for path in folder.glob("*.log") if path.stem.isdigit())
    found: list[tuple[str, int]] = []
    for _, batch in read_segments(segments[-1]) if segments else ():
        found += zip(pc.cast(batch.column("request_id"), pa.string()).to_pylist(),
                     batch.column("served_at").to_pylist(), strict=True)
    return found[-REMEMBERED_REQUESTS:]


class Writers:
    """``rows``: the writers of events and, where there is a catalogue, of items; ``outcomes``; ``exposures``. One set
    a store, in one process, which holds the store open for appending. ``item``: its item column, None where other
    processes make the rows of outcomes. ``compact_rows``: as of ``Compactor``. ``remember``: keys
    of events and of outcomes that are known. Raises what ``EventKeys`` and the store raise."""

    def __init__(self, store: HistoryStore, catalogue: HistoryStore | None, item: str | None,
                 exposures: ExposureWriter | None, now: Callable[[], int], compact_rows: int = 0,
                 remember: int = REMEMBERED):
        from semel.examples.exposures import outcome_schema
        from semel.examples.logs import OutcomeLog

        folder = Path(store.path)
        self.store, self.catalogue, self.exposures = store, catalogue, exposures
        self.rows: dict[str, RowWriter] = {}
        if store.mode == "a":
            self.rows["events"] = RowWriter("event", store, folder / "event_keys", now, remember=remember)
            if catalogue is not None:
                self.rows["items"] = RowWriter("item", catalogue, None, now)
        schema = None if item is None else outcome_schema(store.schema.user_id, store.schema.columns[item])
        self.outcomes = OutcomeWriter(OutcomeLog(folder / "outcomes", remember=remember), schema, now)
        appended = [one for one in (store, catalogue) if one is not None and one.mode == "a"]
        self.compactor = Compactor(appended, compact_rows)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is written meanwhile, and no file is held: what lies beside the store may be rewritten."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.compactor.stopped())
            for writer in (*self.rows.values(), self.outcomes, self.exposures):
                if writer is not None:
                    stack.enter_context(writer.stopped())
            yield

    def close(self) -> None:
        """Write what waits. Each is closed, whatever another one raises; the stores stay open."""
        with contextlib.ExitStack() as stack:
            for writer in (self.exposures, self.outcomes, *self.rows.values()):
                if writer is not None:
                    stack.callback(writer.close)
            self.compactor.close()

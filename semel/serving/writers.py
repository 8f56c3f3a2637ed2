"""All that writes beside one store: events, items, outcomes and exposures, under one roof."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from semel.history import read_segments
from semel.serving.writes import OutcomeWriter, RowWriter

if TYPE_CHECKING:
    from semel.examples.logs import ExposureLog
    from semel.history import HistoryStore

REMEMBERED = 100_000
"""Request ids of which a second exposure is dropped: one that was sent again because its answer was lost."""


class ExposureWriter:
    """Appends exposures to the log, each request once: groups that processes send again are recognised by their
    ``request_id``, over a restart too (by what the last segment holds)."""

    def __init__(self, log: ExposureLog):
        self.log, self._writing = log, threading.Lock()
        self._seen: OrderedDict[str, None] | None = None

    def append(self, table: pa.Table) -> None:
        """Durable on return. Raises what the log raises; the same may then be appended again."""
        with self._writing:
            if self._seen is None:
                self._seen = OrderedDict.fromkeys(_last_requests(self.log.path))
            ids = table["request_id"].to_pylist()
            fresh = [row for row, one in enumerate(ids) if one not in self._seen]
            self.log.append(table if len(fresh) == len(ids) else table.take(pa.array(fresh, pa.int64())))
            self._seen.update(OrderedDict.fromkeys(ids))
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is logged meanwhile; what is on disk may change."""
        with self._writing:
            self.log.close()
            yield

    def close(self) -> None:
        with self._writing:
            self.log.close()


def _last_requests(folder: Path) -> list[str]:
    segments = sorted(path for path in folder.glob("*.log") if path.stem.isdigit())
    found: list[str] = []
    for _, batch in read_segments(segments[-1]) if segments else ():
        found += pc.cast(batch.column("request_id"), pa.string()).to_pylist()
    return found[-REMEMBERED:]


class Writers:
    """``rows``: the writers of events and, where there is a catalogue, of items; ``outcomes``; ``exposures``. One set
    a store, in one process, which holds the store open for appending. ``item``: its item column, None where other
    processes make the rows of outcomes. Raises what ``EventKeys`` and the store raise."""

    def __init__(self, store: HistoryStore, catalogue: HistoryStore | None, item: str | None,
                 exposures: ExposureWriter | None, now: Callable[[], int]):
        from semel.examples.exposures import outcome_schema
        from semel.examples.logs import OutcomeLog

        folder = Path(store.path)
        self.store, self.catalogue, self.exposures = store, catalogue, exposures
        self.rows: dict[str, RowWriter] = {}
        if store.mode == "a":
            self.rows["events"] = RowWriter("event", store, folder / "event_keys", now)
            if catalogue is not None:
                self.rows["items"] = RowWriter("item", catalogue, None, now)
        schema = None if item is None else outcome_schema(store.schema.user_id, store.schema.columns[item])
        self.outcomes = OutcomeWriter(OutcomeLog(folder / "outcomes"), schema, now)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is written meanwhile, and no file is held: what lies beside the store may be rewritten."""
        with contextlib.ExitStack() as stack:
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

"""The writers of a worker process: the same calls as ``writers``, answered by the writer process over its socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from semel.history import WriterUnavailable
from semel.history.server.asking import MessageClient, Unanswered
from semel.history.server.client import stream_of
from semel.serving.errors import InvalidRequest, Overloaded
from semel.serving.group import FRESH_SECONDS
from semel.serving.writes import Rows, Written, outcome_rows, rows_of

if TYPE_CHECKING:
    from semel.history import HistoryStore

DIGESTS = "__event_key"
TIMEOUT = 30.0
RECONNECT = 0.5
"""Seconds that a post waits for a writer that is away (it is being restarted): then it is refused."""
TOGETHER = 32
"""Posts of one worker that may be with the writer at the same time, where they share a commit."""


Send = Callable[[dict[str, Any], Any, bool], dict[str, Any]]


def over_socket(socket_path: Path) -> Send:
    """Sends a message to the process at ``socket_path`` and gives its answer; a connection for each thread."""
    own = threading.local()

    def send(text: dict[str, Any], body: Any, again: bool) -> dict[str, Any]:
        client: MessageClient | None = getattr(own, "client", None)
        if client is None:
            client = own.client = MessageClient(socket_path, TIMEOUT, RECONNECT)
        return client.ask(text, body, again)

    return send


class WriterLink:
    """What a worker has of the writer. ``send(object, rows as an Arrow stream, again)`` gives the answer to a message,
    and raises Unanswered where none came; ``again``: sending it twice does no harm."""

    def __init__(self, send: Send):
        self._send = send
        self._pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="semel-post")
        self._failure: tuple[BaseException, float] | None = None
        self.pending = 0
        self._counting = threading.Lock()

    @property
    def failure(self) -> BaseException | None:
        """Why the writer could not be reached just now, or None."""
        found = self._failure
        return found[0] if found is not None and time.monotonic() - found[1] < FRESH_SECONDS else None

    def ask(self, text: dict[str, Any], table: pa.Table, again: bool) -> dict[str, Any]:
        """The writer's answer. Raises InvalidRequest, Overloaded, WriterUnavailable, and what the store raised
        there."""
        try:
            answer = self._send(text, stream_of(table), again)
        except Unanswered as error:
            what = "it may be stored: send it again with the same keys" if error.perhaps else "nothing was stored"
            gone = WriterUnavailable(f"the writer process does not answer ({error}); {what}")
            self._failure = gone, time.monotonic()
            raise gone from error
        except Exception as error:
            self._failure = error, time.monotonic()
            raise
        self._failure = None
        if "invalid" in answer:
            raise InvalidRequest(*answer["invalid"])
        if "overloaded" in answer:
            raise Overloaded(answer["overloaded"], answer["retry_after"])
        return answer

    def submit(self, text: dict[str, Any], table: pa.Table, again: bool) -> Future[Written]:
        def post() -> Written:
            try:
                answer = self.ask(text, table, again)
                return Written(answer["version"], answer["accepted"], answer["duplicates"])
            finally:
                with self._counting:
                    self.pending -= 1

        with self._counting:
            if self.pending >= 1024:
                raise Overloaded(f"{self.pending} posts wait for the writer process")
            self.pending += 1
        return self._pool.submit(post)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class RemoteRows:
    """As ``RowWriter``: ``kind`` is ``events`` or ``items``, ``store`` is open for reading."""

    def __init__(self, kind: str, store: HistoryStore, link: WriterLink, now: Callable[[], int]):
        self._kind, self._store, self._link, self._now = kind, store, link, now

    @property
    def failure(self) -> BaseException | None:
        return self._link.failure

    @property
    def pending(self) -> int:
        return self._link.pending

    def rows(self, records: list[dict[str, Any]], where: str) -> Rows:
        return rows_of(self._store.schema, records, self._kind == "events", self._now(), where)

    def submit(self, job: Rows) -> Future[Written]:
        table = job.table.append_column(DIGESTS, pa.array(job.digests, pa.binary(16)))
        # Items: appending the same features twice changes nothing.
        again = self._kind == "items" or None not in job.digests
        return self._link.submit({"kind": self._kind}, table, again)

    def close(self) -> None:
        self._link.close()


class RemoteOutcomes:
    """As ``OutcomeWriter``."""

    def __init__(self, schema: pa.Schema, link: WriterLink, now: Callable[[], int]):
        self._schema, self._link, self._now = schema, link, now

    @property
    def failure(self) -> BaseException | None:
        return self._link.failure

    @property
    def pending(self) -> int:
        return self._link.pending

    def rows(self, outcomes: list[dict[str, Any]]) -> pa.Table:
        return outcome_rows(self._schema, outcomes, self._now())

    def submit(self, job: pa.Table) -> Future[Written]:
        return self._link.submit({"kind": "outcomes"}, job, job["outcome_key"].null_count == 0)

    def close(self) -> None:
        self._link.close()


class RemoteExposures:
    """As an ``ExposureLog`` to append to. What is sent again is logged once."""

    def __init__(self, link: WriterLink):
        self._link = link

    def append(self, table: pa.Table) -> None:
        self._link.ask({"kind": "exposures"}, table, again=True)


class RemoteWriters:
    """As ``Writers``, for a predictor whose stores are open for reading."""

    def __init__(self, store: HistoryStore, catalogue: HistoryStore | None, item: str, link: WriterLink,
                 now: Callable[[], int]):
        from semel.examples.exposures import outcome_schema

        self.rows = {"events": RemoteRows("events", store, link, now)}
        if catalogue is not None:
            self.rows["items"] = RemoteRows("items", catalogue, link, now)
        self.outcomes = RemoteOutcomes(outcome_schema(store.schema.user_id, store.schema.columns[item]), link, now)
        self._link = link

    def close(self) -> None:
        """Wait for the answers to what was posted."""
        self._link.close()

"""The server's writes: events, items and outcomes, each through one writer thread that commits in groups."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from semel.examples.recent_keys import REMEMBERED
from semel.history import PositionMoved
from semel.serving.errors import InvalidRequest
from semel.serving.group import GroupCommit
from semel.serving.keys import EventKeys, event_digest
from semel.serving.schemas import rows_table

if TYPE_CHECKING:
    from semel.examples.logs import OutcomeLog
    from semel.history import EventSchema, HistoryStore


SOURCE = "server"
"""Whose position in the store the groups of keyed events move on (``semel.history.log.positions``)."""


@dataclass(frozen=True)
class Written:
    """What a write gives back. ``version``: the store's version as of which all of it, duplicates too, is visible."""

    version: int
    accepted: int
    duplicates: int = 0


@dataclass(frozen=True)
class Rows:
    """One request's rows: a table as the store appends it, and a digest a row (None: the row has no key)."""

    table: pa.Table
    digests: list[bytes | None]


def rows_of(schema: EventSchema, records: list[dict[str, Any]], keyed: bool, now: int, where: str) -> Rows:
    """Validated JSON rows as one request's rows; ``keyed``: with their event keys. Raises InvalidRequest for a time too
    far ahead."""
    table = rows_table(records, schema.key, schema.user_id, schema.columns, now, where)
    if not keyed:
        return Rows(table, [None] * len(table))
    return Rows(table, [event_digest(row[schema.key], row["event_key"]) if "event_key" in row else None
                        for row in records])


class RowWriter:
    """Appends the rows of concurrent requests to one store together: one durable append for all that wait.

    ``folder``: where event keys are kept, None for a store without them (the catalogue: appending an item's features
    twice changes nothing). Raises what ``EventKeys`` and the store raise on opening.
    """

    def __init__(self, name: str, store: HistoryStore, folder: Path | None, now: Callable[[], int],
                 max_pending: int = 1024, remember: int = REMEMBERED):
        self.store, self._now, self._remember = store, now, remember
        self.keys = EventKeys(folder, now(), capacity=remember) if folder is not None else None
        self._committing = threading.Lock()
        self._recover()
        self._group: GroupCommit[Rows] = GroupCommit(name, self._commit, max_pending=max_pending)
        self.submit = self._group.submit

    @property
    def failure(self) -> BaseException | None:
        return self._group.recent_failure

    @property
    def pending(self) -> int:
        return self._group.pending

    def rows(self, records: list[dict[str, Any]], where: str) -> Rows:
        """Validated JSON rows as a job for ``submit``. Raises InvalidRequest for a time too far ahead."""
        return rows_of(self.store.schema, records, self.keys is not None, self._now(), where)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is appended meanwhile; what is on disk may change, and is read again at the end."""
        with self._committing:
            if self.keys is not None:
                self._recover()
                self.keys.close()
            try:
                yield
            finally:
                if self.keys is not None:
                    self.keys = EventKeys(self.keys.folder, self._now(), capacity=self._remember)
                    self._recover()

    def close(self) -> None:
        self._group.close()
        if self.keys is not None:
            self.keys.close()

    def _recover(self) -> None:
        if self.keys is not None and self.keys.pending is not None:
            token, table = self.keys.pending
            with contextlib.suppress(PositionMoved):  # later appends are there, so it was settled: a file is missing
                self.store.append(table, token=token)
            self.keys.settle()

    def _commit(self, jobs: Sequence[Rows]) -> list[Written | BaseException]:
        with self._committing:
            return self._commit_all(jobs)

    def _commit_all(self, jobs: Sequence[Rows]) -> list[Written | BaseException]:
        self._recover()  # a group whose append failed half-way is finished before anything else
        taken: set[bytes] = set()
        tables, digests, accepted = [], [], []
        for job in jobs:
            keep = []
            known = self.keys.known(job.digests) if self.keys is not None else [False] * len(job.digests)
            for row, (digest, before) in enumerate(zip(job.digests, known, strict=True)):
                if digest is not None:
                    if before or digest in taken:
                        continue
                    taken.add(digest)
                keep.append(row)
            whole = len(keep) == len(job.table)
            tables.append(job.table if whole else job.table.take(pa.array(keep, pa.int64())))
            digests += job.digests if whole else [job.digests[row] for row in keep]
            accepted.append(len(keep))
        version = self.store.version
        if digests:
            table = pa.concat_tables(tables).combine_chunks()
            try:
                version = self._append(table, digests if taken else None)
            except ValueError as error:
                if len(jobs) == 1:
                    return [InvalidRequest("events", str(error))]
                return [self._commit_all([job])[0] for job in jobs]  # one request's rows must not fail another's
        return [Written(version, count, len(job.table) - count) for job, count in zip(jobs, accepted, strict=True)]

    def _append(self, table: pa.Table, digests: list[bytes | None] | None) -> int:
        if digests is None or self.keys is None:
            return self.store.append(table)
        # A step from the one before, not a name: of steps the store keeps the last, of names all.
        token = self.store.position(SOURCE).then(uuid.uuid4().hex)
        self.keys.intend(token, table, digests, self._now())
        try:
            version = self.store.append(table, token=token)
        except ValueError:
            self.keys.withdraw(digests, self._now())
            raise
        self.keys.settle()
        return version


class OutcomeWriter:
    """Appends outcomes to the log. ``Written.version`` is 0: outcomes have none; counts are of labels, not outcomes."""

    def __init__(self, log: OutcomeLog, schema: pa.Schema | None, now: Callable[[], int], max_pending: int = 1024):
        self._log, self._schema, self._now = log, schema, now
        self._committing = threading.Lock()
        self._group: GroupCommit[pa.Table] = GroupCommit("outcome", self._commit, max_pending=max_pending)
        self.submit = self._group.submit

    @property
    def failure(self) -> BaseException | None:
        return self._group.recent_failure

    @property
    def pending(self) -> int:
        return self._group.pending

    def rows(self, outcomes: list[dict[str, Any]]) -> pa.Table:
        """Validated outcomes as a job for ``submit``: a row is one task's label."""
        assert self._schema is not None
        return outcome_rows(self._schema, outcomes, self._now())

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing is logged meanwhile; what is on disk may change, and is read again when it is needed."""
        with self._committing:
            self._log.forget()
            yield

    def close(self) -> None:
        self._group.close()
        self._log.close()

    def _commit(self, jobs: Sequence[pa.Table]) -> list[Written | BaseException]:
        with self._committing:
            return [self._append(table) for table in jobs]

    def _append(self, table: pa.Table) -> Written | BaseException:
        try:
            new = self._log.append(table)
        except ValueError as error:
            return InvalidRequest("outcomes", str(error))
        return Written(0, new, len(table) - new)


def outcome_rows(schema: pa.Schema, outcomes: list[dict[str, Any]], now: int) -> pa.Table:
    """Validated outcomes as rows of the log, a row a task's label."""
    flat = [(outcome, task, value) for outcome in outcomes for task, value in outcome["label"].items()]
    return pa.table({
        "request_id": [outcome["request_id"] for outcome, _, _ in flat],
        "item_id": pa.array([outcome["item_id"] for outcome, _, _ in flat], schema.field("item_id").type),
        "task": [task for _, task, _ in flat],
        "value": pa.array([value for _, _, value in flat], pa.float32()),
        "received_at": pa.array([now] * len(flat), pa.int64()),
        "outcome_key": pa.array([f"{outcome['outcome_key']}/{task}" if "outcome_key" in outcome else None
                                 for outcome, task, _ in flat], pa.string()),
    })

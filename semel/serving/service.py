"""What the HTTP endpoints do, without HTTP: a predictor, its writers, admission and metrics under one roof."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from semel.serving.admission import Admission
from semel.serving.errors import InvalidRequest, Overloaded
from semel.serving.metrics import Metrics
from semel.serving.results import RankRequest
from semel.serving.schemas import Body, events_body, outcomes_body, rank_body
from semel.serving.writes import OutcomeWriter, RowWriter, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semel.serving.predictor import Predictor
    from semel.serving.results import RankResult

TOGETHER = 512
"""Most candidates of requests that are scored together: beyond, they would wait for each other and gain nothing."""


class Service:
    """``rank``, ``append`` and ``outcomes`` take a body's bytes and give the answer's; used from one event loop. Where
    the predictor's store is open for reading, events and items are refused."""

    def __init__(self, predictor: Predictor, *, queue: int = 64, workers: int = 1):
        from semel.examples.exposures import SHOWN, outcome_schema
        from semel.examples.logs import OutcomeLog

        self.predictor, self.metrics = predictor, Metrics()
        store, catalogue, features = predictor.store, predictor.catalogue, predictor.artifact.features
        folder = Path(store.path)
        now = predictor.clock.now
        self.draining = False
        self.admission = Admission(self._rank, workers, queue, size=_candidates, most=TOGETHER)
        self.bodies: dict[str, Body] = {
            "rank": rank_body(predictor.user_type, predictor.item_type, predictor.max_candidates),
            "outcomes": outcomes_body(predictor.item_type, {
                **{task.name: task.kind == "binary" for task in features.tasks}, SHOWN: True}),
        }
        self.rows: dict[str, RowWriter] = {}
        writable = store.mode == "a"
        if writable:
            self.rows["events"] = RowWriter("event", store, folder / "event_keys", now)
            self.bodies["events"] = events_body(store.schema.key, store.schema.user_id, store.schema.columns,
                                                (features.item,), "events", "Event", idempotent=True)
        if writable and catalogue is not None:
            self.rows["items"] = RowWriter("item", catalogue, None, now)
            self.bodies["items"] = events_body(catalogue.schema.key, catalogue.schema.user_id, catalogue.schema.columns,
                                               (), "items", "Item", idempotent=False)
        self.outcome_writer = OutcomeWriter(OutcomeLog(folder / "outcomes"),
                                            outcome_schema(predictor.user_type, predictor.item_type), now)
        self._watch()

    async def rank(self, body: bytes) -> bytes:
        """``POST /v1/rank``."""
        request = self.bodies["rank"].parse(body)
        return await self.admission.run(RankRequest(request["user_id"], request["candidates"], request.get("context"),
                                                    request.get("limit"), request.get("as_of")))

    async def append(self, kind: str, body: bytes) -> bytes:
        """``POST /v1/events`` and ``POST /v1/items``: durable, and visible to the next request, when this returns."""
        if kind not in self.rows:
            why = "the store has no catalogue" if kind == "items" and self.rows else "this server only reads its store"
            raise InvalidRequest(kind, why)
        writer = self.rows[kind]

        def prepare() -> Any:  # Arrow's work, off the event loop
            return writer.rows(self.bodies[kind].parse(body)[kind], kind)

        job = await asyncio.to_thread(prepare)
        written: Written = await asyncio.wrap_future(writer.submit(job))
        self._count(kind, written)
        return to_json(asdict(written))

    async def outcomes(self, body: bytes) -> bytes:
        """``POST /v1/outcomes``: durable when this returns."""

        def prepare() -> Any:
            return self.outcome_writer.rows(self.bodies["outcomes"].parse(body)["outcomes"])

        job = await asyncio.to_thread(prepare)
        written: Written = await asyncio.wrap_future(self.outcome_writer.submit(job))
        self._count("outcomes", written)
        return to_json({"accepted": written.accepted, "duplicates": written.duplicates})

    def not_ready(self) -> str | None:
        """Why the server should get no traffic, or None."""
        if self.draining:
            return "the server is shutting down"
        if self.predictor.exposure_failure is not None:
            return f"exposures cannot be written: {self.predictor.exposure_failure}"
        for kind, writer in self._writers():
            if writer.failure is not None:
                return f"{kind} cannot be written: {writer.failure}"
        if self.admission.full:
            return "the queue is full"
        return None

    def close(self) -> None:
        """Finish what was admitted and write what waits. The predictor stays open."""
        self.draining = True
        self.admission.close()
        with contextlib.ExitStack() as stack:  # each is closed, whatever another one raises
            for _, writer in self._writers():
                stack.callback(writer.close)
            if not self.predictor.flush(timeout=30):
                raise Overloaded(f"{self.predictor.pending_exposures} exposures could not be written in 30 s")

    def _rank(self, requests: Sequence[RankRequest], waited: Sequence[float]) -> list[bytes | Exception]:
        """In a scoring thread: all that waited, as one batch."""
        self.metrics.together.observe(len(requests))
        results = self.predictor.rank_together(requests)
        return [result if isinstance(result, Exception) else self._answer(request, result, seconds)
                for request, result, seconds in zip(requests, results, waited, strict=True)]

    def _answer(self, request: RankRequest, result: RankResult, waited: float) -> bytes:
        queue_ms = round(1e3 * waited, 3)
        timings = {"queue": queue_ms, **result.timings_ms}
        timings["total"] = round(timings["total"] + queue_ms, 3)
        for stage, milliseconds in timings.items():
            self.metrics.stage.labels(stage).observe(milliseconds / 1e3)
        self.metrics.candidates.observe(len(request.candidates))
        return to_json({**result.to_json(), "timings_ms": timings})

    def _count(self, kind: str, written: Written) -> None:
        self.metrics.rows.labels(kind, "accepted").inc(written.accepted)
        self.metrics.rows.labels(kind, "duplicate").inc(written.duplicates)

    def _watch(self) -> None:
        watch, predictor = self.metrics.watch, self.predictor
        watch("semel_rank_inside", "Requests being scored or waiting for it", lambda: self.admission.inside)
        watch("semel_exposures_pending", "Exposures that are not on disk yet", lambda: predictor.pending_exposures)
        watch("semel_exposures_lost", "Exposures that could not be written", lambda: predictor.lost_exposures)
        states = predictor.states
        watch("semel_state_hits", "Requests whose state was kept", lambda: states.hits)
        watch("semel_state_misses", "Requests whose state was computed", lambda: states.misses)
        watch("semel_state_bytes", "Bytes of the request states that are kept", lambda: states.bytes)
        watch("semel_store_version", "Version of the event store", lambda: predictor.store.version)
        if predictor.catalogue is not None:
            catalogue = predictor.catalogue
            watch("semel_catalogue_version", "Version of the catalogue", lambda: catalogue.version)
        if predictor.memory is not None:
            rows = predictor.memory
            watch("semel_memory_rows", "Rows of the item memory", lambda: len(rows.memory or ()))
            watch("semel_memory_epoch", "Epoch of the log that rows come from",
                  lambda: rows.position.epoch if rows.position else 0)
            watch("semel_memory_sequence", "Record of it that was applied last",
                  lambda: rows.position.sequence if rows.position else -1)
            watch("semel_memory_failing", "1 if new rows cannot be applied", lambda: float(rows.error is not None))
        watch("semel_ready", "1 if /readyz answers 200", lambda: float(self.not_ready() is None))
        for kind, writer in self._writers():
            watch(f"semel_{kind}_pending", f"Posts of {kind} that wait for the writer", partial(_pending, writer))

    def _writers(self) -> list[tuple[str, RowWriter | OutcomeWriter]]:
        return [*self.rows.items(), ("outcomes", self.outcome_writer)]


def _candidates(request: RankRequest) -> int:
    return len(request.candidates)


def _pending(writer: RowWriter | OutcomeWriter) -> int:
    return writer.pending

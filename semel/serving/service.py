"""What the HTTP endpoints do, without HTTP: a predictor, its writers, admission and metrics under one roof."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from semel.serving.admission import Admission
from semel.serving.errors import InvalidRequest, Overloaded
from semel.serving.metrics import Metrics
from semel.serving.model_choice import ModelChoice
from semel.serving.requests import (
    RECOMMENDED,
    RETRIEVED,
    Diversity,
    Filters,
    RecommendRequest,
    RetrieveRequest,
    StageSize,
)
from semel.serving.results import RankRequest
from semel.serving.schemas import (
    Body,
    events_body,
    models_body,
    outcomes_body,
    rank_body,
    recommend_body,
    retrieve_body,
)
from semel.serving.writes import Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semel.serving.predictor import Predictor
    from semel.serving.remote import RemoteWriters
    from semel.serving.results import RankResult, RecommendResult
    from semel.serving.writers import Writers

LATENCY_TARGET = 1.0
"""Seconds in which an answer must be likely for a request to be admitted."""
TOGETHER = 512
"""Most candidates of requests that are scored together: beyond, they would wait for each other and gain nothing."""


@dataclass(frozen=True)
class Job:
    """A request that waits to be scored. ``size``: candidates; what searches the catalogue is scored alone."""

    endpoint: str
    request: RankRequest | RetrieveRequest | RecommendRequest
    size: int


class Service:
    """``items``, ``append`` and ``outcomes`` take a body's bytes and give the answer's; used from one event loop. Where
    the predictor's store is open for reading, events and items are refused."""

    def __init__(self, predictor: Predictor, *, queue: int = 64, scorers: int = 1,
                 latency_target: float = LATENCY_TARGET, writers: Writers | RemoteWriters | None = None):
        from semel.examples.exposures import SHOWN

        self.predictor, self.metrics = predictor, Metrics()
        store, catalogue, features = predictor.store, predictor.catalogue, predictor.artifact.features
        if writers is None:
            from semel.serving.writers import Writers

            writers = Writers(store, catalogue, features.item, None, predictor.clock.now)
        self.writers, self.rows, self.outcome_writer = writers, writers.rows, writers.outcomes
        self.draining = False
        self.admission: Admission[Job, bytes] = Admission(self._work, scorers, queue, size=_size, most=TOGETHER,
                                                          kind=_endpoint, target=latency_target)
        self.bodies: dict[str, Body] = {
            "rank": rank_body(predictor.user_type, predictor.item_type, predictor.max_candidates),
            "prerank": rank_body(predictor.user_type, predictor.item_type, predictor.most("prerank"), "PrerankRequest"),
            "retrieve": retrieve_body(predictor.user_type, predictor.item_type),
            "recommend": recommend_body(predictor.user_type, predictor.item_type),
            "models": models_body(),
            "outcomes": outcomes_body(predictor.item_type, {
                **{task.name: task.kind == "binary" for task in features.tasks}, SHOWN: True}),
        }
        if "events" in self.rows:
            self.bodies["events"] = events_body(store.schema.key, store.schema.user_id, store.schema.columns,
                                                (features.item,), "events", "Event", idempotent=True)
        if "items" in self.rows and catalogue is not None:
            self.bodies["items"] = events_body(catalogue.schema.key, catalogue.schema.user_id, catalogue.schema.columns,
                                               (), "items", "Item", idempotent=False)
        self.models = ModelChoice(predictor)
        self._watch()

    async def served(self) -> bytes:
        """``GET /v1/models``."""
        return to_json((await asyncio.to_thread(self.models.models)).to_json())

    async def serve(self, body: bytes) -> bytes:
        """``POST /v1/models``: the next request is scored by it when this returns."""
        asked = self.bodies["models"].parse(body)
        found = await asyncio.to_thread(self.models.serve, asked.get("stage", "rank"), asked.get("version"),
                                        asked.get("run"))
        return to_json(found.to_json())

    async def score(self, endpoint: str, body: bytes) -> bytes:
        """``POST /v1/rank``, ``/v1/prerank``, ``/v1/retrieve`` and ``/v1/recommend``."""
        self.admission.check(kind=endpoint)  # before the work of reading the body
        return await self.admission.run(job_of(endpoint, self.bodies[endpoint].parse(body)))

    async def append(self, kind: str, body: bytes) -> bytes:
        """``POST /v1/events`` and ``POST /v1/items``: durable, and visible to the next request, when this returns."""
        if kind not in self.rows:
            why = "the store has no catalogue" if kind == "items" and self.rows else "this server only reads its store"
            raise InvalidRequest(kind, why)
        writer: Any = self.rows[kind]

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

    def told(self, verb: str) -> bool:
        """What an erasure asks of a process that reads: ``flush`` the exposures of what it has scored to their log, or
        ``forget`` what it keeps of users. Whether it was done in time."""
        if verb == "flush":
            return self.admission.settle(30) and self.predictor.flush(30)
        if verb == "forget":
            self.predictor.forget()
            done = self.admission.settle(30)  # what was being scored may have kept a state once more
            self.predictor.forget()
            return done
        raise ValueError(f"this server knows no {verb!r}")

    def close(self) -> None:
        """Finish what was admitted and write what waits. The predictor stays open."""
        self.draining = True
        self.admission.close()
        self.models.close()
        try:
            if not self.predictor.flush(timeout=30):
                raise Overloaded(f"{self.predictor.pending_exposures} exposures could not be written in 30 s")
        finally:
            self.writers.close()

    def _work(self, jobs: Sequence[Job], waited: Sequence[float]) -> list[bytes | Exception]:
        """In a scoring thread: all that waited for one endpoint; what ranks given candidates as one batch."""
        self.metrics.together.observe(len(jobs))
        answers: Sequence[Any]
        if jobs[0].endpoint in ("rank", "prerank"):
            answers = self.predictor.rank_together([job.request for job in jobs],  # type: ignore[misc]
                                                   jobs[0].endpoint)  # type: ignore[arg-type]
        else:
            answers = [self._searched(job.request) for job in jobs]
        return [answer if isinstance(answer, Exception) else self._answer(job, answer, seconds)
                for job, answer, seconds in zip(jobs, answers, waited, strict=True)]

    def _searched(self, request: Any) -> RankResult | RecommendResult | Exception:
        try:
            return (self.predictor.retrieve_one(request) if isinstance(request, RetrieveRequest)
                    else self.predictor.recommend_one(request))
        except Exception as error:  # whatever it is, it is this job's
            return error

    def _answer(self, job: Job, result: RankResult | RecommendResult, waited: float) -> bytes:
        queue_ms = round(1e3 * waited, 3)
        timings = {"queue": queue_ms, **result.timings_ms}
        timings["total"] = round(timings["total"] + queue_ms, 3)
        for stage, milliseconds in timings.items():
            seconds = milliseconds / 1e3
            if job.endpoint == "rank":
                self.metrics.stage.labels(stage).observe(seconds)
            else:
                self.metrics.stages.labels(job.endpoint, stage).observe(seconds)
        if isinstance(job.request, RankRequest):
            self.metrics.candidates.observe(job.size)
        return to_json({**result.to_json(), "timings_ms": timings})

    def _count(self, kind: str, written: Written) -> None:
        self.metrics.rows.labels(kind, "accepted").inc(written.accepted)
        self.metrics.rows.labels(kind, "duplicate").inc(written.duplicates)

    def _watch(self) -> None:
        watch, predictor = self.metrics.watch, self.predictor
        watch("semel_rank_inside", "Requests being scored or waiting for it", lambda: self.admission.inside)
        watch("semel_rank_expected_seconds", "What a request would take that came now, waiting included",
              lambda: self.admission.expected(kind="rank"))
        watch("semel_exposures_pending", "Exposures that are not on disk yet", lambda: predictor.pending_exposures)
        watch("semel_exposures_lost", "Exposures that could not be written", lambda: predictor.lost_exposures)
        states = predictor.states
        watch("semel_state_hits", "Requests whose state was kept", lambda: states.hits)
        watch("semel_state_misses", "Requests whose state was computed", lambda: states.misses)
        watch("semel_state_bytes", "Bytes of the request states that are kept", lambda: states.bytes)
        watch("semel_store_version", "Version of the event store", lambda: predictor.store.version)
        watch("semel_store_uncompacted", "Events in its log, which lie in memory", lambda: predictor.store.uncompacted)
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

    def _writers(self) -> list[tuple[str, Any]]:
        return [*self.rows.items(), ("outcomes", self.outcome_writer)]


def job_of(endpoint: str, body: dict[str, Any]) -> Job:
    """A validated body as a job; what it leaves out, or says null, is as if it were not there."""
    said = {name: value for name, value in body.items() if value is not None}
    diversity = said.get("diversity")
    filters = Filters(said.get("exclude_seen", False), said.get("blocked", ()),
                      None if diversity is None else Diversity(**diversity))
    user, context, as_of = said["user_id"], said.get("context"), said.get("as_of")
    if endpoint in ("rank", "prerank"):
        candidates = said["candidates"]
        return Job(endpoint, RankRequest(user, candidates, context, said.get("limit"), as_of, filters), len(candidates))
    if endpoint == "retrieve":
        return Job(endpoint, RetrieveRequest(user, said.get("limit", RETRIEVED), context, as_of, filters,
                                             said.get("budget_ms")), TOGETHER)
    sizes = {stage: StageSize(**said[stage]) if stage in said else None for stage in ("retrieve", "prerank", "rank")}
    return Job(endpoint, RecommendRequest(user, said.get("limit", RECOMMENDED), context, as_of, filters, **sizes),
               TOGETHER)


def _size(job: Job) -> int:
    return job.size


def _endpoint(job: Job) -> str:
    return job.endpoint


def _pending(writer: Any) -> int:
    return writer.pending

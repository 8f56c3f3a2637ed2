"""The predictor: a trained model over a live store, in process. The server is a thin layer on it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from semel.serving.checks import check_as_of, check_candidates, check_context, check_id, check_limit, show
from semel.serving.clock import Clock
from semel.serving.errors import NonFiniteScore
from semel.serving.exposures import Exposure, exposures_table
from semel.serving.group import GroupCommit
from semel.serving.results import Id, Pointer, RankResult, ScoredItem
from semel.serving.scoring import Scores, eager_path, score

if TYPE_CHECKING:
    from semel.batch import RequestBatch
    from semel.history import HistoryStore
    from semel.models import ModelArtifact


class Predictor:
    """Scores candidates for users whose histories lie in a store, and logs each request as an exposure.

    ``Predictor.load(run, store)`` makes one. It may be used from several threads, and is a context manager: closing it
    writes the exposures that still wait.
    """

    def __init__(self, artifact: ModelArtifact, store: HistoryStore, catalogue: HistoryStore | None = None, *,
                 exposures: Any = None, max_candidates: int = 2000, refresh: bool = False, owned: bool = False):
        """``exposures``: an ``ExposureLog`` or None (requests are then not logged). ``refresh``: look for what other
        processes appended before each request. ``owned``: ``close`` closes the stores too."""
        from semel.examples.exposures import exposure_schema
        from semel.history import StoreError
        from semel.serving.schemas import is_string

        self.artifact, self.store, self.catalogue = artifact, store, catalogue
        self.clock = Clock()
        self.max_candidates = max_candidates
        self.user_type, self.item_type = store.schema.user_id, item_type(store, artifact.features.item)
        self._string_users, self._string_items = is_string(self.user_type), is_string(self.item_type)
        self._refresh, self._owned, self._closed = refresh, owned, False
        self._features = artifact.features
        self._reads: Any = _TimedReads(store)
        self._schema = exposure_schema(self.user_type, self.item_type)
        self._log = exposures
        self._writer: GroupCommit[Exposure] | None = None
        if exposures is not None:
            self._writer = GroupCommit("exposure", self._write, max_group=512, max_pending=4096, linger=0.02,
                                       retry=(OSError, StoreError))

    @classmethod
    def load(cls, run: str | Path, store: str | Path | HistoryStore, *, mode: Literal["r", "a"] = "r",
             log_exposures: bool = True, max_candidates: int = 2000) -> Predictor:
        """The model of ``run`` over ``store`` (a path, or an open handle that stays the caller's to close).

        ``mode="a"`` opens the store for appending, as the server does; ``"r"`` reads beside a writer and looks for its
        appends before each request. Raises FileNotFoundError for a missing run or store, ValueError where the store
        lacks a history column that the model reads, StoreLocked where ``"a"`` meets another writer.
        """
        run = Path(run)
        if not run.exists():
            raise FileNotFoundError(f"no run at {run}; train one with `semel train`")
        from semel.examples.logs import ExposureLog
        from semel.history import HistoryStore
        from semel.models import load_model

        owned = isinstance(store, (str, Path))
        if isinstance(store, (str, Path)) and not Path(store).exists():
            raise FileNotFoundError(f"no store at {store}; make one with `semel ingest`")
        artifact = load_model(run)
        with ExitStack() as opened:  # what is open is closed again if the rest does not fit
            if isinstance(store, (str, Path)):
                store = opened.enter_context(HistoryStore.open(store, mode=mode))
            if not isinstance(store.path, Path):
                raise ValueError(f"{store.path}: a server needs a store in a folder, beside which its catalogue and "
                                 "exposures lie")
            folder = store.path
            catalogue = None
            if (folder / "catalogue").exists():
                catalogue = opened.enter_context(HistoryStore.open(folder / "catalogue", mode=mode))
            _check_columns(run, artifact, store, catalogue)
            log = ExposureLog(folder / "exposures") if log_exposures else None
            predictor = cls(artifact, store, catalogue, exposures=log, max_candidates=max_candidates,
                            refresh=mode == "r", owned=owned)
            opened.pop_all()
        return predictor

    @property
    def model_version(self) -> str:
        return self.artifact.version

    def rank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
             limit: int | None = None, as_of: int | None = None) -> RankResult:
        """Score ``candidates`` (distinct item ids) for ``user_id``, best first.

        Unknown users and items score. ``context``: the model's request features by name. ``as_of``: microseconds, now
        if None; a time in the past asks what would have been scored then, with what is known now. Raises
        InvalidRequest (a ValueError) that names the field, NonFiniteScore if the model gives NaN or infinity,
        Overloaded if exposures cannot be written and too many wait.
        """
        started = time.perf_counter()
        user_id = check_id(user_id, "user_id", self._string_users)
        items = check_candidates(candidates, self._string_items, self.max_candidates)
        context, limit = check_context(self._features, context), check_limit(limit)
        if self._refresh:
            self.store.refresh()
            if self.catalogue is not None:
                self.catalogue.refresh()
        now = self.clock.now()
        as_of = check_as_of(as_of, now)
        request_id = uuid.uuid4().hex
        batch, pointer, catalogue_version, history_s = self._materialize(request_id, user_id, items, context, as_of)
        ready = time.perf_counter()
        scores = self._score(request_id, batch)
        scored = time.perf_counter()
        order = scores.order()
        returned = len(order) if limit is None else min(limit, len(order))
        if self._writer is not None:
            self._writer.submit(self._exposure(request_id, pointer, catalogue_version, context, items, batch, scores,
                                               order, returned, now))
        best = order[:returned]
        results = list(map(ScoredItem._make, zip(items[best].tolist(), scores.ranked_by[best].tolist(), strict=True)))
        ended = time.perf_counter()
        timings = {"history": history_s, "features": ready - started - history_s, "model": scored - ready,
                   "total": ended - started}
        return RankResult(request_id, self.model_version, pointer, results,
                          {name: round(1e3 * seconds, 3) for name, seconds in timings.items()})

    def warm_up(self) -> None:
        """Score a made-up request, unlogged, so that the first real one does not pay for set-up and compilation."""
        from semel.serving.warming import twin

        user = check_id("-" if self._string_users else 0, "user_id", self._string_users)
        items = check_candidates([f"-{n}" for n in range(64)] if self._string_items else list(range(-64, 0)),
                                 self._string_items, self.max_candidates + 64)
        for _ in range(2):
            batch, *_ = self._materialize("warm-up", user, items, {}, self.clock.now())
            self._score("warm-up", batch)
        with TemporaryDirectory() as folder, ExitStack() as opened:
            store = opened.enter_context(twin(self.store, Path(folder) / "events", user))
            catalogue = None
            if self.catalogue is not None:
                catalogue = opened.enter_context(twin(self.catalogue, Path(folder) / "items", items[0]))
            live = Predictor(self.artifact, store, catalogue, max_candidates=self.max_candidates)
            batch, *_ = live._materialize("warm-up", user, items, {}, self.clock.now())
            live._score("warm-up", batch)

    @property
    def pending_exposures(self) -> int:
        """Exposures that are not on disk yet."""
        return self._writer.pending if self._writer else 0

    @property
    def lost_exposures(self) -> int:
        """Exposures that could not be written and never will be: not one, unless there is a bug."""
        return self._writer.failed if self._writer else 0

    @property
    def exposure_failure(self) -> BaseException | None:
        """Why exposures cannot be written just now, or None."""
        return self._writer.failure if self._writer else None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every exposure so far is on disk; False if ``timeout`` seconds were not enough."""
        return self._writer.flush(timeout) if self._writer else True

    def close(self) -> None:
        """Write what waits, then close what ``load`` opened. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self.catalogue is not None:
                self.catalogue.close()
            if self._owned:
                self.store.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _materialize(self, request_id: str, user_id: Id, items: np.ndarray, context: dict[str, Any],
                     as_of: int) -> tuple[RequestBatch, Pointer, int, float]:
        from semel.batch import Jagged, RequestRows
        from semel.examples import materialize
        from semel.examples.context import context_columns

        before = time.perf_counter()
        users = np.array([user_id], dtype=object if self._string_users else np.int64)
        pointers = self.store.point(users, as_of)
        catalogue_version = self.catalogue.version if self.catalogue is not None else 0
        pointed = time.perf_counter() - before
        rows = RequestRows(np.array([request_id], dtype=object), pointers, np.array([catalogue_version], np.int64),
                           context_columns([context], self._features.request),
                           Jagged(items, np.array([0, len(items)], np.int64)), {}, {})
        batch = materialize(rows, self._reads, self.catalogue, self._features, checksum=True)
        pointer = Pointer(user_id, int(pointers.as_of[0]), int(pointers.version[0]))
        return batch, pointer, catalogue_version, pointed + self._reads.seconds

    def _score(self, request_id: str, batch: RequestBatch) -> Scores:
        scores = score(self.artifact, batch)
        if not (np.isfinite(scores.logits).all() and np.isfinite(scores.tasks).all()):
            raise NonFiniteScore(f"request {request_id}: the model {show(self.model_version)} gave NaN or infinity; "
                                 "no score is made up for it. Check its weights and the request's numeric features")
        return scores

    def _exposure(self, request_id: str, pointer: Pointer, catalogue_version: int, context: dict[str, Any],
                  items: np.ndarray, batch: RequestBatch, scores: Scores, order: np.ndarray, returned: int,
                  now: int) -> Exposure:
        history = batch.request["history"]
        return Exposure(
            request_id, *pointer, catalogue_version, context, items, scores.ranked_by, scores.tasks, order, returned,
            self.model_version, int(batch.request["history_checksum"][0]) & 0xFFFF_FFFF_FFFF_FFFF,
            int(history.offsets[-1]), 0 if history.status is None else int(history.status[0]), eager_path(), "cpu", now)

    def _write(self, exposures: Sequence[Exposure]) -> list[None]:
        self._log.append(exposures_table(exposures, self._schema))
        return [None] * len(exposures)


class _TimedReads:
    """A store handle that knows how long this thread's last ``read`` took. One for all requests: ``materialize`` keeps
    what it learnt of a store with its handle."""

    def __init__(self, store: HistoryStore):
        self._store, self._last = store, threading.local()

    @property
    def seconds(self) -> float:
        return self._last.seconds

    def read(self, *args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        try:
            return self._store.read(*args, **kwargs)
        finally:
            self._last.seconds = time.perf_counter() - before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _check_columns(run: Path, artifact: ModelArtifact, store: HistoryStore, catalogue: HistoryStore | None) -> None:
    for feature in artifact.features.history:
        if feature.name not in {*store.schema.columns, "event_time"}:
            raise ValueError(f"the model of {run} reads history column {feature.name!r}, which the store at "
                             f"{store.path} does not have; it has {', '.join(store.schema.columns)}")
    for feature in artifact.features.candidate:
        if catalogue is None or feature.name not in catalogue.schema.columns:
            raise ValueError(f"the model of {run} reads item feature {feature.name!r}, which the catalogue of the "
                             f"store at {store.path} does not have; ingest the items first")


def item_type(store: HistoryStore, item: str) -> Any:
    """The Arrow type of item ids: that of the store's item column."""
    if item not in store.schema.columns:
        raise ValueError(f"the store at {store.path} has no item column {item!r}; it has "
                         f"{', '.join(store.schema.columns)}")
    return store.schema.columns[item]

"""The predictor: a trained model over a live store, in process. The server is a thin layer on it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from semel.batch import offsets_of
from semel.serving.checks import check_as_of, check_candidates, check_context, check_id, check_limit, show
from semel.serving.clock import Clock
from semel.serving.errors import InvalidRequest, NonFiniteScore, Overloaded
from semel.serving.exposures import Exposure, Membership, exposures_table
from semel.serving.filters import check_filters, column_values, seen_items
from semel.serving.group import GroupCommit
from semel.serving.item_side import ItemSide
from semel.serving.pace import Pace
from semel.serving.requests import (
    RECOMMENDED,
    RETRIEVED,
    STAGES,
    Diversity,
    Filters,
    RecommendRequest,
    RetrieveRequest,
    Stage,
    StageSize,
)
from semel.serving.results import Id, Pointer, RankRequest, RankResult, RecommendResult, ScoredItem
from semel.serving.scoring import Scores, path_name, request_states, score, shares
from semel.serving.selection import capped, without
from semel.serving.states import StateCache, state_key

if TYPE_CHECKING:
    from semel.batch import Pointers, RequestBatch
    from semel.history import HistoryStore
    from semel.memory import DeltaSubscriber, Position
    from semel.models import ModelArtifact
    from semel.serving.retrieval import CatalogueScan
    from semel.serving.shared_clock import SharedClock
    from semel.serving.versions import VersionWatch


MOST_PRERANKED = 1 << 14
"""Most candidates of a prerank request."""
MOST_SERVED = 100
"""Versions before the present one that are remembered."""
STATE_BYTES = 256 << 20
"""Of request states that a predictor keeps, unless it is told otherwise."""


class Predictor:
    """Scores candidates for users whose histories lie in a store, and logs each request as an exposure.

    ``retrieval``, ``preranker``: predictors over the same stores whose models do the stages before ranking. Without
    them this one's model does, ``preranker`` None. ``served``: versions that have scored and since when (microseconds
    since 1970), in order, the present one last.

    ``Predictor.load(run, store)`` makes one. It may be used from several threads, and is a context manager: closing it
    writes the exposures that still wait.
    """

    def __init__(self, artifact: ModelArtifact, store: HistoryStore, catalogue: HistoryStore | None = None, *,
                 memory: DeltaSubscriber | None = None, exposures: Any = None, max_candidates: int = 2000,
                 share: bool = True, state_bytes: int = STATE_BYTES, refresh: bool = False, owned: bool = False,
                 faiss: str | None = None):
        """``memory``: what item rows are read from, of a model that has a memory; closed with the predictor.
        ``exposures``: an ``ExposureLog`` or None (requests are then not logged). ``share``: the model's request side
        once per request (else once per candidate, to compare); its states are kept in at most ``state_bytes``.
        ``faiss``: retrieve by a FAISS index of this kind (``semel.serving.approximate``).
        ``refresh``: look for what other processes appended before each request. ``owned``: ``close`` closes the stores
        too."""
        from semel.examples.exposures import exposure_schema
        from semel.history import StoreError
        from semel.serving.schemas import is_string

        self._artifact, self.store, self.catalogue = artifact, store, catalogue
        self.memory = memory
        self._item_side = ItemSide(catalogue, memory, share)
        self.clock: Clock | SharedClock = Clock()
        self.served = [(artifact.version, self.clock.now())]
        self.max_candidates, self.share = max_candidates, share
        self.states = StateCache(state_bytes if share and shares(artifact) else 0)
        self.user_type, self.item_type = store.schema.user_id, item_type(store, artifact.features.item)
        self._string_users, self._string_items = is_string(self.user_type), is_string(self.item_type)
        self._refresh, self._owned, self._closed = refresh, owned, False
        self.versions: VersionWatch | None = None
        self.retrieval: Predictor = self
        self.preranker: Predictor | None = None
        self.paces = {stage: Pace() for stage in STAGES}
        self._scans: dict[str, CatalogueScan] = {}
        self._faiss = faiss
        self._scanning = threading.Lock()
        self._reads: Any = _TimedReads(store)
        self._schema = exposure_schema(self.user_type, self.item_type)
        self._log = exposures
        self._writer: GroupCommit[Exposure] | None = None
        if exposures is not None:
            self._writer = GroupCommit("exposure", self._write, max_group=512, max_pending=4096, linger=0.02,
                                       retry=(OSError, StoreError))

    @classmethod
    def load(cls, run: str | Path, store: str | Path | HistoryStore, *, retrieve: str | Path | None = None,
             prerank: str | Path | None = None, mode: Literal["r", "a"] = "r", log_exposures: bool = True,
             exposures: Any = None, max_candidates: int = 2000, share: bool = True, state_bytes: int = STATE_BYTES,
             memory: str | Path | None = None, faiss: str | None = None) -> Predictor:
        """The model of ``run`` over ``store`` (a path, or an open handle that stays the caller's to close).

        ``mode="a"`` opens the store for appending, as the server does; ``"r"`` reads beside a writer and looks for its
        appends before each request. ``exposures``: what they are appended to, in place of the log beside the store.
        ``retrieve``, ``prerank``: runs whose models do these stages. Weights that training saves into a run later are
        swapped in within a second (``versions``), and so are item rows that it publishes to ``memory`` (by default the
        run's own folder of that name). Where that log has weights too, they are put into ``run``, which may be a folder
        that is not there yet. Raises FileNotFoundError for a missing run, store or folder of ``memory``, ValueError
        where the store lacks a history column that the model reads or ``memory`` is given to a model without one,
        StoreLocked where ``"a"`` meets another writer.
        """
        run = Path(run)
        from semel.examples.logs import ExposureLog
        from semel.history import HistoryStore
        from semel.models import load_model
        from semel.serving.item_rows import first_model, subscribe
        from semel.serving.versions import VersionWatch

        if memory is not None and not (run / "model.json").exists():
            first_model(memory, run)
        if not run.exists():
            raise FileNotFoundError(f"no run at {run}; train one with `semel train`")

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
            log = exposures or (ExposureLog(folder / "exposures") if log_exposures else None)
            rows = subscribe(artifact, run, memory)
            if rows is not None:
                opened.callback(rows.close)
            predictor = cls(artifact, store, catalogue, memory=rows, exposures=log, max_candidates=max_candidates,
                            share=share, state_bytes=state_bytes, refresh=mode == "r", owned=owned)
            opened.pop_all()
        predictor.versions = VersionWatch(predictor, run)
        try:
            if retrieve is not None:
                predictor.retrieval = predictor._beside(retrieve)
            predictor.retrieval._faiss = faiss
            if faiss is not None and catalogue is not None:
                predictor.retrieval._scan(predictor.retrieval.artifact)  # whether it can be, is said now
            if prerank is not None:
                predictor.preranker = predictor._beside(prerank)
        except BaseException:
            predictor.close()
            raise
        return predictor

    def _beside(self, run: str | Path) -> Predictor:
        """The model of another run over the same stores, whose exposures go where this one's go."""
        from semel.models import load_model
        from semel.serving.item_rows import subscribe
        from semel.serving.versions import VersionWatch

        run = Path(run)
        if not run.exists():
            raise FileNotFoundError(f"no run at {run}; train one with `semel train`")
        artifact = load_model(run)
        _check_columns(run, artifact, self.store, self.catalogue)
        rows = subscribe(artifact, run)
        other = Predictor(artifact, self.store, self.catalogue, memory=rows, max_candidates=self.max_candidates,
                          share=self.share)
        if other.item_type != self.item_type:
            if rows is not None:
                rows.close()
            raise ValueError(f"the model of {run} has items in column {artifact.features.item!r}, which are "
                             f"{other.item_type}, the one beside it has {self.item_type}")
        other.clock, other._writer, other.states = self.clock, self._writer, self.states
        other.versions = VersionWatch(other, run)
        return other

    def keep_time_by(self, clock: Clock | SharedClock) -> None:
        """Take the time of requests from ``clock``, here and in the predictors beside this one."""
        for one in (self, self.retrieval, self.preranker):
            if one is not None:
                one.clock = clock

    @property
    def artifact(self) -> ModelArtifact:
        """The model that the next request is scored by."""
        return self._artifact

    @property
    def model_version(self) -> str:
        return self._artifact.version

    def swap(self, artifact: ModelArtifact) -> None:
        """Score by ``artifact`` from the next request on; those that have begun end with the model they began with.

        It scores a made-up request first, so that no real one pays for its set-up. Raises ValueError, and changes
        nothing, for a model of other tasks or of features that the store lacks: that takes a new server.
        """
        from semel.models.early_ranker import memory_layer
        from semel.serving.item_rows import check_width

        old = self._artifact
        if (artifact.features.tasks, artifact.features.item) != (old.features.tasks, old.features.item):
            raise ValueError(f"model {show(artifact.version)} has other tasks or another item column than "
                             f"{show(old.version)}; serve it by a server of its own")
        _check_columns(artifact.version, artifact, self.store, self.catalogue)
        if self.memory is not None:
            check_width(artifact, self.memory)
        elif memory_layer(artifact.model) is not None:
            raise ValueError(f"model {show(artifact.version)} reads an item memory, {show(old.version)} does not; "
                             "serve it by a server of its own")
        self._made_up_score(artifact)
        if self._scans:  # it retrieves: its catalogue is scored by the new model before the first request comes
            self._scan(artifact).prepare()
        self._artifact = artifact
        self.served = [*self.served[-MOST_SERVED:], (artifact.version, self.clock.now())]

    def rank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
             limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
             blocked: Sequence[Id] | np.ndarray = (),
             diversity: Diversity | dict[str, Any] | None = None) -> RankResult:
        """Score ``candidates`` (distinct item ids) for ``user_id``, best first.

        Unknown users and items score. ``context``: the model's request features by name. ``as_of``: microseconds, now
        if None; a time in the past asks what would have been scored then, with what is known now. ``exclude_seen``,
        ``blocked``, ``diversity``: as of ``semel.serving.requests.Filters``; what is seen or blocked is not scored.
        Raises InvalidRequest (a ValueError) that names the field, NonFiniteScore if the model gives NaN or infinity,
        Overloaded if exposures cannot be written and too many wait.
        """
        return self._first(RankRequest(user_id, candidates, context, limit, as_of,
                                       Filters(exclude_seen, blocked, diversity)), "rank")  # type: ignore[arg-type]

    def prerank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
                limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
                blocked: Sequence[Id] | np.ndarray = (),
                diversity: Diversity | dict[str, Any] | None = None) -> RankResult:
        """``rank`` by the lighter model (``preranker``; this one's without it), of up to ``MOST_PRERANKED``."""
        return self._first(RankRequest(user_id, candidates, context, limit, as_of,
                                       Filters(exclude_seen, blocked, diversity)), "prerank")  # type: ignore[arg-type]

    def retrieve(self, user_id: Id, limit: int = RETRIEVED, context: dict[str, Any] | None = None,
                 as_of: int | None = None, *, exclude_seen: bool = False, blocked: Sequence[Id] | np.ndarray = (),
                 diversity: Diversity | dict[str, Any] | None = None, budget_ms: float | None = None) -> RankResult:
        """The ``limit`` best items of the whole catalogue for ``user_id``, best first, exactly: every item is scored
        (in blocks, the user's side once), filters and diversity apply to all of it, equal scores are in ascending order
        of ids. An item is in the catalogue from its first row before ``as_of`` on. After ``budget_ms`` no further block
        is begun, and ``counts["scored"]`` says how far it got. Otherwise as ``rank``.
        """
        return self.retrieve_one(RetrieveRequest(user_id, limit, context, as_of,
                                                 Filters(exclude_seen, blocked, diversity),  # type: ignore[arg-type]
                                                 budget_ms))

    def recommend(self, user_id: Id, limit: int = RECOMMENDED, context: dict[str, Any] | None = None,
                  as_of: int | None = None, *, exclude_seen: bool = False, blocked: Sequence[Id] | np.ndarray = (),
                  diversity: Diversity | dict[str, Any] | None = None, retrieve: StageSize | None = None,
                  prerank: StageSize | None = None, rank: StageSize | None = None) -> RecommendResult:
        """The ``limit`` best items of the catalogue for ``user_id``: retrieved, preranked where there is a model for
        it, ranked; all stages see one history and one catalogue. ``retrieve``, ``prerank``, ``rank``: how many
        candidates each passes on and how long it may take. ``diversity`` applies to the answer, the other filters to
        all stages. Otherwise as ``rank``."""
        return self.recommend_one(RecommendRequest(user_id, limit, context, as_of,
                                                   Filters(exclude_seen, blocked, diversity),  # type: ignore[arg-type]
                                                   retrieve, prerank, rank))

    def retrieve_one(self, request: RetrieveRequest) -> RankResult:
        """``retrieve`` of a request that lies ready."""
        from semel.serving.recommending import retrieve

        return retrieve(self, request)

    def recommend_one(self, request: RecommendRequest) -> RecommendResult:
        """``recommend`` of a request that lies ready."""
        from semel.serving.recommending import recommend

        return recommend(self, request)

    def rank_together(self, requests: Sequence[RankRequest], stage: Stage = "rank") -> list[RankResult | Exception]:
        """``rank`` (or ``prerank``) of several requests, scored as one batch: an answer each, which is what ``rank``
        would have raised where it is an exception. Their times are those of the batch."""
        started = time.perf_counter()
        answers: list[Any] = [None] * len(requests)
        checked = []
        self._look()
        by = self.preranker or self if stage == "prerank" else self
        artifact = by._artifact  # one model for all of it, whatever is swapped meanwhile
        for place, request in enumerate(requests):
            try:
                checked.append(by._check(place, request, artifact, stage))
            except InvalidRequest as error:
                answers[place] = error
        for one, answer in zip(checked, by._score_together(checked, artifact, started), strict=True):
            answers[one.place] = answer
        return answers

    def _score_together(self, checked: Sequence[_Checked], artifact: ModelArtifact,
                        started: float) -> list[RankResult | Exception]:
        if not checked:
            return []
        answers: list[RankResult | Exception] = []
        checked = [self._filtered(one, artifact) for one in checked]
        batch, history_s, position = self._ready(checked, artifact)
        ready = time.perf_counter()
        scores = self._score(batch, artifact)
        scored = time.perf_counter()
        ends = batch.candidate_offsets.tolist()
        for index, one in enumerate(checked):
            try:
                answers.append(self._answer(one, index, batch, scores.rows(*ends[index : index + 2]), artifact,
                                            position))
            except (NonFiniteScore, Overloaded) as error:
                answers.append(error)
        ended = time.perf_counter()
        timings = {"history": history_s, "features": ready - started - history_s, "model": scored - ready,
                   "total": ended - started}
        for answer in answers:
            if isinstance(answer, RankResult):
                answer.timings_ms.update({name: round(1e3 * seconds, 3) for name, seconds in timings.items()})
        self.paces[checked[0].stage].observe(batch.candidates, ended - started)
        return answers

    def most(self, stage: Stage) -> int:
        """Most candidates of a request."""
        return max(self.max_candidates, MOST_PRERANKED) if stage == "prerank" else self.max_candidates

    def _first(self, request: RankRequest, stage: Stage) -> RankResult:
        [result] = self.rank_together([request], stage)
        if isinstance(result, Exception):
            raise result
        return result

    def _look(self) -> None:
        """See what other processes appended."""
        if self._refresh:
            self.store.refresh()
            if self.catalogue is not None:
                self.catalogue.refresh()

    def _scan(self, artifact: ModelArtifact) -> CatalogueScan:
        """The catalogue, ready to be scored by ``artifact``. Kept for two models: one may be on its way out."""
        from semel.serving.retrieval import CatalogueScan

        if self.catalogue is None:
            raise InvalidRequest("retrieve", "the store has no catalogue, whose items could be retrieved; ingest them")
        with self._scanning:
            if artifact.version not in self._scans:
                self._scans[artifact.version] = CatalogueScan(artifact, self.catalogue, self._faiss)
                for old in list(self._scans)[:-2]:
                    del self._scans[old]
            return self._scans[artifact.version]

    def warm_up(self) -> None:
        """Score a made-up request, unlogged, so that the first real one does not pay for set-up and compilation; where
        there is a model that retrieves, read the catalogue for it."""
        from semel.serving.warming import twin

        for one in self.beside:
            one.warm_up()
        if (self.retrieval is not self or self._faiss is not None) and self.catalogue is not None:
            self.retrieval._scan(self.retrieval.artifact).prepare()

        made_up = self._made_up_score(self._artifact)
        with TemporaryDirectory() as folder, ExitStack() as opened:
            store = opened.enter_context(twin(self.store, Path(folder) / "events", made_up.user_id))
            catalogue = None
            if self.catalogue is not None:
                catalogue = opened.enter_context(twin(self.catalogue, Path(folder) / "items", made_up.items[0]))
            live = Predictor(self.artifact, store, catalogue, share=self.share)
            now = replace(made_up, as_of=self.clock.now(), versions=live._versions())
            live._materialize([now, now], live.artifact)  # two of one user share a read, and copy it
            live._score(live._ready([now], live.artifact)[0], live.artifact)
        self.states.clear()

    def _made_up_score(self, artifact: ModelArtifact) -> _Checked:
        """A request of nobody, scored twice and not logged."""
        user = check_id("-" if self._string_users else 0, "user_id", self._string_users)
        items = check_candidates([f"-{n}" for n in range(64)] if self._string_items else list(range(-64, 0)),
                                 self._string_items, self.max_candidates + 64)
        made_up = _Checked(0, "warm-up", user, items, {}, None, self.clock.now(), self._versions())
        for _ in range(2):
            score(artifact, self._ready([made_up], artifact)[0], self.share)
        return made_up

    @property
    def beside(self) -> list[Predictor]:
        """The predictors of the stages before ranking, where they have models of their own."""
        return [one for one in (self.retrieval, self.preranker) if one is not None and one is not self]

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

    def forget(self) -> None:
        """Let go of what is kept of users between requests, and of files that were replaced: they were erased."""
        for store in (self.store, self.catalogue):
            if store is not None:
                store.refresh()
        self.states.clear()
        for one in (self, *self.beside):
            one._item_side.forget()

    def close(self) -> None:
        """Write what waits, then close what ``load`` opened. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        for one in (self, *self.beside):
            for follower in (one.versions, one.memory):
                if follower is not None:
                    follower.close()
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

    def _check(self, place: int, request: RankRequest, artifact: ModelArtifact, stage: Stage) -> _Checked:
        user_id = check_id(request.user_id, "user_id", self._string_users)
        items = check_candidates(request.candidates, self._string_items, self.most(stage))
        context, limit = check_context(artifact.features, request.context), check_limit(request.limit)
        filters = check_filters(request.filters, self._string_items, self.catalogue)
        now = self.clock.now()
        as_of = check_as_of(request.as_of, now)
        return _Checked(place, uuid.uuid4().hex, user_id, items, context, limit, as_of, self._versions(), now, filters,
                        len(items), stage)

    def _versions(self) -> tuple[int, int]:
        """Of the store and of the catalogue, as of which a request that begins now reads."""
        return self.store.version, self.catalogue.version if self.catalogue is not None else 0

    def _excluded(self, one: _Checked, artifact: ModelArtifact) -> np.ndarray:
        """The ids that the request's answer must not hold."""
        blocked: Any = one.filters.blocked
        if not one.filters.exclude_seen:
            return blocked
        return np.unique(np.concatenate([blocked, seen_items(self.store, self._pointers([one]),
                                                             artifact.features.item)]))

    def _filtered(self, one: _Checked, artifact: ModelArtifact) -> _Checked:
        if not one.filters.exclude_seen and not len(one.filters.blocked):
            return one
        return replace(one, items=one.items[without(one.items, self._excluded(one, artifact))])

    def _pointers(self, requests: Sequence[_Checked]) -> Pointers:
        from semel.batch import Pointers

        users = np.array([one.user_id for one in requests], dtype=object if self._string_users else np.int64)
        return Pointers(users, np.array([one.as_of for one in requests], np.int64),
                        np.array([one.versions[0] for one in requests], np.int64))

    def _ready(self, requests: Sequence[_Checked], artifact: ModelArtifact) -> tuple[RequestBatch, float,
                                                                                     Position | None]:
        """The batch as the model takes it, the seconds that the histories took, and whence its item rows are."""
        batch, seconds = self._materialize(requests, artifact, self._item_side.way(artifact) != "folded")
        items = np.concatenate([one.items for one in requests])
        with self._item_side.rows(artifact) as (rows, position):
            return rows(batch, items, [one.versions[1] for one in requests]), seconds, position

    def _materialize(self, requests: Sequence[_Checked], artifact: ModelArtifact, of_items: bool = True
                     ) -> tuple[RequestBatch, float]:
        """The batch, with features ``of_items`` or without, and the seconds that the histories took."""
        from semel.batch import Jagged, RequestRows
        from semel.examples import materialize
        from semel.examples.context import context_columns

        items = [one.items for one in requests]
        rows = RequestRows(np.array([one.request_id for one in requests], dtype=object), self._pointers(requests),
                           np.array([one.versions[1] for one in requests], np.int64),
                           context_columns([one.context for one in requests], artifact.features.request),
                           Jagged(np.concatenate(items), offsets_of([len(own) for own in items])), {}, {})
        features = artifact.features if of_items else replace(artifact.features, candidate=())
        batch = materialize(rows, self._reads, self.catalogue, features, checksum=True)
        return batch, self._reads.seconds

    def _score(self, batch: RequestBatch, artifact: ModelArtifact, states: list[Any] | None = None) -> Scores:
        if states is None and self.states.limit:
            states = self._states(batch, artifact)
        return score(artifact, batch, self.share, states)

    def _states(self, batch: RequestBatch, artifact: ModelArtifact) -> list[Any] | None:
        """The state of each request, kept or computed; None of a model that has none."""
        if not shares(artifact):
            return None
        if not self.states.limit:
            return request_states(artifact, batch)
        parts = [batch] if batch.requests == 1 else [batch.slice(row, row + 1) for row in range(batch.requests)]
        return [self.states.get(artifact.version.encode() + b"\0" + state_key(part), partial(_state, artifact, part))
                for part in parts]

    def _answer(self, one: _Checked, index: int, batch: RequestBatch, scores: Scores, artifact: ModelArtifact,
                position: Position | None) -> RankResult:
        """The answer to request ``index`` of the batch, whose exposure is handed to the writer."""
        if not (np.isfinite(scores.logits).all() and np.isfinite(scores.tasks).all()):
            raise NonFiniteScore(f"request {one.request_id}: the model {show(artifact.version)} gave NaN or "
                                 "infinity; no score is made up for it. Check its weights and the request's numeric "
                                 "features")
        order, fit = self._diverse(one, scores.order())
        returned = fit if one.limit is None else min(one.limit, fit)
        pointer = Pointer(one.user_id, one.as_of, one.versions[0])
        if self._writer is not None:
            history = batch.request["history"]
            self._writer.submit(Exposure(
                one.request_id, *pointer, one.versions[1], one.context, one.items, scores.ranked_by, scores.tasks,
                order, returned, artifact.version,
                int(batch.request["history_checksum"][index]) & 0xFFFF_FFFF_FFFF_FFFF, int(history.lengths[index]),
                0 if history.status is None else int(history.status[index]),
                path_name(self._item_side.way(artifact)), "cpu", one.now,
                Membership(batch.request_id[0], index, batch.requests, batch.candidates), position, one.stage,
                one.part_of))
        best = order[:returned]
        results = list(map(ScoredItem._make, zip(one.items[best].tolist(), scores.ranked_by[best].tolist(),
                                                 strict=True)))
        return RankResult(one.request_id, artifact.version, pointer, results, {},
                          {"in": one.given, "scored": len(one.items), "out": returned})

    def _diverse(self, one: _Checked, order: np.ndarray) -> tuple[np.ndarray, int]:
        """``order`` with what there is too much of at its end, and how many are not."""
        diversity = one.filters.diversity
        if diversity is None or not len(order):
            return order, len(order)
        kept = capped(self._values(one, one.items[order], one.versions[1]), diversity.most)
        return np.concatenate([order[kept], order[~kept]]), int(kept.sum())

    def _values(self, one: _Checked, ids: np.ndarray, version: int) -> np.ndarray:
        """What ``ids`` are told apart by, for diversity, at this version of the catalogue."""
        assert one.filters.diversity is not None and self.catalogue is not None
        return column_values(self.catalogue, ids, one.filters.diversity.column, one.as_of, version)

    def _write(self, exposures: Sequence[Exposure]) -> list[None]:
        self._log.append(exposures_table(exposures, self._schema))
        return [None] * len(exposures)


@dataclass(frozen=True)
class _Checked:
    """A request that may be scored; ``place`` among those that came with it. ``versions``: of the store and of the
    catalogue. ``given``: candidates before filters."""

    place: int
    request_id: str
    user_id: Id
    items: np.ndarray
    context: dict[str, Any]
    limit: int | None
    as_of: int
    versions: tuple[int, int]
    now: int = 0
    filters: Filters = Filters()
    given: int = 0
    stage: Stage = "rank"
    part_of: str | None = None


def _state(artifact: ModelArtifact, request: RequestBatch) -> Any:
    return request_states(artifact, request)[0]


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


def _check_columns(run: Path | str, artifact: ModelArtifact, store: HistoryStore,
                   catalogue: HistoryStore | None) -> None:
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

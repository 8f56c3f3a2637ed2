"""From a catalogue to an answer: retrieve, prerank, rank, over one view of history and catalogue."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.serving.checks import check_as_of, check_context, check_id, show
from semel.serving.errors import InvalidRequest
from semel.serving.filters import check_filters
from semel.serving.requests import (
    MOST_RETRIEVED,
    PRERANKED,
    RETRIEVED,
    Filters,
    RecommendRequest,
    RetrieveRequest,
    StageSize,
)
from semel.serving.results import RankResult, RecommendResult, StageCost

if TYPE_CHECKING:
    from semel.serving.predictor import Predictor, _Checked


def retrieve(predictor: Predictor, request: RetrieveRequest) -> RankResult:
    """``Predictor.retrieve``."""
    started = time.perf_counter()
    predictor._look()
    one = _checked(predictor, request)
    return _retrieve(predictor.retrieval, one, request.context, request.limit,
                     check_budget(request.budget_ms, "budget_ms"), started)[0]


def recommend(predictor: Predictor, request: RecommendRequest) -> RecommendResult:
    """``Predictor.recommend``."""
    started = time.perf_counter()
    predictor._look()
    one = _checked(predictor, request)
    for name in ("retrieve", "prerank", "rank"):
        check_size(getattr(request, name), name)
    if request.prerank is not None and predictor.preranker is None:
        raise InvalidRequest("prerank", "there is no model for this stage here; serve one (semel serve RUN --prerank "
                                        "RUN), or leave it out")
    if request.rank is not None and request.rank.candidates is not None:
        raise InvalidRequest("rank.candidates", "the last stage gives as many as limit says; set limit")
    check_context(predictor.artifact.features, request.context)  # before anything is computed or logged
    size = request.retrieve or StageSize()
    diversity, among_all = one.filters.diversity, replace(one.filters, diversity=None)
    part = replace(one, filters=among_all, part_of=one.request_id)
    begun = time.perf_counter()
    found, catalogue_version = _retrieve(predictor.retrieval, part, request.context, size.candidates or RETRIEVED,
                                         _seconds(size), begun)
    stages = [_cost("retrieve", found, found.counts["in"] - found.counts["scored"])]
    # What is excluded is gone, and all stages see the catalogue that was searched.
    part = replace(part, filters=Filters(), versions=(part.versions[0], catalogue_version))
    if predictor.preranker is not None:
        size = request.prerank or StageSize()
        found, cut = _narrow(predictor.preranker, replace(part, stage="prerank", limit=size.candidates or PRERANKED),
                             request.context, found, size)
        stages.append(_cost("prerank", found, cut))
    last = replace(part, stage="rank", limit=request.limit, part_of=None, filters=Filters(diversity=diversity))
    found, cut = _narrow(predictor, last, request.context, found, request.rank or StageSize())
    stages.append(_cost("rank", found, cut))
    timings = {stage.stage: stage.timings_ms["total"] for stage in stages}
    timings["total"] = round(1e3 * (time.perf_counter() - started), 3)
    return RecommendResult(one.request_id, found.model_version, found.pointer, found.results, stages, timings)


def check_budget(budget_ms: Any, field: str) -> float | None:
    """A stage's time in seconds. Raises InvalidRequest."""
    if budget_ms is None:
        return None
    if isinstance(budget_ms, bool) or not isinstance(budget_ms, (int, float, np.number)) or not budget_ms > 0 \
            or not math.isfinite(budget_ms):
        raise InvalidRequest(field, f"must be a number of milliseconds above 0, got {show(budget_ms)}")
    return float(budget_ms) / 1e3


def check_size(size: Any, field: str) -> None:
    """Raises InvalidRequest for numbers that are none, or too large."""
    if size is None:
        return
    if not isinstance(size, StageSize):
        raise InvalidRequest(field, f"must be a StageSize, got {show(size)}")
    check_budget(size.budget_ms, f"{field}.budget_ms")
    if size.candidates is not None:
        _check_count(size.candidates, f"{field}.candidates")


def _check_count(count: Any, field: str) -> int:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 1 <= count <= MOST_RETRIEVED:
        raise InvalidRequest(field, f"must be an integer from 1 to {MOST_RETRIEVED:,}, got {show(count)}")
    return int(count)


def _seconds(size: StageSize) -> float | None:
    return None if size.budget_ms is None else size.budget_ms / 1e3


def _checked(predictor: Predictor, request: RetrieveRequest | RecommendRequest) -> _Checked:
    """A request without candidates yet, which reads as of now."""
    from semel.serving.predictor import _Checked

    user_id = check_id(request.user_id, "user_id", predictor._string_users)
    _check_count(request.limit, "limit")
    filters = check_filters(request.filters, predictor._string_items, predictor.catalogue)
    now = predictor.clock.now()
    nothing = np.empty(0, object if predictor._string_items else np.int64)
    return _Checked(0, uuid.uuid4().hex, user_id, nothing, {}, None, check_as_of(request.as_of, now),
                    predictor._versions(), now, filters, 0, "retrieve")


def _retrieve(by: Predictor, one: _Checked, context: Any, limit: int, seconds: float | None,
              started: float) -> tuple[RankResult, int]:
    """The best of the catalogue by the model of ``by``, scored once more as one batch: the exposure's scores are then
    those of a batch that can be put together again. Also the version of the catalogue that was searched."""
    import torch

    artifact = by._artifact
    scan = by._scan(artifact)
    if one.part_of is not None:
        one = replace(one, request_id=f"{one.part_of}/{one.stage}")
    one = replace(one, context=check_context(artifact.features, context), limit=limit)
    batch, history_s = by._materialize([one], artifact)
    excluded = by._excluded(one, artifact)
    ready = time.perf_counter()
    states = by._states(batch, artifact)
    diversity = one.filters.diversity
    encoded = time.perf_counter()
    with by._item_side.rows(artifact) as (rows, position):
        found = scan.find(batch, states, one.as_of, limit, excluded, rows,
                          None if diversity is None else partial(by._values, one),
                          0 if diversity is None else diversity.most, None if seconds is None else started + seconds)
        scanned = time.perf_counter()
        batch = rows(replace(batch, candidate=scan.features(found.ids, one.as_of, found.version),
                             candidate_offsets=torch.tensor([0, len(found.ids)]), label={}, label_mask={}),
                     found.ids, found.version)
    final = replace(one, items=found.ids, given=found.items, filters=Filters(),
                    versions=(one.versions[0], found.version))
    gathered = time.perf_counter()
    scores = by._score(batch, artifact, states)
    scored = time.perf_counter()
    result = by._answer(final, 0, batch, scores, artifact, position)
    result.counts["scored"] = found.scanned
    ended = time.perf_counter()
    by.paces["retrieve"].observe(found.scanned, ended - started)
    result.timings_ms.update({name: round(1e3 * value, 3) for name, value in {
        "history": history_s, "features": ready - started - history_s + gathered - scanned, "scan": scanned - encoded,
        "model": encoded - ready + scored - gathered, "total": ended - started}.items()})
    return result, found.version


def _narrow(by: Predictor, one: _Checked, context: Any, before: RankResult, size: StageSize) -> tuple[RankResult, int]:
    """The best of what the stage before gave, and how many of them there was no time for: the last ones."""
    started = time.perf_counter()
    artifact = by._artifact
    seconds = _seconds(size)
    fit = None if seconds is None else by.paces[one.stage].most(seconds)
    given = [item.item_id for item in before.results]
    items = np.empty(len(given[:fit]), one.items.dtype)
    items[:] = given[:fit]
    one = replace(one, items=items, given=len(given), context=check_context(artifact.features, context),
                  request_id=one.request_id if one.part_of is None else f"{one.part_of}/{one.stage}")
    [result] = by._score_together([one], artifact, started)
    if isinstance(result, Exception):
        raise result
    return result, len(given) - len(items)


def _cost(stage: str, result: RankResult, cut: int) -> StageCost:
    return StageCost(stage, result.model_version, result.counts, result.timings_ms, cut)

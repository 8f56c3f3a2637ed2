"""Request-oriented reallocation (ROCS, arXiv 2607.27744, section 3.1): spend on the request what isolation saves.

An isolated model as wide as the one without sides costs less per candidate, for its request side is computed once for
all of them. ``widen_request`` makes that side wider, by one ratio in all of its layers, until N candidates a request
cost the same again; ``widen_candidate`` may give candidates a part of it first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import Jagged, JaggedTable, RequestBatch
from semel.features import Feature, FeatureSpec
from semel.models.artifact import make_model
from semel.models.config import ModelConfig
from semel.models.embeddings import ITEM
from semel.models.fields import FieldRanker, IsolatedRanker
from semel.models.flops import Cost, cost_of
from semel.models.vocabulary import Scale, Vocabulary

WIDEST = 256.0
"""No request side is made wider than this."""


def cost(config: ModelConfig, features: FeatureSpec, history: int | None = None) -> Cost:
    """What the model of this configuration costs for a history of ``history`` events (``features.history_last`` if
    None). It does not depend on data: tables of one row stand in for the real ones. A model without sides is counted
    as its paper has it, every candidate with all fields, whatever of it could be computed once per request."""
    length = (features.history_last or 0) if history is None else history
    with torch.random.fork_rng(devices=[]):
        model = make_model(config, features, _encoders(features)).eval()
    run: Any = model
    if isinstance(model, FieldRanker) and not isinstance(model, IsolatedRanker):
        run = _mixed(model)
    return cost_of(run, _batch(features, length))


def widen_request(isolated: ModelConfig, plain: ModelConfig, features: FeatureSpec, *, candidates: int = 100,
                  history: int | None = None) -> ModelConfig:
    """``isolated`` with the largest ``request_width``, within a hundredth, whose amortized cost at ``candidates`` a
    request is at most that of ``plain``. Raises ValueError if it costs more as it is."""
    return _widest(isolated, "request_width", plain, features, 1.0, candidates, history)


def widen_candidate(isolated: ModelConfig, plain: ModelConfig, features: FeatureSpec, *, share: float = 0.5,
                    candidates: int = 100, history: int | None = None) -> ModelConfig:
    """``isolated`` with the largest ``candidate_width`` whose amortized cost is at most ``share`` of that of ``plain``;
    the rest is for ``widen_request`` to spend. Candidate units are few in an isolated model as wide as the plain one,
    whose every unit is a candidate's. Raises ValueError if it costs more as it is."""
    return _widest(isolated, "candidate_width", plain, features, share, candidates, history)


def _widest(isolated: ModelConfig, name: str, plain: ModelConfig, features: FeatureSpec, share: float, candidates: int,
            history: int | None) -> ModelConfig:
    budget = share * cost(plain, features, history).amortized(candidates)

    def wide(width: float) -> ModelConfig:
        return replace(isolated, **{name: width})  # type: ignore[arg-type]

    def affordable(width: float) -> bool:
        return cost(wide(width), features, history).amortized(candidates) <= budget

    low = getattr(isolated, name)
    if not affordable(low):
        raise ValueError(f"with {candidates} candidates a request a {isolated.kind} model of {name} {low} costs more "
                         f"than {share:.0%} of the {plain.kind} model already; make it smaller")
    high = low
    while affordable(high) and high < WIDEST:
        low, high = high, 2 * high
    while high - low > 0.01 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return wide(low)


def _mixed(model: FieldRanker) -> Callable[[RequestBatch], Tensor]:
    return lambda batch: model.mixed(model.all_fields(batch))


def _encoders(features: FeatureSpec) -> dict[str, nn.Module]:
    every = (*features.history, *features.request, *features.candidate)
    made: dict[str, nn.Module] = {feature.name: Scale() if feature.kind == "numeric" else Vocabulary(torch.arange(1))
                                  for feature in every}
    return {**made, features.item: Vocabulary(torch.arange(1))}


def _batch(features: FeatureSpec, history: int) -> RequestBatch:
    """One request with one candidate."""

    def column(feature: Feature, n: int) -> Any:
        values = torch.zeros(n, dtype=torch.float32 if feature.kind == "numeric" else torch.int64)
        return Jagged(values, torch.arange(n + 1)) if feature.kind == "multi" else values

    events = {"event_time": torch.arange(history), **{f.name: column(f, history) for f in features.history}}
    request = {"as_of": torch.full((1,), history), "history": JaggedTable(events, torch.tensor([0, history])),
               **{f.name: column(f, 1) for f in features.request}}
    candidate = {f.name: column(f, 1) for f in (Feature(ITEM), *features.candidate)}
    return RequestBatch(torch.arange(1), request, candidate, torch.tensor([0, 1]))

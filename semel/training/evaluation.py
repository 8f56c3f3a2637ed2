"""How good a model is: on the labels of its test requests, and ranking the whole catalogue; with intervals by user.

Three steps, each usable alone: ``predict`` turns a model and batches into arrays, ``judge`` turns arrays into figures,
``rank_catalogue`` and ``rank_next`` give the ranks of targets among all items. ``evaluate(run)`` does all of them.
``docs/metrics.md`` explains the figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semel import metrics
from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows, offsets_of
from semel.examples import RequestLoader, SequenceSet, history_tensors, leave_one_out, materialize, open_examples
from semel.features import FeatureSpec, Task, stable_id
from semel.history import HistoryStore, Projection
from semel.metrics import Interval
from semel.models import load_model
from semel.training.run import Run
from semel.training.sequences import last_events

DAY_US = 86_400_000_000
HISTORY_LENGTHS = (0, 1, 10, 50, 200)
"""Where buckets of the history's length begin."""
ITEM_AGES = (0, DAY_US, 7 * DAY_US, 30 * DAY_US, 365 * DAY_US)
"""Where buckets of an item's age begin: microseconds since its first event; below 0: no event yet."""
KS = (10, 50, 200)

OnProgress = Callable[[str, int, int], None]
"""Called as ``on_progress(what, done, total)``."""


@dataclass(frozen=True)
class Predictions:
    """One entry a candidate: ``user``, ``item`` (stable ids), ``as_of``, ``history_length``, all [C] int64;
    ``output`` [C, tasks] logits or values; ``label`` and ``mask`` by task [C]."""

    user: np.ndarray
    item: np.ndarray
    as_of: np.ndarray
    history_length: np.ndarray
    output: np.ndarray
    label: dict[str, np.ndarray]
    mask: dict[str, np.ndarray]


@dataclass(frozen=True)
class Slice:
    """Figures of some of the data. ``name``: "all", or the bucket; ``rows``: labelled candidates or requests."""

    name: str
    rows: int
    users: int
    figures: dict[str, Interval]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "rows": self.rows, "users": self.users,
                **{name: interval.to_json() for name, interval in self.figures.items()}}


@dataclass(frozen=True)
class Judgement:
    """``overall``, by history length and by item age; ``base_rate`` and ``reliability`` (see ``metrics.Calibration``)
    for binary tasks."""

    kind: str
    overall: Slice
    by_history_length: tuple[Slice, ...]
    by_item_age: tuple[Slice, ...]
    base_rate: float | None = None
    reliability: tuple[dict[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.overall.to_json(), "base_rate": self.base_rate,
                "reliability": list(self.reliability),
                "by_history_length": [part.to_json() for part in self.by_history_length],
                "by_item_age": [part.to_json() for part in self.by_item_age]}


@dataclass(frozen=True)
class Evaluation:
    """``tasks``: by task name (none for a next-item model). ``catalogue``: HR, NDCG and MRR among all ``items`` items,
    None where no request had a target. ``protocol``: in words, what was ranked and against what."""

    model_version: str
    kind: str
    split: str
    requests: int
    items: int
    protocol: str
    tasks: dict[str, Judgement]
    catalogue: Judgement | None
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"format_version": 1, "model_version": self.model_version, "kind": self.kind, "split": self.split,
                "requests": self.requests, "items": self.items, "protocol": self.protocol,
                "tasks": {name: task.to_json() for name, task in self.tasks.items()},
                "catalogue": None if self.catalogue is None else self.catalogue.to_json(),
                "seconds": self.seconds, **self.extra}

    def save(self, path: str | Path) -> None:
        """As JSON, for instance ``RUN/evaluation.json``."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False))


def evaluate(run: Run | str | Path, store: str | Path | None = None, *, split: str = "test",
             ranking_requests: int = 200, samples: int = 1000, seed: int = 0,
             on_progress: OnProgress | None = None) -> Evaluation:
    """Judge the best model of a run on ``split`` ("test" or "validation") of the store that it was trained on.

    Ranking models: every labelled candidate, and the catalogue ranked for ``ranking_requests`` requests drawn by
    ``seed`` among those with a positive label of the first task. Next-item models: leave-one-out, all users.
    ``samples``: bootstrap replicates. Raises FileNotFoundError for a missing run, store or example set, ValueError for
    an empty split.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    if split not in ("test", "validation"):
        raise ValueError(f"split {split!r} is none of test, validation")
    artifact = load_model(run.path)
    path = Path(store if store is not None else run.recipe.store)
    events = HistoryStore.open(str(path))
    folder = path / "catalogue"
    catalogue = HistoryStore.open(str(folder)) if folder.exists() else None
    options: dict[str, Any] = {"samples": samples, "seed": seed, "on_progress": on_progress}
    try:
        if artifact.kind == "next_item":
            if split == "validation" and not run.recipe.examples.validate:
                raise ValueError(f"{run.path} was trained on the validation events (examples.validate is false); only "
                                 f"the test split judges it")
            columns = [feature.name for feature in artifact.features.history]
            sequences = leave_one_out(events, columns, holdout=2, min_events=run.recipe.examples.min_events)
            return evaluate_next_item(artifact.model, sequences, artifact.features, split=split,
                                      version=artifact.version, **options)
        rows = open_examples(path, run.recipe.examples.name).rows(split)
        return evaluate_ranking(artifact.model, rows, events, catalogue, artifact.features, split=split,
                                version=artifact.version, ranking_requests=ranking_requests, **options)
    finally:
        events.close()
        if catalogue is not None:
            catalogue.close()


def evaluate_ranking(model: Any, rows: RequestRows, store: HistoryStore, catalogue: HistoryStore | None,
                     features: FeatureSpec, *, split: str = "test", version: str = "", ranking_requests: int = 200,
                     samples: int = 1000, seed: int = 0, on_progress: OnProgress | None = None) -> Evaluation:
    """Judge anything that maps a ``RequestBatch`` to logits [C, tasks], baselines included (one column may be fewer
    than the tasks: those beyond are left out). See ``evaluate``."""
    started = time.perf_counter()
    if not len(rows):
        raise ValueError(f"the {split} split has no requests to evaluate on")
    lengths, _ = store.lengths(rows.pointers, Projection(columns=("event_time",)))
    loader = RequestLoader(rows, store, features=features, catalogue=catalogue, batch_requests=128, shuffle=False)
    predictions = predict(model, loader, features.tasks, np.asarray(lengths), on_progress)
    known, first = first_events(store, features.item)
    age = item_age(predictions.item, predictions.as_of, known, first)
    tasks = {task.name: judge(predictions, column, task, age, samples=samples, seed=seed)
             for column, task in enumerate(features.tasks[: predictions.output.shape[1]])
             if predictions.mask[task.name].any()}
    items = catalogue.keys() if catalogue is not None else np.unique(rows.candidates.values)
    chosen = _some_with_target(rows, features.tasks[0].name, ranking_requests, seed)
    ranked = None
    if len(chosen):
        some = rows.select(chosen)
        ranks, request, target = rank_catalogue(model, some, items, store, catalogue, features,
                                                on_progress=on_progress)
        first_target = np.unique(request, return_index=True)[1]  # a request's age bucket is its first target's
        age = item_age(stable_id(target)[first_target], some.pointers.as_of, known, first)
        ranked = _judge_ranks(stable_id(some.pointers.user_id), ranks, request, np.asarray(lengths)[chosen], age,
                              samples, seed)
    protocol = (f"time split; labels: all {len(rows)} requests; catalogue: {len(items)} items ranked for {len(chosen)} "
                f"requests drawn among those with a positive label, targets: their positive candidates, nothing "
                f"removed, ties by item order")
    return Evaluation(version, "ranking", split, len(rows), len(items), protocol, tasks, ranked,
                      time.perf_counter() - started)


def evaluate_next_item(model: Any, sequences: SequenceSet, features: FeatureSpec, *, split: str = "test",
                       version: str = "", item_ids: Any = None, samples: int = 1000, seed: int = 0,
                       on_progress: OnProgress | None = None) -> Evaluation:
    """Leave-one-out: each user's last event (validation: the one before) among ``item_ids`` (stable ids; None: the
    items of the training events), items already met not removed."""
    started = time.perf_counter()
    before, target = sequences.test() if split == "test" else sequences.validation()
    if not len(before):
        raise ValueError("no user has enough events for leave-one-out evaluation")
    history = history_tensors(before, features)
    wanted = history_tensors(target, features)
    if item_ids is None:
        item_ids = torch.unique(history_tensors(sequences.train(), features).columns[features.item]).numpy()
    item_ids = np.asarray(item_ids)
    item, as_of = wanted.columns[features.item].numpy(), wanted.columns["event_time"].numpy()
    users = stable_id(sequences.user_id[sequences.evaluated])
    ranks = rank_next(model, history, item, item_ids, users, as_of, last=features.history_last,
                      on_progress=on_progress)
    whole = history_tensors(sequences.histories, features)
    known, first = _first_of(whole.columns[features.item].numpy(), whole.columns["event_time"].numpy())
    judged = _judge_ranks(users, ranks, np.arange(len(ranks)), np.asarray(before.lengths),
                          item_age(item, as_of, known, first), samples, seed)
    held_out = "last event" if split == "test" else "event before the last"
    protocol = (f"leave-one-out ({held_out} of {len(ranks)} users), all {len(item_ids)} items ranked, seen ones not "
                f"removed, ties by item order, a target that training never saw is a miss")
    return Evaluation(version, "next_item", split, len(ranks), len(item_ids), protocol, {}, judged,
                      time.perf_counter() - started)


# From models to arrays


def predict(model: Any, batches: Iterable[RequestBatch], tasks: Sequence[Task],
            history_length: np.ndarray | None = None, on_progress: OnProgress | None = None) -> Predictions:
    """Run ``model`` over ``batches``. ``history_length`` [requests in all]: the true lengths, None: as read."""
    parts: list[tuple[np.ndarray, ...]] = []
    total = len(batches) if isinstance(batches, Sized) else 0
    done = 0
    with _inference(model):
        for step, batch in enumerate(batches):
            request = batch.candidate_to_request().numpy()
            lengths = batch.request["history"].lengths.numpy() if history_length is None \
                else history_length[done : done + batch.requests]
            done += batch.requests
            output = model(batch).float().numpy()
            parts.append((batch.request["user_id"].numpy()[request], batch.candidate["item_id"].numpy(),
                          batch.request["as_of"].numpy()[request], lengths[request],
                          output if output.ndim == 2 else output[:, None],
                          *(batch.label[task.name].numpy() for task in tasks),
                          *(batch.label_mask[task.name].numpy() for task in tasks)))
            if on_progress is not None:
                on_progress("scoring requests", step + 1, total)
    if not parts:
        raise ValueError("no batches to evaluate on")
    user, item, as_of, length, output, *rest = (np.concatenate(column) for column in zip(*parts, strict=True))
    names = [task.name for task in tasks]
    return Predictions(user, item, as_of, length, output, dict(zip(names, rest[: len(names)], strict=True)),
                       dict(zip(names, rest[len(names) :], strict=True)))


def rank_catalogue(model: Any, rows: RequestRows, item_ids: np.ndarray, store: HistoryStore,
                   catalogue: HistoryStore | None, features: FeatureSpec, *, candidates_at_once: int = 16_384,
                   on_progress: OnProgress | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The 0-based ranks among ``item_ids`` (raw ids [I]) of each request's positive candidates of the first task:
    ranks [T], their request [T], their item [T] (raw). A target outside ``item_ids`` has rank I, a miss.

    A model with ``score_items`` is asked for all items at once; any other scores them as candidates, with their
    catalogue features as of the request, ``candidates_at_once`` at a time (at least one request).
    """
    task = features.tasks[0].name
    positive = _positive(rows, task)
    request = np.repeat(np.arange(len(rows)), rows.candidates.lengths)[positive]
    target = rows.candidates.values[positive]
    ids = stable_id(item_ids)
    ranks = np.empty(len(target), dtype=np.int64)
    step = max(1, candidates_at_once // max(1, len(ids)))
    with _inference(model):
        for start in range(0, len(rows), step):
            some = np.arange(start, min(start + step, len(rows)))
            scores = _catalogue_scores(model, rows.select(some), item_ids, ids, store, catalogue, features)
            own = np.flatnonzero((request >= start) & (request < start + step))
            ranks[own] = _ranks(scores[request[own] - start], stable_id(target[own]), ids)
            if on_progress is not None:
                on_progress("ranking the catalogue", int(some[-1]) + 1, len(rows))
    return ranks, request, target


def rank_next(model: Any, history: JaggedTable, target: np.ndarray, item_ids: np.ndarray, user: np.ndarray,
              as_of: np.ndarray, *, last: int, users_at_once: int = 256,
              on_progress: OnProgress | None = None) -> np.ndarray:
    """[U] 0-based ranks of ``target`` [U] among ``item_ids`` [I] (all stable ids) after the ``last`` events of each
    history (torch). A target outside ``item_ids`` has rank I, a miss."""
    ranks = np.empty(len(target), dtype=np.int64)
    ids = torch.from_numpy(np.ascontiguousarray(item_ids))
    with _inference(model):
        for start in range(0, len(target), users_at_once):
            some = np.arange(start, min(start + users_at_once, len(target)))
            table = last_events(history, some, last)
            nothing = torch.zeros(len(some) + 1, dtype=torch.int64)
            batch = RequestBatch(some.astype(str), {
                "history": table, "user_id": torch.from_numpy(user[some]), "as_of": torch.from_numpy(as_of[some]),
            }, {"item_id": nothing[:0]}, nothing)
            ranks[some] = _ranks(model.score_items(batch, ids).float().numpy(), target[some], item_ids)
            if on_progress is not None:
                on_progress("ranking the next item", int(some[-1]) + 1, len(target))
    return ranks


def first_events(store: HistoryStore, item: str = "item_id", users_at_once: int = 16_384) -> tuple[np.ndarray, ...]:
    """Of every item in a store: sorted stable ids [I] and the time of its first event [I] (microseconds)."""
    users, parts = store.keys(), []
    for start in range(0, len(users), users_at_once):
        some = users[start : start + users_at_once]
        table = store.read(Pointers(some, np.array(np.iinfo(np.int64).max), np.array(store.version)),
                           Projection(columns=("event_time", item)))
        values = table.strings(item) if item in (table.dictionaries or {}) else table.columns[item]
        parts.append(_first_of(stable_id(values), table.columns["event_time"]))
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return _first_of(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def item_age(item: np.ndarray, as_of: np.ndarray, known: np.ndarray, first: np.ndarray) -> np.ndarray:
    """[N] microseconds from an item's first event (of ``known`` items, sorted) to ``as_of``; -1 where it had none."""
    if not len(known):
        return np.full(len(item), -1)
    place = np.minimum(np.searchsorted(known, item), len(known) - 1)
    age = np.where(known[place] == item, as_of - first[place], -1)
    return np.maximum(age, -1)


# From arrays to figures


def judge(predictions: Predictions, column: int, task: Task, age: np.ndarray, *, samples: int = 1000,
          seed: int = 0) -> Judgement:
    """Figures of one task on its labelled candidates. ``age`` [C]: see ``item_age``."""
    keep = predictions.mask[task.name].astype(bool)
    label, output = predictions.label[task.name][keep], predictions.output[keep, column].astype(np.float64)
    user = predictions.user[keep]
    figures = binary_figures if task.kind == "binary" else regression_figures

    def part(name: str, rows: np.ndarray) -> Slice:
        return Slice(name, len(rows), len(np.unique(user[rows])),
                     figures(user[rows], label[rows], output[rows], samples=samples, seed=seed))

    everything = part("all", np.arange(len(label)))
    by_length, by_age = _buckets(predictions.history_length[keep], age[keep], part)
    if task.kind != "binary":
        return Judgement(task.kind, everything, by_length, by_age)
    calibration = metrics.Calibration().update_logits(label, output)
    return Judgement(task.kind, everything, by_length, by_age, float(label.mean()), tuple(calibration.table()))


def binary_figures(user: Any, label: Any, logit: Any, *, samples: int = 1000, seed: int = 0) -> dict[str, Interval]:
    """``ne``, ``log_loss``, ``auc``, ``user_auc``, ``calibration`` of [N] rows, intervals by user."""
    loss = metrics.log_losses_of_logits(label, logit)
    sums = metrics.cluster_sums(user, loss, np.ones(len(loss)), label, metrics.sigmoid(logit))
    options: dict[str, Any] = {"samples": samples, "seed": seed}
    _, value, rows = metrics.auc_by_group(user, label, logit)
    return {
        "ne": metrics.bootstrap(sums, _ne, **options),
        "log_loss": metrics.bootstrap(sums, _mean, **options),
        "auc": metrics.bootstrap_auc(user, label, logit, samples=min(samples, 200), seed=seed),
        "user_auc": metrics.bootstrap(np.stack([value * rows, rows], axis=1),
                                      _mean, **options),
        "calibration": metrics.bootstrap(sums, lambda s: _quotient(s[..., 3], s[..., 2]), **options),
    }


def regression_figures(user: Any, label: Any, value: Any, *, samples: int = 1000, seed: int = 0) -> dict[str, Interval]:
    """``rmse`` and ``mae`` of [N] rows, intervals by user."""
    gap = np.asarray(value, np.float64) - np.asarray(label, np.float64)
    sums = metrics.cluster_sums(user, gap * gap, np.abs(gap), np.ones(len(gap)))
    return {
        "rmse": metrics.bootstrap(sums, lambda s: np.sqrt(_quotient(s[..., 0], s[..., 2])), samples=samples, seed=seed),
        "mae": metrics.bootstrap(sums, lambda s: _quotient(s[..., 1], s[..., 2]), samples=samples, seed=seed),
    }


def ranking_figures(user: Any, values: dict[str, np.ndarray], *, samples: int = 1000,
                    seed: int = 0) -> dict[str, Interval]:
    """Means of per-request ``metrics.ranking_values``, intervals by user ([R])."""
    one = np.ones(len(np.asarray(user)))
    return {name: metrics.bootstrap(metrics.cluster_sums(user, value, one), _mean, samples=samples, seed=seed)
            for name, value in values.items()}


def compare(a: Predictions, b: Predictions, task: str, *, column_a: int = 0, column_b: int = 0, samples: int = 1000,
            seed: int = 0) -> dict[str, Interval]:
    """Paired differences a - b of two models on the same requests: ``ne`` (below 0: a is better) and ``user_auc``
    (above 0: a is better)."""
    keep = a.mask[task].astype(bool)
    if not (np.array_equal(a.user, b.user) and np.array_equal(a.item, b.item)):
        raise ValueError("a paired comparison needs predictions of the same candidates in the same order")
    user, label, sums, grouped = a.user[keep], a.label[task][keep], [], []
    for output in (a.output[keep, column_a], b.output[keep, column_b]):
        loss = metrics.log_losses_of_logits(label, output)
        sums.append(metrics.cluster_sums(user, loss, np.ones(len(loss)), label))
        _, value, rows = metrics.auc_by_group(user, label, output)
        grouped.append(np.stack([value * rows, rows], axis=1))
    return {"ne": metrics.bootstrap_difference(sums[0], sums[1], _ne, samples=samples, seed=seed),
            "user_auc": metrics.bootstrap_difference(grouped[0], grouped[1], _mean, samples=samples, seed=seed)}


def _judge_ranks(user: np.ndarray, ranks: np.ndarray, request: np.ndarray, history_length: np.ndarray, age: np.ndarray,
                 samples: int, seed: int) -> Judgement:
    """``user``, ``history_length``, ``age``: [R]; ``ranks``, ``request``: [T]."""
    values = metrics.ranking_values(ranks, request, KS)

    def part(name: str, rows: np.ndarray) -> Slice:
        figures = ranking_figures(user[rows], {metric: value[rows] for metric, value in values.items()},
                                  samples=samples, seed=seed)
        return Slice(name, len(rows), len(np.unique(user[rows])), figures)

    return Judgement("ranking", part("all", np.arange(len(user))), *_buckets(history_length, age, part))


def _buckets(history_length: np.ndarray, age: np.ndarray,
             part: Callable[[str, np.ndarray], Slice]) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """Slices of the buckets that hold anything."""
    length_names = [str(low) if high == low + 1 else f"{low} to {high - 1}"
                    for low, high in pairwise(HISTORY_LENGTHS)]
    length_names.append(f"{HISTORY_LENGTHS[-1]} or more")
    age_names = ["no event yet", "under a day", "1 to 7 days", "7 to 30 days", "30 days to a year", "over a year"]
    found = []
    for values, edges, names in ((history_length, HISTORY_LENGTHS[1:], length_names), (age, ITEM_AGES, age_names)):
        bucket = np.searchsorted(edges, values, side="right")
        found.append(tuple(part(name, np.flatnonzero(bucket == number)) for number, name in enumerate(names)
                           if (bucket == number).any()))
    return found[0], found[1]


def _catalogue_scores(model: Any, rows: RequestRows, item_ids: np.ndarray, ids: np.ndarray, store: HistoryStore,
                      catalogue: HistoryStore | None, features: FeatureSpec) -> np.ndarray:
    """[R, I]."""
    count = len(rows)
    if hasattr(model, "score_items"):
        nothing = Jagged(rows.candidates.values[:0], np.zeros(count + 1, np.int64))
        batch = materialize(_with_candidates(rows, nothing), store, catalogue, features)
        return model.score_items(batch, torch.from_numpy(ids)).float().numpy()
    everything = Jagged(np.tile(item_ids, count), offsets_of(np.full(count, len(item_ids))))
    logits = model(materialize(_with_candidates(rows, everything), store, catalogue, features))
    return (logits if logits.ndim == 1 else logits[:, 0]).float().numpy().reshape(count, len(item_ids))


def _with_candidates(rows: RequestRows, candidates: Jagged) -> RequestRows:
    return RequestRows(rows.request_id, rows.pointers, rows.catalogue_version, rows.context, candidates, {}, {})


def _ranks(scores: np.ndarray, target: np.ndarray, item_ids: np.ndarray) -> np.ndarray:
    """Ranks of targets among ``item_ids`` (any order); I where a target is not among them."""
    order = np.argsort(item_ids, kind="stable")
    if not len(order):
        return np.zeros(len(target), dtype=np.int64)
    place = order[np.minimum(np.searchsorted(item_ids, target, sorter=order), len(order) - 1)]
    ranks = metrics.ranks_of_targets(scores, place)
    return np.where(item_ids[place] == target, ranks, len(item_ids))


def _positive(rows: RequestRows, task: str) -> np.ndarray:
    """[C] bool."""
    return np.asarray(rows.label_mask[task], dtype=bool) & (np.asarray(rows.label[task]) == 1)


def _some_with_target(rows: RequestRows, task: str, most: int, seed: int) -> np.ndarray:
    """Up to ``most`` requests with a positive label, drawn by ``seed``, in order."""
    if task not in rows.label:
        return np.empty(0, dtype=np.int64)
    request = np.repeat(np.arange(len(rows)), rows.candidates.lengths)
    with_target = np.unique(request[_positive(rows, task)])
    if len(with_target) > most:
        with_target = np.sort(np.random.default_rng(seed).choice(with_target, most, replace=False))
    return with_target


def _first_of(item: np.ndarray, event_time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct items, sorted, and the least time of each."""
    order = np.lexsort((event_time, item))
    items, at = np.unique(item[order], return_index=True)
    return items, event_time[order][at]


def _ne(sums: np.ndarray) -> Any:
    return metrics.normalized_entropy(sums[..., 0], sums[..., 1], sums[..., 2])


def _mean(sums: np.ndarray) -> Any:
    """Of sums and counts."""
    return _quotient(sums[..., 0], sums[..., 1])


def _quotient(numerator: Any, denominator: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator) / np.asarray(denominator)


class _inference:
    """No gradients, and a module in eval mode within the block."""

    def __init__(self, model: Any) -> None:
        self.module = model if isinstance(model, torch.nn.Module) else None
        self.mode = torch.inference_mode()

    def __enter__(self) -> None:
        self.was_training = self.module is not None and self.module.training
        if self.module is not None:
            self.module.eval()
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        if self.module is not None and self.was_training:
            self.module.train()

"""Skew: what serving lost of what training knew, on the same examples, and why.

``served`` is what a request got, ``trained`` what the model that follows gave for the same request before it learned
from it (prequential). Between the two lies ``replayed``: the served request computed again from all that its exposure
names. served - replayed must be 0 (promise 8); replayed - trained is staleness: the weights and the rows that served
were those of an earlier moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.metrics import NormalizedEntropy
from semel.serving.replays import OUTCOME_WINDOW_US, Again, score_again
from semel.serving.scoring import score

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch
    from semel.features import FeatureSpec, Task
    from semel.models import ModelArtifact

SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6
ROW_AGES = {"under 1 s": SECOND, "1 to 10 s": 10 * SECOND, "10 s to 1 min": MINUTE, "1 to 10 min": 10 * MINUTE}
ITEM_AGES = {"under 5 min": 5 * MINUTE, "5 min to 1 h": HOUR, "1 h to 1 day": DAY}
HISTORIES = {"0": 1, "1 to 9": 10, "10 to 49": 50}
WORST = 10


@dataclass(frozen=True)
class Part:
    """Labelled candidates ``rows`` of some kind. ``trained``, ``replayed``, ``served``: their NE (binary) or RMSE
    (regression); None where it has none. ``skew`` = served - trained = ``inexact`` (served - replayed) + ``staleness``
    (replayed - trained); ``gap`` = skew / trained."""

    name: str
    rows: int
    trained: float | None
    replayed: float | None
    served: float | None

    @property
    def skew(self) -> float | None:
        return _minus(self.served, self.trained)

    @property
    def inexact(self) -> float | None:
        return _minus(self.served, self.replayed)

    @property
    def staleness(self) -> float | None:
        return _minus(self.replayed, self.trained)

    @property
    def gap(self) -> float | None:
        return None if self.skew is None or not self.trained else self.skew / self.trained

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **{name: getattr(self, name) for name in ("skew", "inexact", "staleness", "gap")}}


@dataclass(frozen=True)
class Worst:
    """A request whose served predictions of the first task are far from the trained ones. Mean absolute differences
    over its candidates: ``difference`` served - trained; of that ``inexact`` served - replayed, ``memory`` replayed -
    the same with the tower in place of rows, ``weights`` that - trained. ``differs``: what does, in that order of
    history, features, memory, weights, replay."""

    request_id: str
    difference: float
    inexact: float
    memory: float
    weights: float
    differs: tuple[str, ...]


@dataclass(frozen=True)
class SkewReport:
    """``tasks``: by task, by split ("all", "memory", "row age", "item age", "history length"), its parts.
    ``requests``: served and trained on; ``unmatched``: served and not trained on (yet, or not by this run);
    ``memory_gone``: no longer restorable, left out. ``coverage``: share of candidates with a score, ``found``: with a
    row; ``largest``: |served - replayed| of a prediction, 0 where promise 8 holds."""

    requests: int
    candidates: int
    labelled: int
    unmatched: int
    memory_gone: int
    coverage: float
    found: float
    largest: float
    tasks: dict[str, dict[str, tuple[Part, ...]]]
    worst: tuple[Worst, ...]
    seconds: float

    @property
    def exact(self) -> bool:
        return self.largest == 0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["tasks"] = {task: {split: [part.to_json() for part in parts] for split, parts in splits.items()}
                          for task, splits in self.tasks.items()}
        return {**found, "exact": self.exact}


def skew(run: str | Path, store: str | Path, limit: int | None = None, memory: str | Path | None = None,
         progress: Callable[[int, int], None] | None = None) -> SkewReport:
    """Of the requests that models of ``run`` served over ``store`` and that ``run``, following, has learned from since.

    ``limit``: the last so many; ``memory``: where rows were published, RUN/memory by default. Raises FileNotFoundError
    for a missing run, store, log or predictions, ValueError where no request is in both or the log of the memory does
    not reach back to any.
    """
    started = time.perf_counter()
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    run, folder = Path(run), Path(store)
    for what, path in (("run", run), ("store", folder)):
        if not path.exists():
            raise FileNotFoundError(f"no {what} at {path}")
    from semel.examples import ExposureLog, OutcomeLog, join
    from semel.examples.predictions import read_predictions
    from semel.models import current_version, model_versions

    log = ExposureLog(folder / "exposures").read()
    if not len(log):
        raise FileNotFoundError(f"no exposures under {folder}; rank something first (semel serve, POST /v1/rank)")
    kept = {current_version(run), *(one.version for one in model_versions(run))}
    own = log.filter(pc.is_in(log["model_version"], pa.array(sorted(kept))))
    own = own.take(np.sort(np.unique(own["request_id"].to_numpy(), return_index=True)[1]))
    trained = read_predictions(run / "predictions", own["request_id"].to_pylist())
    both = own.filter(pc.is_in(own["request_id"], trained["request_id"].combine_chunks()))
    if not len(both):
        raise ValueError(f"none of the {len(own)} requests that {run} served was learned from by it; join exposures "
                         "with outcomes (semel.examples.join) and write the rows where it follows")
    exposures = both if limit is None else both.slice(max(0, len(both) - limit))
    looks: dict[str, _Looked] = {}
    found = score_again(run, folder, exposures, memory, progress, _look(looks))
    gone = sum(again.memory_gone for again in found)
    if gone == len(exposures):
        raise ValueError(f"the log of {run}'s item memory no longer reaches back to any of the {gone} exposures; keep "
                         "more of it (recipe memory.keep)")
    exposures = pa.concat_tables([again.exposures for again in found])
    features = found[-1].features
    table = _columns(features, exposures, found, trained, looks, _first_times(folder))
    labels = join(exposures, OutcomeLog(folder / "outcomes").read(), OUTCOME_WINDOW_US, features.tasks,
                  int(np.max(exposures["served_at"].to_numpy())) + OUTCOME_WINDOW_US).rows
    whole = np.isfinite(table.replayed[:, 0])
    tasks, labelled = {}, 0
    for column, task in enumerate(features.tasks):
        mask = np.asarray(labels.label_mask[task.name], bool) & whole & np.isfinite(table.trained[:, column])
        labelled = labelled or int(mask.sum())
        tasks[task.name] = {split: tuple(_parts(task, column, labels.label[task.name], table, mask, groups))
                            for split, groups in table.splits.items()}
    return SkewReport(
        len(exposures) - gone, int(whole.sum()), labelled, len(own) - len(both), gone,
        float(np.isfinite(table.served[:, 0]).mean()), float(table.hit[whole].mean()),
        float(np.abs(table.served - table.replayed)[whole].max(initial=0.0)), tasks,
        tuple(_worst(exposures, table, trained, looks)), time.perf_counter() - started)


@dataclass
class _Looked:
    """What only the batch knew of a request: predictions with the tower in place of rows, [C] each."""

    live: np.ndarray
    hit: np.ndarray
    written: np.ndarray
    features: int


@dataclass
class _Columns:
    """By candidate: ``served``, ``replayed``, ``trained`` [C, tasks]; ``live`` [C] of the first; ``splits``: names of
    parts and which part each candidate is in, -1 for none."""

    served: np.ndarray
    replayed: np.ndarray
    trained: np.ndarray
    live: np.ndarray
    hit: np.ndarray
    offsets: np.ndarray
    splits: dict[str, tuple[list[str], np.ndarray]]


def _look(looks: dict[str, _Looked]) -> Callable[[ModelArtifact, np.ndarray, RequestBatch, Tensor, Tensor], None]:
    from semel.examples.predictions import features_checksums
    from semel.models.early_ranker import HIT, ROW

    def look(artifact: ModelArtifact, members: np.ndarray, batch: RequestBatch, hit: Tensor, written: Tensor) -> None:
        bare = replace(batch, candidate={name: value for name, value in batch.candidate.items()
                                         if name not in (ROW, HIT)})
        live = score(artifact, bare).ranked_by
        checksums, ends = features_checksums(bare), batch.candidate_offsets.tolist()
        for place, name in enumerate(batch.request_id):
            some = slice(*ends[place : place + 2])
            looks[str(name)] = _Looked(live[some], hit[some].numpy(), written[some].numpy(), int(checksums[place]))

    return look


def _columns(features: FeatureSpec, exposures: pa.Table, found: list[Again], trained: pa.Table,
             looks: dict[str, _Looked], first: Callable[[np.ndarray], np.ndarray] | None) -> _Columns:
    from semel.examples.rows import column_to_numpy, list_values
    from semel.features import stable_id

    values, offsets = list_values(exposures["candidates"], "candidates")
    items, count = column_to_numpy(values), len(features.tasks)
    lengths = np.diff(offsets)
    served = exposures["task_scores"].combine_chunks().flatten().to_numpy().reshape(len(items), -1)
    replayed = np.concatenate([again.tasks for again in found])[:, : served.shape[1]]
    learned = np.full((len(items), count), np.nan, np.float32)
    place = {name: row for row, name in enumerate(trained["request_id"].to_pylist())}
    ids = stable_id(items)
    names = exposures["request_id"].to_pylist()
    given, logits = trained["items"].combine_chunks(), trained["logits"].combine_chunks()
    for request, name in enumerate(names):
        row, some = place[name], slice(offsets[request], offsets[request + 1])
        own, output = given[row].values.to_numpy(), logits[row].values.to_numpy().reshape(-1, count)
        order = np.argsort(own, kind="stable")
        at = np.minimum(np.searchsorted(own, ids[some], sorter=order), len(own) - 1)
        learned[some] = np.where((own[order[at]] == ids[some])[:, None], output[order[at]], np.nan)
    nothing = [_Looked(np.full(length, np.nan, np.float32), np.zeros(length, bool), np.zeros(length, np.int64), 0)
               for length in lengths]
    seen = [looks.get(name, nothing[request]) for request, name in enumerate(names)]
    hit, written = (np.concatenate([getattr(one, what) for one in seen]) for what in ("hit", "written"))
    served_at = np.repeat(exposures["served_at"].to_numpy(), lengths)
    splits: dict[str, tuple[list[str], np.ndarray]] = {"all": (["all"], np.zeros(len(items), np.int64))}
    if hit.any():
        splits["memory"] = ["hit", "miss"], np.where(hit, 0, 1)
        splits["row age"] = _bucket(ROW_AGES, "over 10 min", np.where(hit, np.maximum(served_at - written, 0), -1))
    if first is not None:
        born = first(items)
        asked = np.repeat(exposures["as_of"].to_numpy(), lengths)
        ages, part = _bucket(ITEM_AGES, "over a day", np.where(born >= 0, np.maximum(asked - born, 0), -1))
        splits["item age"] = [*ages, "not in the catalogue"], np.where(part < 0, len(ages), part)
    splits["history length"] = _bucket(HISTORIES, "50 or more", np.repeat(exposures["history_length"].to_numpy(),
                                                                           lengths))
    return _Columns(served, replayed, _predicted(learned, features.tasks),
                    np.concatenate([one.live for one in seen]), hit, offsets, splits)


def _predicted(logits: np.ndarray, tasks: tuple[Task, ...]) -> np.ndarray:
    """As ``scoring.score`` makes predictions of outputs, with its own sigmoid."""
    import torch

    out = torch.from_numpy(logits)
    binary = torch.tensor([task.kind == "binary" for task in tasks])
    return torch.where(binary, out.sigmoid(), out).numpy()


def _first_times(store: Path) -> Callable[[np.ndarray], np.ndarray] | None:
    """Items [C] -> when the catalogue first knew each (microseconds), -1 where it does not; None without one."""
    folder = store / "catalogue"
    if not folder.exists():
        return None
    from semel.history import HistoryStore, Pointers, Projection

    def first(items: np.ndarray) -> np.ndarray:
        distinct, where = np.unique(items, return_inverse=True)
        with closing(HistoryStore.open(folder, mode="r")) as catalogue:
            table = catalogue.read(Pointers(distinct, np.array(np.iinfo(np.int64).max), np.array(catalogue.version)),
                                   Projection(columns=("event_time",)))
        times = np.append(table.columns["event_time"], -1)
        return np.where(table.lengths > 0, times[np.minimum(table.offsets[:-1], len(times) - 1)], -1)[where]

    return first


def _bucket(upper: dict[str, int], last: str, values: np.ndarray) -> tuple[list[str], np.ndarray]:
    place = np.searchsorted(list(upper.values()), values, side="right")
    return [*upper, last], np.where(values < 0, -1, place)


def _parts(task: Task, column: int, label: Any, table: _Columns, mask: np.ndarray,
           groups: tuple[list[str], np.ndarray]) -> Iterator[Part]:
    label = np.asarray(label)
    for number, name in enumerate(groups[0]):
        some = mask & (groups[1] == number)
        if some.any():
            yield Part(name, int(some.sum()), *(
                _figure(task, label[some], values[some, column]) for values in (table.trained, table.replayed,
                                                                              table.served)))


def _figure(task: Task, label: np.ndarray, predicted: np.ndarray) -> float | None:
    if task.kind != "binary":
        return float(np.sqrt(np.mean((predicted.astype(np.float64) - label) ** 2)))
    value = NormalizedEntropy().update(label, predicted).ne
    return float(value) if np.isfinite(value) else None


def _worst(exposures: pa.Table, table: _Columns, trained: pa.Table, looks: dict[str, _Looked]) -> Iterator[Worst]:
    row_of = {name: row for row, name in enumerate(trained["request_id"].to_pylist())}
    history, features = (trained[name].to_numpy() for name in ("history_checksum", "features_checksum"))
    names, logged = exposures["request_id"].to_pylist(), exposures["history_checksum"].to_numpy()
    differences = np.full(len(names), np.nan)
    steps = np.abs(np.stack([table.served[:, 0] - table.trained[:, 0], table.served[:, 0] - table.replayed[:, 0],
                             table.replayed[:, 0] - table.live, table.live - table.trained[:, 0]], 1))
    means = np.full((len(names), 4), np.nan)
    for request, name in enumerate(names):
        if name in looks:
            means[request] = steps[table.offsets[request] : table.offsets[request + 1]].mean(0)
    differences = np.where(np.isfinite(means[:, 0]), means[:, 0], -1)
    for request in np.argsort(-differences, kind="stable")[:WORST].tolist():
        if differences[request] <= 0:
            return
        row, one = row_of[names[request]], looks[names[request]]
        total, inexact, memory, weights = means[request].tolist()
        differs = [name for name, does in (
            ("history", logged[request] != history[row]), ("features", one.features != int(features[row])),
            ("memory", memory > 0), ("weights", weights > 0), ("replay", inexact > 0)) if does]
        yield Worst(names[request], total, inexact, memory, weights, tuple(differs))


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b

"""Replay: what was served, computed again from pointers, and compared bit for bit (promise 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.serving.scoring import Way, on_path, score

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch, RequestRows
    from semel.memory import MemoryHistory
    from semel.models import ModelArtifact

OUTCOME_WINDOW_US = 7 * 24 * 3600 * 1_000_000
TOLERANCE = 1e-5
"""Promise 8: of the output's scale, where a batch cannot be put together as it was served."""


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found. Counts are of requests unless they say otherwise.

    ``histories_equal``: the checksum is the logged one; ``histories_erased``: deletion or retention changed what can
    be read, and the read's status says so. ``bit_equal``: every score has the logged bits; ``max_difference``: the
    largest absolute difference of a score; ``max_scaled_difference``: the same over the largest score of its request
    (1 where all are smaller). ``incomplete_batches``: requests scored in another batch shape than logged, because the
    rest of their batch is missing. ``model_version``: the run's latest; ``by_version``: requests by what scored them,
    of the versions that the run keeps; ``other_versions``: exposures of other models, left out; ``memory_gone``:
    exposures whose item memory the log no longer reaches back to, left out too. ``served_ne``,
    ``replayed_ne``: normalized entropy of the first task over the ``labelled`` candidates that have an outcome, None
    without any or for a regression; ``skew`` is their difference.
    """

    model_version: str
    by_version: dict[str, int]
    requests: int
    candidates: int
    histories_equal: int
    histories_erased: int
    bit_equal: int
    max_difference: float
    max_scaled_difference: float
    incomplete_batches: int
    other_versions: int
    memory_gone: int
    labelled: int
    served_ne: float | None
    replayed_ne: float | None
    skew: float | None
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether promise 8 held: histories equal (or known to be erased), scores bit-equal in the logged batch shape
        and within 1e-5 of the output's scale elsewhere."""
        same = self.histories_equal + self.histories_erased == self.requests
        bits = self.bit_equal + self.incomplete_batches + self.histories_erased >= self.requests
        return same and bits and self.max_scaled_difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exact": self.exact}


def replay(run: str | Path, store: str | Path, limit: int | None = None,
           progress: Callable[[int, int], None] | None = None, memory: str | Path | None = None) -> ReplayReport:
    """Read the exposures that models of ``run`` served over ``store``, materialize and score each again by the version
    that scored it, and compare.

    May run beside the server. ``limit``: only the last so many; ``progress`` gets (done, requests); ``memory``:
    where item rows were published, RUN/memory by default. Raises
    FileNotFoundError for a missing run, store or log, ValueError for a log without exposures of a version that the run
    keeps.
    """
    started = time.perf_counter()
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    run, folder = Path(run), Path(store)
    for what, path in (("run", run), ("store", folder)):
        if not path.exists():
            raise FileNotFoundError(f"no {what} at {path}")
    from semel.examples import ExposureLog, OutcomeLog
    from semel.models import current_version, model_versions

    latest = current_version(run)
    log = ExposureLog(folder / "exposures").read()
    if not len(log):
        raise FileNotFoundError(f"no exposures under {folder}; rank something first (semel serve, POST /v1/rank)")
    exposures, others = _of_models(log, {latest, *(one.version for one in model_versions(run))}, latest, limit)
    found = score_again(run, folder, exposures, memory, progress)
    gone = sum(again.memory_gone for again in found)
    if gone == len(exposures):
        raise ValueError(f"the log of {run}'s item memory no longer reaches back to any of the {gone} exposures; keep "
                         "more of it (recipe memory.keep)")
    exposures = pa.concat_tables([again.exposures for again in found])
    served, replayed = (np.concatenate([getattr(again, name) for again in found]) for name in ("served", "replayed"))
    labelled, served_ne, replayed_ne = _entropies(found[-1], exposures, OutcomeLog(folder / "outcomes").read(), served,
                                                  replayed)

    def total(name: str) -> int:
        return sum(getattr(again, name) for again in found)

    return ReplayReport(
        latest, {again.version: len(again) for again in found}, len(exposures) - gone,
        int(np.isfinite(replayed).sum()), total("equal"),
        total("erased"), total("bit_equal"), max(again.max_difference for again in found),
        max(again.max_scaled for again in found), total("incomplete"), others, gone, labelled, served_ne, replayed_ne,
        None if served_ne is None or replayed_ne is None else served_ne - replayed_ne, time.perf_counter() - started)


def score_again(run: Path, store: Path, exposures: pa.Table, memory: str | Path | None = None,
                progress: Callable[[int, int], None] | None = None, look: Look | None = None) -> list[Again]:
    """Exposures of models that ``run`` keeps, scored by the version and from the memory rows that they name, one
    ``Again`` a version; ``look`` is shown each batch. ``memory``: RUN/memory by default."""
    from semel.examples import exposure_rows
    from semel.history import HistoryStore
    from semel.memory import MemoryHistory
    from semel.models import load_model

    found: list[Again] = []
    rows_of = MemoryHistory(run / "memory" if memory is None else memory)
    done = 0
    with ExitStack() as stack:
        history = stack.enter_context(closing(HistoryStore.open(store, mode="r")))
        catalogue = stack.enter_context(closing(HistoryStore.open(store / "catalogue", mode="r"))) \
            if (store / "catalogue").exists() else None
        for version in sorted(set(exposures["model_version"].to_pylist())):
            part = exposures.filter(pc.equal(exposures["model_version"], version))
            artifact = load_model(run, version)
            again = Again(artifact, part, exposure_rows(part, artifact.features.request), rows_of)
            told = None if progress is None else partial(_after, progress, done, len(exposures))
            again.run(artifact, history, catalogue, told, look)
            done += len(part)
            found.append(again)
    return found


def _after(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


Look = Callable[["ModelArtifact", np.ndarray, "RequestBatch", "Tensor", "Tensor"], None]
"""Shown what scores, which of its rows a batch is, the batch with memory rows, hit [C] and written [C] of those."""


class Again:
    """The second computation of what one model scored: batch by batch as logged, adding up what differs. It does not
    keep the model: a log may name thousands of versions."""

    def __init__(self, artifact: ModelArtifact, exposures: pa.Table, rows: RequestRows, memory: MemoryHistory):
        self.exposures, self.version = exposures, artifact.version
        self.features, self.kind = artifact.features, artifact.kind
        self._rows, self._memory = rows, memory
        self.positions = [None if place is None else (place[0]["epoch"], place[0]["sequence"])
                          for place in exposures["memory"].to_pylist()]
        self._column = {name: exposures[name].to_numpy() for name in (
            "history_checksum", "history_status", "batch_requests", "path", "device")}
        self._batch = exposures["batch_id"].to_pylist()
        self._index = exposures["batch_index"].to_pylist()
        self.served = exposures["scores"].combine_chunks().flatten().to_numpy()
        self.replayed = np.full(len(self.served), np.nan, dtype=np.float32)
        self.tasks = np.full((len(self.served), max(1, len(artifact.features.tasks))), np.nan, dtype=np.float32)
        self.equal = self.erased = self.bit_equal = self.incomplete = self.memory_gone = 0
        self.max_difference = self.max_scaled = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def span(self, row: int) -> slice:
        """Where the candidates of a request are."""
        return slice(int(self._rows.candidates.offsets[row]), int(self._rows.candidates.offsets[row + 1]))

    def run(self, artifact: ModelArtifact, store: Any, catalogue: Any, progress: Callable[[int], None] | None,
            look: Look | None = None) -> None:
        def path_of(members: np.ndarray) -> str:
            return self._column["path"][members[0]]

        def place_of(members: np.ndarray) -> tuple[str, tuple[int, int]]:
            return path_of(members), self.positions[members[0]] or (-1, -1)

        done = 0
        # By path: to change the number of threads costs more than to score a batch. Then forward through the memory.
        for path, batches in groupby(sorted(self._batches(), key=place_of), key=path_of):
            with on_path(path) as way:
                for members in batches:
                    self._one(artifact, members, store, catalogue, way, look)
                    done += len(members)
                    if progress is not None:
                        progress(done)

    def _one(self, artifact: ModelArtifact, members: np.ndarray, store: Any, catalogue: Any, way: Way,
             look: Look | None) -> None:
        """One logged batch: its rows, materialized and scored again together."""
        from semel.examples import materialize
        from semel.memory import DeltaGap
        from semel.serving.folding import with_vectors
        from semel.serving.item_rows import joined

        position = self.positions[members[0]]
        try:
            memory = None if position is None else self._memory.at(*position)
        except DeltaGap:
            self.memory_gone += len(members)
            return
        if len(members) != self._column["batch_requests"][members[0]]:
            self.incomplete += len(members)
        device = self._column["device"][members[0]]
        if device != "cpu":
            raise ValueError(f"exposures were scored on {device!r}; this version replays on 'cpu'")
        batch = materialize(self._rows.select(members), store, catalogue, self.features, checksum=True)
        batch, hit, written = joined(batch, artifact, memory)
        if look is not None:
            look(artifact, members, batch, hit, written)
        if way == "folded":
            batch = with_vectors(batch, artifact)
        again = score(artifact, batch, way != "broadcast")
        checksums = batch.request["history_checksum"].numpy().view(np.uint64)
        status = batch.request["history"].status
        start = 0
        for place, row in enumerate(members):
            now = 0 if status is None else int(status[place])
            span = self.span(row)
            stop = start + span.stop - span.start
            self.tasks[span] = again.tasks[start:stop]
            self._compare(row, checksums[place], now, again.ranked_by[start:stop])
            start = stop

    def _batches(self) -> Iterator[np.ndarray]:
        """Rows of one logged batch together, in their order in it."""
        groups: dict[Any, list[int]] = {}
        for row, batch in enumerate(self._batch):
            groups.setdefault(row if batch is None else batch, []).append(row)
        for members in groups.values():
            members.sort(key=lambda row: self._index[row] or 0)
            yield np.array(members)

    def _compare(self, row: int, checksum: np.uint64, status: int, scores: np.ndarray) -> None:
        from semel.history import Status

        span = self.span(row)
        self.replayed[span] = scores
        if checksum == self._column["history_checksum"][row]:
            self.equal += 1
        elif status in (Status.SCRUBBED, Status.EXPIRED) and status != self._column["history_status"][row]:
            self.erased += 1
            return  # its scores rest on what may no longer be read
        served = self.served[span]
        self.bit_equal += bool(np.array_equal(scores.view(np.uint32), served.view(np.uint32)))
        difference = float(np.abs(scores.astype(np.float64) - served).max(initial=0.0))
        scale = max(1.0, float(np.abs(served).max(initial=0.0)))
        self.max_difference = max(self.max_difference, difference)
        self.max_scaled = max(self.max_scaled, difference / scale)


def _of_models(log: pa.Table, versions: set[str], latest: str, limit: int | None) -> tuple[pa.Table, int]:
    """The exposures of these models, each request once, the last ``limit`` of them; how many are of other models."""
    own = log.filter(pc.is_in(log["model_version"], pa.array(sorted(versions))))
    if not len(own):
        seen = ", ".join(sorted(set(log["model_version"].to_pylist()))[:3])
        raise ValueError(f"no exposures of model {latest}"
                         + (f" or the {len(versions) - 1} before it that the run keeps" if len(versions) > 1 else "")
                         + f"; the log has {len(log)} of {seen}")
    first = np.unique(own["request_id"].to_numpy(), return_index=True)[1]
    keep = np.sort(first)
    if limit is not None:
        keep = keep[-limit:]
    return own.take(keep), len(log) - len(own)


def _entropies(last: Again, exposures: pa.Table, outcomes: pa.Table, served: np.ndarray,
               replayed: np.ndarray) -> tuple[int, float | None, float | None]:
    """(candidates with a label, NE of the served scores, NE of the replayed ones) of the first task."""
    from semel.examples import join
    from semel.metrics import NormalizedEntropy

    if not last.features.tasks or last.features.tasks[0].kind != "binary" or last.kind == "next_item" \
            or not len(outcomes):
        return 0, None, None
    task = last.features.tasks[0]
    # Every window is taken as closed: a replay looks at what is known now.
    joined = join(exposures, outcomes, OUTCOME_WINDOW_US, [task],
                  int(np.max(exposures["served_at"].to_numpy())) + OUTCOME_WINDOW_US).rows
    mask = joined.label_mask[task.name].astype(bool) & np.isfinite(replayed)
    label = joined.label[task.name][mask]
    if not len(label):
        return 0, None, None
    pair = [NormalizedEntropy().update(label, scores[mask]).ne for scores in (served, replayed)]
    return len(label), *(value if np.isfinite(value) else None for value in pair)  # type: ignore[return-value]


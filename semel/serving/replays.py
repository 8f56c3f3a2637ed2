"""Replay: what was served, computed again from pointers, and compared bit for bit (promise 8)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.serving.item_rows import check_memory
from semel.serving.logged import Survey, parts, survey
from semel.serving.scoring import Way, on_path, score

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch, RequestRows
    from semel.features import Task
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
    from semel.examples import ExposureLog
    from semel.models import current_version, load_model, model_versions

    latest = current_version(run)
    log = ExposureLog(folder / "exposures")
    found = survey(log, {latest, *(one.version for one in model_versions(run))}, limit)
    if not found.total:
        raise FileNotFoundError(f"no exposures under {folder}; rank something first (semel serve, POST /v1/rank)")
    if not len(found.places):
        raise ValueError(f"no exposures of model {latest} or of another version that the run keeps; the log has "
                         f"{found.total} of {', '.join(found.other_versions)}")
    last = load_model(run, found.versions[-1])
    judged = _Judged(folder, last.features.tasks, last.kind, found)
    del last
    total, by_version, candidates, done = _Totals(), Counter[str](), 0, 0
    with Rescorer(run, folder, memory) as rescorer:
        for exposures, places in parts(log, found):
            told = None if progress is None else partial(_after, progress, done, len(found.places))
            again = rescorer.score(exposures, told)
            done += len(exposures)
            for one in again:
                total.add(one)
                by_version[one.version] += len(one)
                candidates += int(np.isfinite(one.replayed).sum())
            judged.add(exposures, places, again)
    if total.memory_gone == len(found.places):
        raise ValueError(f"the log of {run}'s item memory no longer reaches back to any of the {total.memory_gone} "
                         "exposures; keep more of it (recipe memory.keep)")
    labelled, served_ne, replayed_ne = judged.entropies()
    return ReplayReport(
        latest, {version: by_version[version] for version in found.versions}, len(found.places) - total.memory_gone,
        candidates, total.equal, total.erased, total.bit_equal, total.max_difference, total.max_scaled,
        total.incomplete, found.others, total.memory_gone, labelled, served_ne, replayed_ne,
        None if served_ne is None or replayed_ne is None else served_ne - replayed_ne, time.perf_counter() - started)


@dataclass
class _Totals:
    """What ``Again`` counts, over all of them."""

    equal: int = 0
    erased: int = 0
    bit_equal: int = 0
    incomplete: int = 0
    memory_gone: int = 0
    max_difference: float = 0.0
    max_scaled: float = 0.0

    def add(self, again: Again) -> None:
        for name in ("equal", "erased", "bit_equal", "incomplete", "memory_gone"):
            setattr(self, name, getattr(self, name) + getattr(again, name))
        self.max_difference = max(self.max_difference, again.max_difference)
        self.max_scaled = max(self.max_scaled, again.max_scaled)


class Rescorer:
    """Exposures of models that ``run`` keeps, scored by the version and from the memory rows that they name.
    ``memory``: RUN/memory by default; ValueError where a model has none that would read it. A context manager: closing
    it closes the stores."""

    def __init__(self, run: Path, store: Path, memory: str | Path | None = None) -> None:
        from semel.history import HistoryStore
        from semel.memory import MemoryHistory

        self._run, self._told = run, memory
        self._memory = MemoryHistory(run / "memory" if memory is None else memory)
        self._artifact: ModelArtifact | None = None
        with ExitStack() as opened:
            self._history = opened.enter_context(closing(HistoryStore.open(store, mode="r")))
            self._catalogue = opened.enter_context(closing(HistoryStore.open(store / "catalogue", mode="r"))) \
                if (store / "catalogue").exists() else None
            self._opened = opened.pop_all()

    def score(self, exposures: pa.Table, progress: Callable[[int], None] | None = None, look: Look | None = None
              ) -> list[Again]:
        """One ``Again`` a version, by version; ``look`` is shown each batch, ``progress`` gets how many are done."""
        from semel.examples import exposure_rows

        found, done = [], 0
        # As they were served: a version goes on in the next part, and a memory goes forward.
        for version in pc.unique(exposures["model_version"]).to_pylist():
            part = exposures.filter(pc.equal(exposures["model_version"], version))
            artifact = self._model(version)
            again = Again(artifact, part, exposure_rows(part, artifact.features.request), self._memory)
            told = None if progress is None else partial(_further, progress, done)
            again.run(artifact, self._history, self._catalogue, told, look)
            done += len(part)
            found.append(again)
        return sorted(found, key=lambda again: again.version)

    def _model(self, version: str) -> ModelArtifact:
        from semel.models import load_model

        if self._artifact is None or self._artifact.version != version:
            self._artifact = None
            self._artifact = load_model(self._run, version)
            check_memory(self._artifact, self._run, self._told)
        return self._artifact

    def __enter__(self) -> Rescorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def score_again(run: Path, store: Path, exposures: pa.Table, memory: str | Path | None = None,
                progress: Callable[[int, int], None] | None = None, look: Look | None = None) -> list[Again]:
    """``Rescorer.score`` of one table; ``progress`` gets (done, requests)."""
    with Rescorer(run, store, memory) as rescorer:
        return rescorer.score(exposures, None if progress is None else partial(_after, progress, 0, len(exposures)),
                              look)


def _after(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _further(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


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


class _Judged:
    """Served and replayed scores of candidates that have a label of the first task, part by part: their entropies are
    those of all candidates at once, in the order of versions and of the log."""

    def __init__(self, store: Path, tasks: Sequence[Task], kind: str, found: Survey) -> None:
        self._task = tasks[0] if tasks and tasks[0].kind == "binary" and kind != "next_item" else None
        self._version = {version: number for number, version in enumerate(found.versions)}
        # Every window is taken as closed: a replay looks at what is known now.
        self._now = found.served_at + OUTCOME_WINDOW_US
        self._outcomes = None if self._task is None else _outcomes_of(store, self._task.name)
        self._pairs: list[tuple[np.ndarray, ...]] = []

    def add(self, exposures: pa.Table, places: np.ndarray, found: list[Again]) -> None:
        """``found``: of these exposures, which lie at ``places`` of the log."""
        from semel.examples import join

        if self._task is None or self._outcomes is None or not len(self._outcomes):
            return
        ids = exposures["request_id"].combine_chunks()
        outcomes = self._outcomes.filter(pc.is_in(self._outcomes["request_id"], value_set=ids))
        rows = join(exposures, outcomes, OUTCOME_WINDOW_US, [self._task], self._now).rows
        lengths = np.diff(rows.candidates.offsets)
        replayed, version = np.full(int(lengths.sum()), np.nan, np.float32), exposures["model_version"]
        for again in found:
            own = np.asarray(pc.equal(version, again.version))
            replayed[np.repeat(own, lengths)] = again.replayed
        number = np.array([self._version[one] for one in version.to_pylist()])
        keep = rows.label_mask[self._task.name].astype(bool) & np.isfinite(replayed)
        served = exposures["scores"].combine_chunks().flatten().to_numpy()
        self._pairs.append((np.repeat(number, lengths)[keep], np.repeat(places, lengths)[keep],
                            rows.label[self._task.name][keep], served[keep], replayed[keep]))

    def entropies(self) -> tuple[int, float | None, float | None]:
        """(candidates with a label, NE of the served scores, NE of the replayed ones)."""
        from semel.metrics import NormalizedEntropy

        if not self._pairs:
            return 0, None, None
        version, place, label, *scores = (np.concatenate(column) for column in zip(*self._pairs, strict=True))
        if not len(label):
            return 0, None, None
        order = np.lexsort((place, version))
        pair = [NormalizedEntropy().update(label[order], one[order]).ne for one in scores]
        return len(label), *(value if np.isfinite(value) else None for value in pair)  # type: ignore[return-value]


def _outcomes_of(store: Path, task: str) -> pa.Table:
    """What ``join`` needs of them, of one task: a fifth of what the log holds."""
    from semel.examples import OutcomeLog
    from semel.examples.exposures import SHOWN, outcome_schema

    wanted, columns = pa.array([SHOWN, task]), ["request_id", "item_id", "task", "value", "received_at"]
    whole: list[pa.Table] = []
    few: list[pa.Table] = []
    for table in OutcomeLog(store / "outcomes").tables():
        few.append(table.select(columns).filter(pc.is_in(table["task"], value_set=wanted)))
        if len(few) == 1024:  # a record is small: what lies around its columns takes more than they do
            whole.append(pa.concat_tables(few).combine_chunks())
            few.clear()
    empty = [] if whole or few else [outcome_schema().empty_table().select(columns)]
    return pa.concat_tables([*whole, *few, *empty]).combine_chunks()

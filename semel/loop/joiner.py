"""The joiner: exposures and outcomes become request rows, in files that appear whole and with growing names.

    python -m semel.loop.joiner FOLDER

A request is joined once its window has closed, and once only: the name of a file says which exposures of the log it
holds (``FIRST-LAST.parquet``, counted from 0), so what was written before a crash is not written again after it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.examples import ExposureLog, OutcomeLog, join, rows_to_table
from semel.examples.exposures import outcome_schema
from semel.examples.tailing import LogPosition, LogTail
from semel.history.durable import replace_file, sync_folder
from semel.loop.config import LoopFolder
from semel.loop.figures import normalized
from semel.metrics import log_losses

if TYPE_CHECKING:
    from semel.features import Feature, Task

STATE = "joined.json"
FORMAT = 1
GRACE_US = 2_000_000
"""An outcome is stamped before it is on disk: so much later the log has all that were received in a window."""
KNOWN_WINDOWS = 20
"""So long it is known which requests were joined: their outcomes are late then, and later on of nobody."""
MOST_A_FILE = 4096
EVERY_S = 2.0
_COUNTS = ("used", "duplicates", "unshown", "other_tasks", "unmatched_items", "late", "unmatched_requests")


@dataclass
class _State:
    """``exposures``, ``outcomes``: from where to read after a restart, of which ``done`` exposures are joined already
    and outcomes up to ``seen`` were looked at;
    ``joined``: exposures in files so far (or found without a label); ``counts``: outcomes by what became of them;
    ``rows``, ``labelled``, ``loss``, ``positive``: of the files, and how good the served scores were on their labels;
    ``watermark``: every request served up to then (us) is joined."""

    exposures: LogPosition = LogPosition()
    outcomes: LogPosition = LogPosition()
    seen: LogPosition = LogPosition()
    done: int = 0
    joined: int = 0
    rows: int = 0
    labelled: int = 0
    loss: float = 0.0
    positive: float = 0.0
    watermark: int = 0
    files: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))


class Joiner:
    """``step(now)`` reads what is new and writes what can be joined. ``tasks``, ``request``: of the model; the served
    NE is of the binary task ``judged``, the one that the logged scores rank by."""

    def __init__(self, store: Path, out: Path, tasks: tuple[Task, ...], request: tuple[Feature, ...],
                 window_us: int) -> None:
        if window_us < 0:
            raise ValueError(f"window_us must not be negative, got {window_us}")
        if not out.is_dir():
            raise FileNotFoundError(f"{out} is not a folder; make it first")
        self._out, self._tasks, self._request, self._window = out, tasks, request, window_us
        self._judged = tasks[0].name if tasks and tasks[0].kind == "binary" else None
        self.state = self._load()
        self._exposures = LogTail(ExposureLog(store / "exposures"), self.state.exposures)
        self._outcomes = LogTail(OutcomeLog(store / "outcomes"), self.state.outcomes)
        self._skip = self.state.done
        # (exposures not joined yet, position before their record, rows of the record in front of them)
        self._pending: deque[tuple[pa.Table, LogPosition, int]] = deque()
        self._held: deque[tuple[pa.Table, LogPosition]] = deque()  # outcomes that may be needed, position before them
        self._recent: deque[tuple[int, set[str]]] = deque()        # request ids that were joined, and when
        self._recall()

    @property
    def pending(self) -> int:
        """Exposures whose window is open."""
        return sum(len(table) for table, *_ in self._pending)

    def step(self, now: int) -> list[Path]:
        """The files that are new. ``now``: microseconds of the server's clock."""
        self._read(now)
        written = []
        while exposures := self._closed(now):
            path = self._write(pa.concat_tables(exposures), now)
            if path is not None:
                written.append(path)
        self._forget(now)
        return written

    def status(self) -> dict[str, Any]:
        state = self.state
        return {"joined": state.joined, "rows": state.rows, "pending": self.pending, "files": state.files,
                "labelled": state.labelled, "served_ne": normalized(state.loss, state.labelled, state.positive),
                "watermark": state.watermark, "outcomes": dict(state.counts)}

    def _read(self, now: int) -> None:
        before = self._exposures.position
        for table, after in self._exposures.read():
            front = min(self._skip, len(table))  # joined before the restart
            self._skip -= front
            if front < len(table):
                self._pending.append((table.slice(front), before, front))
            before = after
        before, joined = self._outcomes.position, self._joined_lately()
        for table, after in self._outcomes.read():
            self._held.append((table, before))
            before = after
            if (after.segment, after.records) > (self.state.seen.segment, self.state.seen.records):
                # Of requests that are in a file already: too late for it.
                self.state.counts["late"] += sum(one in joined for one in table["request_id"].to_pylist())
                self.state.seen = after

    def _joined_lately(self) -> set[str]:
        return set().union(*(ids for _, ids in self._recent))

    def _closed(self, now: int) -> list[pa.Table]:
        """The next exposures whose window has closed, in the order of the log, as many as one file takes."""
        closed = now - self._window - GRACE_US
        parts, rows = [], 0
        for table, *_ in self._pending:
            open_ = np.flatnonzero(table["served_at"].to_numpy() > closed)
            take = min(int(open_[0]) if len(open_) else len(table), MOST_A_FILE - rows)
            if take:
                parts.append(table.slice(0, take))
            rows += take
            if take < len(table):
                break
        return parts

    def _write(self, exposures: pa.Table, now: int) -> Path | None:
        """A file of the first pending ``exposures``, joined; None where none has a label."""
        rows = len(exposures)
        outcomes = pa.concat_tables([table for table, _ in self._held]) if self._held else \
            outcome_schema(item_id=exposures.schema.field("candidates").type.value_type).empty_table()
        report = join(exposures, outcomes, self._window, self._tasks, now, self._request)
        for name in _COUNTS[:-1]:
            self.state.counts[name] += getattr(report, name)
        labelled = np.zeros(len(report.rows), bool)
        for mask in report.rows.label_mask.values():
            labelled |= np.add.reduceat(np.append(mask, False), report.rows.candidates.offsets[:-1]) > 0
        self._score(exposures, report.rows)
        path = None
        first = self.state.joined
        if labelled.any():
            path = self._out / f"{first:012d}-{first + rows - 1:012d}.parquet"
            hidden = self._out / f".{path.name}.{os.getpid()}.tmp"
            pq.write_table(rows_to_table(report.rows.select(np.flatnonzero(labelled))), hidden, compression="zstd")
            sync_folder(hidden)
            os.replace(hidden, path)
            sync_folder(self._out)
            self.state.files += 1
        self.state.rows += int(labelled.sum())
        self.state.joined += rows
        self.state.watermark = int(exposures["served_at"].to_numpy().max())
        self._recent.append((now, set(exposures["request_id"].to_pylist())))
        self._drop(rows)
        self._save()
        return path

    def _score(self, exposures: pa.Table, rows: Any) -> None:
        """Add up the log loss of what was served, over the labels that the trainer will see."""
        if self._judged is None:
            return
        mask = rows.label_mask[self._judged].astype(bool)
        scores = exposures["scores"].combine_chunks().flatten().to_numpy()
        if len(scores) != len(mask):  # a request was logged twice: its rows are fewer
            return
        label = rows.label[self._judged][mask].astype(np.float64)
        self.state.labelled += int(mask.sum())
        self.state.loss += float(log_losses(label, scores[mask].astype(np.float64)).sum())
        self.state.positive += float(label.sum())

    def _drop(self, rows: int) -> None:
        while rows:
            table, before, front = self._pending.popleft()
            if len(table) > rows:
                self._pending.appendleft((table.slice(rows), before, front + rows))
                return
            rows -= len(table)

    def _forget(self, now: int) -> None:
        """Let go of outcomes whose requests must all have been joined, and of old request ids."""
        keep_until = now - 2 * (self._window + GRACE_US)
        oldest = min([int(table["served_at"].to_numpy().min()) for table, *_ in list(self._pending)[:1]], default=now)
        joined = self._joined_lately()
        while self._held and int(self._held[0][0]["received_at"].to_numpy().max()) < min(oldest, keep_until):
            table, _ = self._held.popleft()
            self.state.counts["unmatched_requests"] += sum(one not in joined for one in table["request_id"].to_pylist())
        while self._recent and self._recent[0][0] < now - KNOWN_WINDOWS * (self._window + GRACE_US):
            self._recent.popleft()

    def _save(self) -> None:
        state = self.state
        if self._pending:
            state.exposures, state.done = self._pending[0][1], self._pending[0][2]
        else:
            state.exposures, state.done = self._exposures.position, 0
        state.outcomes = self._held[0][1] if self._held else self._outcomes.position
        replace_file(self._out / STATE, json.dumps({"format": FORMAT, **vars(state)}).encode())

    def _recall(self) -> None:
        """What was joined lately, before a restart, from the files."""
        files = sorted(self._out.glob("*-*.parquet"))
        oldest = files[-1].stat().st_mtime - KNOWN_WINDOWS * (self._window + GRACE_US) / 1e6 if files else 0.0
        for path in reversed(files):
            written = path.stat().st_mtime
            if written < oldest:
                return
            ids = pq.read_table(path, columns=["request_id"])["request_id"].to_pylist()
            self._recent.appendleft((int(1e6 * written), set(ids)))

    def _load(self) -> _State:
        path = self._out / STATE
        state = _State()
        if path.exists():
            try:
                values = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is damaged ({error}); remove it and all files beside it to join anew"
                                 ) from None
            if values.pop("format", None) != FORMAT:
                raise ValueError(f"{path}: unknown format; this Semel reads {FORMAT}")
            state = _State(**values)
            for name in ("exposures", "outcomes", "seen"):
                setattr(state, name, LogPosition(*getattr(state, name)))
        # A file that was written just before a crash, whose state was not saved any more.
        for hidden in self._out.glob(".*.tmp"):
            hidden.unlink()
        last = max((int(path.stem.partition("-")[2]) for path in self._out.glob("*-*.parquet")), default=-1)
        if last >= state.joined:
            table = pq.read_table(self._out / next(path.name for path in self._out.glob(f"*-{last:012d}.parquet")))
            state.done += last + 1 - state.joined
            state.joined = last + 1
            state.files += 1
            state.rows += len(table)
        return state


def main(arguments: list[str]) -> None:
    folder = LoopFolder(arguments[0])
    config, _ = folder.load()
    features = folder.read_served().features
    joiner = Joiner(folder.store, folder.rows, features.tasks, features.request,
                    round(1e6 * config.window))
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with (folder.path / "joined.jsonl").open("a") as history:
        while True:
            for path in joiner.step(time.time_ns() // 1000):
                state = joiner.state
                history.write(json.dumps({"file": path.name, "labelled": state.labelled, "loss": state.loss,
                                          "positive": state.positive}) + "\n")
            history.flush()
            folder.write_status("joiner", {"time": time.time(), **joiner.status()})
            if stopping.wait(EVERY_S):
                return


if __name__ == "__main__":
    main(sys.argv[1:])

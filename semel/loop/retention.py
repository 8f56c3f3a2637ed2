"""What a loop no longer needs is taken away: it runs for weeks on a disk that has an end.

Kept is what was served within the retention, and all that computing it again takes: its exposures and outcomes, the
model versions and memory rows that they name. Request rows go once the trainer's checkpoint is behind them. (Histories
are the store's: ``semel compact --retention``.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from semel.loop.config import LoopFolder

KEPT_VERSIONS = 5
"""The latest ones are kept in any case: ``semel rollback`` goes back to them."""
SLACK_S = 600.0
"""Logs are kept for so much longer than the ledger's answers, which verification looks for in them."""
KNOWN_WINDOWS = 20
"""So many windows of joined rows a joiner reads at its start."""


@dataclass
class _Segment:
    """What is known of a log's segment: the newest time in it, the versions that it names, and the earliest (epoch,
    sequence) of a memory."""

    newest: int = 0
    versions: set[str] = field(default_factory=set)
    memory: tuple[int, int] | None = None


@dataclass
class Swept:
    """How many files of each kind were removed so far, and since when (wall clock) all that was served is kept."""

    exposures: int = 0
    outcomes: int = 0
    versions: int = 0
    rows: int = 0
    predictions: int = 0
    memory: int = 0
    kept_since: float = 0.0


class Broom:
    """``sweep()`` removes what lies before the last ``retention`` seconds; to be called now and then, by one process.

    Exposures and outcomes go by whole segments (64 MB) that were joined. Nothing that a retained exposure names goes,
    however old it is.
    """

    def __init__(self, folder: LoopFolder, run: Path, retention: float, window: float) -> None:
        self._folder, self._run, self._retention, self._window = folder, run, retention, window
        self._sealed: dict[Path, _Segment] = {}
        self.swept = Swept()

    def sweep(self, now: float | None = None) -> Swept:
        """``now``: by the wall clock. Raises OSError where the disk refuses, ValueError for damaged files."""
        now = time.time() if now is None else now
        cutoff = now - self._retention
        joined = self._joined()
        kept = self._log("exposures", "served_at", cutoff - SLACK_S, joined)
        self._log("outcomes", "received_at", cutoff - SLACK_S, joined)
        self._versions({one for segment in kept for one in segment.versions}, cutoff)
        self._memory([segment.memory for segment in kept if segment.memory is not None])
        self._old("rows", sorted(self._folder.rows.glob("*-*.parquet")), self._trained(),
                  min(cutoff, now - KNOWN_WINDOWS * (self._window + 2) - 60))
        predictions = sorted((self._run / "predictions").glob("step-*.parquet"))
        self._old("predictions", predictions, predictions[-1].name if predictions else "", cutoff - SLACK_S)
        self.swept.kept_since = cutoff
        self._folder.write_status("retention", asdict(self.swept))
        return self.swept

    def _joined(self) -> dict[str, int]:
        """By log the segment that the joiner reads: those before it are done."""
        try:
            state = json.loads((self._folder.rows / "joined.json").read_text())
        except FileNotFoundError:
            return {"exposures": 0, "outcomes": 0}
        return {"exposures": int(state["exposures"][0]), "outcomes": min(int(state["outcomes"][0]),
                                                                         int(state["seen"][0]))}

    def _log(self, name: str, column: str, before: float, joined: dict[str, int]) -> list[_Segment]:
        """Remove segments of a log; what is known of those that stay."""
        paths = sorted(path for path in (self._folder.store / name).glob("*.log") if path.stem.isdigit())
        kept = []
        for path in paths:
            last = path == paths[-1]  # it grows
            segment = _segment(path, column) if last or path not in self._sealed else self._sealed[path]
            if not last:
                self._sealed[path] = segment
                if segment.newest < 1e6 * before and int(path.stem) < joined[name]:
                    path.unlink()
                    del self._sealed[path]
                    setattr(self.swept, name, getattr(self.swept, name) + 1)
                    continue
            kept.append(segment)
        return kept

    def _versions(self, named: set[str], cutoff: float) -> None:
        from semel.models import current_version, model_versions

        found = model_versions(self._run)
        before = [one.version for one in found if one.saved_at < 1e6 * cutoff]
        stay = {*named, current_version(self._run), *(one.version for one in found[-KEPT_VERSIONS:]), *before[-1:]}
        for one in found:
            if one.saved_at < 1e6 * cutoff and one.version not in stay:
                one.path.unlink(missing_ok=True)
                one.path.with_suffix(".safetensors").unlink(missing_ok=True)
                self.swept.versions += 1

    def _memory(self, needed: list[tuple[int, int]]) -> None:
        """Records of the memory's log below the last snapshot from which the earliest position can be restored."""
        folder = self._run / "memory"
        if not needed or not folder.is_dir():
            return
        from semel.memory.publisher import place_of
        from semel.memory.sink import FolderSink

        sink = FolderSink(folder)
        places = [(name, place) for name in sink.names() if (place := place_of(name)) is not None]
        snapshots = [(epoch, sequence) for _, (epoch, _, kind, sequence) in places
                     if kind == "snapshot" and (epoch, sequence) <= min(needed)]
        if not snapshots:
            return
        base = max(snapshots)
        for name, (epoch, _, kind, sequence) in places:
            if (epoch, sequence) < base or ((epoch, sequence) == base and kind != "snapshot"):
                sink.remove(name)
                self.swept.memory += 1

    def _trained(self) -> str:
        """The file that the trainer's checkpoint stands in, or the last one behind it; empty where there is none."""
        for path in sorted((self._run / "checkpoints").glob("step-*"), reverse=True):
            try:
                state = json.loads((path / "state.json").read_text())
            except FileNotFoundError:  # a newer one has taken its place
                continue
            return str(state.get("file") or max(state.get("done", ()), default=""))
        return ""

    def _old(self, kind: str, paths: list[Path], upto: str, before: float) -> None:
        """Remove files with a name before ``upto`` that were written before a moment."""
        for path in paths:
            if path.name < upto and path.stat().st_mtime < before:
                path.unlink()
                setattr(self.swept, kind, getattr(self.swept, kind) + 1)


def _segment(path: Path, column: str) -> _Segment:
    from semel.history import read_segments

    found = _Segment()
    for _, batch in read_segments(path):
        found.newest = max(found.newest, int(np.max(batch.column(column).to_numpy(), initial=0)))
        if "model_version" in batch.schema.names:
            found.versions.update(batch.column("model_version").unique().to_pylist())
            positions = batch.column("memory").flatten()
            named = zip(positions.field("epoch").to_pylist(), positions.field("sequence").to_pylist(), strict=True)
            found.memory = min([*([] if found.memory is None else [found.memory]), *named], default=None)
    return found


def sweeping(broom: Broom, every: float, stopping: Any, say: Callable[[str], None]) -> None:
    """Sweep every so many seconds until ``stopping`` is set; what goes wrong is said once, and tried again."""
    told = ""
    while not stopping.wait(every):
        try:
            broom.sweep()
            told = ""
        except (OSError, ValueError) as error:
            if str(error) != told:
                told = str(error)
                say(f"what is older than the retention could not be removed: {error}")

"""Which version of which run serves each stage: listed, changed without dropping a request, taken back.

A choice is a line in ``STORE/models.json``. Every process that serves the store looks at it twice a second, and one
that starts goes by it as long as it is started with the same run: a rollback outlives a restart.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.serving.calls import AvailableModel, Models, ServedModel, StageModels
from semel.serving.checks import show
from semel.serving.errors import InvalidRequest

if TYPE_CHECKING:
    from semel.serving.predictor import Predictor

log = logging.getLogger("semel.serving")
FORMAT_VERSION = 1
POLL_S = 0.5
LATEST, PREVIOUS = "latest", "previous"


class ModelChoice:
    """The models of ``predictor`` and of those beside it. Safe to use from several threads; ``close`` ends its own."""

    def __init__(self, predictor: Predictor, interval: float = POLL_S):
        self._by_stage = {stage: one for stage, one in (
            ("retrieve", predictor.retrieval), ("prerank", predictor.preranker), ("rank", predictor))
            if one is not None and (stage == "rank" or one is not predictor)}
        self._started_with = {stage: str(one.versions.run.resolve()) for stage, one in self._by_stage.items()
                              if one.versions is not None}
        self._path = Path(predictor.store.path) / "models.json"
        self._changing = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._stop = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._follow, args=(interval,), name="semel-models", daemon=True)
        self._thread.start()

    def models(self) -> Models:
        """What serves, what did, and every version of the runs beside those that serve."""
        found = list(self._available())
        run_of = {one.version: one.run for one in found}
        stages = {}
        for stage, by in self._by_stage.items():
            own = by.versions.run.name if by.versions is not None else ""
            *before, current = [ServedModel(version, run_of.get(version, own), since) for version, since in by.served]
            stages[stage] = StageModels(current, before, by.versions is None or by.versions.paused)
        return Models(stages, found)

    def serve(self, stage: str, version: str | None = None, run: str | None = None) -> Models:
        """Have ``stage`` served by a version of any run beside its own (which stays until something else is chosen),
        by "latest" (of the run that serves, and those it saves later), by "previous", or by another ``run`` and what it
        saves later. Raises InvalidRequest, and changes nothing, for what is not there or does not fit."""
        with self._changing:
            by = self._by_stage.get(stage)
            if by is None:
                raise InvalidRequest("stage", f"{show(stage)} has no model of its own here; there are "
                                              f"{', '.join(self._by_stage)}")
            if (version is None) == (run is None):
                raise InvalidRequest("version", "say either a version or a run")
            if version == PREVIOUS:
                if len(by.served) < 2:
                    raise InvalidRequest("version", f"nothing has served {stage} before {by.model_version} here")
                version = by.served[-2][0]
                self._apply(by, version, None)
                del by.served[-3:-1]  # going back again goes further back
            else:
                self._apply(by, version, run)
            self._write(stage, by, version)
        return self.models()

    def close(self) -> None:
        """Safe to call again."""
        self._stop.set()
        self._thread.join()

    def _apply(self, by: Predictor, version: str | None, run: str | None) -> None:
        from semel.models import load_model

        watch = by.versions
        if watch is None:
            raise InvalidRequest("stage", "its model was not loaded from a run, so there is no other")
        try:
            if version == LATEST:
                watch.follow(watch.run)
                return
            folder = self._folder(watch.run, run) if run is not None else self._run_of(str(version))
            if by.memory is not None and folder.resolve() != watch.run.resolve():
                raise ValueError(f"{folder.name} is another run, and the item memory that is read here is of "
                                 f"{watch.run.name}; serve it by a server of its own")
            if run is not None:
                watch.follow(folder)
            else:
                watch.pin(load_model(folder, version))
        except InvalidRequest:
            raise
        except (ValueError, FileNotFoundError) as error:
            raise InvalidRequest("run" if run is not None else "version", str(error)) from None

    def _folder(self, beside: Path, name: str) -> Path:
        """The run of that name: one of those that are there, never a path that somebody sent."""
        for folder in _runs(beside.parent):
            if folder.name == name:
                return folder
        raise InvalidRequest("run", f"there is no run {show(name)} beside {beside.name}; there are "
                                    f"{', '.join(folder.name for folder in _runs(beside.parent)) or 'none'}")

    def _run_of(self, version: str) -> Path:
        for one, folder in self._versions():
            if one.version == version:
                return folder
        raise InvalidRequest("version", f"no run here keeps {show(version)}; GET /v1/models lists what there is")

    def _available(self) -> Iterator[AvailableModel]:
        return (one for one, _ in self._versions())

    def _versions(self) -> Iterator[tuple[AvailableModel, Path]]:
        parents = {by.versions.run.parent.resolve() for by in self._by_stage.values() if by.versions is not None}
        for folder in (folder for parent in sorted(parents) for folder in _runs(parent)):
            kept = {}
            for path in [*folder.glob("model-*.json"), folder / "model.json"]:
                try:
                    one = json.loads(path.read_text())
                    kept[one["version"]] = AvailableModel(one["version"], folder.name, one["config"]["kind"],
                                                          int(one.get("saved_at", 0)))
                except (OSError, ValueError, KeyError, TypeError):  # being replaced, or damaged: not available
                    continue
            yield from ((one, folder) for one in sorted(kept.values(), key=lambda one: one.saved_at))

    def _write(self, stage: str, by: Predictor, version: str | None) -> None:
        from semel.examples.logs import write_atomic

        assert by.versions is not None
        stages = self._read()
        stages[stage] = {"started_with": self._started_with[stage], "run": by.versions.run.name,
                         "version": version if by.versions.paused else None, "since": time.time_ns() // 1000}
        write_atomic(self._path, json.dumps({"format_version": FORMAT_VERSION, "stages": stages}, indent=1).encode())
        self._seen = self._signature()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
            if found["format_version"] != FORMAT_VERSION:
                raise ValueError(f"it has format version {found['format_version']}")
            return dict(found["stages"])
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            log.error("%s is left aside: %s", self._path, error)
            return {}

    def _signature(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _look(self) -> None:
        """Take over what was chosen by somebody else, or before this process."""
        signature = self._signature()
        if signature == self._seen:
            return
        with self._changing:
            self._seen = signature
            for stage, chosen in self._read().items():
                by = self._by_stage.get(stage)
                if by is None or by.versions is None or chosen.get("started_with") != self._started_with.get(stage):
                    continue
                version, run = chosen.get("version"), chosen.get("run")
                try:
                    if version is not None and version != by.model_version:
                        self._apply(by, version, None)
                    elif version is not None:
                        by.versions.paused = True
                    elif by.versions.paused or run != by.versions.run.name:
                        self._apply(by, None, run)
                except InvalidRequest as error:
                    log.error("%s: what was chosen for %s is not served, %s goes on: %s", self._path, stage,
                              by.model_version, error)

    def _follow(self, interval: float) -> None:
        while not self._stop.wait(interval):
            try:
                self._look()
            except Exception as error:  # whatever it is, what serves goes on
                log.error("%s cannot be followed: %s", self._path, error)


def _runs(parent: Path) -> list[Path]:
    return sorted(path.parent for path in parent.glob("*/model.json"))

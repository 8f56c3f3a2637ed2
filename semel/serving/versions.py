"""New weights under a running predictor: a watcher that swaps them in when a run's folder has a new version.

Where weights travel in the log of the item memory, that folder is where they are put when they come.

A request is scored by one version from its first read to its answer, and its exposure names it; requests that came
before a swap end with the version they began with, and none waits.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.memory import DeltaSubscriber, Position
    from semel.models import ModelArtifact
    from semel.serving.predictor import Predictor

log = logging.getLogger("semel.serving")
POLL_S = 0.5
KEEP = 10
"""Versions out of a log that a run's folder keeps."""


def take(rows: DeltaSubscriber, run: str | Path) -> str | None:
    """Puts the weights that the log of ``rows`` has, behind the rows that are here, into the folder ``run`` as its
    latest version, if it does not keep them already; returns their version, None where the log has none. Raises
    CorruptDelta or ValueError for a damaged record, OSError where the log or the folder does not answer."""
    from semel.models import install

    found = rows.model()
    return None if found is None else install(run, found.description, found.weights, KEEP)


class VersionWatch:
    """A thread that calls ``predictor.swap`` when ``run`` has a new model.

    ``error``: why the latest could not be swapped in (damaged, other tasks), None after a good one; the predictor then
    goes on with what it has, and the version is tried again when the folder changes. ``paused``: nothing is swapped
    while it is set (a version is pinned); after it the latest version is. A context manager: closing ends the thread.
    """

    def __init__(self, predictor: Predictor, run: str | Path, interval: float = POLL_S) -> None:
        if not interval > 0:
            raise ValueError(f"interval must be above 0, got {interval}")
        self.predictor, self.run, self.interval = predictor, Path(run), interval
        self.error: Exception | None = None
        self.paused = False
        self._seen: tuple[int, ...] | None = None
        self._taken: Position | None = None
        self._polling = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="semel-versions", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Look now: whether a new version was swapped in. Raises what stood in the way."""
        with self._polling:
            return self._poll()

    def pin(self, artifact: ModelArtifact) -> None:
        """Swap to ``artifact``, which stays, whatever the run saves. Raises what ``swap`` raises; nothing has changed
        then."""
        with self._polling:
            if artifact.version != self.predictor.model_version:
                self.predictor.swap(artifact)
            self.paused = True

    def follow(self, run: str | Path) -> None:
        """Swap to the latest of ``run``, and to what it saves later. Raises what ``load_model`` and ``swap`` raise;
        nothing changed then."""
        from semel.models import load_model

        with self._polling:
            artifact = load_model(run)
            if artifact.version != self.predictor.model_version:
                self.predictor.swap(artifact)
            self.run, self.paused, self._seen = Path(run), False, None

    def close(self) -> None:
        """Safe to call again."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> VersionWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll(self) -> bool:
        from semel.models import current_version, load_model

        self._take()
        signature = None if self.paused else self._signature()
        if signature is None or signature == self._seen:
            self._seen = signature  # after a pause the latest is looked at anew
            return False
        new = current_version(self.run) != self.predictor.model_version
        if new:
            self.predictor.swap(load_model(self.run))
        self._seen = signature
        return new

    def _take(self) -> None:
        rows = self.predictor.memory
        if rows is not None and rows.model_position is not None and rows.model_position != self._taken:
            at = rows.model_position
            take(rows, self.run)
            self._taken = at

    def _signature(self) -> tuple[int, ...] | None:
        """Of ``model.json``: changes with every version, and costs no read."""
        try:
            found = os.stat(self.run / "model.json")
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _run(self) -> None:
        failed: tuple[int, ...] | None = None
        while not self._stop.wait(self.interval):
            rows = self.predictor.memory
            signature = self._signature()
            if signature is not None and signature == failed and (rows is None or rows.model_position == self._taken):
                continue
            try:
                self.poll()
                self.error, failed = None, None
            except FileNotFoundError as error:  # newer ones have taken its place while it was read: look again
                self.error = error
            except Exception as error:  # whatever it is, the version that serves goes on
                repeated = self.error is not None and str(self.error) == str(error)
                self.error, failed = error, signature
                if repeated:  # what the log has is tried again, until it has something else
                    continue
                log.error("%s: the new version is not served, %s goes on: %s", self.run,
                          self.predictor.model_version, error)

"""``DeltaPublisher``: what changes in a trainer's memory, as an ordered log that readers elsewhere follow.

A log has epochs, one each time a publisher starts; only the newest may be written. An epoch has ``shards`` ranks, each
with its own records; record ``sequence`` of every shard is of the same training step, so that a reader who applies a
sequence number only when all shards have it sees one state.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import torch

from semel.memory.delta import FORMAT_VERSION, Place, encode, encode_model
from semel.memory.sink import Sink, open_sink
from semel.memory.table import Changes, ItemMemory, Rows

logger = logging.getLogger(__name__)


class Fenced(RuntimeError):
    """A newer publisher has taken the log over: this one must stop."""


class DeltaPublisher:
    """Publishes the changes of ``memory`` to ``url`` (a folder or object storage), from now on: it starts a new epoch
    with a snapshot of all rows.

    ``flush()`` publishes once; ``start()`` does so in a thread of its own every ``interval`` seconds, or sooner when
    ``max_rows`` rows have changed. A snapshot follows every ``snapshot_every`` deltas; of snapshots the last ``keep``
    stay, of deltas those that follow the oldest of them. ``shard`` of ``shards``: this rank's part of a memory that is
    sharded by key; shard 0 takes the next epoch, the others are given it (``epoch``).

    What cannot be published stays: ``backlog`` counts the rows that wait, never more than the memory holds and those
    that have left it. Raises Fenced where another publisher has started since, OSError where ``url`` does not answer.
    """

    def __init__(self, memory: ItemMemory, url: str | Path, interval: float = 1.0, *, max_rows: int = 100_000,
                 snapshot_every: int = 600, keep: int = 2, shard: int = 0, shards: int = 1,
                 epoch: int | None = None) -> None:
        for name, value in (("interval", interval), ("max_rows", max_rows), ("snapshot_every", snapshot_every),
                            ("keep", keep)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if not 0 <= shard < shards:
            raise ValueError(f"shard must be in 0..{shards - 1}, got {shard}")
        if (epoch is None) != (shard == 0):
            raise ValueError("shard 0 takes the next epoch itself; tell the others which (epoch=publisher.epoch)")
        self.memory, self.interval, self.max_rows = memory, interval, max_rows
        self.snapshot_every, self.keep, self.shard, self.shards = snapshot_every, keep, shard, shards
        self.sink: Sink = open_sink(url)
        self.sequence = 0
        self.error: Exception | None = None
        self._waiting = Changes(_no_rows(memory.dim), torch.empty(0, dtype=torch.int64))
        self._model: tuple[bytes, bytes] | None = None  # weights that no record holds yet
        self._unsent: list[tuple[str, bytes]] = []  # records whose fate is unknown: they go first, as they are
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.epoch = self._next_epoch() if epoch is None else epoch
        self._send_base()

    def _send_base(self) -> None:
        """All rows, which an epoch begins with."""
        with self.memory.still():
            self.memory.changes()
            rows = self.memory.rows()
        place = Place("snapshot", self.epoch, self.shard, 0, _latest(rows), _now())
        self._unsent.append((place.name, encode(place, Changes(rows, _none()))))
        self._resend()

    def _next_epoch(self) -> int:
        description = {"format_version": FORMAT_VERSION, "shards": self.shards, "dim": self.memory.dim,
                       "capacity": self.memory.capacity * self.shards}
        while True:
            epoch = max(epochs(self.sink), default=0) + 1
            try:
                self.sink.create(f"{epoch:08d}/epoch.json", json.dumps(description).encode())
                return epoch
            except FileExistsError:
                continue  # another publisher was faster: the one after it

    @property
    def backlog(self) -> int:
        """Rows and departures that no record holds yet."""
        return len(self._waiting.rows) + len(self._waiting.gone) + self.memory.changed

    def flush(self, step: int | None = None) -> int:
        """Publishes what has changed; returns the sequence number of the last record. Without changes (and with one
        shard) nothing is published. ``step``: of training, by default the latest of a row that changed."""
        with self._lock:
            self._check()  # before the memory is asked: its changes may be another publisher's now
            return self._record(step)

    def check(self) -> None:
        """Sends what could not be sent before. Raises what ``flush`` raises, which then publishes nothing: shards that
        ask one another first stay at one sequence number while a sink does not answer (``record``)."""
        with self._lock:
            self._check()

    def record(self, step: int) -> int:
        """``flush`` without ``check``, for shards that have all done that. The record has its number even where OSError
        is raised, and goes with the next ``check``."""
        with self._lock:
            return self._record(step)

    def _check(self) -> None:
        newest = max(epochs(self.sink), default=0)
        if newest > self.epoch:
            raise Fenced(f"{self.sink.url}: epoch {newest} has begun, this publisher's is {self.epoch}; only one "
                         "trainer may publish to a log")
        self._resend()

    def _record(self, step: int | None) -> int:
        snapshot = None
        with self.memory.still():
            self.memory.expire()
            self._waiting = _joined(self._waiting, self.memory.changes())
            if (self.sequence + 1) % self.snapshot_every == 0:
                snapshot = self.memory.rows()
        waiting = self._waiting
        if not len(waiting.rows) and not len(waiting.gone) and self.shards == 1 and self._model is None:
            return self.sequence
        step = _latest(waiting.rows) if step is None else step
        place = Place("delta", self.epoch, self.shard, self.sequence + 1, step, _now())
        self.sequence += 1
        self._waiting = Changes(_no_rows(self.memory.dim), _none())
        self._unsent.append((place.name, encode(place, waiting)))
        if self._model is not None:
            place = Place("model", self.epoch, 0, self.sequence, step, _now())
            self._unsent.append((place.name, encode_model(place, *self._model)))
            self._model = None
        if snapshot is not None:
            place = Place("snapshot", self.epoch, self.shard, self.sequence, step, _now())
            self._unsent.append((place.name, encode(place, Changes(snapshot, _none()))))
        self._resend()
        if snapshot is not None:
            self._truncate()
        return self.sequence

    def publish_model(self, description: bytes, weights: bytes) -> int:
        """Publishes what has changed and, behind it, dense weights (``semel.memory.delta``), which readers take when
        they have the rows; returns the sequence number of both. Weights that cannot be sent go with the next flush, if
        no newer ones come before. Of a memory in shards shard 0 alone is given them, and the next flush takes them."""
        if self.shard:
            raise ValueError(f"shard {self.shard} of {self.shards} publishes rows only; shard 0 publishes the weights")
        with self._lock:
            self._model = description, weights
        return self.flush() if self.shards == 1 else self.sequence + 1

    def _resend(self) -> None:
        while self._unsent:
            name, content = self._unsent[0]
            try:
                self.sink.create(name, content)
            except FileExistsError:
                if self.sink.read(name) != content:
                    raise Fenced(f"{self.sink.url}/{name} was written by another publisher of epoch "
                                 f"{self.epoch}") from None
            self._unsent.pop(0)

    def _truncate(self) -> None:
        """Removes records below the oldest snapshot that is kept: its own shard's, and whole epochs before it."""
        names = self.sink.names()
        found = sorted(place for place in map(place_of, names) if place is not None)
        snapshots = [(epoch, sequence) for epoch, shard, kind, sequence in found
                     if kind == "snapshot" and (shard == self.shard or epoch < self.epoch)]
        if not snapshots:  # a listing that is late: cut at the next one
            return
        oldest = sorted(set(snapshots))[-self.keep:][0]
        for epoch, shard, kind, sequence in found:
            mine = shard == self.shard or epoch < oldest[0]
            below = (epoch, sequence) < oldest if kind == "snapshot" else (epoch, sequence) <= oldest
            if mine and below:
                self.sink.remove(Place(kind, epoch, shard, sequence).name)  # type: ignore[arg-type]
        if self.shard == 0:
            for _, _, name in models(names)[:-1]:
                self.sink.remove(name)
            for epoch in epochs(self.sink):
                if epoch < oldest[0]:
                    self.sink.remove(f"{epoch:08d}/epoch.json")

    @property
    def running(self) -> bool:
        """Whether ``start`` was called, and ``close`` not yet."""
        return self._thread is not None

    def start(self) -> DeltaPublisher:
        """Publish in the background until ``close``. An error of the sink is logged, kept in ``error`` and tried again;
        Fenced ends the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="semel-deltas", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        due = time.monotonic() + self.interval
        while not self._stop.wait(min(0.02, self.interval)):
            if time.monotonic() < due and self.memory.changed < self.max_rows:
                continue
            due = time.monotonic() + self.interval
            try:
                self.flush()
                self.error = None
            except Fenced as error:
                self.error = error
                logger.error("%s", error)
                return
            except OSError as error:
                if self.error is None:
                    logger.warning("deltas wait, %d rows of them: %s", self.backlog, error)
                self.error = error

    def close(self) -> None:
        """Ends the thread and publishes what is left. Raises what ``flush`` raises."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.flush()

    def __enter__(self) -> DeltaPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def epochs(sink: Sink) -> list[int]:
    """That have begun."""
    return [int(name[:8]) for name in sink.names() if name[8:] == "/epoch.json" and name[:8].isdigit()]


def models(names: list[str]) -> list[tuple[int, int, str]]:
    """Epoch, sequence and name of the records of weights among ``names``, in order."""
    found = (re.fullmatch(r"(\d{8})/model-0000-(\d{12})", name) for name in names)
    return sorted((int(match[1]), int(match[2]), match[0]) for match in found if match is not None)


def place_of(name: str) -> tuple[int, int, str, int] | None:
    """Epoch, shard, kind and sequence of a record by its name; None for other names."""
    folder, _, file = name.partition("/")
    parts = file.split("-")
    if not folder.isdigit() or len(parts) != 3 or parts[0] not in ("delta", "snapshot"):
        return None
    if not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(folder), int(parts[1]), parts[0], int(parts[2])


def _joined(earlier: Changes, later: Changes) -> Changes:
    """Both as one, the later ones on top."""
    if not len(earlier.rows) and not len(earlier.gone):
        return later
    over = torch.cat([later.rows.keys, later.gone])
    rows = earlier.rows.select(~torch.isin(earlier.rows.keys, over)).then(later.rows)
    gone = torch.cat([earlier.gone[~torch.isin(earlier.gone, over)], later.gone])
    order = torch.from_numpy(np.argsort(rows.keys.numpy(), kind="stable"))
    return Changes(rows.select(order), gone.sort().values)


def _no_rows(dim: int) -> Rows:
    return Rows(_none(), torch.empty(0, dim), _none(), _none(), _none())


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


def _latest(rows: Rows) -> int:
    return int(rows.step.max()) if len(rows) else 0


def _now() -> int:
    return time.time_ns() // 1000

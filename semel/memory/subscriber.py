"""``DeltaSubscriber``: follows a log of deltas; its memory is what the trainer's was at one moment, whole.

Two tables: one is read, the other gets what is new, then they change places. So readers never wait and never see half
of a record.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semel.memory.delta import FORMAT_VERSION, CorruptDelta, decode, decode_model
from semel.memory.publisher import models, place_of
from semel.memory.sink import Sink, open_sink
from semel.memory.table import Changes, ItemMemory

logger = logging.getLogger(__name__)


class DeltaGap(RuntimeError):
    """A record is missing or damaged and no later snapshot is there: the memory stays as it was before it."""


@dataclass(frozen=True, order=True)
class Position:
    """Of a memory in a log: all records of ``epoch`` up to ``sequence``, of each of the ``shards``, and none after."""

    epoch: int
    sequence: int
    shards: int = field(default=1, compare=False)


@dataclass(frozen=True)
class Model:
    """Dense weights out of a log, where they lay in it; what ``description`` and ``weights`` are, their publisher
    knows."""

    position: Position
    description: bytes
    weights: bytes


class _Vanished(DeltaGap):
    """A record was listed and could not be read."""


class _Table:
    """A memory, how far it is, and how many read it just now."""

    def __init__(self, memory: ItemMemory) -> None:
        self.memory, self.position, self.readers = memory, Position(0, -1), 0


class DeltaSubscriber:
    """``poll()`` applies what is new at ``url`` and returns how many rows and departures that was; ``memory`` is the
    latest whole state, read-only, its ``position`` beside it. Before the first publisher there is none: None.

    Records are applied in order, each sequence number when all shards have it. One that was applied already is passed
    over; where one is missing or damaged, the next snapshot is loaded instead; a new epoch begins with its snapshot.
    ``freshness``: seconds from write to visible, of the last rows. ``start(interval)`` polls in a thread of its own
    until ``close``; ``error`` is what the last poll raised there. ``on_new(memory, changes)``, where it is set, is
    called with a memory that is going to be read and what it has taken since it last was, None for all of it.

    Raises DeltaGap, CorruptDelta for a log that cannot be followed (``memory`` stays what it was), OSError where
    ``url`` does not answer, ValueError for a log of a newer format.
    """

    def __init__(self, url: str | Path) -> None:
        self.sink: Sink = open_sink(url)
        self.freshness: deque[float] = deque(maxlen=10_000)
        self.error: Exception | None = None
        self.on_new: Callable[[ItemMemory, Sequence[Changes] | None], None] | None = None
        self._tables: list[_Table] = []
        self._model: tuple[Position, str] | None = None
        self._between: list[tuple[Position, list[Changes]]] = []  # what the spare table lacks
        self._applied = 0
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, interval: float = 0.25) -> DeltaSubscriber:
        """Poll every ``interval`` seconds in the background. An error is logged, kept in ``error`` and tried again."""
        if not interval > 0:
            raise ValueError(f"interval must be above 0, got {interval}")
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(interval,), name="semel-subscriber", daemon=True)
            self._thread.start()
        return self

    def _run(self, interval: float) -> None:
        while not self._stop.wait(interval):
            try:
                self.poll()
                self.error = None
            except (OSError, RuntimeError, ValueError) as error:
                if self.error is None or str(self.error) != str(error):
                    logger.warning("deltas are not applied, the memory stays at %s: %s", self.position, error)
                self.error = error

    def close(self) -> None:
        """Ends the thread; the memory stays what it is. Safe to call again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> DeltaSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def memory(self) -> ItemMemory | None:
        """To read from once; a request that reads more than once does so within ``reading``."""
        return self._tables[0].memory if self._tables else None

    @property
    def position(self) -> Position | None:
        return self._tables[0].position if self._tables else None

    @contextmanager
    def reading(self) -> Iterator[tuple[ItemMemory, Position]]:
        """One state, which stays as it is within the block. RuntimeError before the first publisher."""
        with self._lock:
            if not self._tables:
                raise RuntimeError(f"{self.sink.url}: nothing was published yet; poll() later")
            table = self._tables[0]
            table.readers += 1
        try:
            yield table.memory, table.position
        finally:
            with self._lock:
                table.readers -= 1

    def poll(self) -> int:
        """Applies what is new; how many rows and departures. From one thread at a time."""
        with self._polling:
            before = self._applied
            for again in (True, True, False):  # a log that is cut while it is read lies further on when listed anew
                try:
                    log = _Log(self.sink)
                    self._follow(log)
                    self._model = log.model(self.position)
                    break
                except _Vanished:
                    if not again:
                        raise
            return self._applied - before

    @property
    def model_position(self) -> Position | None:
        """Where the latest weights lie whose rows are here, None where none were published."""
        return self._model[0] if self._model is not None else None

    def model(self) -> Model | None:
        """The weights at ``model_position``. Raises CorruptDelta for a damaged record, OSError where the sink does not
        answer or has newer ones by now (``poll``)."""
        if self._model is None:
            return None
        position, name = self._model
        return Model(position, *decode_model(self.sink.read(name), name)[1:])

    def _follow(self, log: _Log) -> None:
        epoch = log.newest()
        if epoch is None:
            return
        position = self.position
        if position is None or epoch > position.epoch:
            self._from_snapshot(log, epoch, -1)
            return
        if epoch < position.epoch:
            raise DeltaGap(f"{self.sink.url}: epoch {position.epoch} was there and is gone; it now ends at {epoch}. "
                           "Publish anew, or follow it with a new subscriber")
        error = self._deltas(log, epoch, position.sequence)
        at = self._tables[0].position.sequence
        if log.snapshots(epoch)[0] > at:  # the records between are gone or damaged, or were cut off
            self._from_snapshot(log, epoch, at)
        elif error is not None:
            raise error

    def _from_snapshot(self, log: _Log, epoch: int, above: int) -> None:
        """A fresh table from the newest snapshot that is whole, and what follows it."""
        damaged: Exception | None = None
        for sequence in log.snapshots(epoch):
            if sequence <= above:
                break
            try:
                table = log.table(epoch, sequence)
            except CorruptDelta as error:
                damaged = damaged or error
                continue
            spare = _Table(_copy(table.memory))
            spare.position = table.position
            if self.on_new is not None:
                self.on_new(table.memory, None)
            with self._lock:
                self._tables, self._between = [table, spare], []
            self._applied += len(table.memory)
            self._note(table.memory.rows().written)
            self._deltas(log, epoch, sequence)  # what is wrong with them is said at the next poll, if it still is
            return
        raise damaged or DeltaGap(f"{self.sink.url}: epoch {epoch} has no whole snapshot")

    def _deltas(self, log: _Log, epoch: int, after: int) -> Exception | None:
        """Applies what follows a sequence number, as far as it is whole; returns what stopped it."""
        new: list[tuple[Position, list[Changes]]] = []
        error: Exception | None = None
        try:
            for sequence in log.following(epoch, after):
                place = Position(epoch, sequence, log.described(epoch)["shards"])
                new.append((place, log.deltas(epoch, sequence)))
        except (CorruptDelta, DeltaGap) as found:
            error = found
        if new:
            self._advance(new)
        return error

    def _advance(self, new: list[tuple[Position, list[Changes]]]) -> None:
        spare = self._tables[1]
        while spare.readers:  # of a request that began before the last swap
            time.sleep(0.0005)
        taken = []
        for position, parts in [*self._between, *new]:
            for changes in parts:
                spare.memory.merge(changes)
            taken += parts
            spare.position = position
        if self.on_new is not None:
            self.on_new(spare.memory, taken)
        with self._lock:
            self._tables, self._between = [spare, self._tables[0]], new
        for _, parts in new:
            for changes in parts:
                self._note(changes.rows.written)
                self._applied += len(changes.rows) + len(changes.gone)

    def _note(self, written: Any) -> None:
        now = time.time_ns() // 1000
        self.freshness.extend(((now - written[-1000:]) / 1e6).tolist())


class _Log:
    """What a listing of the sink shows."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.records: dict[tuple[int, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        names = sink.names()
        for place in map(place_of, names):
            if place is not None:
                epoch, shard, kind, sequence = place
                self.records[epoch, kind][sequence].add(shard)
        self.models = models(names)
        self.epochs = sorted(int(name[:8]) for name in names if name[8:] == "/epoch.json" and name[:8].isdigit())
        self._described: dict[int, dict[str, int]] = {}

    def described(self, epoch: int) -> dict[str, int]:
        if epoch not in self._described:
            name = f"{epoch:08d}/epoch.json"
            try:
                found = json.loads(self.sink.read(name))
                version = found["format_version"]
                if version != FORMAT_VERSION:
                    raise ValueError(f"{self.sink.url}/{name} has format version {version}; this version of semel "
                                     f"reads {FORMAT_VERSION}")
                self._described[epoch] = {key: int(found[key]) for key in ("shards", "dim", "capacity")}
            except (json.JSONDecodeError, KeyError, TypeError):
                raise CorruptDelta(f"{self.sink.url}/{name} is damaged") from None
        return self._described[epoch]

    def newest(self) -> int | None:
        """The latest epoch of which all shards have begun."""
        for epoch in reversed(self.epochs):
            if self.snapshots(epoch):
                return epoch
        return None

    def model(self, position: Position | None) -> tuple[Position, str] | None:
        """The latest weights at or before ``position``, and the name of their record."""
        found = [(Position(epoch, sequence), name) for epoch, sequence, name in self.models
                 if position is not None and (epoch, sequence) <= (position.epoch, position.sequence)]
        return found[-1] if found else None

    def snapshots(self, epoch: int) -> list[int]:
        """Sequence numbers of snapshots that all shards have, newest first."""
        shards = self.described(epoch)["shards"]
        found = self.records[epoch, "snapshot"]
        return sorted((sequence for sequence, have in found.items() if len(have) == shards), reverse=True)

    def following(self, epoch: int, sequence: int) -> Iterator[int]:
        """The numbers after ``sequence`` that all shards have, up to the last. DeltaGap where one is left out."""
        shards = self.described(epoch)["shards"]
        found = self.records[epoch, "delta"]
        last = max((number for number, have in found.items() if len(have) == shards), default=0)
        for number in range(sequence + 1, last + 1):
            if len(found.get(number, ())) < shards:
                missing = min(set(range(shards)) - found.get(number, set()))
                raise DeltaGap(f"{self.sink.url}: record {number} of shard {missing} in epoch {epoch} is missing, "
                               "later ones are there; wait for a snapshot, or publish anew")
            yield number

    def deltas(self, epoch: int, sequence: int) -> list[Changes]:
        return self._parts("delta", epoch, sequence)

    def _parts(self, kind: str, epoch: int, sequence: int) -> list[Changes]:
        found = []
        for shard in range(self.described(epoch)["shards"]):
            name = f"{epoch:08d}/{kind}-{shard:04d}-{sequence:012d}"
            try:
                content = self.sink.read(name)
            except FileNotFoundError:
                raise _Vanished(f"{self.sink.url}/{name} was there and is gone") from None
            changes = decode(content, name)[1]
            if changes.rows.vectors.shape[1] != self.described(epoch)["dim"]:
                raise CorruptDelta(f"{name}: vectors of {changes.rows.vectors.shape[1]}, the log's have "
                                   f"{self.described(epoch)['dim']}")
            found.append(changes)
        return found

    def table(self, epoch: int, sequence: int) -> _Table:
        about = self.described(epoch)
        memory = ItemMemory(about["capacity"], about["dim"]).eval()
        memory.read_only = f"it follows {self.sink.url}"
        for changes in self._parts("snapshot", epoch, sequence):
            memory.merge(changes)
        table = _Table(memory)
        table.position = Position(epoch, sequence, about["shards"])
        return table


def memory_at(url: str | Path, epoch: int, sequence: int) -> ItemMemory:
    """The memory as it was at a position that an exposure names. DeltaGap where the log no longer reaches so far."""
    return MemoryHistory(url).at(epoch, sequence)


class MemoryHistory:
    """``at(epoch, sequence)``: the memory as it was, for one position after another; going forward in an epoch only
    applies what lies between. The memory that it gave before is not to be used any more."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._log = _Log(open_sink(url))
        self._table: _Table | None = None

    def at(self, epoch: int, sequence: int) -> ItemMemory:
        """DeltaGap where the log does not reach so far (back, or yet), CorruptDelta for a damaged record."""
        log, table = self._log, self._table
        if epoch not in log.epochs or sequence > self._last(epoch):
            self._log = log = _Log(log.sink)
        before = next((number for number in log.snapshots(epoch) if number <= sequence), None) \
            if epoch in log.epochs else None
        if before is None:
            raise DeltaGap(f"{self.url}: no snapshot at or before record {sequence} of epoch {epoch} is left")
        if sequence > self._last(epoch):
            raise DeltaGap(f"{self.url}: epoch {epoch} has no record {sequence} yet, its last is {self._last(epoch)}")
        here = table is not None and table.position.epoch == epoch and before <= table.position.sequence <= sequence
        if not here:
            table = log.table(epoch, before)
        assert table is not None
        self._table = None  # half advanced, should a record be damaged
        for number in range(table.position.sequence + 1, sequence + 1):
            for changes in log.deltas(epoch, number):
                table.memory.merge(changes)
        table.position = Position(epoch, sequence, table.position.shards)
        self._table = table
        return table.memory

    def _last(self, epoch: int) -> int:
        return max([*self._log.records[epoch, "snapshot"], *self._log.records[epoch, "delta"]], default=-1)


def _copy(memory: ItemMemory) -> ItemMemory:
    import copy

    return copy.deepcopy(memory)

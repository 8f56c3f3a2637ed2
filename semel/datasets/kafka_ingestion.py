"""``ingest_kafka``: the events of a Kafka topic into a store, each once, whatever is interrupted when.

How far the topic has been read is kept by the store, in the append of the events (``semel.history.log.positions``):
after a crash both are there or neither is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from semel.datasets.dataset import Progress
from semel.datasets.filling import COMPACT_EVENTS, as_schema, distinct, existing_schema
from semel.datasets.ingestion import CATALOGUE_SHARDS, catalogue_rows
from semel.datasets.json_messages import EventReader, NoTimeUnit, Row, infer_schema, parse
from semel.datasets.kafka_topic import KafkaTopic, Message, log
from semel.datasets.table import EventColumns
from semel.history import EventSchema, HistoryStore, Projection
from semel.history.durable import whole_folder
from semel.history.schema import type_name

ON_BAD = ("stop", "skip")
SHOWN = 5  # bad messages whose reasons a report has
_ALWAYS = 2**62
_NOTHING = Projection(())


@dataclass(frozen=True)
class KafkaReport:
    """What one run did: ``messages`` read, of which ``events`` appended and ``bad`` left out; ``lost``: offsets that
    the broker had removed before they were read (``skip_lost``); ``seconds`` of it, waiting included, and ``events`` /
    ``seconds``; ``version`` of the store; ``positions``: next offset by partition; ``notes``: what was decided or left
    out."""

    messages: int
    events: int
    bad: int
    lost: int
    seconds: float
    events_per_second: float
    version: int
    positions: dict[int, int]
    notes: tuple[str, ...] = ()


def ingest_kafka(url: str, store: Path, columns: EventColumns | None = None, *,
                 types: Mapping[str, pa.DataType] | None = None, until_end: bool = False, batch: int = 10_000,
                 linger: float = 1.0, on_bad: str = "stop", skip_lost: bool = False,
                 config: Mapping[str, str] | None = None, group: str | None = None,
                 stop: threading.Event | None = None, progress: Progress | None = None, shards: int = 16,
                 ) -> KafkaReport:
    """Appends the events of the topic ``url`` (``kafka://broker[:port][,broker]/topic``, messages are JSON objects) to
    the store at ``store``, from where it left off, until ``stop`` is set; with ``until_end`` up to the last message
    that is there at the start, after which the store is compacted.

    One append for up to ``batch`` messages of all partitions, or those of ``linger`` seconds. ``columns``: which key is
    which column, as in tables; ``payload.price`` reaches into nested objects; keys that the store has no column for are
    left out. A store that is not there yet is made, with a catalogue, when the first messages have come: ``types`` (by
    stored name) for its columns, those of the values in them for the rest.

    ``on_bad``: what a message that cannot be stored does: ``stop`` with a ValueError that names it, nothing of its
    batch appended; or it is counted and ``skip``ped, for good. ``skip_lost``, ``config``, ``group``: see
    ``KafkaTopic``. ValueError for what contradicts the store or the topic, ConnectionError where no broker answers at
    the start (one that goes away later is waited for), StoreLocked, FileExistsError where ``store`` is something else.
    """
    if on_bad not in ON_BAD:
        raise ValueError(f"on_bad must be one of {', '.join(ON_BAD)}, got {on_bad!r}")
    if batch < 1 or not linger >= 0:
        raise ValueError(f"batch must be at least 1 and linger at least 0 seconds, got {batch} and {linger}")
    columns, stop, store = columns or EventColumns(), stop or threading.Event(), Path(store)
    schema = existing_schema(store)
    if schema is not None:
        EventReader(schema, columns)
        _check_types(types or {}, schema)
    topic = KafkaTopic(url, config, group)
    try:
        run = _Run(topic, store, columns, dict(types or {}), on_bad, progress or (lambda *_: None), shards)
        with run:
            return run.read(batch, linger, until_end, skip_lost, stop)
    finally:
        topic.close()


def _check_types(types: Mapping[str, pa.DataType], schema: EventSchema) -> None:
    there = {"user_id": schema.user_id, **schema.columns}
    for name, kind in types.items():
        if there.get(name) != kind:
            keeps = f"{type_name(there[name])}" if name in there else f"no such column, but {', '.join(there)}"
            raise ValueError(f"{name} is to be {type_name(kind)}; the store is there and keeps {keeps}")


@dataclass
class _Run:
    """One run's counts, and the store once it is there."""

    topic: KafkaTopic
    path: Path
    columns: EventColumns
    types: dict[str, pa.DataType]
    on_bad: str
    progress: Progress
    shards: int
    messages: int = 0
    events: int = 0
    bad: int = 0
    notes: list[str] = field(default_factory=list)
    _in_log: int = 0

    def __enter__(self) -> _Run:
        self._open = ExitStack()
        self._store: HistoryStore | None = None
        self._catalogue: HistoryStore | None = None
        self._reader: EventReader | None = None
        if (self.path / "manifest.json").is_file():
            self._open_store()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, batch: int, linger: float, until_end: bool, skip_lost: bool, stop: threading.Event) -> KafkaReport:
        began, topic = time.monotonic(), self.topic
        state = self._store.position(topic.source).state if self._store is not None else None
        ends = topic.start({int(partition): offset for partition, offset in (state or {}).items()}, skip_lost)
        total = sum(end - topic.next[partition] for partition, end in ends.items()) if until_end else None

        def done() -> bool:
            return stop.is_set() or (until_end and topic.reached(ends))

        while messages := topic.take(batch, linger, done):
            self._append(messages)
            topic.commit()
            self.progress("append events", self.messages, total)
        if until_end and not stop.is_set() and self.messages:
            self._compact()
        topic.finish()
        seconds = time.monotonic() - began
        if topic.lost:
            self.notes.append(f"messages gone from the broker before they were read: up to {topic.lost:,}")
        if self._store is None:
            self.notes.append(f"no message of {topic.topic} could be stored, so no store was made")
        return KafkaReport(self.messages, self.events, self.bad, topic.lost, seconds, self.events / max(seconds, 1e-9),
                           self._store.version if self._store is not None else 0, dict(sorted(topic.next.items())),
                           tuple(self.notes))

    def _append(self, messages: Sequence[Message]) -> None:
        """One batch and the position behind it, in one append."""
        rows: list[Row] = []
        of: list[Message] = []
        for message in messages:
            try:
                rows.append(parse(message.value))
                of.append(message)
            except ValueError as error:
                self._refuse(message, str(error))
        self.messages += len(messages)
        notes: list[str] = []
        reader = self._reader
        if reader is None:
            if not rows:
                return
            schema, notes = infer_schema(rows, self.columns, self.types)
            reader = EventReader(schema, self.columns)
        try:
            tables, bad = reader.read(rows)
        except NoTimeUnit as error:
            raise ValueError(f"{self.topic.topic}: {error}") from None
        for index, reason in bad:
            self._refuse(of[index], reason)
        if self._store is None:
            if not tables:
                return  # a run that finds no store reads these messages again
            self._make_store(reader.schema)
            self.notes += notes
        assert self._store is not None
        events = pa.concat_tables(tables) if tables else reader.schema.arrow.empty_table()
        self._add_items(events["item_id"])
        position = self._store.position(self.topic.source)
        self._store.append(events, position.then({str(number): offset for number, offset in self.topic.next.items()}))
        self.events += events.num_rows
        self._in_log += events.num_rows
        if self._in_log >= COMPACT_EVENTS:
            self._compact()

    def _refuse(self, message: Message, reason: str) -> None:
        where = f"{self.topic.topic}, partition {message.partition}, offset {message.offset}: {reason}"
        if self.on_bad == "stop":
            raise ValueError(f"{where} (nothing of its batch was appended; to leave such messages out: --on-bad skip)")
        self.bad += 1
        if self.bad <= SHOWN:
            self.notes.append(f"left out: {where}")
        if str(self.bad).strip("0") == "1":  # 1, 10, 100, ...: somebody should see it while it runs
            log.warning("messages left out so far: %d; the last: %s", self.bad, where)

    # -- the store ----------------------------------------------------------------------------------------------------

    def _make_store(self, schema: EventSchema) -> None:
        kept = {"user_id": schema.user_id, **schema.columns}
        named = ", ".join(f"{name} {type_name(kind)}" for name, kind in kept.items())
        self.notes.append(f"{self.path} was made with {named}")
        items = pa.int64() if pa.types.is_integer(schema.columns["item_id"]) else pa.string()
        with whole_folder(self.path, "--store") as building:
            HistoryStore.create(building, schema, shards=self.shards).close()
            HistoryStore.create(building / "catalogue", EventSchema({}, user_id=items, key="item_id"),
                                shards=CATALOGUE_SHARDS).close()
        self._open_store()

    def _open_store(self) -> None:
        self._store = self._open.enter_context(HistoryStore.open(self.path, mode="a"))
        if (self.path / "catalogue" / "manifest.json").is_file():
            self._catalogue = self._open.enter_context(HistoryStore.open(self.path / "catalogue", mode="a"))
        self._reader = EventReader(self._store.schema, self.columns)
        self._in_log = self._store.uncompacted

    def _add_items(self, items: pa.ChunkedArray) -> None:
        """Every item of an event is in the catalogue, if only by name, before its event is in the store."""
        if self._catalogue is None or not len(items):
            return
        seen = distinct(items.chunks)
        pointers = self._catalogue.point(seen.to_numpy(zero_copy_only=False), _ALWAYS)
        known, _ = self._catalogue.lengths(pointers, _NOTHING)
        new = seen.filter(pa.array(known == 0))
        if len(new):
            self._catalogue.append(as_schema(catalogue_rows(None, new), self._catalogue.schema.arrow))

    def _compact(self) -> None:
        for store in (self._store, self._catalogue):
            if store is not None and store.uncompacted:
                self.progress("compact", 0, None)
                store.compact()
        self._in_log = 0

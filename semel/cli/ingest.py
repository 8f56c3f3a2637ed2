"""``semel ingest``: a public data set, tables of your own, fat rows or a Kafka topic, into a history store."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from semel.datasets import Dataset, EventColumns, IngestReport, Progress
    from semel.examples import FatRowColumns

OWN = "Own tables"
FAT = "Fat rows"
KAFKA = "Kafka"


def ingest(
    names: Annotated[list[str], typer.Argument(
        metavar="NAME|PATH...|URL", help="A data set by name (ml-1m, ...), or Parquet, Arrow, CSV or TSV files "
        "of your own, or a folder of them, or kafka://broker[:port][,broker]/topic.")],
    store: Annotated[Path, typer.Option(help="The folder of the store to make, or to append own events to.")] = Path(
        "store"),
    data: Annotated[Path | None, typer.Option(help="Where the named data set lies; else it is looked for.")] = None,
    user: Annotated[str | None, typer.Option(
        help="Column of user ids.", show_default="user_id", rich_help_panel=OWN)] = None,
    item: Annotated[str | None, typer.Option(
        help="Column of item ids.", show_default="item_id", rich_help_panel=OWN)] = None,
    time: Annotated[str | None, typer.Option(
        help="Column of event times.", show_default="event_time", rich_help_panel=OWN)] = None,
    time_unit: Annotated[str | None, typer.Option(
        help="s, ms, us, ns or iso, where times are numbers.", rich_help_panel=OWN)] = None,
    column: Annotated[list[str] | None, typer.Option(
        metavar="NAME[=COLUMN]", show_default="all", rich_help_panel=OWN,
        help="A further column to keep, and what it is called in the table; may be repeated.")] = None,
    from_fat_rows: Annotated[bool, typer.Option(
        "--from-fat-rows", rich_help_panel=FAT,
        help="The files are training rows with lists of history: recover the events in them.")] = False,
    request_time: Annotated[str | None, typer.Option(
        help="Column of the time of the request.", show_default="request_time", rich_help_panel=FAT)] = None,
    until_end: Annotated[bool, typer.Option(
        "--until-end", rich_help_panel=KAFKA,
        help="End at the last message that is there now, and compact; else run until SIGTERM or Ctrl-C.")] = False,
    batch: Annotated[int | None, typer.Option(
        min=1, help="Most messages of one append.", show_default="10000", rich_help_panel=KAFKA)] = None,
    linger: Annotated[float | None, typer.Option(
        min=0, help="Seconds that the first message of an append waits for others.", show_default="1",
        rich_help_panel=KAFKA)] = None,
    on_bad: Annotated[str | None, typer.Option(
        metavar="stop|skip", help="What a message does that cannot be stored: end the run, or be counted and left out.",
        show_default="stop", rich_help_panel=KAFKA)] = None,
    type_: Annotated[list[str] | None, typer.Option(
        "--type", metavar="NAME=TYPE", rich_help_panel=KAFKA, show_default="by the first messages",
        help="The type of a column of a new store, such as price=float32; may be repeated.")] = None,
    kafka_config: Annotated[Path | None, typer.Option(
        help="A file of further settings of the client, name=value in each line.", rich_help_panel=KAFKA)] = None,
    group: Annotated[str | None, typer.Option(
        help="Also commit offsets to Kafka as this group, for monitors of its lag.", rich_help_panel=KAFKA)] = None,
    skip_lost: Annotated[bool, typer.Option(
        "--skip-lost", rich_help_panel=KAFKA,
        help="Go on where the broker has removed messages before they were read.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put events and item features into a store.

    A data set, and the events of fat rows, make a new store. Tables of your own make one, or are appended to one that
    is there; the same bytes are appended once, so the command may be repeated after an interruption. So may that of a
    Kafka topic: the store knows how far it has been read.
    """
    from semel.cli import output

    mapping = Mapping(user, item, time, time_unit, column, request_time)
    options = Streaming(until_end, batch, linger, on_bad, type_, kafka_config, group, skip_lost)
    if any(name.startswith("kafka://") for name in names):
        if len(names) > 1 or data is not None or from_fat_rows or request_time is not None:
            raise ValueError(f"{names[0]}: a topic is ingested alone, without files, --data, --from-fat-rows and "
                             "--request-time")
        _kafka(names[0], store, mapping, options, as_json)
        return
    if options != Streaming():
        raise ValueError("--until-end, --batch, --linger, --on-bad, --type, --kafka-config, --group and --skip-lost "
                         "are for kafka://broker/topic")
    facts: dict[str, Any]
    with output.progress_bar() as bar:
        progress = output.Steps(bar)
        if from_fat_rows:
            if data is not None:
                raise ValueError("--data is for data sets by name; give the files of fat rows as arguments")
            report, facts = _fat_rows(names, store, mapping, progress)
        else:
            if request_time is not None:
                raise ValueError("--request-time is for fat rows; add --from-fat-rows")
            report, facts = _events(names, data, store, mapping, progress)
    if as_json:
        output.print_json({"store": str(store), **facts, **dataclasses.asdict(report)})
        return
    of = "of" if report.appended == report.events else f"({output.count(report.appended)} of them new); now"
    output.results().print(
        f"{output.count(report.events, 'event')} {of} {output.count(report.users, 'user')} and "
        f"{output.count(report.items, 'item')}: {output.size(report.bytes)} in {store}, "
        f"{output.count(report.events_per_second)} events/s", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The options that say what columns are called, as they were given."""

    user: str | None
    item: str | None
    time: str | None
    unit: str | None
    column: list[str] | None
    request_time: str | None

    @property
    def given(self) -> bool:
        return any(value is not None for value in dataclasses.astuple(self))

    @property
    def others(self) -> dict[str, str] | None:
        """Stored name -> name in the table, of the --column options."""
        return None if self.column is None else dict(_renamed(text) for text in self.column)

    def of_events(self) -> EventColumns:
        from semel.datasets import EventColumns

        return EventColumns(self.user or "user_id", self.item or "item_id", self.time or "event_time", self.unit,
                            self.others)


    def of_fat_rows(self, version: str | None = None) -> FatRowColumns:
        from semel.examples import FatRowColumns

        return FatRowColumns(self.user or "user_id", self.request_time or "request_time", self.item, self.time, version,
                             self.unit, self.others)


@dataclasses.dataclass(frozen=True)
class Streaming:
    """The options of a Kafka topic, as they were given."""

    until_end: bool = False
    batch: int | None = None
    linger: float | None = None
    on_bad: str | None = None
    types: list[str] | None = None
    config: Path | None = None
    group: str | None = None
    skip_lost: bool = False

    def arguments(self) -> dict[str, Any]:
        """As ``ingest_kafka`` takes them; those that were not given are left out."""
        from semel.history.schema import parse_type

        given: dict[str, Any] = {"until_end": self.until_end, "skip_lost": self.skip_lost, "group": self.group}
        for name in ("batch", "linger", "on_bad"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.config is not None:
            given["config"] = _settings(self.config)
        pairs = [text.partition("=") for text in self.types or []]
        for name, _, kind in pairs:
            if not name or not kind:
                raise ValueError(f"--type {name!r}: say NAME=TYPE, such as price=float32")
        given["types"] = {name: parse_type(kind) for name, _, kind in pairs}
        return given


def _settings(path: Path) -> dict[str, str]:
    """The settings in a file of ``name=value`` lines; # begins a remark."""
    settings = {}
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if name and not name.startswith("#"):
            if not equals:
                raise ValueError(f"{path}, line {number}: say name=value")
            settings[name.strip()] = value.strip()
    return settings


def _renamed(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not name or (equals and not source):
        raise ValueError(f"--column {text!r}: say NAME, or NAME=COLUMN where the table calls it otherwise")
    return name, source or name


def _events(names: Sequence[str], data: Path | None, store: Path, mapping: Mapping,
            progress: Progress) -> tuple[IngestReport, dict[str, Any]]:
    from semel import datasets
    from semel.cli import output

    found = _find(names, data, mapping, progress)
    if isinstance(found, list):
        report = datasets.ingest_files(found, store, mapping.of_events(), progress)
        for note in report.notes:
            output.remark(f"note: {note}")
        return report, {"dataset": found[0].stem, "source": ", ".join(map(str, found)), "licence": "your own data"}
    progress.clear()  # type: ignore[attr-defined]
    output.remark(f"{found.name} from {found.source}")
    output.remark(f"terms: {found.licence}")
    for note in found.notes:
        output.remark(f"note: {note}")
    return datasets.ingest(found, store, progress), {
        "dataset": found.name, "source": found.source, "licence": found.licence}


def _kafka(url: str, store: Path, mapping: Mapping, options: Streaming, as_json: bool) -> None:
    import signal
    import threading

    from semel import datasets
    from semel.cli import output

    stop = threading.Event()
    before = [(number, signal.signal(number, lambda *_: stop.set())) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with output.progress_bar() as bar:
            report = datasets.ingest_kafka(url, store, mapping.of_events(), stop=stop, progress=output.Steps(bar),
                                           **options.arguments())
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    for note in report.notes:
        output.remark(f"note: {note}")
    if as_json:
        output.print_json({"store": str(store), "source": url, **dataclasses.asdict(report)})
        return
    left = f", {output.count(report.bad)} left out" if report.bad else ""
    output.results().print(
        f"{output.count(report.events, 'event')} of {output.count(report.messages, 'message')}{left}: {store} is at "
        f"version {report.version}, {output.count(report.events_per_second)} events/s", soft_wrap=True)


def _fat_rows(names: Sequence[str], store: Path, mapping: Mapping,
              progress: Progress) -> tuple[IngestReport, dict[str, Any]]:
    from semel.cli import output
    from semel.examples import ingest_fat_rows

    report, recovery = ingest_fat_rows([Path(name) for name in names], store, mapping.of_fat_rows(), progress)
    for note in report.notes:
        output.remark(f"note: {note}")
    output.remark(f"{output.count(recovery.rows, 'row')}: {output.count(recovery.listed, 'event')}, "
                  f"{output.count(recovery.events)} of them distinct")
    return report, {"dataset": Path(names[0]).stem, "source": ", ".join(names), "licence": "your own data",
                    "fat_rows": dataclasses.asdict(recovery)}


def _find(names: Sequence[str], data: Path | None, mapping: Mapping, progress: Progress) -> Dataset | list[Path]:
    """The data set that is meant, or the paths of tables of one's own."""
    from semel import datasets
    from semel.datasets.own_events import looks_like_events

    if len(names) > 1:
        if data is not None:
            raise ValueError(f"--data {data} is for one data set, got {', '.join(names)}")
        return [Path(name) for name in names]
    name, path = names[0], Path(names[0])
    if name in datasets.PUBLISHED:
        if mapping.given:
            raise ValueError(f"{name} is a data set whose columns are known; --user, --item, --time, --time-unit and "
                             f"--column are for tables of your own (for a folder of that name say .{os.sep}{name})")
        return datasets.fetch(name, data, progress)
    if path.exists():
        if data is not None:
            raise ValueError(f"{name} is a path, and so is --data {data}; give one of them")
        return [path] if mapping.given or looks_like_events(path) else datasets.read(path)
    if os.sep in name or path.suffix:
        raise FileNotFoundError(f"{name}: no such file or folder")
    return datasets.fetch(name, data, progress)  # raises, naming the nearest data set

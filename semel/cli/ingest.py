"""``semel ingest``: a public data set, tables of your own, or the events inside fat rows, into a history store."""

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


def ingest(
    names: Annotated[list[str], typer.Argument(
        metavar="NAME|PATH...", help="A data set by name (ml-1m, ...), or Parquet, Arrow, CSV or TSV files "
        "of your own, or a folder of them.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put events and item features into a store.

    A data set, and the events of fat rows, make a new store. Tables of your own make one, or are appended to one that
    is there; the same bytes are appended once, so the command may be repeated after an interruption.
    """
    from semel.cli import output

    mapping = Mapping(user, item, time, time_unit, column, request_time)
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
        f"{output.count(report.events)} events {of} {output.count(report.users)} users and "
        f"{output.count(report.items)} items: {output.size(report.bytes)} in {store}, "
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


def _fat_rows(names: Sequence[str], store: Path, mapping: Mapping,
              progress: Progress) -> tuple[IngestReport, dict[str, Any]]:
    from semel.cli import output
    from semel.examples import ingest_fat_rows

    report, recovery = ingest_fat_rows([Path(name) for name in names], store, mapping.of_fat_rows(), progress)
    for note in report.notes:
        output.remark(f"note: {note}")
    output.remark(f"{output.count(recovery.rows)} rows list {output.count(recovery.listed)} events, "
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

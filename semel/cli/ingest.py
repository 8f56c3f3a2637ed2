"""``semel ingest``: a public data set, or a table of your own, into a history store."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from semel.datasets import Dataset, EventColumns, Progress


def ingest(
    name: Annotated[str, typer.Argument(
        metavar="NAME|PATH", help="A data set by name (ml-1m, ...), or a folder, or a Parquet or CSV table.")],
    store: Annotated[Path, typer.Option(help="The folder of the store to make.")] = Path("store"),
    data: Annotated[Path | None, typer.Option(help="Where the named data set lies; else it is looked for.")] = None,
    user: Annotated[str | None, typer.Option(help="Own table: column of user ids.", show_default="user_id")] = None,
    item: Annotated[str | None, typer.Option(help="Own table: column of item ids.", show_default="item_id")] = None,
    time: Annotated[str | None, typer.Option(help="Own table: column of times.", show_default="event_time")] = None,
    time_unit: Annotated[str | None, typer.Option(help="Own table: s, ms, us or iso, where times are numbers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put events and item features into a new store."""
    from semel import datasets
    from semel.cli import output

    with output.progress_bar() as bar:
        progress = output.Steps(bar)
        dataset = _find(name, data, _columns(user, item, time, time_unit), progress)
        progress.clear()
        output.remark(f"{dataset.name} from {dataset.source}")
        output.remark(f"terms: {dataset.licence}")
        for note in dataset.notes:
            output.remark(f"note: {note}")
        report = datasets.ingest(dataset, store, progress)
    if as_json:
        output.print_json({"store": str(store), "dataset": dataset.name, "source": dataset.source,
                           "licence": dataset.licence, **dataclasses.asdict(report)})
        return
    output.results().print(
        f"{output.count(report.events)} events of {output.count(report.users)} users on {output.count(report.items)} "
        f"items: {output.size(report.bytes)} in {store}, {output.count(report.events_per_second)} events/s",
        soft_wrap=True)


def _columns(user: str | None, item: str | None, time: str | None, unit: str | None) -> EventColumns | None:
    """The mapping of an own table, or None where none of its options was given."""
    from semel.datasets import EventColumns

    if (user, item, time, unit) == (None, None, None, None):
        return None
    return EventColumns(user or "user_id", item or "item_id", time or "event_time", unit)


def _find(name: str, data: Path | None, columns: EventColumns | None, progress: Progress) -> Dataset:
    from semel import datasets

    if name in datasets.PUBLISHED:
        if columns is not None:
            raise ValueError(f"{name} is a data set whose columns are known; --user, --item, --time and --time-unit "
                             f"are for tables of your own (for a folder of that name say .{os.sep}{name})")
        return datasets.fetch(name, data, progress)
    path = Path(name)
    if path.exists():
        if data is not None:
            raise ValueError(f"{name} is a path, and so is --data {data}; give one of them")
        return datasets.read(path, columns=columns)
    if os.sep in name or path.suffix:
        raise FileNotFoundError(f"{name}: no such file or folder")
    return datasets.fetch(name, data, progress)  # raises, naming the nearest data set

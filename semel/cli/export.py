"""``semel export``: a store's events as Parquet or Lance."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def export(
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    format: Annotated[str, typer.Option(
        help="parquet: a file a shard; lance: a dataset (needs the extra lance).")] = "parquet",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write all events of a store, sorted by user and time, with their versions: semel ingest reads them back."""
    from semel.cli import output
    from semel.history import HistoryStore
    from semel.history.export import export as write

    with output.progress_bar() as bar, HistoryStore.open(store) as handle:
        report = write(handle, out, format, partial(output.Steps(bar), "write shards"))
    if as_json:
        output.print_json({"store": str(store), "out": str(out), "format": format, **dataclasses.asdict(report)})
        return
    output.results().print(
        f"{output.count(report.rows, 'event')} of {output.count(report.users, 'user')} at version {report.version}: "
        f"{output.size(report.bytes)} in {output.count(report.files, 'file')} of {out}", soft_wrap=True)

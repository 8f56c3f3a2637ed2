"""``semel ingest``: a public data set, or a table of your own, into a history store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ingest(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A data set (ml-1m, ...) or a Parquet or CSV file.")],
    store: Annotated[Path, typer.Option(help="The folder of the store to make.")] = Path("store"),
    data: Annotated[Path | None, typer.Option(help="Where the data set lies; otherwise it is looked for.")] = None,
    user: Annotated[str, typer.Option(help="Own table: the column of user ids.")] = "user_id",
    item: Annotated[str, typer.Option(help="Own table: the column of item ids.")] = "item_id",
    time: Annotated[str, typer.Option(help="Own table: the column of event times.")] = "event_time",
    time_unit: Annotated[str, typer.Option(help="Own table: s, ms, us or ns; for numbers without a unit.")] = "us",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put events and item features into a store."""

"""``semel shadow``: the histories in fat rows against those that the store rebuilds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

DIFFERENT = 1


def shadow(
    fat_rows: Annotated[Path, typer.Argument(metavar="FATROWS", help="A Parquet or Arrow file, or a folder of them.")],
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    user: Annotated[str, typer.Option(help="Column of user ids.")] = "user_id",
    request_time: Annotated[str, typer.Option(help="Column of the time of the request.")] = "request_time",
    version: Annotated[str | None, typer.Option(
        help="Column of the store's version that the request saw.", show_default="the store's current version")] = None,
    item: Annotated[str | None, typer.Option(
        help="List column of item ids.", show_default="item_id, history_item_id")] = None,
    time: Annotated[str | None, typer.Option(
        help="List column of event times.", show_default="event_time, history_event_time")] = None,
    time_unit: Annotated[str | None, typer.Option(help="s, ms, us, ns or iso, where times are numbers.")] = None,
    column: Annotated[list[str] | None, typer.Option(
        metavar="NAME[=COLUMN]", show_default="all",
        help="A further list to compare, and what it is called in the rows; may be repeated.")] = None,
    last: Annotated[int | None, typer.Option(
        min=1, help="At how many events the rows were cut.", show_default="the longest row")] = None,
    explained: Annotated[str, typer.Option(
        metavar="CAUSE,...", help="Causes of a difference that are no reason to fail.")] = (
        "schema,deleted,late,tie,truncation"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare each row's lists with the history that its pointer gives, and sort what differs by cause.

    Exit code 0 where all rows are equal or differ for causes that are --explained, and the store has all their
    columns; 1 otherwise. docs/adoption.md says what the causes mean.
    """
    from semel.cli import output
    from semel.cli.ingest import Mapping
    from semel.examples import compare_fat_rows, open_fat_rows
    from semel.history import HistoryStore

    mapping = Mapping(user, item, time, time_unit, column, request_time)
    causes = [cause.strip() for cause in explained.split(",") if cause.strip()]
    with output.progress_bar() as bar, HistoryStore.open(store) as handle:
        progress = output.Steps(bar)
        table = open_fat_rows([fat_rows], mapping.of_fat_rows(version), progress)
        report = compare_fat_rows(table, handle, last, causes, progress)
    for note in table.notes:
        output.remark(f"note: {note}")
    facts: dict[str, Any] = {"fat_rows": str(fat_rows), "store": str(store), "passed": report.passed,
                             **dataclasses.asdict(report)}
    if as_json:
        output.print_json(facts)
    else:
        show(facts)
    if not report.passed:
        raise typer.Exit(DIFFERENT)


def show(facts: dict[str, Any]) -> None:
    """A report for people."""
    from semel.cli import output

    rows = [["equal", output.count(facts["equal"]), share(facts["equal"], facts["rows"]), "", ""]]
    rows += [[cause, output.count(count["rows"]), share(count["rows"], facts["rows"]), output.count(count["events"]),
              "yes" if cause in facts["explained"] else "no"]
             for cause, count in reversed(facts["causes"].items())]
    console = output.results()
    console.print(output.table(f"{output.count(facts['rows'], 'row')}, last {output.count(facts['last'], 'event')}",
                               ["", "rows", "share", "events", "explained"], rows))
    for name, why in facts["unmatched"].items():
        console.print(f"column {name} was not compared: {why}", markup=False, soft_wrap=True)
    for one in facts["examples"]:
        console.print(f"{one['cause']}: {one['file']}, row {one['row']}, user {one['user_id']!r}: {one['what']}",
                      markup=False, soft_wrap=True)
    verdict = "passed" if facts["passed"] else "not passed"
    console.print(f"{verdict}: {output.count(facts['equal'])} of {output.count(facts['rows'], 'row')} equal",
                  soft_wrap=True)


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"

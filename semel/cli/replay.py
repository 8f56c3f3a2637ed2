"""``semel replay``: score logged requests again and compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from semel.serving import ReplayReport


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of the run that served.")],
    store: Annotated[Path, typer.Option(help="The folder of the store.")] = Path("store"),
    limit: Annotated[int | None, typer.Option(help="Only the last so many requests.")] = None,
    memory: Annotated[str | None, typer.Option(help="Where item rows were published.",
                                               show_default="RUN/memory")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read what was served, score it again as training would, and compare. Exit code 1 if anything differs."""
    from semel.cli import output
    from semel.serving import replay as replay_run

    with output.progress_bar() as bar:
        steps = output.Steps(bar)
        report = replay_run(run, store, limit, lambda done, total: steps("replay", done, total), memory)
    if as_json:
        output.print_json(report.to_json())
    else:
        output.results().print(output.table(None, ["replay", ""], rows_of(report)))
    if not report.exact:
        output.remarks().print("[red]what was served and what is replayed differ[/red]")
        raise typer.Exit(1)


def rows_of(report: ReplayReport) -> list[list[str]]:
    """The report for people."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.6f}"

    rows = [
        ["requests", f"{report.requests:,}"],
        ["candidates", f"{report.candidates:,}"],
        ["histories_equal", f"{report.histories_equal:,} of {report.requests:,}"],
        ["scores bit-equal", f"{report.bit_equal:,} of {report.requests:,}"],
        ["max_difference", f"{report.max_difference:g}"],
        ["served NE", number(report.served_ne)],
        ["replayed NE", number(report.replayed_ne)],
        ["skew", number(report.skew)],
        ["labelled candidates", f"{report.labelled:,}"],
    ]
    if report.histories_erased:
        rows.insert(3, ["histories erased since", f"{report.histories_erased:,}"])
    if len(report.by_version) > 1:
        rows.append(["model versions", f"{len(report.by_version)}"])
    if report.memory_gone:
        rows.append(["requests whose item memory is gone", f"{report.memory_gone:,}"])
    if report.other_versions:
        rows.append(["requests of other models", f"{report.other_versions:,}"])
    return rows

"""``semel skew``: what serving lost of what training knew, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from semel.serving import SkewReport


def skew(
    run: Annotated[Path, typer.Argument(help="The folder of the run that served and follows.")],
    store: Annotated[Path, typer.Option(help="The folder of the store.")] = Path("store"),
    limit: Annotated[int | None, typer.Option(help="Only the last so many requests.")] = None,
    memory: Annotated[str | None, typer.Option(help="Where item rows were published.",
                                               show_default="RUN/memory")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare what was served with what training predicted of the same requests before it learned from them. Exit code
    1 if what was served cannot be computed again exactly."""
    from semel.cli import output
    from semel.serving import skew as skew_of

    with output.progress_bar() as bar:
        steps = output.Steps(bar)
        report = skew_of(run, store, limit, memory, lambda done, total: steps("replay", done, total))
    if as_json:
        output.print_json(report.to_json())
    else:
        show(report)
    if not report.exact:
        output.remarks().print(f"[red]served and replayed predictions differ by up to {report.largest:g}[/red]")
        raise typer.Exit(1)


def show(report: SkewReport) -> None:
    """The report for people."""
    from semel.cli import output

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    console = output.results()
    for task, splits in report.tasks.items():
        rows = [[part.name if split == "all" else f"{split}: {part.name}", f"{part.rows:,}", number(part.trained),
                 number(part.served), number(part.skew), number(part.inexact), number(part.staleness)]
                for split, parts in splits.items() for part in parts]
        console.print(output.table(task, ["", "labels", "trained", "served", "skew", "inexact", "stale"], rows))
    if report.worst:
        rows = [[one.request_id, f"{one.difference:.4f}", f"{one.memory:.4f}", f"{one.weights:.4f}",
                 ", ".join(one.differs)] for one in report.worst]
        console.print(output.table("furthest from what was trained (mean difference of a prediction)",
                                   ["request", "served - trained", "of it memory", "weights", "what differs"], rows))
    left = f", {report.memory_gone:,} left out: the memory's log is too short" if report.memory_gone else ""
    console.print(f"{output.count(report.requests, 'request')}, {output.count(report.candidates, 'candidate')}: "
                  f"{report.coverage:.2%} scored, {report.found:.2%} with a row; {report.unmatched:,} served and not "
                  f"trained on{left}", soft_wrap=True)

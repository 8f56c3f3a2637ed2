"""``semel evaluate``: how good a run's model is, with intervals, overall and by history length and item age."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

NAMES = {"ne": "NE", "log_loss": "log loss", "auc": "AUC", "user_auc": "AUC by user", "calibration": "calibration",
         "rmse": "RMSE", "mae": "MAE", "mrr": "MRR"}


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    store: Annotated[Path | None, typer.Option(help="The folder of the store.", show_default="as trained")] = None,
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    ranking_requests: Annotated[int, typer.Option(
        min=0, help="Ranking models: rank the whole catalogue for so many requests.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge a model on data that it was not trained on; writes evaluation.json into the run."""
    from semel.cli import output
    from semel.training import evaluate as evaluate_run

    with output.progress_bar() as bar:
        judged = evaluate_run(run, store, split=split, ranking_requests=ranking_requests, on_progress=output.Steps(bar))
    judged.save(run / "evaluation.json")
    document = judged.to_json()
    if as_json:
        output.print_json(document)
        return
    output.remark(judged.protocol)
    for table in tables(document):
        output.results().print(table)


def tables(document: dict[str, Any]) -> list[Table]:
    """An evaluation (as JSON) as tables: for each part its figures with intervals, then the first ones by bucket."""
    from semel.cli import output

    parts = list(document["tasks"].items())
    if document["catalogue"] is not None:
        parts.append((f"ranking all {document['items']:,} items", document["catalogue"]))
    made = []
    for title, part in parts:
        names = figures_of(part)
        rows = [[NAMES.get(name, name.upper()), number(part[name]["value"]),
                 f"{number(part[name]['low'])} to {number(part[name]['high'])}"] for name in names]
        made.append(output.table(f"{title}: {part['rows']:,} rows of {part['users']:,} users",
                                 ["", "value", "95 % interval"], rows))
        for heading, key in (("events before", "by_history_length"), ("age of the item", "by_item_age")):
            rows = [[piece["name"], f"{piece['rows']:,}", *(number(piece[name]["value"]) for name in names[:4])]
                    for piece in part[key]]
            columns = [heading, "rows", *(NAMES.get(name, name.upper()) for name in names[:4])]
            made.append(output.table(None, columns, rows))
    return made


def number(value: float | None) -> str:
    """Four digits; a dash for what could not be measured (one class only, no rows)."""
    return "-" if value is None else f"{value:.4f}"


def figures_of(part: dict[str, Any]) -> list[str]:
    """Names of the figures of a judgement or one of its buckets."""
    return [name for name, value in part.items() if isinstance(value, dict) and "low" in value]


"""``semel report``: a run as one self-contained page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from semel.cli.report.page import Page
    from semel.training import Run


def report(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write a page with a run's learning curves, quality, calibration and histories."""
    from semel.cli import output
    from semel.cli.report.page import write
    from semel.training import Run

    opened = Run.open(run)
    if not opened.metrics:
        raise ValueError(f"{run} has no metrics.jsonl to report on: it has not trained yet")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {out.parent}")
    if not (opened.path / "evaluation.json").exists():
        output.remark(f"{run} has not been evaluated; for quality and calibration run: semel evaluate {run}")
    output.results().print(str(write(page_of(opened), out)), soft_wrap=True)


def page_of(run: Run) -> Page:
    """What is known of a run. Histories are there where its store and examples still are."""
    from semel import __version__
    from semel.cli.report import sections
    from semel.cli.report.page import Card, Page

    summary, recipe = run.summary, run.recipe
    parts = [sections.learning({recipe.name: run.metrics})]
    times = sections.step(run.metrics, run.timeline)
    if times is not None:
        parts.append(times)
    cards = []
    if summary:
        waited = f"{summary['wait_seconds']:.1f} s of it waiting"
        note = f"{summary['steps']:,} steps in {summary['seconds']:,.0f} s, {waited}"
        cards.append(Card("trained", f"{summary['epochs']} epochs", note))
        cards.append(Card("parameters", f"{summary['parameters']:,}", f"{recipe.model.kind}, seed {recipe.seed}"))
    file = run.path / "evaluation.json"
    if file.exists():
        evaluation = json.loads(file.read_text())
        parts.append(sections.figures_of_run(evaluation))
        for part in (*evaluation["tasks"].values(), *([evaluation["catalogue"]] if evaluation["catalogue"] else [])):
            name = next(name for name, value in part.items() if isinstance(value, dict) and "low" in value)
            if part[name]["value"] is not None:
                cards.append(Card(sections.FIGURES.get(name, name.upper()), f"{part[name]['value']:.4f}",
                                  f"{part['rows']:,} rows of {part['users']:,} users, {evaluation['split']}"))
        binary = next((task for task in evaluation["tasks"].values() if task["reliability"]), None)
        if binary is not None:
            parts.append(sections.calibration(binary["reliability"], binary.get("calibration")))
    lengths = _lengths(run)
    if lengths is not None:
        parts.append(sections.histories(lengths, recipe.features.history_last, "test requests"))
    facts = {"run": str(run.path), "recipe": recipe.name, "store": recipe.store, "semel": __version__}
    if summary:
        facts["model version"] = summary["model_version"]
    return Page(f"A run of {recipe.name}", "How it learned, how good it is, and what it read.", cards[:4], parts, facts)


def _lengths(run: Run) -> object | None:
    """Events before each test request [R], or None where the run's store or examples are gone."""
    from semel.examples import open_examples
    from semel.history import HistoryStore, Projection, StoreError

    try:
        rows = open_examples(run.recipe.store, run.recipe.examples.name).rows("test")
        with HistoryStore.open(run.recipe.store) as store:
            return store.lengths(rows.pointers, Projection(("event_time",)))[0]
    except (FileNotFoundError, StoreError):
        return None

"""``semel demo``: the whole loop on MovieLens-1M, from events to a served score that is replayed. One file a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from semel.cli.demo.state import Demo


def demo(
    quick: Annotated[bool, typer.Option(help="A sample of the users and few epochs: within a minute.")] = False,
    data: Annotated[Path | None, typer.Option(help="MovieLens-1M, if you have it; otherwise it is fetched.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="The folder to work in; made fresh.")] = Path("semel-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the whole loop on real data (MovieLens-1M) and write a report."""
    from semel.cli import output
    from semel.cli.demo import closing, state

    work = state.start(folder, quick, data)
    for number, (title, step) in enumerate(_steps(), start=1):
        _run(work, number, title, step)
    result = closing.result(work)
    closing.write_files(work, result)
    if as_json:
        output.print_json(result)
    else:
        closing.show(work, result)


def _steps() -> list[tuple[str, Callable[[Demo], None]]]:
    from semel.cli.demo import (
        computing,
        embedding,
        evaluating,
        examples,
        ingesting,
        looping,
        planning,
        replaying,
        serving,
        storage,
        training,
        waiting,
    )

    return [
        ("events into a store", ingesting.step),
        ("requests that hold pointers", examples.step),
        ("what the pointers save", storage.step),
        ("training", training.step),
        ("quality, beside baselines", evaluating.step),
        ("serving over HTTP", serving.step),
        ("a request computed once", computing.step),
        ("a batch balanced over trainers", waiting.step),
        ("the same model on more devices, planned", planning.step),
        ("replay", replaying.step),
        ("items embedded once", embedding.step),
        ("the loop, live", looping.step),
    ]


def _run(work: Demo, number: int, title: str, step: Callable[[Demo], None]) -> None:
    """One step, timed. What fails says which step it was and where its files are; the folder is left as it is."""
    import time
    import traceback

    from semel.cli import output
    from semel.cli.errors import BAD_INPUT, line_of

    output.remarks().print(f"[bold]{number}[/bold]  {title}")
    started = time.perf_counter()
    try:
        step(work)
    except KeyboardInterrupt:
        output.remarks().print(f"stopped in step {number} ({title}); what there is so far lies in {work.folder}, "
                               "and a new demo begins anew", markup=False, soft_wrap=True)
        raise
    except Exception as error:
        line = line_of(error)
        if line is None and not isinstance(error, RuntimeError):
            traceback.print_exc()
        output.remarks().print(f"error: step {number} ({title}): {line or error}; see what it left in {work.folder}",
                               markup=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT if line is not None else 1) from None
    work.seconds[title] = time.perf_counter() - started

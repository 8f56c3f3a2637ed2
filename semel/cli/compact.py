"""``semel compact``: move what lies in a store's log into its next generation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def compact(
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rewrite a store for reading: what is in the log joins its user's other events. Readers never notice."""
    from semel.cli import output
    from semel.history import HistoryStore

    done: dict[str, Any] = {}
    with output.progress_bar() as bar:
        for name, path in {"events": store, "catalogue": store / "catalogue"}.items():
            if name == "catalogue" and not path.exists():
                continue
            task = bar.add_task(f"compact {name}", total=None, detail="")
            handle = HistoryStore.open(str(path), mode="a")
            try:
                done[name] = {"generation": handle.compact(), **handle.stats()}
            finally:
                handle.close()
            bar.remove_task(task)
    if as_json:
        output.print_json(done)
        return
    for name, facts in done.items():
        output.results().print(f"{name}: generation {facts['generation']}")

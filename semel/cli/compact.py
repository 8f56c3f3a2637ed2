"""``semel compact``: move what lies in a store's log into its next generation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def compact(
    store: Annotated[Path, typer.Argument(help="The folder of the store.")],
    codec: Annotated[str, typer.Option(help="packed: small; plain: larger, a little faster to read; cold: smaller, "
                                            "slower where it is first read.")] = "packed",
    retention: Annotated[str | None, typer.Option(
        help="How old events may be by now, e.g. 90d; older ones are removed for good.")] = None,
    engine: Annotated[str, typer.Option(help="local: threads here; ray: a Ray cluster (extra ray).")] = "local",
    workers: Annotated[int, typer.Option(help="Shards written at a time.")] = 2,
    memory_limit: Annotated[str, typer.Option(help="What it may allocate; the rest goes through a file.")] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rewrite a store for reading: what is in the log joins its user's other events."""
    from semel.cli import output
    from semel.history import HistoryStore, StoreNotFound

    stats: dict[str, Any] = {}
    with output.progress_bar() as bar:
        progress = output.Steps(bar)
        for name, path in {"events": store, "catalogue": store / "catalogue"}.items():
            try:
                opened = HistoryStore.open(path, mode="a")
            except StoreNotFound:
                if name == "catalogue":
                    continue
                raise
            with opened as handle:
                before, in_log = handle.event_count, handle.uncompacted
                handle.compact(engine, workers, memory_limit, codec=codec,  # type: ignore[arg-type]  # it checks
                               retention=retention if name == "events" else None,
                               progress=partial(progress, f"compact {name}"))
                after = handle.stats()
                stats[name] = {"moved": in_log, "removed": before - after["events"]["total"],
                               "expired_before": handle.expired_before, **after}
    if as_json:
        output.print_json(stats)
        return
    for name, facts in stats.items():
        output.results().print(
            f"{name}: {output.count(facts['moved'], 'row')} moved into generation {facts['generation']}, "
            f"{output.count(facts['events']['total'])} in all, {output.size(facts['bytes']['total'])}"
            + (f"; {output.count(facts['removed'], 'deleted or too old event')} removed" if facts["removed"] else ""),
            soft_wrap=True)

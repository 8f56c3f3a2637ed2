"""What a loop ends with: one object, one table, one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli import output
from semel.cli.loop.dashboard import clock, number

if TYPE_CHECKING:
    from semel.loop import Loop

POINTS = 8


def result(live: Loop, last: dict[str, Any], check: bool) -> dict[str, Any]:
    """What ``semel loop --json`` prints. The report is written on the way."""
    from semel.cli.report.loop import page_of
    from semel.cli.report.page import write
    from semel.loop import verify

    if not last:
        return {"dir": str(live.folder.path), "verification": None, "report": None}
    verification = None
    if check:
        with output.progress_bar() as bar:
            steps = output.Steps(bar)
            verification = verify(live.folder, progress=lambda done, total: steps("replay", done, total)).to_json()
    samples = read_samples(live.folder.samples)
    facts = {"dir": str(live.folder.path), **last, "gap_over_time": gaps(samples), "verification": verification,
             "report": str(live.folder.report)}
    write(page_of(live.config, samples, facts), live.folder.report)
    (live.folder.path / "result.json").write_text(json.dumps(output.plain(facts), indent=2, ensure_ascii=False) + "\n")
    return facts


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of all runs of a loop; a last line that was cut short is left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def gaps(samples: Sequence[dict[str, Any]], points: int = POINTS) -> list[tuple[float, float]]:
    """(seconds since the first sample, mean of served NE - best NE around then): some, from the first to the last."""
    known = [(one["time"] - samples[0]["time"], one["gap"]) for one in samples if one["gap"] is not None]
    points = min(points, len(known))
    parts = [known[len(known) * i // points : len(known) * (i + 1) // points] for i in range(points)]
    return [(sum(time for time, _ in part) / len(part), sum(gap for _, gap in part) / len(part)) for part in parts]


def show(live: Loop, facts: dict[str, Any]) -> None:
    """The closing table, on stdout."""
    console = output.results()
    if "requests" not in facts:
        console.print(f"{facts['dir']}: ended before anything was served", soft_wrap=True)
        return
    rows = [
        ["requests", f"{facts['requests']:,}", f"in {clock(facts['seconds'])}"],
        ["latency", f"p50 {number(facts['p50_ms'], '.1f')} ms, p99 {number(facts['p99_ms'], '.1f')} ms",
         "the last ten seconds, by the client"],
        ["NE", f"served {number(facts['served_ne'], '.4f')}", f"prequential {number(facts['prequential_ne'], '.4f')}"
         + (f", best reachable {facts['best_ne']:.4f}" if facts["best_ne"] is not None else "")],
    ]
    if facts["gap_over_time"]:
        rows.append(["gap to the best NE", f"{facts['gap_over_time'][-1][1]:.4f}", ", ".join(
            f"{clock(time)} {gap:.4f}" for time, gap in facts["gap_over_time"])])
    rows += [
        ["new item", f"shown after p50 {number(facts['item_shown_p50_s'], '.2f')} s, "
         f"p99 {number(facts['item_shown_p99_s'], '.2f')} s", f"{facts['items_shown']:,} items uploaded and shown"],
        ["restarts", ", ".join(f"{name} {one['restarts']}" for name, one in facts["processes"].items()),
         ", ".join(f"{kill['process']} back after {number(kill['back_s'], '.1f')} s" for kill in facts["kills"])],
    ]
    verified = facts["verification"]
    if verified is not None:
        rows.append(["lost", f"{verified['events_lost']} of {verified['events']:,} events, "
                     f"{verified['outcomes_lost']} of {verified['outcomes']:,} outcomes",
                     f"acknowledged; twice: {verified['events_repeated']} and {verified['outcomes_repeated']}"])
        replayed = verified["replayed"]
        if replayed is not None:
            rows.append(["replay", f"{replayed['histories_equal']:,} of {replayed['requests']:,} histories equal",
                         f"largest difference of a score: {replayed['max_difference']:g}"])
            rows.append(["coverage", f"{verified['coverage']:.2%}", f"{replayed['candidates']:,} candidates"])
        if verified["growth"]:
            rows.append(["memory", "steady" if all(one["steady"] for one in verified["growth"].values()) else "grows",
                         ", ".join(f"{name} {one['before_mb']:.0f} → {one['after_mb']:.0f} MB"
                                   for name, one in verified["growth"].items())])
    table = output.table(f"The loop, {live.config.recipe}", ["", "", ""], rows)
    table.show_header = False
    for column in table.columns:
        column.justify = "left"
    console.print(table)
    console.print(f"The page with plots: {facts['report']}", soft_wrap=True)

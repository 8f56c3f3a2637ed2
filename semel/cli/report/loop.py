"""The report of a live loop: its figures over time, and what each of its processes did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from semel.cli.report import figures
from semel.cli.report.page import Card, Figure, Grid, Page, Section

if TYPE_CHECKING:
    from semel.loop import LoopConfig

POINTS = 360
"""Of a line: more could not be told apart."""

Samples = Sequence[Mapping[str, Any]]


def page_of(config: LoopConfig, samples: Samples, facts: Mapping[str, Any]) -> Page:
    """``samples``: of all its runs; ``facts``: the result of the last one."""
    from semel import __version__

    source = "a simulated site" if config.data is None else config.data
    minutes = (samples[-1]["time"] - samples[0]["time"]) / 60 if samples else 0.0
    cards = [
        Card("served", f"{facts['requests']:,}", f"requests; p99 {_text(facts['p99_ms'], '.0f')} ms at the end"),
        Card("NE", _text(facts["served_ne"], ".4f"), "as served" + (
            f"; best reachable {facts['best_ne']:.4f}" if facts["best_ne"] is not None else "")),
        Card("a new item", f"{_text(facts['item_shown_p99_s'], '.2f')} s", "from upload to first shown, p99"),
    ]
    verified = facts["verification"]
    if verified is not None:
        cards.append(Card("lost", f"{verified['events_lost'] + verified['outcomes_lost']}",
                          f"of {verified['events']:,} events and {verified['outcomes']:,} labels acknowledged"))
    sections = [quality(samples), requests(samples), freshness(samples), backlog(samples),
                processes(samples, facts["kills"])]
    if verified is not None:
        sections.append(verification(verified))
    return Page(f"The loop, {config.recipe}", f"{minutes:.1f} minutes of {source}: served, joined, trained on, and "
                "served again by what was learnt.", cards, sections,
                {"recipe": config.recipe, "data": source, "window": f"{config.window:g} s",
                 "speed-up": f"{config.speedup:g}", "semel": __version__})


def quality(samples: Samples) -> Section:
    best = any(one["best_ne"] is not None for one in samples)
    text = [
        "NE is the log loss over that of a guess that only knows the average: 1 knows nothing, less is better. Served: "
        "the scores that users were ranked by, on what they then did. Prequential: the trainer's, on rows that it had "
        "not trained on yet.",
        "Skew is the difference of the two on the same labels, from the beginning on: what training sees is what "
        "serving saw, so all of it is weights that were older when a request was served than when its outcome came.",
    ]
    if best:
        text.insert(1, "The site is simulated, so the probability of every click is known; no model's NE can be "
                       "expected to be below that of the true probabilities on the same labels. The gap to it is what "
                       "is left to learn.")
    lines = {"served": "served_ne", "prequential": "prequential_ne", **({"best reachable": "best_ne"} if best else {})}
    plots = [wide(over_time(samples, lines, "NE over time", "NE"))]
    if best:
        plots.append(over_time(samples, {"gap": "gap"}, "Served NE less the best reachable", "NE"))
    plots.append(over_time(samples, {"skew": "skew"}, "Skew: served less prequential NE", "NE"))
    return Section("Quality", text, plots)


def requests(samples: Samples) -> Section:
    return Section("Requests", [
        "Latency is measured by the client, over HTTP, in windows of ten seconds. Where the server was killed nothing "
        "is answered, and then what had waited is answered at once.",
    ], [over_time(samples, {"p50": "p50_ms", "p99": "p99_ms"}, "Latency of a ranked request", "milliseconds"),
        over_time(samples, {"requests": "requests_per_s"}, "Requests answered a second", "requests / s")])


def freshness(samples: Samples) -> Section:
    return Section("Freshness", [
        "A new item is uploaded, and shown for the first time: the seconds between, of the last 500 items. An event "
        "is posted, and visible to the next request when its post is answered: the milliseconds between.",
    ], [over_time(samples, {"p50": "item_shown_p50_s", "p99": "item_shown_p99_s"}, "A new item, until it is shown",
                  "seconds"),
        over_time(samples, {"p99": "event_visible_p99_ms"}, "An event, until it is visible", "milliseconds")])


def backlog(samples: Samples) -> Section:
    return Section("What waits", [
        "Requests whose window is open wait for their outcomes by design: as many as come in a window. Files of joined "
        "rows that wait for the trainer, and events that wait for the server, should be few, and after a crash fall "
        "back to few.",
    ], [over_time(samples, {"windows open": "windows_open"}, "Requests whose window is open", "requests"),
        over_time(samples, {"files": "files_waiting", "events": "events_waiting", "outcomes": "outcomes_waiting"},
                  "Waiting for the trainer (files) and to be sent (answers)", "count")])


def processes(samples: Samples, kills: Sequence[Mapping[str, Any]]) -> Section:
    names = list(samples[-1]["processes"]) if samples else []
    memory = [{"time": one["time"], **{name: one["processes"].get(name, {}).get("rss_mb") for name in names}}
              for one in samples]
    plots = [wide(over_time(memory, {name: name for name in names}, "Memory of each process", "MB"))]
    rows = [[name, f"{samples[-1]['processes'][name]['restarts']}", ", ".join(
        _text(kill["back_s"], ".1f") for kill in kills if kill["process"] == name) or "–"] for name in names]
    return Section("Processes", [
        "A process that ends is started again and goes on where its files say that it was. Memory is what a process "
        "holds for itself, without mapped files; it falls where a process began anew.",
    ], plots, Grid(["process", "restarts", "back after a kill, seconds"], rows))


def verification(facts: Mapping[str, Any]) -> Section:
    rows = [[f"{name} acknowledged", f"{facts[name]:,}"] for name in ("events", "outcomes", "items")]
    rows += [["of them lost", f"{facts['events_lost'] + facts['outcomes_lost'] + facts['items_lost']:,}"],
             ["stored twice", f"{facts['events_repeated'] + facts['outcomes_repeated']:,}"],
             ["answers", f"{facts['answers']:,}"],
             ["answers whose exposure a kill took", f"{facts['answers_not_logged']:,}"]]
    replayed = facts["replayed"]
    if replayed is not None:
        rows += [["exposures replayed", f"{replayed['requests']:,}"],
                 ["histories equal, by checksum", f"{replayed['histories_equal']:,}"],
                 ["requests with every score bit-equal", f"{replayed['bit_equal']:,}"],
                 ["largest difference of a score", f"{replayed['max_difference']:g}"]]
    if facts["coverage"] is not None:
        rows.append(["candidates with a score", f"{facts['coverage']:.2%}"])
    for name, one in facts["growth"].items():
        rows.append([f"memory of the {name} after its warm-up",
                     f"{one['before_mb']:.0f} → {one['after_mb']:.0f} MB in {one['seconds'] / 60:.0f} min"])
    return Section("Verification", [
        "The driver notes what it sends before it sends it, and what was acknowledged. When the loop has ended, its "
        "ledger is compared with the store and the logs, and every exposure is computed again by the model version "
        "that served it.",
    ], [], Grid(["", "measured"], rows))


def over_time(samples: Samples, lines: Mapping[str, str], caption: str, y: str) -> Figure:
    """Figures of samples by minute; ``lines``: the field of each, by name. A line breaks where there is no value."""
    shown = thin(samples)
    begin = samples[0]["time"] if samples else 0.0
    minutes = [(one["time"] - begin) / 60 for one in shown]
    plot = figures.curves({name: (minutes, [one.get(field) for one in shown]) for name, field in lines.items()},
                          caption, "minutes", y)
    for data in plot.data:
        data["mode"] = "lines"
    return plot


def thin(samples: Samples, most: int = POINTS) -> list[Mapping[str, Any]]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(samples) <= most:
        return list(samples)
    return [samples[round(i * (len(samples) - 1) / (most - 1))] for i in range(most)]


def wide(plot: Figure) -> Figure:
    return Figure(plot.data, plot.layout, plot.caption, plot.height, wide=True)


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)

"""What a demo ends with: one object, one table, and one page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli import output
from semel.cli.demo.evaluating import OURS
from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    from semel.cli.report.page import Page

LATER = ("planned",)
"""Parts of Semel that are still to come; their place in the result is null."""


def result(demo: Demo) -> dict[str, Any]:
    """What ``semel demo --json`` prints."""
    replay = demo.facts["replay"]
    return {
        "data": demo.facts["data"],
        "stored": demo.facts["stored"],
        "computed": demo.facts["computed"],
        "waited": demo.facts["waited"],
        "embedded": demo.facts["embedded"],
        **dict.fromkeys(LATER),
        "quality": demo.facts["quality"],
        "served": demo.facts["served"],
        "replay": replay,
        "training": {kind: demo.facts[f"{kind}_training"] for kind in OURS},
        "report": str(report_path(demo)),
        "seconds": time.perf_counter() - demo.started,
        "seconds_by_step": demo.seconds,
    }


def report_path(demo: Demo) -> Path:
    return demo.folder / "report.html"


def write_files(demo: Demo, facts: dict[str, Any]) -> None:
    """``report.html`` and ``result.json`` into the demo's folder."""
    from semel.cli.report.page import write

    write(page(demo), report_path(demo))
    (demo.folder / "result.json").write_text(json.dumps(output.plain(facts), indent=2, ensure_ascii=False) + "\n")


def show(demo: Demo, facts: dict[str, Any]) -> None:
    """The closing table, on stdout."""
    stored, served, computed, waited, replay, embedded = (facts[name] for name in (
        "stored", "served", "computed", "waited", "replay", "embedded"))
    fat = {name: value for name, value in stored["fat_rows_by_layout"].items() if "last" in name}
    rows = [["stored", f"{output.size(stored['bytes'])} store and pointers", "fat rows:\n" + "\n".join(
        f"{output.size(value)} {name}" for name, value in fat.items())]]
    for kind, figure, name in (("ranking", "ne", "NE"), ("ranking", "auc", "AUC"), ("next_item", "hr@10", "HR@10"),
                               ("next_item", "ndcg@10", "NDCG@10")):
        models = {model: figures[figure] for model, figures in facts["quality"][kind]["models"].items()}
        own = next(model for model in models if model in OURS.values())
        rows.append([f"quality: {name}", f"{_interval(models[own])} {own}", "\n".join(
            f"{value['value']:.4f} {model}" for model, value in models.items() if model != own)])
    rows += [
        ["served", f"p50 {served['p50_ms']:.1f} ms, p99 {served['p99_ms']:.1f} ms",
         f"{served['candidates']} candidates,\n{served['requests']:,} requests"],
        ["compute once", f"{computed['once_ms']:.1f} ms a request, {computed['kept_ms']:.1f} ms where it was kept",
         f"{computed['per_candidate_ms']:,.0f} ms with the request's side\ncomputed per candidate; scores differ by "
         f"{computed['max_difference']:.1g}"],
        ["wait never", f"{waited['ranks']} trainers wait {waited['idle']['balanced']:.2%} of a step for the slowest",
         f"{waited['idle']['as they come']:.1%} with requests\nas they come"],
        ["embed once", f"{embedded['coverage']:.0%} of candidates scored, a row visible after "
         f"{embedded['fresh_p50_s']:.1f} s", f"{1 - embedded['found']:.1%} of candidates without a row;\nNE trained "
         f"{embedded['trained_ne']:.4f}, served {embedded['served_ne']:.4f}"],
        ["replay", f"{replay['histories_equal']:,} of {replay['requests']:,} histories equal",
         f"largest difference of a score: {replay['max_difference']:g}"],
        ["time", f"{facts['seconds']:.0f} s in all", f"{facts['training']['rank']['seconds']:.0f} s + "
         f"{facts['training']['next']['seconds']:.0f} s of it training"],
    ]
    table = output.table("MovieLens-1M, once through the loop", ["", "Semel", "beside it"], rows)
    for column in table.columns:
        column.justify = "left"
    table.show_lines = True
    console = output.results()
    console.print(table)
    if demo.quick:
        console.print("A sample and a few epochs show that the loop works, not how good the models are: "
                      "leave out --quick for that.", soft_wrap=True)
    console.print(f"The page with plots: {report_path(demo)}", soft_wrap=True)


def page(demo: Demo) -> Page:
    """The demo's report."""
    from semel import __version__
    from semel.cli.report import sections
    from semel.cli.report.page import Card, Page

    facts = demo.facts
    data, stored, served, replay = facts["data"], facts["stored"], facts["served"], facts["replay"]
    rank, following = facts["quality"]["ranking"]["models"], facts["quality"]["next_item"]["models"]
    own, next_own = rank[OURS["rank"]], following[OURS["next"]]
    judged = facts["ranking"][OURS["rank"]]["tasks"]["like"]
    others = {name: model["ne"]["value"] for name, model in rank.items() if name != OURS["rank"]}
    cards = [
        Card("stored", f"{stored['ratio']:.1f}× less", f"{output.size(stored['bytes'])} instead of "
             f"{output.size(stored['fat_rows_bytes'])} for a shuffled row a candidate"),
        Card("quality", f"NE {own['ne']['value']:.3f}", ", ".join(f"{n} {v:.3f}" for n, v in others.items())),
        Card("served", f"{served['p50_ms']:.0f} ms", f"p50 at {served['candidates']} candidates; "
             f"p99 {served['p99_ms']:.0f} ms"),
        Card("replay", f"{replay['histories_equal']:,} of {replay['requests']:,}",
             f"histories equal; scores differ by {replay['max_difference']:g}"),
    ]
    parts = [
        sections.stored({**stored, "users": data["users"]}),
        sections.histories(facts["history_lengths"], demo.recipe("rank").features.history_last, "all requests"),
        sections.learning({"Ranking": facts["rank_metrics"], "Next item": facts["next_metrics"]}),
        sections.quality(rank, following, tuple(OURS.values()), _quality_text(demo, next_own)),
        sections.calibration(judged["reliability"], judged.get("calibration")),
        sections.latency(facts["latencies_ms"], facts["inside_ms"], served),
        sections.waiting(facts["waited"]),
        sections.replay(replay),
    ]
    sample = f" (a sample of {data['users']:,} users)" if demo.quick else ""
    return Page(
        f"MovieLens-1M{sample}, once through the loop",
        f"{data['events']:,} ratings went in. Two models were trained from pointers, one was served over HTTP, and "
        f"every score that it gave was replayed. It took {(time.perf_counter() - demo.started) / 60:.1f} minutes.",
        cards, parts,
        {"data": f"{data['name']}, from {data['source']}", "terms": data["licence"], "semel": __version__})


def _quality_text(demo: Demo, next_own: dict[str, Any]) -> list[str]:
    epochs = demo.recipe("next").epochs
    return [
        "Two questions are asked. Ranking: which of the films that a person is about to rate will get 4 or 5 stars? "
        "Judged on the last tenth of the time, which no model has seen. NE is the log loss over that of a guess that "
        "only knows the average: 1 knows nothing, less is better. AUC is how often a liked film is scored above one "
        "that was not.",
        "Next item: which of all films comes next? Each person's last film is held out; HR@10 is how often it is "
        "among the ten that the model puts first, NDCG@10 also counts how far up. All films compete, also those "
        "already seen.",
        "Grey are the things that a model must beat: how popular a film is, how generous the person and how good the "
        "film are on average, and what people with the same films did next. The models here were trained for minutes "
        f"(at most {epochs} epochs for the next item); what the recipes reach in full is in docs/results.md. Whiskers "
        "are 95 % intervals over users.",
    ]


def _interval(figure: dict[str, Any]) -> str:
    half = (figure["high"] - figure["low"]) / 2
    return f"{figure['value']:.4f} ± {half:.4f}"

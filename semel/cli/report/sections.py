"""The sections of a report: what was measured, as plots, and what it means, in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from semel.cli.output import size
from semel.cli.report import figures
from semel.cli.report.figures import Estimate
from semel.cli.report.page import Figure, Grid, Section
from semel.training.timeline import BUBBLES

FIGURES = {"ne": "NE", "auc": "AUC", "user_auc": "AUC by user", "log_loss": "log loss", "calibration": "calibration",
           "hr@10": "HR@10", "ndcg@10": "NDCG@10", "mrr": "MRR", "rmse": "RMSE", "mae": "MAE"}
STEPS_SHOWN = 3
SMALLER_IS_BETTER = {"ne", "log_loss", "rmse", "mae"}


def learning(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    """``runs``: the lines of ``metrics.jsonl`` by the run's title."""
    plots = []
    for title, lines in runs.items():
        steps_in_epoch = _steps_in_epoch(lines)
        train = [line for line in lines if line["kind"] == "train"]
        validation = [line for line in lines if line["kind"] == "validation"]
        loss = _smooth([line["loss"] for line in train])
        plots.append(figures.curves({"training loss": ([line["step"] / steps_in_epoch for line in train], loss)},
                                    f"{title}: training loss", "epoch", "loss"))
        judged = next((name for name in ("ne", "ndcg@10") if validation and name in validation[0]), None)
        if judged is not None:
            plots.append(figures.curves(
                {FIGURES[judged]: ([line["epoch"] for line in validation], [line[judged] for line in validation])},
                f"{title}: {FIGURES[judged]} on validation", "epoch", FIGURES[judged]))
    return Section("Learning", [
        "An epoch is one pass over the training data. The loss on the left is what training pushes down; it is "
        "measured on the very examples that the model learns from, so on its own it proves nothing.",
        "What counts is on the right: the same model on a later stretch of time that it has not seen. For NE less is "
        "better, for NDCG more. Training keeps the weights of the best point and stops when no better one has come "
        "for a while.",
    ], plots)


def step(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Section | None:
    """``lines`` of ``metrics.jsonl`` and ``events`` of ``timeline.json``. None for a run that does not say where its
    time went."""
    seconds = [line["seconds"] for line in lines if line["kind"] == "train" and line.get("seconds")]
    if not seconds:
        return None
    names = [name for name in dict.fromkeys(name for part in seconds for name in part) if name != "step"]
    mean = {name: float(np.mean([part.get(name, 0.0) for part in seconds])) * 1000 for name in names}
    shown = {name: value for name, value in sorted(mean.items(), key=lambda item: -item[1]) if value >= 0.005}
    whole = float(np.mean([part["step"] for part in seconds])) * 1000
    plots = [figures.bars({f"waits: {name.replace('_', ' ')}" if name in BUBBLES else name: value
                           for name, value in shown.items()}, f"Of a step's {whole:.1f} ms, on average",
                          "milliseconds", [f"{value:.2f} ms" for value in shown.values()])]
    rows = _last_steps(events)
    if rows:
        plots.append(figures.spans(rows, f"{STEPS_SHOWN} steps: one below the other what ran at once"))
    return Section("A step's time", [
        "A step goes through stages. Those that prepare the next batches run beside the one that computes, in threads "
        "of their own, and cost a step nothing unless it waits for them. What a step waits for has a name: input (the "
        "next batch was not ready), straggler (another trainer was slower), exposed gradient and exposed embedding "
        "(bytes were on their way and nothing was left to do). The whole of it, for every trainer, is in "
        "timeline.json, which ui.perfetto.dev opens.",
    ], plots)


def _last_steps(events: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, float, float, bool]]]:
    """Rows of ``figures.spans`` by rank and thread."""
    timed = [event for event in events if event["ph"] == "X"]
    if not timed:
        return {}
    steps = sorted({event["args"]["step"] for event in timed})
    shown = steps[max(0, len(steps) - 10):][:STEPS_SHOWN]  # in the last ones of an epoch nothing is prepared any more
    timed = [event for event in timed if event["args"]["step"] in shown]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
               if event["name"] == "thread_name"}
    ranks = {event["pid"] for event in timed}
    begin = min(event["ts"] for event in timed)
    rows: dict[str, list[tuple[str, float, float, bool]]] = {}
    for event in sorted(timed, key=lambda event: (event["pid"], event["tid"], event["ts"])):
        thread = threads.get((event["pid"], event["tid"]), "").removeprefix("semel-stage-")
        title = thread.replace("MainThread", "computing").rsplit("_", 1)[0]
        title += f", trainer {event['pid']}" if len(ranks) > 1 else ""
        rows.setdefault(title, []).append((event["name"], (event["ts"] - begin) / 1000, event["dur"] / 1000,
                                           event["cat"] == "bubble"))
    return rows


def stored(facts: Mapping[str, Any]) -> Section:
    """``facts``: what the demo measured of bytes."""
    layouts: Mapping[str, int] = facts["fat_rows_by_layout"]
    ours = "store and pointers"
    values = {ours: facts["bytes"] / 1e6, **{name: value / 1e6 for name, value in layouts.items()}}
    plot = figures.bars(values, "Bytes on disk for the same training data", "megabytes",
                        [size(value * 1e6) for value in values.values()], highlight=ours)
    per_user = facts["requests"] / max(1, facts["users"])
    return Section("Stored once", [
        "A training row usually carries a copy of the user's history. Here a row carries a pointer, a few bytes that "
        f"name the history, and each of the {facts['events']:,} events is stored once ({size(facts['store_bytes'])}); "
        f"the rows themselves take {size(facts['rows_bytes'])}. The grey bars are the same rows with their histories "
        "inside, really written as compressed Parquet (a sample of them, scaled).",
        "How much this saves depends on how often a history is copied. A row a request, in order, is the kindest "
        f"case: this data set has only {per_user:.1f} requests a user and short histories, and compression finds what "
        "neighbours share. A row for each candidate in random order, which is what trainers want to read, is the "
        "costly one. Where users come back every day the copies grow with every visit, and the store only with what "
        "is new.",
    ], [Figure(plot.data, plot.layout, plot.caption, plot.height, wide=True)])


def histories(lengths: Any, last: int, requests: str) -> Section:
    """``lengths`` [R]: events before each request; ``requests``: which requests these are."""
    lengths = np.asarray(lengths)
    empty, longer = float((lengths == 0).mean()), float((lengths > last).mean())
    marks = {f"the model reads {last}": float(last)} if last <= lengths.max(initial=0) else {}
    plot = figures.length_histogram(lengths, f"How long a history is ({requests})", "events in the history", marks)
    return Section("Histories", [
        "Each bar counts the requests whose history had that many events at the time. The axis is logarithmic, since "
        "a few users have very long ones; requests without any history have no place on it. The median is "
        f"{np.median(lengths):,.0f} events, the longest {lengths.max(initial=0):,}.",
        f"{empty:.0%} of these requests came from someone who had not rated anything before: the model must do "
        f"without. {longer:.0%} had more events than the last {last} that the model reads; the store skips the rest "
        "without reading it.",
    ], [Figure(plot.data, plot.layout, plot.caption, plot.height, wide=True)])


def quality(ranking: Mapping[str, Mapping[str, Any]], next_item: Mapping[str, Mapping[str, Any]], ours: Sequence[str],
            text: Sequence[str]) -> Section:
    """Models beside each other. ``ranking``, ``next_item``: figures (``value``, ``low``, ``high``) by model."""
    plots = []
    for models, names in ((ranking, ("ne", "auc")), (next_item, ("hr@10", "ndcg@10"))):
        highlight = next((name for name in models if name in ours), None)
        for name in names:
            if models and all(name in model for model in models.values()):
                better = "less is better" if name in SMALLER_IS_BETTER else "more is better"
                plots.append(figures.estimates([_estimate(model, figure[name]) for model, figure in models.items()],
                                               f"{FIGURES[name]} ({better})", FIGURES[name], highlight))
    both = {model: {**ranking.get(model, {}), **next_item.get(model, {})} for model in {**ranking, **next_item}}
    both = {model: both[model] for model in sorted(both, key=lambda model: model in ours)}  # stable: ours come last
    rows = [[model, *(_with_interval(figure.get(name)) for name in ("ne", "auc", "hr@10", "ndcg@10"))]
            for model, figure in both.items()]
    strong = frozenset(number for number, model in enumerate(both) if model in ours)
    return Section("Quality", text, plots, Grid(["model", "NE", "AUC", "HR@10", "NDCG@10"], rows, strong))


def figures_of_run(evaluation: Mapping[str, Any]) -> Section:
    """One model's figures, from its ``evaluation.json``, with intervals; its first figure by history length."""
    parts = dict(evaluation["tasks"])
    if evaluation["catalogue"] is not None:
        parts["the catalogue"] = evaluation["catalogue"]
    rows: list[list[str]] = []
    plots: list[Figure] = []
    for title, part in parts.items():
        names = [name for name, value in part.items() if isinstance(value, dict) and "low" in value]
        rows += [[f"{title}: {FIGURES.get(name, name.upper())}", _digits(part[name]["value"]),
                  f"{_digits(part[name]['low'])} to {_digits(part[name]['high'])}"] for name in names]
        pieces = [piece for piece in part["by_history_length"] if (piece.get(names[0]) or {}).get("value") is not None]
        if len(pieces) > 1:
            name = FIGURES.get(names[0], names[0].upper())
            plots.append(figures.buckets([_estimate(piece["name"], piece[names[0]]) for piece in pieces],
                                         f"{title}: {name} by history length", "events before the request", name))
    return Section("Quality", [
        f"Measured on the {evaluation['split']} data: {evaluation['protocol']}.",
        "An interval says where the figure would fall 95 times out of 100 if other users had been drawn. Figures by "
        "history length show what a history is worth to the model: it should do better where it knows more.",
    ], plots, Grid(["figure", "value", "95 % interval"], rows))


def calibration(reliability: Sequence[Mapping[str, float]], ratio: Mapping[str, Any] | None = None) -> Section:
    """``reliability``: bins of predictions (``prediction``, ``label``, ``weight``), from an evaluation."""
    bins = [{"predicted": b["prediction"], "observed": b["label"], "count": b["weight"]} for b in reliability]
    plots = [figures.reliability(bins, "Predicted and observed"), figures.columns(
        {f"{b['low']:.2f} to {b['high']:.2f}": (b["low"] + b["high"]) / 2 for b in reliability},
        [b["weight"] for b in reliability], "How often it predicts what", "predicted probability", "candidates")]
    text = [
        "When the model says 0.7, do 7 out of 10 people like the film? Each dot gathers candidates with about the "
        "same prediction; its height says how many of them were really liked, its size how many there were. On the "
        "dotted line the model's numbers can be taken at face value; below it the model promises too much, above it "
        "too little.",
    ]
    if ratio is not None and ratio.get("value") is not None:
        text.append(f"Over everything the mean prediction is {ratio['value']:.3f} times the mean label (1 is perfect).")
    return Section("Calibration", text, plots)


def latency(milliseconds: Sequence[float], inside: Mapping[str, float], served: Mapping[str, Any]) -> Section:
    """``inside``: median milliseconds of each part, as the server told them."""
    plots = [figures.latency_histogram(milliseconds, f"{served['requests']:,} requests")]
    names = {"queue": "waiting", "history": "reading the history", "features": "item features", "model": "the model"}
    parts = {names[name]: inside[name] for name in names if name in inside}
    # The rest of what the client measured: HTTP, JSON, logging the exposure.
    parts["HTTP, JSON, logging"] = max(0.0, float(np.median(milliseconds)) - sum(parts.values()))
    plots.append(figures.bars(parts, "Where a request's time goes (medians)", "milliseconds",
                              [f"{value:.1f} ms" for value in parts.values()]))
    return Section("Latency", [
        f"A real server answered over HTTP, one request after the other, each with {served['candidates']} films to "
        f"score for one person. Half of the answers came within {served['p50_ms']:.1f} ms (p50), 99 of 100 within "
        f"{served['p99_ms']:.1f} ms (p99), measured by the client, so including HTTP and JSON. The machine is the one "
        "that this page was made on.",
        "An event that is sent is part of the same user's next request: from sending it to an answer that saw it "
        f"took {served['event_to_seen_ms']:.1f} ms (median), with the event safely on disk in between.",
    ], plots)


def waiting(facts: Mapping[str, Any]) -> Section:
    """``loads``: of one batch, what each rank computes, by way of sharing out its requests; ``idle``: means."""
    idle, loads = facts["idle"], facts["loads"]
    plots = []
    for name, values in loads.items():
        most = max(values)
        plots.append(figures.bars({f"trainer {rank}": value / most for rank, value in enumerate(values)},
                                  f"One batch, requests {name}", "share of the slowest trainer's work",
                                  [f"{value / most:.0%}" for value in values]))
    return Section("Waiting", [
        f"Training on {facts['ranks']} machines ends a step when the slowest is done. Requests differ in the length of "
        f"their histories and the number of their films, so dealt out as they come the mean machine waits "
        f"{idle['as they come']:.1%} of a step. Every machine knows all lengths before it reads a history, and all "
        f"compute the same way of sharing requests out in well under a millisecond: then it waits "
        f"{idle['balanced']:.2%}. These are figures of {facts['batches']} batches of {facts['requests']} requests, "
        "counted in events and films; nothing was trained on so many machines here.",
    ], plots)


def replay(report: Mapping[str, Any]) -> Section:
    """``report``: a ReplayReport as JSON."""
    rows = [
        ["requests", f"{report['requests']:,}"],
        ["histories equal, by checksum", f"{report['histories_equal']:,}"],
        ["requests with every score bit-equal", f"{report['bit_equal']:,}"],
        ["largest difference of a score", f"{report['max_difference']:g}"],
        ["NE as served", _digits(report["served_ne"])],
        ["NE as replayed", _digits(report["replayed_ne"])],
        ["labelled candidates", f"{report['labelled']:,}"],
    ]
    return Section("Replay", [
        "Recommenders often learn from data that differ a little from what was served, and nobody can tell where the "
        "quality went. Here every served request left a pointer, a checksum of the history it saw, and its scores. "
        "The replay follows the pointers through the path that training uses and compares.",
        "Equal histories mean that training sees exactly what serving saw, also after new events have come in. A "
        "difference of 0 means that the scores are the same to the last bit.",
    ], [], Grid(["", "measured"], rows))


def _estimate(name: str, figure: Mapping[str, Any]) -> Estimate:
    return Estimate(name, figure["value"], figure.get("low"), figure.get("high"))


def _with_interval(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure.get("value") is None:
        return "–"
    if figure.get("low") is None or figure.get("high") is None:
        return _digits(figure["value"])
    return f"{figure['value']:.4f} ± {(figure['high'] - figure['low']) / 2:.4f}"


def _digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _steps_in_epoch(lines: Sequence[Mapping[str, Any]]) -> float:
    ends = [line["step"] / line["epoch"] for line in lines if line["kind"] == "validation" and line["epoch"]]
    return ends[0] if ends else max((line["step"] for line in lines), default=1)


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Means of up to ``window`` neighbours, so that the trend can be seen in what is noisy by nature."""
    return [float(np.mean(values[max(0, i - window // 2) : i + window // 2 + 1])) for i in range(len(values))]

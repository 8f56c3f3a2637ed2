"""The live loop: how soon a new item is shown, what kills cost, whether a swap costs a request, what is learnt.

    python -m benchmarks.loop [--seconds 60] [--chaos 12] [--rate 10] [--users 200] [--json FILE]
    python -m benchmarks.loop --seconds 3600 --chaos 60 --rate 20 --users 600   # an hour, and one without kills

Runs ``semel.loop.Loop`` on the simulated site, twice: with a process killed every ``--chaos`` seconds, each in turn,
and for as long without a kill, where every failed attempt would be the fault of a swap. Both are verified: what
was acknowledged is there, once, and every exposure is computed again by the version that served it. Beside the served
NE stands that of the first model, frozen, on the same labels: what a site has that does not train on.

The gap to the best reachable NE is a mean over eight stretches of the run; it needs half an hour to say much.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MUST_SHOWN_S = 5.0


def run(folder: Path, seconds: float, chaos: float | None, rate: float, users: int, window: float) -> dict[str, Any]:
    """One loop and its figures."""
    from semel.cli.loop.closing import gaps, read_samples
    from semel.loop import Loop, LoopConfig, verify
    from semel.loop.ledger import Ledger

    config = LoopConfig(users=users, rate=rate, window=window)
    live = Loop(config, folder, chaos=chaos, say=lambda text: print(f"  {text}", file=sys.stderr))
    last = live.run(seconds)
    checked = verify(live.folder).to_json()
    with Ledger(live.folder.ledger, read_only=True) as ledger:
        shown, unseen = ledger.freshness()
    samples = [one for one in read_samples(live.folder.samples) if one["requests_per_s"]]
    p99 = [one["p99_ms"] for one in samples if one["p99_ms"] is not None]
    replayed = checked["replayed"] or {}
    return {
        "seconds": last["seconds"], "requests": last["requests"], "kills": last["kills"],
        "failed": last["failed"], "duplicates": last["duplicates"], "stale_reads": last["stale_reads"],
        "versions": len(replayed.get("by_version", {})),
        "item_shown_s": {f"p{q}": float(np.percentile(shown, q)) for q in (50, 90, 99)} if shown else None,
        "items_shown": len(shown), "items_unseen": unseen,
        "p50_ms": _median([one["p50_ms"] for one in samples if one["p50_ms"] is not None]), "p99_ms": _median(p99),
        "gap_over_time": gaps(samples), "skew": last["skew"], "verification": checked,
        **frozen(live.folder),
    }


def frozen(folder: Any) -> dict[str, Any]:
    """NE over the last half of the labels: as served, and by the first model, both on the same candidates."""
    import torch

    from semel.examples import ExposureLog, RequestLoader, read_rows
    from semel.metrics import NormalizedEntropy
    from semel.models import load_model
    from semel.training import Run
    from semel.training.objectives import RequestObjective

    first = Run.open(json.loads((folder.path / "run.json").read_text())["first"])
    files = sorted(folder.rows.glob("*.parquet"))
    files = files[len(files) // 2 :]
    exposures = ExposureLog(folder.store / "exposures").read()
    served = dict(zip(exposures["request_id"].to_pylist(), exposures["scores"].to_pylist(), strict=True))
    ours, theirs = NormalizedEntropy(), NormalizedEntropy()
    model, objective = load_model(first.path).model, RequestObjective(first.recipe)
    try:
        with torch.inference_mode():
            for path in files:
                loader = RequestLoader(read_rows(path), objective.store, features=first.recipe.features, workers=0,
                                       catalogue=objective.catalogue, batch_requests=64, shuffle=None)
                for batch in loader:
                    label, logits = objective.labelled(model, batch)
                    theirs.update_logits(label, logits)
                    scores = np.concatenate([served[one] for one in batch.request_id.tolist()])
                    ours.update(label, scores[batch.label_mask[objective.judged].numpy()])
    finally:
        objective.close()
    return {"served_ne": ours.to_json()["ne"], "frozen_ne": theirs.to_json()["ne"], "labels": ours.rows}


def rows_of(killed: dict[str, Any], calm: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(measure, what it was, what it must be)."""
    rows = []
    for title, one in (("with kills", killed), ("without", calm)):
        check, shown = one["verification"], one["item_shown_s"]
        replayed = check["replayed"]
        rows += [
            (f"{title}: requests in {one['seconds']:.0f} s", f"{one['requests']:,}", ""),
            ("  latency p50, p99 (medians of windows of 10 s)", f"{_form(one['p50_ms'], '.1f')}, "
             f"{_form(one['p99_ms'], '.1f')} ms", ""),
            ("  a new item, from upload to first shown: p50, p99", "–" if shown is None else
             f"{shown['p50']:.2f}, {shown['p99']:.2f} s of {one['items_shown']:,}", f"p99 <= {MUST_SHOWN_S:g} s"),
            ("  acknowledged and lost: events, labels, items", f"{check['events_lost']} of {check['events']:,}, "
             f"{check['outcomes_lost']} of {check['outcomes']:,}, {check['items_lost']} of {check['items']:,}", "0"),
            ("  stored twice: events, labels", f"{check['events_repeated']}, {check['outcomes_repeated']}", "0"),
            ("  histories equal, scores bit-equal", f"{replayed['histories_equal']:,} and {replayed['bit_equal']:,} of "
             f"{replayed['requests']:,}", "all"),
            ("  coverage", f"{check['coverage']:.2%}", "100 %"),
            ("  versions served, failed attempts", f"{one['versions']}, {sum(one['failed'].values())}",
             "0 failed" if one is calm else ""),
            ("  NE of the last half: served, first model frozen", f"{_form(one['served_ne'], '.4f')}, "
             f"{_form(one['frozen_ne'], '.4f')}", ""),
            ("  gap to the best NE over time", " ".join(f"{gap:.4f}" for _, gap in one["gap_over_time"]), "falling"),
        ]
        rows += [(f"  memory of the {name}", f"{grown['before_mb']:.0f} -> {grown['after_mb']:.0f} MB, "
                  f"{grown['mb_per_minute']:+.2f} MB/min", "steady") for name, grown in check["growth"].items()]
    back: dict[str, list[float]] = {}
    for kill in killed["kills"]:
        back.setdefault(kill["process"], []).append(np.nan if kill["back_s"] is None else kill["back_s"])
    rows.append(("kills, and seconds until back (median)", ", ".join(
        f"{name} {len(times)}: {np.median(times):.1f}" for name, times in back.items()) or "none", ""))
    return rows


def met(killed: dict[str, Any], calm: dict[str, Any]) -> bool:
    """Whether all musts that do not need an hour held."""
    return bool(killed["verification"]["good"] and calm["verification"]["good"] and not calm["failed"] and all(
        one["item_shown_s"] is None or one["item_shown_s"]["p99"] <= MUST_SHOWN_S for one in (killed, calm)))


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _form(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--chaos", type=float, default=12.0)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--window", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = {}
    with tempfile.TemporaryDirectory(prefix="semel-loop-") as scratch:
        for name, chaos in (("killed", options.chaos), ("calm", None)):
            print(f"{name}: {options.seconds:g} s", file=sys.stderr)
            parts[name] = run(Path(scratch) / name, options.seconds, chaos, options.rate, options.users,
                              options.window)
    rows = rows_of(parts["killed"], parts["calm"])
    width = [max(len(row[column]) for row in rows) for column in range(2)]
    for row in rows:
        print(f"{row[0]:<{width[0]}}  {row[1]:<{width[1]}}  {row[2]}".rstrip())
    print("all musts held" if met(parts["killed"], parts["calm"]) else "A MUST WAS MISSED")
    if options.json:
        asked = {**vars(options), "json": str(options.json)}
        options.json.write_text(json.dumps({**parts, "options": asked}, indent=1))


if __name__ == "__main__":
    main()

"""Check what ``semel demo --quick --json > demo.json`` left in a folder: one JSON object with the promised keys."""

import json
import sys
from pathlib import Path

KEYS = {"stored", "computed", "waited", "embedded", "planned", "quality", "served", "replay", "loop", "seconds"}


def check(folder: Path) -> None:
    result = json.loads((folder / "demo.json").read_text())
    missing = KEYS - set(result)
    assert not missing, f"the demo's JSON lacks {sorted(missing)}"
    assert 0 < result["served"]["p50_ms"] <= result["served"]["p99_ms"], result["served"]
    computed = result["computed"]
    assert computed["per_candidate_ms"] > 2 * computed["once_ms"] and computed["max_difference"] <= 1e-5, computed
    waited = result["waited"]["idle"]
    assert 0 <= waited["balanced"] < waited["as they come"] < 1, waited
    replay = result["replay"]
    assert replay["histories_equal"] == replay["requests"] > 0, replay
    assert replay["max_difference"] <= 1e-5, replay
    for task, figure in (("ranking", "ne"), ("next_item", "ndcg@10")):
        models = result["quality"][task]["models"]
        assert len(models) >= 3 and all(model[figure]["value"] is not None for model in models.values()), models
    live = result["loop"]
    assert live["requests"] > 0 and live["verification"]["good"], live
    report = next(folder.rglob("report.html"))
    assert report.stat().st_size > 100_000, f"{report} is too small to hold its plots"
    print(f"demo: {result['seconds']:.0f} s, p50 {result['served']['p50_ms']:.1f} ms, "
          f"{replay['requests']} requests replayed, max difference {replay['max_difference']:g}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))

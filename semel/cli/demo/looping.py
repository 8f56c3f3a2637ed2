"""Step 11: all of it at once, live: served, joined, trained on, and served again by what was learnt."""

from __future__ import annotations

from semel.cli.demo.state import Demo

SECONDS, QUICK_SECONDS = 60.0, 5.0


def step(demo: Demo) -> None:
    from semel.cli.loop.closing import gaps, read_samples
    from semel.loop import Loop, LoopConfig, verify

    # A simulated site: real data do not say how good a model could be.
    config = LoopConfig(users=60 if demo.quick else 300, past_hours=24 if demo.quick else 24 * 7,
                        window=2.0 if demo.quick else 3.0, rate=10.0 if demo.quick else 20.0)
    live = Loop(config, demo.folder / "loop", say=demo.say)
    last = live.run(QUICK_SECONDS if demo.quick else SECONDS)
    if not last:
        raise RuntimeError("the loop was stopped")
    checked = verify(live.folder).to_json()
    samples = read_samples(live.folder.samples)
    demo.facts["loop_samples"] = samples
    demo.facts["loop"] = {
        **{name: last[name] for name in ("seconds", "requests", "p50_ms", "p99_ms", "served_ne", "best_ne", "gap",
                                         "prequential_ne", "item_shown_p50_s", "item_shown_p99_s", "items_shown",
                                         "trained_rows")},
        "gap_over_time": gaps(samples), "verification": checked}
    replayed = checked["replayed"]
    demo.say(f"{last['requests']:,} requests in {last['seconds']:.0f} s by {len(replayed['by_version'])} versions of "
             f"the model; {checked['events_lost']} of {checked['events']:,} acknowledged events lost, "
             f"{replayed['histories_equal']:,} of {replayed['requests']:,} histories equal")
    if not checked["good"]:
        raise RuntimeError(f"the loop lost something, or cannot be replayed: {checked}")

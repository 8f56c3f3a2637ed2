"""Step 8: how long eight trainers of this model would wait for the slowest, with requests as they come and balanced."""

from __future__ import annotations

from semel.cli.demo.state import Demo

RANKS = 8
REQUESTS = 64
"""Of a rank and step."""
BATCHES = 20


def step(demo: Demo) -> None:
    import numpy as np

    from semel.examples import open_examples
    from semel.history import HistoryStore, Projection
    from semel.training import balance

    rows = open_examples(demo.store, demo.facts["examples"]["set"]).rows("train")
    last = demo.recipe("rank").features.history_last
    with HistoryStore.open(demo.store) as store:
        lengths, _ = store.lengths(rows.pointers, Projection(("event_time",), last=last))
    # What this model does for a request grows with its events and its candidates; attention over 100 events is little.
    costs = np.asarray(lengths, np.float64) + rows.candidates.lengths
    order = np.random.default_rng(0).permutation(len(costs))
    count = max(RANKS, min(RANKS * REQUESTS, len(costs)))
    batches = [order[start:start + count] for start in range(0, len(order) - count + 1, count)][:BATCHES] or [order]
    ways = {"as they come": lambda costs, ranks: np.arange(len(costs)) % ranks, "balanced": balance.equal_count}
    idle = {name: [balance.idle(costs[batch], way(costs[batch], RANKS), RANKS) for batch in batches]
            for name, way in ways.items()}
    first = costs[batches[0]]
    demo.facts["waited"] = {
        "ranks": RANKS, "requests": count, "batches": len(batches),
        "idle": {name: float(np.mean(values)) for name, values in idle.items()},
        "loads": {name: balance.loads(first, way(first, RANKS), RANKS).tolist() for name, way in ways.items()}}
    mean = demo.facts["waited"]["idle"]
    demo.say(f"{RANKS} trainers would wait {mean['as they come']:.1%} of a step for the slowest, with balanced "
             f"requests {mean['balanced']:.2%}")

"""Step 2: a sitting becomes a request; what is kept of it is a pointer, its candidates and their labels."""

from __future__ import annotations

from semel.cli.demo.state import Demo


def step(demo: Demo) -> None:
    from semel.examples import build_examples

    recipe = demo.recipe("rank")
    config = recipe.examples
    examples = build_examples(
        demo.store, config.name, recipe.features, gap_us=round(config.gap_minutes * 60_000_000),
        like_threshold=config.like_threshold, validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction, max_candidates=config.max_candidates)
    demo.facts["examples"] = {"set": config.name, "counts": examples.counts, "boundaries": examples.boundaries}
    for split, counts in examples.counts.items():
        demo.say(f"{split}: {counts['requests']:,} requests with {counts['candidates']:,} candidates")
    if not all(counts["requests"] for counts in examples.counts.values()):
        raise ValueError("a split has no requests: too few events")

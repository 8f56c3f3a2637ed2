"""Step 9: how long a step of this ranker would take on 1, 8, 64 and 1,024 devices, with the best plan for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    from semel.planning import Recommender
    from semel.training import Recipe

DEVICES = (1, 8, 64, 1024)
REQUESTS = 64
"""Of a device and step."""


def step(demo: Demo) -> None:
    import numpy as np

    from semel.examples import open_examples

    rows = open_examples(demo.store, demo.facts["examples"]["set"]).rows("train")
    recipe = demo.recipe("rank")
    lengths = np.asarray(demo.facts["history_lengths"], float)
    mean = float(np.minimum(lengths, recipe.features.history_last).mean())
    candidates = float(rows.candidates.lengths.mean())
    demo.facts["planned"] = planned(recipe, mean, candidates, len(np.unique(rows.candidates.values)))
    last = demo.facts["planned"]["plans"][-1]
    demo.say(f"on {last['devices']:,} devices a step would take {last['seconds'] * 1e3:.2f} ms: {last['title']}")


def planned(recipe: Recipe, mean_length: float, candidates: float, items: int) -> dict[str, Any]:
    """The best plan for each number of devices, as plain data; ``beside``: with data parallelism alone."""
    from dataclasses import replace

    from semel.planning import Layout, Options, load_cluster, search
    from semel.planning.plan import measured

    cluster, plans = load_cluster("dgx-h100"), []
    for devices in DEVICES:
        job = job_of(recipe, mean_length, candidates, items, devices * REQUESTS)
        options = Options(devices=(devices,), microbatches=(8, 16, 32, REQUESTS), nodes=400, simulations=12, keep=1)
        best = search(cluster, job, options)[0]
        plain = measured(cluster, job, replace(Layout({"dp": devices}, order=("dp",)), microbatch=REQUESTS),
                         causes=False)
        plans.append({"devices": devices, "seconds": best.seconds, "requests_per_second": job.batch / best.seconds,
                      "title": best.title, "exposed": {axis: sum(levels.values()) for axis,
                                                       levels in best.exposed.items()},
                      "beside": plain.seconds})
    return {"device": cluster.device.name, "requests": REQUESTS, "plans": plans}


def job_of(recipe: Recipe, mean_length: float, candidates: float, items: int, batch: int) -> Recommender:
    """The demo's ranker as the planner knows it: an encoder over the history, an item table, a network over
    candidates."""
    from semel.planning import load_job
    from semel.planning.job import Recommender

    model, encoder = recipe.model, recipe.model.encoder
    layers = {"layers": encoder.layers, "width": encoder.dim, "heads": encoder.heads, "head_width": encoder.head_dim}
    pooled = len(recipe.features.request) + len(recipe.features.candidate)
    job = load_job({
        "kind": "recommender", "name": recipe.name, "batch": batch, "candidates": max(1.0, candidates), **layers,
        "top": [encoder.dim + model.dim * (1 + pooled), *model.hidden, 1], "dtype": "bf16",
        "lengths": {"mean": max(1.0, mean_length), "sigma": 0.0},
        "tables": [{"name": "item of an event", "rows": items, "width": encoder.dim, "sequence": True},
                   {"name": "item of a candidate", "rows": items, "width": model.dim, "candidate": True}]})
    assert isinstance(job, Recommender)
    return job

"""Step 1: MovieLens-1M into a history store, its films into the catalogue."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from semel.cli import output
from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    from semel.datasets import Dataset

QUICK_USERS = 350


def step(demo: Demo) -> None:
    from semel import datasets

    with output.progress_bar() as bar:
        progress = output.Steps(bar)
        dataset = datasets.fetch("ml-1m", demo.data, progress)
        progress.clear()
        demo.say(f"MovieLens-1M from {dataset.source}")
        demo.say(f"terms: {dataset.licence}")
        if demo.quick:
            dataset = sample(dataset, QUICK_USERS)
            demo.say(f"--quick: {QUICK_USERS:,} of its users")
        report = datasets.ingest(dataset, demo.store, progress)
    demo.facts["data"] = {"name": dataset.name, "source": dataset.source, "licence": dataset.licence,
                          "quick": demo.quick, **dataclasses.asdict(report)}
    demo.say(f"{report.events:,} ratings by {report.users:,} people of {report.items:,} films, "
             f"{report.events_per_second:,.0f} events/s, {output.size(report.bytes)}")


def sample(dataset: Dataset, users: int, seed: int = 0) -> Dataset:
    """The data set with the events of ``users`` of its users, drawn with a fixed seed; items and users stay."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    everyone = np.unique(dataset.events["user_id"].to_numpy())
    chosen = np.random.default_rng(seed).choice(everyone, size=min(users, len(everyone)), replace=False)
    mask = pc.is_in(dataset.events["user_id"], value_set=pa.array(chosen, dataset.events["user_id"].type))
    return dataclasses.replace(dataset, events=dataset.events.filter(mask))

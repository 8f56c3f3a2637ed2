"""Step 10: early ranking from an item memory that training writes while it serves, and what that loses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    import pyarrow as pa

    from semel.batch import RequestRows
    from semel.cli.demo.serving import Ask
    from semel.training import Recipe

REQUESTS, QUICK_REQUESTS = 120, 40
ROUND = 30
LEARNED, QUICK_LEARNED = 1500, 500
"""Requests of the training period, the last ones, that the model begins with."""
UNKNOWN = 10
"""Candidates of a request that no catalogue has: they have no row."""
WITHIN_S = 120.0
WINDOW_US = 3_600_000_000


def step(demo: Demo) -> None:
    import numpy as np

    from semel.cli.demo.serving import draw
    from semel.examples import ExposureLog, OutcomeLog, open_examples
    from semel.history import HistoryStore
    from semel.serving import Predictor, skew

    started = time.perf_counter()
    examples = open_examples(demo.store, demo.facts["examples"]["set"])
    with HistoryStore.open(demo.store / "catalogue") as catalogue:
        items = catalogue.keys()
    asks = list(draw(examples.rows("test"), items, QUICK_REQUESTS if demo.quick else REQUESTS))
    before = examples.rows("train")
    learned = QUICK_LEARNED if demo.quick else LEARNED
    before = before.select(np.argsort(before.pointers.as_of, kind="stable")[-learned:])
    recipe, log = _recipe(demo), ExposureLog(demo.store / "exposures")
    rows = demo.folder / "rows"
    rows.mkdir()
    write(rows, 0, before)
    unknown = [int(np.max(items)) + 1 + number for number in range(UNKNOWN)]
    outcomes, scored, asked = OutcomeLog(demo.store / "outcomes"), 0, 0
    with following(recipe, rows, _begin(demo, recipe)) as run, Predictor.load(run, demo.store) as predictor:
        wait_for(run, len(before))
        for number in range(0, len(asks), ROUND):
            done = len(log.read())
            for ask in asks[number : number + ROUND]:
                candidates = [*ask.candidates[:-UNKNOWN], *unknown]
                scored += len(predictor.rank(ask.user_id, candidates, ask.context, as_of=ask.as_of).results)
                asked += len(candidates)
            predictor.flush()
            joined = _join(log.read().slice(done), asks[number : number + ROUND], outcomes, recipe)
            write(rows, number + 1, joined)
            wait_for(run, len(before) + min(number + ROUND, len(asks)))
        fresh = np.array(predictor.memory.freshness) if predictor.memory is not None else np.zeros(1)
    outcomes.close()
    report = skew(run, demo.store)
    [whole] = report.tasks["like"]["all"]
    demo.facts["embedded"] = {
        "items": len(items), "requests": report.requests, "coverage": scored / asked, "found": report.found,
        "fresh_p50_s": float(np.median(fresh)), "fresh_p99_s": float(np.quantile(fresh, 0.99)),
        "trained_ne": whole.trained, "served_ne": whole.served, "skew": whole.skew, "inexact": whole.inexact,
        "staleness": whole.staleness, "largest": report.largest, "seconds": time.perf_counter() - started}
    if not report.exact:
        raise RuntimeError(f"what the memory served is not what it replays, by {report.largest:g}")
    demo.say(f"{report.requests:,} requests while training wrote: {scored / asked:.0%} of candidates scored, a row "
             f"visible after {np.median(fresh):.1f} s; served and replayed predictions differ by {report.largest:g}")


def _recipe(demo: Demo) -> Recipe:
    """Early ranking over the features of the ranker, its weights renewed often enough to be seen."""
    from semel import recipes
    from semel.training import override, with_paths

    recipe = override(recipes.get("ml1m_memory"), {"version_seconds": 5.0, "optimizer.warmup_steps": 10})
    return with_paths(recipe, demo.store, demo.folder / "runs")


def _begin(demo: Demo, recipe: Recipe) -> Path:
    """A model that knows what the ranker's tables know, and nothing else yet."""
    import torch

    from semel.models import load_model, make_model, save_model
    from semel.training.trainer import new_run

    known = load_model(demo.run["rank"]).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = make_model(recipe.model, recipe.features, dict(known.tables.encoders.items()))
    model.tables.load_state_dict(known.tables.state_dict())
    run = new_run(recipe)
    save_model(run, model, recipe.model, recipe.features, recipe.name)
    return run


@contextmanager
def following(recipe: Recipe, rows: Path, start: Path) -> Iterator[Path]:
    """A trainer that follows ``rows`` in a thread for the duration of the block; its run, once it has a model. Raises
    what training raised."""
    from semel.training import Follower, Interrupted

    found: list[BaseException] = []
    before = set(Path(recipe.out).iterdir())
    follower = Follower(recipe, rows, start=start)

    def follow() -> None:
        try:
            follower.fit()
        except Interrupted:
            pass
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=follow, name="semel-demo-follow", daemon=True)
    thread.start()
    try:
        end = time.monotonic() + WITHIN_S
        while not (made := [path for path in Path(recipe.out).iterdir()
                            if path not in before and (path / "model.json").exists()]):
            if found:
                raise found[0]
            if time.monotonic() > end:
                raise RuntimeError(f"training did not begin within {WITHIN_S:.0f} s")
            time.sleep(0.05)
        yield made[0]
    finally:
        follower.stop()
        thread.join(WITHIN_S)
    if found:
        raise found[0]


def wait_for(run: Path, requests: int) -> None:
    """Until the run has learned from so many requests."""
    from semel.examples.predictions import read_predictions

    end = time.monotonic() + WITHIN_S
    while not list((run / "predictions").glob("step-*")) or len(read_predictions(run / "predictions")) < requests:
        if time.monotonic() > end:
            raise RuntimeError(f"{run} did not learn from {requests} requests within {WITHIN_S:.0f} s")
        time.sleep(0.1)


def write(folder: Path, number: int, rows: RequestRows) -> None:
    """A file for a trainer that follows: it appears whole."""
    import pyarrow.parquet as pq

    from semel.examples import rows_to_table

    pq.write_table(rows_to_table(rows), folder / ".part")
    os.replace(folder / ".part", folder / f"{number:06d}.parquet")


def _join(exposures: pa.Table, asks: list[Ask], outcomes: Any, recipe: Recipe) -> RequestRows:
    """Requests with what their users did, as a site would report it."""
    import pyarrow as pa

    from semel.examples import join

    now = time.time_ns() // 1000
    found = [(name, item, task, value) for name, ask in zip(exposures["request_id"].to_pylist(), asks, strict=True)
             for item, labels in ask.labels.items() for task, value in labels.items()]
    ids = exposures.schema.field("candidates").type.value_type
    outcomes.append(pa.table({
        "request_id": [one[0] for one in found], "item_id": pa.array([one[1] for one in found], ids),
        "task": [one[2] for one in found], "value": pa.array([one[3] for one in found], pa.float32()),
        "received_at": [now] * len(found), "outcome_key": pa.nulls(len(found), pa.string())}))
    return join(exposures, outcomes.read(), WINDOW_US, recipe.features.tasks, now + 2 * WINDOW_US,
                recipe.features.request).rows

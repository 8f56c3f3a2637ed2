"""Step 6: the real server answers the requests of the test period, each with 500 candidates, as of its own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.cli import output
from semel.cli.demo.server import serving
from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    import numpy as np

    from semel.batch import RequestRows
    from semel.serving import Client

CANDIDATES = 500
REQUESTS = 400
QUICK_REQUESTS = 80
WARM_UP = 20
WRITES = 20
PATIENCE_S = 60.0
"""A busy machine shows slow answers, it does not end a demo."""


@dataclass(frozen=True)
class Ask:
    """One request as a site would send it, and what the user then did: ``labels`` by item."""

    user_id: Any
    as_of: int
    candidates: list[Any]
    context: dict[str, Any]
    labels: dict[Any, dict[str, float]]


def step(demo: Demo) -> None:
    import numpy as np

    from semel.examples import open_examples
    from semel.history import HistoryStore
    from semel.serving import Client

    rows = open_examples(demo.store, demo.facts["examples"]["set"]).rows("test")
    with HistoryStore.open(demo.store / "catalogue") as catalogue:
        items = catalogue.keys()
    with HistoryStore.open(demo.store) as store:
        columns = list(store.schema.columns)
    asks = list(draw(rows, items, (QUICK_REQUESTS if demo.quick else REQUESTS) + WARM_UP))
    milliseconds, inside = [], []
    with (serving(demo.run["rank"], demo.store, demo.folder / "server.log") as url,
          Client(url, timeout=PATIENCE_S) as client, output.progress_bar() as bar):
        demo.say(f"serving at {url}")
        task = bar.add_task("rank", total=len(asks), detail="")
        for number, ask in enumerate(asks):
            started = time.perf_counter()
            result = client.rank(ask.user_id, ask.candidates, ask.context, as_of=ask.as_of)
            if number >= WARM_UP:
                milliseconds.append(1e3 * (time.perf_counter() - started))
                inside.append(result.timings_ms)
            send_outcomes(client, result.request_id, ask.labels)
            bar.advance(task)
        fresh = [see_own_write(client, ask, columns) for ask in asks[:WRITES]]
    p50, p90, p99 = np.percentile(milliseconds, [50, 90, 99])
    demo.facts["latencies_ms"] = milliseconds
    demo.facts["inside_ms"] = {name: float(np.median([t[name] for t in inside])) for name in inside[0]}
    demo.facts["served"] = {"requests": len(milliseconds), "candidates": len(asks[0].candidates), "p50_ms": float(p50),
                            "p90_ms": float(p90), "p99_ms": float(p99), "event_to_seen_ms": float(np.median(fresh))}
    demo.say(f"{len(milliseconds):,} requests of {len(asks[0].candidates)} candidates: p50 {p50:.1f} ms, "
             f"p99 {p99:.1f} ms; an event is seen by the next request after {np.median(fresh):.1f} ms")


def draw(rows: RequestRows, items: np.ndarray, requests: int, seed: int = 0) -> Iterator[Ask]:
    """Requests of ``rows``, drawn with a fixed seed: each with its own candidates (at most 500) and others of the
    catalogue up to 500. Repeated once all are drawn, where there are too few."""
    import numpy as np

    random = np.random.default_rng(seed)
    order = np.resize(random.permutation(len(rows)), requests)
    for row in order.tolist():
        own = rows.candidates[row][:CANDIDATES]
        others = random.permutation(np.setdiff1d(items, own))[: CANDIDATES - len(own)]
        candidates = random.permutation(np.concatenate([own, others])).tolist()
        yield Ask(_plain(rows.pointers.user_id[row]), int(rows.pointers.as_of[row]), candidates,
                  {name: value for name, column in rows.context.items() if (value := _plain(column[row])) is not None},
                  _labels(rows, row, own.tolist()))


def send_outcomes(client: Client, request_id: str, labels: dict[Any, dict[str, float]]) -> None:
    """What the user did with the candidates that were really there."""
    outcomes = [{"request_id": request_id, "item_id": item, "label": label} for item, label in labels.items() if label]
    if outcomes:
        client.outcomes(outcomes)


def see_own_write(client: Client, ask: Ask, columns: list[str]) -> float:
    """Post an event, then ask again: milliseconds until an answer that saw it. RuntimeError if it did not."""
    event = {"user_id": ask.user_id, "item_id": ask.candidates[0]}
    if "rating" in columns:
        event["rating"] = 5.0
    started = time.perf_counter()
    version = client.events([event]).version
    seen = client.rank(ask.user_id, ask.candidates, ask.context).pointer.version
    if version is None or seen < version:
        raise RuntimeError(f"an event got version {version}, but the next request saw only {seen}")
    return 1e3 * (time.perf_counter() - started)


def _labels(rows: RequestRows, row: int, own: list[Any]) -> dict[Any, dict[str, float]]:
    start = int(rows.candidates.offsets[row])
    return {item: {task: float(values[start + place]) for task, values in rows.label.items()
                   if rows.label_mask[task][start + place]} for place, item in enumerate(own)}


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's; NaN as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value

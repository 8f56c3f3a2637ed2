"""The item memory through a real server: seconds until a written row, and new weights, are in an answer.

    python -m benchmarks.memory_loop [--seconds 60] [--every 10] [--rows 200] [--json]

``semel serve``'s server (a process of its own) follows a log in a folder, to which this process publishes at the
default interval: ten times a second it writes ``--rows`` rows and one of a probe item, and every ``--every`` seconds it
saves new weights. A client asks for all probes as fast as it is answered, some of its candidates being items that
nobody has written. ``rows``: from a probe's write to the end of the first answer whose score of it is another one;
``events``: the same from before an event of an item is sent to the server: this process follows the store as a trainer
does, looks ten times a second and writes the row of each item that something happened to (a step of training would come
between); ``weights``: from the save to the end of the first answer by them; coverage: candidates with a score. Then
every exposure is replayed. Weights are untrained: that does not change the time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import run_and_show
from benchmarks.serving import ITEMS, USERS, make_store, serving
from semel.history import HistoryStore, Pointers, Projection

PROBES = 200
"""Items whose rows are written unasked, and as many whose rows follow events."""
NEW = 10
DIM = 64


def save(run: Path, seed: int) -> str:
    from semel.features import Feature, FeatureSpec, Task, stable_id
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(seed)
    features = FeatureSpec(history=(Feature("item_id"), Feature("rating", "numeric")),
                           candidate=(Feature("genres", "multi"), Feature("year", "numeric")), tasks=(Task("like"),),
                           history_last=100)
    config = ModelConfig(kind="early_ranker", dim=DIM, memory_rows=2 * ITEMS,
                         encoder=EncoderConfig(layers=1, positions=101))
    encoders = {"item_id": Vocabulary(np.arange(ITEMS)), "rating": Scale(3.0, 1.0), "year": Scale(1985.0, 20.0),
                "genres": Vocabulary(stable_id(np.array([f"g{n}" for n in range(7)], dtype=object)))}
    return save_model(run, make_model(config, features, encoders), config, features, name="untrained", keep=1000)


def items_of(history: HistoryStore, after: int) -> np.ndarray:
    """The last item of each user to whom something happened above version ``after``."""
    users = history.changed_keys(after)
    assert users is not None  # nobody compacts
    last = history.read(Pointers(users, np.array(2**62), np.array(history.version)), Projection(("item_id",), last=1))
    return np.unique(last.columns["item_id"])


def loop(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from semel import Client
    from semel.memory import DeltaPublisher, ItemMemory
    from semel.serving import replay

    run, store = folder / "run", folder / "store"
    make_store(store, 100)
    save(run, 0)
    memory = ItemMemory(2 * ITEMS, DIM)
    memory.write(np.arange(ITEMS), torch.randn(ITEMS, DIM))
    random = np.random.default_rng(0)
    candidates = [*range(2 * PROBES), *range(ITEMS, ITEMS + NEW)]
    waiting: dict[int, float] = {}
    happened: dict[int, float] = {}
    saved: dict[str, float] = {}
    rows, events, weights, found, asked = [], [], [], 0, 0
    with DeltaPublisher(memory, run / "memory").start(), serving(run, store) as url, Client(url) as client, \
            HistoryStore.open(store, mode="r") as history:
        seen = history.version
        last = client.rank(0, candidates, as_of=10**15)
        began = due = time.monotonic()
        next_weights = began + arguments.every
        turn = 0
        end = began + arguments.seconds
        while (now := time.monotonic()) < end or ((waiting or happened) and now < end + 10):
            if due <= now < end:
                due += 0.1
                probe = turn % PROBES
                turn += 1
                memory.write(random.integers(2 * PROBES, ITEMS, arguments.rows), torch.randn(arguments.rows, DIM))
                if probe not in waiting:
                    memory.write([probe], 3 * torch.randn(1, DIM))
                    waiting[probe] = time.monotonic()
                history.refresh()
                happened_to = items_of(history, seen)
                seen = history.version
                memory.write(happened_to, 3 * torch.randn(len(happened_to), DIM))
                if PROBES + probe not in happened:
                    happened[PROBES + probe] = time.monotonic()
                    client.events([{"user_id": 1 + turn % (USERS - 1), "event_time": time.time_ns() // 1000,
                                    "item_id": PROBES + probe, "rating": 3}])
            if next_weights <= now < end:
                next_weights += arguments.every
                saved[save(run, turn)] = time.monotonic()
            result = client.rank(0, candidates, as_of=10**15)
            ended = time.monotonic()
            asked, found = asked + len(candidates), found + len(result.results)
            if result.model_version != last.model_version:  # all scores have changed, whose rows are new is unknown
                weights.append(ended - saved.pop(result.model_version))
                waiting.clear()
                happened.clear()
            else:
                before = dict(last.results)
                for item, score in result.results:
                    for since, took in ((waiting, rows), (happened, events)):
                        if item in since and score != before[item]:
                            took.append(ended - since.pop(item))
            last = result
    report = replay(run, store)

    def spread(values: list[float]) -> dict[str, float]:
        return {"count": len(values), "p50": float(np.median(values)), "p99": float(np.quantile(values, 0.99)),
                "max": max(values)}

    return {"rows": spread(rows), "events": spread(events), "weights": spread(weights) if weights else None,
            "coverage": found / asked,
            "replay": {"requests": report.requests, "bit_equal": report.bit_equal,
                                       "versions": len(report.by_version), "memory_gone": report.memory_gone,
                                       "exact": report.exact}}


def show(result: dict[str, Any]) -> None:
    for name in ("rows", "events", "weights"):
        one = result[name]
        if one is not None:
            print(f"{name:8} to in an answer: p50 {one['p50']:.2f} s, p99 {one['p99']:.2f} s, "
                  f"max {one['max']:.2f} s ({one['count']} seen)")
    again = result["replay"]
    print(f"coverage {result['coverage']:.2%}; {again['bit_equal']:,} of {again['requests']:,} requests replayed to "
          f"the bit, of {again['versions']} versions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between new weights")
    parser.add_argument("--rows", type=int, default=200, help="written ten times a second, beside the probe")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.seconds > 0 and arguments.every > 0 and arguments.rows > 0):
        parser.error("--seconds, --every and --rows must be above 0")
    run_and_show(lambda folder: loop(arguments, folder), show, arguments.json)


if __name__ == "__main__":
    main()

"""Latency of a ranked request: 500 candidates, histories of 200 and 1,024 events, in process and over HTTP.

    python benchmarks/serving.py [--requests 300] [--json serving.json]

The model is an untrained HSTU ranker (2 layers, width 64): weights do not change the time. ``outside`` is all that is
not the model: checks, history, item features, sorting, the exposure. HTTP adds JSON both ways and two processes on
the same cores. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

ITEMS, USERS, CANDIDATES = 4000, 50, 500


def make_store(path: Path, length: int) -> None:
    """``USERS`` users with ``length`` events each and ``ITEMS`` items, compacted."""
    from semel.history import EventSchema, HistoryStore

    rng = np.random.default_rng(0)
    rows = USERS * length
    schema = EventSchema({"item_id": pa.int64(), "rating": pa.float32()})
    with HistoryStore.create(path, schema) as store:
        store.append(pa.table({
            "user_id": np.tile(np.arange(USERS), length), "event_time": np.sort(rng.integers(1, 10**15, rows)),
            "item_id": rng.integers(0, ITEMS, rows), "rating": pa.array(rng.integers(1, 6, rows), pa.float32())}))
        store.compact()
    items = EventSchema({"genres": pa.string(), "year": pa.int32()}, key="item_id")
    with HistoryStore.create(path / "catalogue", items) as catalogue:
        catalogue.append(pa.table({
            "item_id": np.arange(ITEMS), "event_time": np.zeros(ITEMS, np.int64),
            "genres": [f"g{n % 7}|g{n % 5}" for n in range(ITEMS)], "year": pa.array(1950 + np.arange(ITEMS) % 70)
            .cast(pa.int32())}))
        catalogue.compact()


def save_ranker(run: Path, length: int) -> None:
    """An untrained HSTU ranker that reads ``length`` events, item, rating, genres and year."""
    import torch

    from semel.features import Feature, FeatureSpec, Task, stable_id
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(0)
    features = FeatureSpec(
        history=(Feature("item_id"), Feature("rating", "numeric")), request=(Feature("surface"),),
        candidate=(Feature("genres", "multi"), Feature("year", "numeric")), tasks=(Task("like"),), history_last=length)
    config = ModelConfig(encoder=EncoderConfig(positions=length + 1))
    encoders = {
        "item_id": Vocabulary(np.arange(ITEMS)), "rating": Scale(3.0, 1.0), "year": Scale(1985.0, 20.0),
        "surface": Vocabulary(stable_id(np.array(["home", "search"], dtype=object))),
        "genres": Vocabulary(stable_id(np.array([f"g{n}" for n in range(7)], dtype=object)))}
    save_model(run, make_model(config, features, encoders), config, features, name="untrained")


def requests(number: int) -> list[dict]:
    rng = np.random.default_rng(1)
    return [{"user_id": int(rng.integers(0, USERS)), "candidates": rng.permutation(ITEMS)[:CANDIDATES].tolist(),
             "context": {"surface": "home"}} for _ in range(number)]


def summary(times: list[dict[str, float]]) -> dict[str, float]:
    """p50 and p99 of the whole in ms, and the medians of its stages."""
    total = np.array([timing["total"] for timing in times])
    out = {"p50_ms": float(np.median(total)), "p99_ms": float(np.quantile(total, 0.99))}
    for stage in ("history", "features", "model"):
        out[f"{stage}_ms"] = float(np.median([timing[stage] for timing in times]))
    out["outside_ms"] = float(np.median([timing["inside"] - timing["model"] for timing in times]))
    return out


def in_process(run: Path, store: Path, number: int) -> dict[str, float]:
    import torch

    from semel import Predictor

    torch.set_num_threads(2)
    times = []
    with Predictor.load(run, store, mode="a") as predictor:
        predictor.warm_up()
        for request in requests(number):
            started = time.perf_counter()
            timings = predictor.rank(**request).timings_ms
            times.append({**timings, "inside": timings["total"], "total": 1e3 * (time.perf_counter() - started)})
    return summary(times)


def over_http(run: Path, store: Path, number: int) -> dict[str, float]:
    from semel import Client

    code = ("import sys; from semel.serving import run_server; "
            "run_server(sys.argv[1], sys.argv[2], port=0, ready=lambda url: print(url, flush=True))")
    server = subprocess.Popen([sys.executable, "-c", code, str(run), str(store)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError("the server did not start; its message is above")
        times = []
        with Client(url) as client:
            for request in requests(number + 10):
                started = time.perf_counter()
                timings = client.rank(**request).timings_ms
                times.append({**timings, "inside": timings["total"], "total": 1e3 * (time.perf_counter() - started)})
        return summary(times[10:])
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for length in (200, 1024):
        with tempfile.TemporaryDirectory() as folder:
            run, store = Path(folder) / "run", Path(folder) / "store"
            make_store(store, length)
            save_ranker(run, length)
            for way, measure in (("in process", in_process), ("over HTTP", over_http)):
                results.append({"history": length, "way": way, **measure(run, store, arguments.requests)})
    names = [name for name in results[0] if name.endswith("_ms")]
    print(f"{CANDIDATES} candidates, {arguments.requests} requests, milliseconds")
    print(f"{'history':>8} {'':>11}" + "".join(f"{name.removesuffix('_ms'):>10}" for name in names))
    for row in results:
        print(f"{row['history']:>8} {row['way']:>11}" + "".join(f"{row[name]:>10.2f}" for name in names))
    if arguments.json:
        arguments.json.write_text(json.dumps({"candidates": CANDIDATES, "results": results}, indent=1))


if __name__ == "__main__":
    main()

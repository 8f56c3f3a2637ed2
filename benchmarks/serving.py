"""Serving: how long a ranked request takes, what sharing is worth, retrieval over whole catalogues, hot swaps.

    python -m benchmarks.serving [--requests 300] [--json serving.json]
    python -m benchmarks.serving sharing [--seconds 8] [--history 1024] [--models sequence_dcnv2] [--small] [--json F]
    python -m benchmarks.serving retrieval [--items 16384 131072 1048576] [--limits 500 16384] [--rounds 50] \
        [--faiss HNSW32] [--json F]
    python -m benchmarks.serving swap [--seconds 30] [--json swap.json]

Models are untrained: weights do not change the time. Run it on an idle machine.

Latency: an HSTU ranker (2 layers, width 64) over histories of 200 and 1,024 events, in process and over HTTP.
``outside`` is all that is not the model: checks, history, item features, sorting, the exposure. HTTP adds JSON both
ways and two processes on the same cores.

Sharing: ``semel serve`` with the request side computed once per request, and with ``--no-share``, which copies it to
every candidate; histories of ``--history`` events; HSTU with DCN V2 as its scorer, HSTU, and DCN V2. ``--models``
names others, ``--small`` is a minute's size (64 candidates, 128 events, the first model). Closed loop: each client
asks again when it has its answer. ``paged`` asks for nine more pages of each request's candidates, whose state is
kept. The ratio is of requests a second at equal p99: sharing takes as many clients as its p99 stays below that of one
client without.

Retrieval and swap: ``benchmarks/serving_stages.py`` says what they do.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def save_ranker(run: Path, length: int, kind: Any = "sequence_ranker", seed: int = 0) -> None:
    """An untrained ranker (HSTU) that reads ``length`` events, item, rating, genres and year."""
    import torch

    from semel.features import Feature, FeatureSpec, Task, stable_id
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(seed)
    features = FeatureSpec(
        history=(Feature("item_id"), Feature("rating", "numeric")), request=(Feature("surface"),),
        candidate=(Feature("genres", "multi"), Feature("year", "numeric")), tasks=(Task("like"),), history_last=length)
    config = ModelConfig(kind=kind, encoder=EncoderConfig(positions=length + 1))
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


@contextmanager
def serving(run: Path, store: Path, **options: Any) -> Iterator[str]:
    """A server in a process of its own; yields its address."""
    code = ("import json, sys; from semel.serving import run_server; run_server(sys.argv[1], sys.argv[2], port=0, "
            "latency_target=3600, ready=lambda url: print(url, flush=True), **json.loads(sys.argv[3]))")
    server = subprocess.Popen([sys.executable, "-c", code, str(run), str(store), json.dumps(options)],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError("the server did not start; its message is above")
        yield url
    finally:
        os.kill(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def over_http(run: Path, store: Path, number: int) -> dict[str, float]:
    from semel import Client

    times = []
    with serving(run, store) as url, Client(url) as client:
        for request in requests(number + 10):
            started = time.perf_counter()
            timings = client.rank(**request).timings_ms
            times.append({**timings, "inside": timings["total"], "total": 1e3 * (time.perf_counter() - started)})
    return summary(times[10:])


def closed_loop(url: str, clients: int, seconds: float, pages: int = 1) -> dict[str, float]:
    """Requests a second and latency in ms of ``clients`` that ask without pause; each request has so many ``pages``."""
    from semel import Client

    asked = requests(200)
    latencies: list[float] = []
    stop = time.perf_counter() + seconds

    def ask(number: int) -> None:
        asked_one = False
        with Client(url, timeout=300) as client:
            for turn in range(number, 10**9, clients):
                as_of = None
                for page in range(pages):
                    started = time.perf_counter()
                    if started >= stop and asked_one:
                        return
                    request = {**asked[turn % 200], "candidates": asked[(turn + page) % 200]["candidates"]}
                    as_of = client.rank(**request, limit=50, as_of=as_of).pointer.as_of
                    latencies.append(1e3 * (time.perf_counter() - started))
                    asked_one = True

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    p50, p99 = np.quantile(latencies, [0.5, 0.99])
    return {"clients": clients, "requests": len(latencies), "p50_ms": float(p50), "p99_ms": float(p99),
            "requests_per_s": len(latencies) / (time.perf_counter() - started)}


def sharing(seconds: float, history: int, models: list[str]) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        make_store(store, history)
        for kind in models:
            run = Path(folder) / kind
            save_ranker(run, history, kind)
            for share, loads in ((False, ((1, 1),)), (True, ((1, 1), (2, 1), (4, 1), (1, 10)))):
                with serving(run, store, share=share) as url:
                    if share:
                        closed_loop(url, 1, 0.2 * seconds)
                    for clients, pages in loads:
                        how = "off" if not share else "on" if pages == 1 else "paged"
                        results.append({"model": kind, "share": how, **closed_loop(url, clients, seconds, pages)})
    ratios = {}
    for kind in models:
        own = [row for row in results if row["model"] == kind]
        [off] = [row for row in own if row["share"] == "off"]
        for how in ("on", "paged"):
            fast = [row["requests_per_s"] for row in own if row["share"] == how and row["p99_ms"] <= off["p99_ms"]]
            ratios[f"{kind} {how}"] = max(fast, default=0.0) / off["requests_per_s"]
    return {"candidates": CANDIDATES, "history": history, "seconds": seconds, "results": results,
            "requests_per_s_at_equal_p99": ratios}


def show_sharing(found: dict[str, Any]) -> None:
    print(f"{CANDIDATES} candidates, {found['history']} events, {found['seconds']:g} s a row")
    print(f"{'model':>16} {'share':>6} {'clients':>8} {'requests':>9} {'p50 ms':>9} {'p99 ms':>9} {'requests/s':>11}")
    for row in found["results"]:
        print(f"{row['model']:>16} {row['share']:>6} {row['clients']:>8} {row['requests']:>9} {row['p50_ms']:>9.1f} "
              f"{row['p99_ms']:>9.1f} {row['requests_per_s']:>11.1f}")
    for name, ratio in found["requests_per_s_at_equal_p99"].items():
        print(f"{name}: {ratio:.1f}x the requests/s of share off, at equal p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("latency", "sharing", "retrieval", "swap"), default="latency")
    parser.add_argument("--models", nargs="+", default=["sequence_dcnv2", "sequence_ranker", "dcnv2"],
                        help="of sharing: kinds of rankers")
    parser.add_argument("--small", action="store_true", help="of sharing: a size that takes a minute")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--history", type=int, default=1024)
    parser.add_argument("--items", type=int, nargs="+", default=[16384, 131072, 1048576])
    parser.add_argument("--limits", type=int, nargs="+", default=[500, 16384])
    parser.add_argument("--faiss", help="of retrieval: an index to compare with, such as HNSW32")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.small:
        global CANDIDATES
        CANDIDATES = 64
        arguments.seconds, arguments.history, arguments.models = 2.0, 128, arguments.models[:1]
    if arguments.what != "latency":
        from benchmarks.serving_stages import retrieval, show_retrieval, show_swap, swap

        found = sharing(arguments.seconds, arguments.history, arguments.models) if arguments.what == "sharing" else \
            swap(arguments.seconds) if arguments.what == "swap" else \
            retrieval(arguments.items, arguments.limits, arguments.rounds, arguments.faiss)
        {"sharing": show_sharing, "retrieval": show_retrieval, "swap": show_swap}[arguments.what](found)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
        return
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

"""Retrieval over whole catalogues, and models that change under load: parts of ``benchmarks/serving.py``."""

from __future__ import annotations

import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.serving import CANDIDATES, ITEMS, USERS, make_store, save_ranker, serving

DIM, HISTORY = 64, 200


def save_retriever(run: Path, items: int, seed: int = 0) -> None:
    """An untrained next-item model (HSTU, 2 layers, width 64) that knows ``items`` items."""
    import torch

    from semel.features import Feature, FeatureSpec, Task
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(seed)
    features = FeatureSpec(history=(Feature("item_id"), Feature("rating", "numeric")), tasks=(Task("like"),),
                           history_last=HISTORY)
    config = ModelConfig(kind="next_item", dim=DIM, encoder=EncoderConfig(positions=HISTORY + 1))
    encoders = {"item_id": Vocabulary(np.arange(items)), "rating": Scale(3.0, 1.0)}
    save_model(run, make_model(config, features, encoders), config, features, name="untrained")


def grow_catalogue(store: Path, items: int) -> None:
    from semel.history import HistoryStore

    with HistoryStore.open(store / "catalogue", mode="a") as catalogue:
        for first in range(ITEMS, items, 1 << 18):
            ids = np.arange(first, min(items, first + (1 << 18)))
            catalogue.append(pa.table({
                "item_id": ids, "event_time": np.zeros(len(ids), np.int64),
                "genres": pa.array(np.char.add("g", (ids % 7).astype(str))),
                "year": pa.array(1950 + ids % 70).cast(pa.int32())}))
        catalogue.compact()


def whole(artifact: Any, batch: Any, ids: Any, limit: int) -> Any:
    """What one would write otherwise: all scores by one product, and a top-k of them, in ids."""
    import torch

    with torch.inference_mode():
        scores = artifact.model.score_items(batch, ids)[0]
        best = scores.topk(min(limit, len(scores)))
        return ids[best.indices], best.values


def retrieval(sizes: list[int], limits: list[int], rounds: int, faiss: str | None = None) -> dict[str, Any]:
    """Rows of milliseconds: ``retrieve`` (all of it, exposure included), its scan, and ``whole`` with the same history
    read and encoded, interleaved; the retrieval after one more item was appended; with ``faiss``, a predictor whose
    scan FAISS goes before, and which share of the exact answer it gave."""
    import torch

    from semel import Predictor

    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        make_store(store, HISTORY)
        for items in sizes:
            grow_catalogue(store, items)
            run = Path(folder) / f"next-{items}"
            save_retriever(run, items)
            with Predictor.load(run, store, mode="a") as predictor:
                began = time.perf_counter()
                predictor.retrieve(0, 10)
                first = time.perf_counter() - began
                rows += [_retrieval(predictor, items, limit, rounds, first) for limit in limits if limit <= items]
            if faiss is not None:
                with Predictor.load(run, store, mode="a", faiss=faiss) as predictor:
                    predictor.retrieval._scan(predictor.artifact).prepare()
                    for row in rows:
                        if row["items"] == items:
                            row.update(_near(predictor, row["limit"], rounds))
    return {"dim": DIM, "history": HISTORY, "rounds": rounds, "rows": rows}


def _retrieval(predictor: Any, items: int, limit: int, rounds: int, first: float) -> dict[str, Any]:
    import torch

    from semel.serving.predictor import _Checked

    ids = torch.arange(items)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, list[float]] = {"retrieve": [], "scan": [], "whole": [], "new_item": []}
    agree = 0
    for turn in range(rounds):
        user = turn % USERS
        began = time.perf_counter()
        result = predictor.retrieve(user, limit)
        found["retrieve"].append(1e3 * (time.perf_counter() - began))
        found["scan"].append(result.timings_ms["scan"])
        began = time.perf_counter()
        one = _Checked(0, "whole", user, np.empty(0, np.int64), {}, None, result.pointer.as_of, predictor._versions())
        batch, _ = predictor._materialize([one], predictor.artifact)
        plain, _ = whole(predictor.artifact, batch, ids, limit)
        found["whole"].append(1e3 * (time.perf_counter() - began))
        agree += len(set(plain.tolist()) & {item for item, _ in result.results}) == min(limit, items)
        predictor.catalogue.append(pa.table({"item_id": [items + turn], "event_time": [0], "genres": ["g1"],
                                             "year": pa.array([2000], pa.int32())}))
        began = time.perf_counter()
        predictor.retrieve(user, limit)
        found["new_item"].append(1e3 * (time.perf_counter() - began))
        predictor.catalogue.delete([items + turn])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    times = {f"{name}_{label}": float(np.quantile(values, share)) for name, values in found.items()
             for label, share in (("p50", 0.5), ("p99", 0.99))}
    return {"items": items, "limit": limit, **times, "first_s": first, "sets_equal": agree / rounds,
            "million_items_per_s": items / 1e3 / times["scan_p50"], "peak_growth_mb": grown,
            "ratio": times["whole_p50"] / times["retrieve_p50"]}


def _near(predictor: Any, limit: int, rounds: int) -> dict[str, float]:
    """The first stage by FAISS, its latency, and its recall against all items ranked by the same model."""
    times, recall = [], []
    for turn in range(rounds):
        began = time.perf_counter()
        result = predictor.retrieve(turn % USERS, limit)
        times.append(1e3 * (time.perf_counter() - began))
        scan = predictor._scan(predictor.artifact)
        near, scan._near = scan._near, None  # the same predictor without it
        exact = predictor.retrieve(turn % USERS, limit, as_of=result.pointer.as_of)
        scan._near = near
        recall.append(len({item for item, _ in exact.results} & {item for item, _ in result.results}) / limit)
    return {"faiss_p50": float(np.median(times)), "faiss_recall": float(np.mean(recall))}


def show_retrieval(found: dict[str, Any]) -> None:
    print(f"next-item model, width {found['dim']}, histories of {found['history']}, {found['rounds']} rounds, one "
          "thread, milliseconds; 'whole': one product over all items and topk, the same history")
    print(f"{'items':>9} {'k':>6} {'p50':>8} {'p99':>8} {'scan':>7} {'whole':>8} {'ratio':>6} {'after a new item':>17} "
          f"{'M items/s':>10} {'same sets':>10} {'peak MB':>8} {'first s':>8}")
    for row in found["rows"]:
        print(f"{row['items']:>9,} {row['limit']:>6,} {row['retrieve_p50']:>8.2f} {row['retrieve_p99']:>8.2f} "
              f"{row['scan_p50']:>7.2f} {row['whole_p50']:>8.2f} {row['ratio']:>5.2f}x {row['new_item_p50']:>17.2f} "
              f"{row['million_items_per_s']:>10.1f} {row['sets_equal']:>10.0%} {row['peak_growth_mb']:>8.1f} "
              f"{row['first_s']:>8.2f}")
    for row in found["rows"]:
        if "faiss_p50" in row:
            print(f"FAISS before the scan, {row['items']:,} items, k {row['limit']:,}: p50 {row['faiss_p50']:.2f} ms, "
                  f"recall {row['faiss_recall']:.1%}")


def swap(seconds: float, clients: int = 4) -> dict[str, Any]:
    """Closed loop over HTTP, rank and recommend in turn, first undisturbed, then with a swap a second: the other
    weights of the run, the other run, and back. ``failed`` counts whatever is no answer."""
    with tempfile.TemporaryDirectory() as folder:
        runs, store = Path(folder) / "runs", Path(folder) / "store"
        make_store(store, HISTORY)
        for run, kind, seed in (("one", "sequence_ranker", 0), ("one", "sequence_ranker", 1), ("two", "dcnv2", 2)):
            save_ranker(runs / run, HISTORY, kind, seed)
        save_retriever(runs / "next", ITEMS)
        with serving(runs / "one", store, retrieve=str(runs / "next")) as url:
            quiet = _hammer(url, seconds, clients, [])
            from semel.models import model_versions

            versions = [one.version for one in model_versions(runs / "one")]
            changes = [{"version": versions[0]}, {"run": "two"}, {"version": "previous"}, {"version": "latest"}]
            busy = _hammer(url, seconds, clients, changes)
    return {"seconds": seconds, "clients": clients, "quiet": quiet, "swapping": busy}


def _hammer(url: str, seconds: float, clients: int, changes: list[dict[str, str]]) -> dict[str, Any]:
    from semel import Client

    latencies: list[float] = []
    failed: list[str] = []
    swaps: list[float] = []
    served: set[str] = set()
    stop = threading.Event()

    def ask(number: int) -> None:
        rng = np.random.default_rng(number)
        with Client(url, timeout=300, retries=0) as client:
            while not stop.is_set():
                user, began = int(rng.integers(0, USERS)), time.perf_counter()
                try:
                    if len(latencies) % 2:
                        served.add(client.recommend(user, 20).model_version)
                    else:
                        served.add(client.rank(user, rng.permutation(ITEMS)[:CANDIDATES], limit=50).model_version)
                except Exception as error:  # whatever it is, it is a failed request
                    failed.append(repr(error))
                latencies.append(1e3 * (time.perf_counter() - began))

    with ThreadPoolExecutor(clients) as pool, Client(url, timeout=300) as control:
        for number in range(clients):
            pool.submit(ask, number)
        end, turn = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            time.sleep(min(1.0, max(0.0, end - time.perf_counter())))
            if changes:
                began = time.perf_counter()
                control.serve(**changes[turn % len(changes)])
                swaps.append(1e3 * (time.perf_counter() - began))
                turn += 1
        stop.set()
    return {"requests": len(latencies), "failed": len(failed), "errors": failed[:3], "versions": len(served),
            "swaps": len(swaps), "swap_ms": float(np.median(swaps)) if swaps else None,
            "p50_ms": float(np.median(latencies)), "p99_ms": float(np.quantile(latencies, 0.99)),
            "requests_per_s": len(latencies) / seconds}


def show_swap(found: dict[str, Any]) -> None:
    print(f"{found['clients']} clients, rank (500 candidates) and recommend in turn, {found['seconds']:g} s each")
    print(f"{'':>9} {'requests':>9} {'failed':>7} {'versions':>9} {'swaps':>6} {'swap ms':>8} {'p50 ms':>8} "
          f"{'p99 ms':>8}")
    for name in ("quiet", "swapping"):
        row = found[name]
        print(f"{name:>9} {row['requests']:>9} {row['failed']:>7} {row['versions']:>9} {row['swaps']:>6} "
              f"{row['swap_ms'] or 0:>8.0f} {row['p50_ms']:>8.1f} {row['p99_ms']:>8.1f}")
    print(f"failed requests while swapping: {found['swapping']['failed']} (must be 0)")

"""Compaction of a log: events a second, and the most memory that the process held.

    python -m benchmarks.compaction [--events 5000000] [--memory-limit 1GiB] [--workers 2] [--json]

6 columns, 1,000 events an append, log-normal histories, events in the order of their time but for 1 % that come late.
Appending and compacting are processes of their own, so that the memory is that of the compaction alone; ``before`` is
what the process holds once the store is open and compiled code is loaded (a small store has been compacted). Every
user's newest events are read at the end and counted. With ``--old`` that share of the events is compacted first: the
compaction measured merges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.command import run_and_show
from benchmarks.history import SCHEMA
from semel.history import HistoryStore

ROWS = 1000
PIECE = 1_000_000  # events are drawn that many at a time


def piece(users: int, start: int, count: int, seed: int) -> pa.Table:
    """Events ``start`` ... of a stream: users drawn by log-normal activity, times ascending, a few late."""
    random = np.random.default_rng(seed)
    activity = np.cumsum(np.random.default_rng(0).lognormal(0, 1.2, users))
    when = (np.arange(start, start + count) * 1_000_000) + random.integers(0, 1_000_000, count)
    late = random.random(count) < 0.01
    when[late] = np.maximum(when[late] - random.integers(0, 86_400_000_000, int(late.sum())), 0)
    codes = random.choice(4, count, p=[0.7, 0.2, 0.07, 0.03]).astype(np.int8)
    return pa.table({
        "user_id": np.searchsorted(activity, random.random(count) * activity[-1]), "event_time": when,
        "item_id": np.minimum(random.zipf(1.2, count), 1_000_000), "watch_time": random.random(count, np.float32),
        "action": pa.DictionaryArray.from_arrays(pa.array(codes), ["view", "like", "share", "follow"]),
        "surface": random.integers(0, 5, count).astype(np.int8),
        "author_id": random.integers(0, 100_000, count).astype(np.int32), "price": random.random(count, np.float32),
    })


def fill(path: Path, events: int, start: int) -> None:
    """Append events ``start`` to ``events`` of the stream, durable as any."""
    create = not (path / "manifest.json").exists()
    with HistoryStore.create(path, SCHEMA) if create else HistoryStore.open(path, mode="a") as store:
        for at in range(start, events, PIECE):
            table = piece(max(events // 500, 1), at, min(PIECE, events - at), at)
            for batch in table.to_batches(max_chunksize=ROWS):
                store.append(batch)


def compact(path: Path, memory_limit: str, workers: int, engine: str) -> dict[str, Any]:
    """Compact the store at ``path`` in this process."""
    fill(path.with_name("small"), 100_000, 0)
    with HistoryStore.open(path.with_name("small"), mode="a") as small:
        small.compact(workers=workers)  # compiles, or loads what was compiled
    start = time.perf_counter()
    with HistoryStore.open(path, mode="a") as store:
        opened = time.perf_counter() - start
        before = peak()
        start = time.perf_counter()
        store.compact(engine, workers, memory_limit)  # type: ignore[arg-type]  # it checks
        seconds = time.perf_counter() - start
        after = peak()
        stats = store.stats()
        return {"seconds": seconds, "open_seconds": opened, "peak_bytes": after, "before_bytes": before,
                "bytes": stats["bytes"]["total"], "compacted": stats["events"]["generation"]}


def peak() -> int:
    """The most memory (resident, bytes) that this process has held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def child(*arguments: str) -> str:
    return subprocess.run([sys.executable, "-m", "benchmarks.compaction", *arguments], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path, events = folder / "store", options.events
    old = int(events * options.old)
    if old:
        child("--fill", str(path), "--events", str(old))
        child("--compact", str(path))
    child("--fill", str(path), "--events", str(events), "--start", str(old))
    result = json.loads(child("--compact", str(path), "--memory-limit", options.memory_limit, "--workers",
                              str(options.workers), "--engine", options.engine))
    assert result.pop("compacted") == events, result
    return {"events": events, "old": old, "memory_limit": options.memory_limit, "workers": options.workers,
            "engine": options.engine, "cpus": os.cpu_count(),
            "events_per_second": round((events - old) / result["seconds"]), **result}


def show(result: dict[str, Any]) -> None:
    print(f"{result['events']:,} events of 6 columns, {result['old']:,} of them compacted before; engine "
          f"{result['engine']}, {result['workers']} workers, {result['cpus']} cores, memory limit "
          f"{result['memory_limit']}")
    print(f"  opened in {result['open_seconds']:.1f} s, compacted in {result['seconds']:.1f} s: "
          f"{result['events_per_second']:,} new events/s")
    print(f"  memory: {result['peak_bytes'] / 2**20:,.0f} MiB at most, {result['before_bytes'] / 2**20:,.0f} MiB "
          f"before; {result['bytes'] / result['events']:.1f} bytes an event on disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--old", type=float, default=0.0, help="share of the events that is compacted before")
    parser.add_argument("--memory-limit", default="1GiB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the folder for temporary files)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--compact", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill is not None:
        fill(options.fill, options.events, options.start)
    elif options.compact is not None:
        print(json.dumps(compact(options.compact, options.memory_limit, options.workers, options.engine)))
    else:
        run_and_show(lambda folder: run(options, folder), show, options.json, options.folder)


if __name__ == "__main__":
    main()

"""The item memory: rows written and read, seconds from write to visible, and what a candidate costs at serving.

    python -m benchmarks.memory [--rows 1000000] [--dim 64] [--rounds 15] [--seconds 60] [--json]

rows      random keys of a full table, ``--batch`` at a time: writes; reads into a caller's buffer; the same gather
          without any index (``torch.index_select`` of known rows), interleaved. All threads of torch.
fresh     a trainer that writes 2,000 rows ten times a second and publishes to a folder at the default interval, and a
          reader in another process that polls every 0.1 s: seconds from a row's write to the poll that shows it.
latency   1,000 candidates of early ranking, one in a hundred without a row, microseconds each, the same dot product
          behind: ``folded`` (``FoldedMemory``: one row a candidate) and ``layer`` (``MemoryLayer``
          in eval mode: row, always-on part, gate) against ``frozen``, a cache of the same ids looked up in the same
          table, with a constant for a miss; interleaved pairs and the 95 % upper bound of their median ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.command import run_and_show
from benchmarks.sharing import upper_rank
from semel.memory import DeltaPublisher, DeltaSubscriber, FoldedMemory, ItemMemory, MemoryLayer, QuantizedMemory


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of ``times`` calls, round by round, after two rounds that are thrown away. They are called one after
    another, in turning order, so that a machine that slows down within a round slows down all of them."""
    seconds: dict[str, list[float]] = {name: [0.0] * (rounds + 2) for name in calls}
    order = list(calls)
    for i in range((rounds + 2) * times):
        for name in order[i % len(order):] + order[:i % len(order)]:
            started = time.perf_counter()
            calls[name]()
            seconds[name][i // times] += time.perf_counter() - started
    return {name: taken[2:] for name, taken in seconds.items()}


def rows(arguments: argparse.Namespace) -> dict[str, Any]:
    count, dim, batch = arguments.rows, arguments.dim, arguments.batch
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-2**62, 2**62, (count,), generator=generator)
    vectors = torch.randn(count, dim, generator=generator)
    memory = ItemMemory(count, dim).eval()
    memory.write(keys, vectors)
    small = QuantizedMemory(memory)
    out = torch.empty(batch, dim)

    def drawn() -> torch.Tensor:
        return torch.randint(0, count, (batch,), generator=generator)

    def timed(work: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[[], float]:
        def run() -> float:
            places = drawn()
            key, vector = keys[places], vectors[places]
            time.sleep(0.02)  # torch's own threads wait busily for a while after each operation
            started = time.perf_counter()
            work(places, key, vector)
            return time.perf_counter() - started
        return run

    asked = {
        "write": timed(lambda place, key, vector: memory.write(key, vector)),
        "read": timed(lambda place, key, vector: memory.read(key, out)),
        "read int8": timed(lambda place, key, vector: small.read(key, out)),
        "raw gather": timed(lambda place, key, vector: torch.index_select(vectors, 0, place, out=out)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    order = list(asked)
    for i in range(arguments.rounds + 2):
        for name in order[i % len(order):] + order[:i % len(order)]:
            took = asked[name]()
            if i >= 2:
                seconds[name].append(took)
    rate = {name: batch / statistics.median(values) / 1e6 for name, values in seconds.items()}
    ratios = [g / r for r, g in zip(seconds["read"], seconds["raw gather"], strict=True)]
    return {"million_rows_per_second": rate, "read_over_gather": statistics.median(ratios),
            "spread": {name: [batch / max(v) / 1e6, batch / min(v) / 1e6] for name, v in seconds.items()}}


def _follow(folder: str, stop: Connection) -> None:
    reader = DeltaSubscriber(folder)
    reader.freshness = type(reader.freshness)(maxlen=10_000_000)
    stop.send("ready")
    while not stop.poll(0.1):
        reader.poll()
    reader.poll()
    stop.send(sorted(reader.freshness))


def fresh(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(str(folder), theirs))
    memory = ItemMemory(200_000, arguments.dim)
    random = np.random.default_rng(0)
    process.start()
    try:
        if not mine.poll(120) or mine.recv() != "ready":
            raise RuntimeError("the reader does not start")
        with DeltaPublisher(memory, folder).start():
            end = time.monotonic() + arguments.seconds
            while time.monotonic() < end:
                keys = random.integers(0, 300_000, 2000)
                memory.write(keys, torch.randn(2000, arguments.dim))
                time.sleep(0.1)
        time.sleep(0.3)
        mine.send("stop")
        if not mine.poll(60):
            raise RuntimeError("the reader does not answer")
        seconds = np.array(mine.recv())
    finally:
        process.join(30)
        if process.is_alive():
            process.kill()
    return {"rows": len(seconds), "p50": float(np.median(seconds)), "p99": float(np.quantile(seconds, 0.99)),
            "max": float(seconds.max())}


@torch.no_grad()
def latency(arguments: argparse.Namespace) -> dict[str, Any]:
    dim, candidates, items = arguments.dim, 1000, min(arguments.rows, 200_000)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(items, dim, generator=generator)
    memory = ItemMemory(items, dim).eval()
    memory.write(torch.arange(items), vectors)
    layer = MemoryLayer(nn.Linear(8, dim), memory, nn.Embedding(1000, dim)).eval()
    user, constant = torch.randn(dim, generator=generator), torch.tensor(-3.0)
    item = torch.randint(0, items + items // 100, (candidates,), generator=generator)
    folded = FoldedMemory(layer, memory, lambda some: some % 1000)

    def frozen() -> torch.Tensor:
        rows, found, _ = memory.read(item)
        return torch.where(found, rows @ user, constant)

    calls = {"frozen": frozen, "folded": lambda: folded.read(item) @ user,
             "layer": lambda: layer(item, None, item % 1000) @ user}
    times = 50
    seconds = interleaved(calls, max(arguments.rounds, 15), times)
    each = {name: statistics.median(v) / times / candidates * 1e6 for name, v in seconds.items()}
    result: dict[str, Any] = {"microseconds_a_candidate": each, "ratio": {}, "upper_bound": {}}
    for name in ("folded", "layer"):
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["frozen"], strict=True))
        result["ratio"][name] = statistics.median(ratios)
        result["upper_bound"][name] = ratios[upper_rank(len(ratios)) - 1]
    return result


def show(result: dict[str, Any]) -> None:
    one = result["rows"]
    for name, rate in one["million_rows_per_second"].items():
        low, high = one["spread"][name]
        print(f"{name:12} {rate:6.1f} M rows/s ({low:.1f} .. {high:.1f})")
    print(f"a read is {one['read_over_gather']:.2f} of a raw gather's speed")
    if "fresh" in result:
        at = result["fresh"]
        print(f"write to visible: p50 {at['p50']:.2f} s, p99 {at['p99']:.2f} s, {at['rows']:,} rows seen")
    each, bound = result["latency"]["microseconds_a_candidate"], result["latency"]["upper_bound"]
    for name, ratio in result["latency"]["ratio"].items():
        print(f"{name}: {each[name]:.3f} us a candidate, frozen {each['frozen']:.3f}: {ratio:.2f}x, at most "
              f"{bound[name]:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60, help="of the trainer in the part about freshness; 0: none")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.dim, arguments.batch, arguments.rounds) < 1 or arguments.seconds < 0:
        parser.error("--rows, --dim, --batch and --rounds must be at least 1, --seconds 0 or more")

    def run(folder: Path) -> dict[str, Any]:
        result: dict[str, Any] = {"threads": torch.get_num_threads(), "rows": rows(arguments)}
        if arguments.seconds:
            result["fresh"] = fresh(arguments, folder)
        return result | {"latency": latency(arguments)}

    run_and_show(run, show, arguments.json)


if __name__ == "__main__":
    main()

"""What serving loses of what was trained: an item memory against a cache that a bulk job fills.

    python -m benchmarks.memory_skew [--data FOLDER [--speedup 1]] [--seconds 1800] [--seeds 3] [--items 1000]
                                     [--budget 4] [--dense 60] [--reads live cached] [--quantized] [--json]

``benchmarks.item_stream`` says what runs. ``gap`` = served NE / trained NE - 1, of impressions after the first 30 %;
``cut``: how much smaller the memory's is than the frozen cache's. ``young``: items under 300 s old; their ``recall``:
of those that truly are among a user's best 100, the share that the served scores put there (simulation only).
``tower``: rows that an item tower computed, in training and beside it, memory over frozen. With ``--data`` ratings of a
public data set (``semel.datasets.read``) come in place of the simulated site, by time: 60 a second, or with
``--speedup`` when they came, so many times as fast (a seed is then the models' alone).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.item_stream import replayed, run, simulated


def show(reads: str, runs: list[dict[str, Any]]) -> None:
    def mean(*path: str) -> float:
        values = []
        for one in runs:
            for name in path:
                one = one[name]
            values.append(one)
        return statistics.fmean(values)  # type: ignore[arg-type]

    print(f"training reads {reads}; {len(runs)} runs; NE trained: with a memory {mean('trained', 'memory'):.4f}, "
          f"without {mean('trained', 'plain'):.4f}")
    print(f"  {'served by':10} {'NE':>7} {'gap':>8} {'young gap':>10} {'found':>7} {'scored':>7} {'young recall':>13}")
    for name in ("memory", "frozen", "recompute"):
        recall = f"{mean('served', name, 'young_recall'):13.2f}" if "young_recall" in runs[0]["served"][name] else ""
        print(f"  {name:10} {mean('served', name, 'ne'):7.4f} {mean('served', name, 'gap'):8.2%} "
              f"{mean('served', name, 'young_gap'):10.2%} {mean('served', name, 'found'):7.1%} "
              f"{mean('served', name, 'coverage'):7.1%} {recall}")
    cuts = ", ".join(f"{one['gap_cut']:.0%}" for one in runs)
    print(f"  gap cut by {1 - mean('served', 'memory', 'gap') / mean('served', 'frozen', 'gap'):.0%} ({cuts}); tower "
          f"{mean('tower_rows', 'ratio'):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--speedup", type=float)
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--budget", type=int, default=4, help="items of the pool that training refreshes a second")
    parser.add_argument("--dense", type=int, default=60, help="seconds between dense weights, the users' too")
    parser.add_argument("--reads", nargs="+", choices=("live", "cached"), default=["live", "cached"])
    parser.add_argument("--quantized", action="store_true", help="serve int8 rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if min(arguments.seconds, arguments.seeds, arguments.items, arguments.dense) < 1 or arguments.budget < 0:
        parser.error("--seconds, --seeds, --items and --dense must be at least 1, --budget 0 or more")
    if arguments.speedup is not None and (arguments.data is None or not arguments.speedup > 0):
        parser.error("--speedup takes a number above 0, and --data whose clock it is")
    torch.set_num_threads(1)  # the steps are small
    seeds = range(arguments.seeds)
    streams = [replayed(arguments.data, speedup=arguments.speedup)] * len(seeds) if arguments.data else [
        simulated(seed, arguments.seconds, items=arguments.items) for seed in seeds]
    results = {}
    for reads in arguments.reads:
        how = {"reads": reads, "budget": arguments.budget, "dense": arguments.dense, "quantized": arguments.quantized}
        results[reads] = [run(stream, seed=seed, **how) for seed, stream in zip(seeds, streams, strict=True)]
        if not arguments.json:
            show(reads, results[reads])
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Re-indexing jagged rows around an exchange: fused, against slices and concatenations, and against one big index.

    python -m benchmarks.reindex [--requests 128] [--keys 8] [--mean 10] [--seconds 1] [--json FILE]

One rank of 2 to 512, with ``--requests`` requests of ``--keys`` jagged id features each. What it does in one exchange:
``permute`` (rows into another order), ``dispatch`` (rows to where they go), ``transpose`` (rank-major to key-major) and
``combine`` (rows to their places). "slices" is what one writes first: an operation a rank, row or key (``semel.comm.
reference``); "one index" is the better way in plain PyTorch: build the index of every value, then ``index_select``.
Times are medians of interleaved runs in one process, microseconds of CPU time, with the middle half's range; a ratio
above 1 means that fused is faster. "together" is the four one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.comm import jagged, reference

RANKS = (2, 4, 8, 16, 32, 64, 128, 512)
OPERATIONS = ("permute", "dispatch", "transpose", "combine")


class OneIndex:
    """The same functions by one ``index_select``."""

    @staticmethod
    def permute(values: Tensor, offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        starts, lengths = offsets[order], offsets.diff()[order]
        new = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        index = torch.arange(int(new[-1])) + torch.repeat_interleave(starts - new[:-1], lengths)
        return values.index_select(0, index), new

    @staticmethod
    def dispatch(values: Tensor, offsets: Tensor, ranks: Tensor, world_size: int) -> Any:
        order = torch.argsort(ranks, stable=True)
        moved, new = OneIndex.permute(values, offsets, order)
        rows = torch.bincount(ranks, minlength=world_size)
        ends = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        return jagged.Dispatched(moved, new.diff(), order, rows, new[ends].diff())

    @staticmethod
    def transpose(values: Tensor, lengths: Tensor, rows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        ranks = torch.repeat_interleave(torch.arange(len(rows)), rows * keys)
        lines = rows * keys
        within = torch.arange(len(lengths)) - torch.repeat_interleave(lines.cumsum(0) - lines, lines)
        order = torch.argsort(within // rows[ranks], stable=True)
        moved, new = OneIndex.permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), order)
        return moved, new.diff()

    @staticmethod
    def combine(values: Tensor, lengths: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return OneIndex.permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), torch.argsort(places))


def calls(module: Any, inputs: dict[str, tuple[Any, ...]]) -> dict[str, Callable[[], Any]]:
    return {name: partial(getattr(module, name), *inputs[name]) for name in OPERATIONS}


def draw(ranks: int, requests: int, keys: int, mean: int) -> dict[str, tuple[Any, ...]]:
    random = np.random.default_rng(ranks)
    lengths = torch.from_numpy(np.minimum(random.geometric(1 / mean, requests * keys) - 1, 50 * mean))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.from_numpy(random.integers(0, 1 << 40, int(offsets[-1])))
    order = torch.from_numpy(random.permutation(requests * keys))
    rows = torch.from_numpy(np.bincount(random.integers(0, ranks, requests), minlength=ranks))
    return {"permute": (values, offsets, order),
            "dispatch": (values, offsets, torch.from_numpy(random.integers(0, ranks, requests * keys)), ranks),
            "transpose": (values, lengths, rows, keys), "combine": (values, lengths, order)}


def quartiles(contestants: list[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Each one's quarter, half and three quarters of its CPU times in microseconds, taking turns."""
    times: list[list[float]] = [[] for _ in contestants]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 10:
        for run, taken in zip(contestants, times, strict=True):
            started = time.process_time()
            run()
            taken.append(time.process_time() - started)
    return [[float(x) * 1e6 for x in np.percentile(taken, (25, 50, 75))] for taken in times]


def measure(requests: int, keys: int, mean: int, seconds: float) -> list[dict[str, Any]]:
    out = []
    for ranks in RANKS:
        inputs = draw(ranks, requests, keys, mean)
        ours, slices, index = (calls(module, inputs) for module in (jagged, reference, OneIndex))
        for name in OPERATIONS:
            _check(ours[name](), slices[name](), index[name]())

        def together(functions: dict[str, Callable[[], Any]]) -> Callable[[], None]:
            return lambda: [f() for f in functions.values()] and None

        for name in (*OPERATIONS, "together"):
            runs = [together(f) if name == "together" else f[name] for f in (ours, slices, index)]
            fused, plain, one = quartiles(runs, seconds / 5)
            out.append({"ranks": ranks, "operation": name, "fused_us": fused, "slices_us": plain, "one_index_us": one,
                        "ratio": plain[1] / fused[1], "ratio_one_index": one[1] / fused[1]})
    return out


def _check(*results: Any) -> None:
    parts = [tuple(vars(r).values()) if isinstance(r, jagged.Dispatched) else r for r in results]
    for other in parts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parts[0], other, strict=True))


def show(lines: list[dict[str, Any]]) -> None:
    print("ranks  operation    fused us (middle half)    slices us  one index us   slices/fused  one index/fused")
    for line in lines:
        low, middle, high = line["fused_us"]
        print(f"{line['ranks']:5}  {line['operation']:10} {middle:9.1f} ({low:.1f}-{high:.1f})".ljust(46)
              + f"{line['slices_us'][1]:10.1f} {line['one_index_us'][1]:12.1f} {line['ratio']:14.1f} "
              f"{line['ratio_one_index']:16.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--mean", type=int, default=10, help="ids a request and key")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of ranks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = measure(options.requests, options.keys, options.mean, options.seconds)
    show(lines)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()

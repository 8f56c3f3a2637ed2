"""Partitions of a global batch over ranks side by side: how long ranks wait for the slowest, and what it costs.

    python -m benchmarks.balance [--parts partitions lengths measured processes] [--batches 9] [--quick]
                                [--ranks 64] [--requests 128] [--repeats 3] [--json FILE]

Histories: log-normal lengths with median 3,000 and sigma 1.2, cut at 21,000: mean 5,200 (KuaiRand-1K: 5,038), 5 % at
the cut. A request of length L costs 5,000 L + L^2: projections and attention cost the same at 5,000 tokens. 128
requests a rank; unbalanced, a rank computes those that it read.

``partitions``: idle = 1 - mean / max over ranks, by tokens, by cost, and by time where every request takes up to 10 %
more or less than its cost says (uniform), and where the model is wrong about length (it takes projections for half as
much again as they are). The share of padding, and how long a step would be if ranks padded to their longest, in jagged
steps; the fullest rank's tokens in means; the tokens that move; own CPU time, turns taken. Then with a cap of tokens
that binds: halfway between the mean and the fullest rank of ``equal_count`` without one. Medians over global batches.

``lengths``: idle by the cut of histories. ``measured`` and ``processes``: see ``benchmarks.balance_steps``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from semel.training import balance, reference

REQUESTS, CUT, HOST = 128, 21_000, 8
LINEAR = 5000.0
ERROR = 0.1
PARTS = ("partitions", "lengths", "measured", "processes")

Partition = Callable[..., np.ndarray]


def draw_lengths(requests: int, random: np.random.Generator, cut: int = CUT) -> np.ndarray:
    return np.clip(random.lognormal(np.log(3000), 1.2, requests), 1, cut).astype(np.int64)


def cost_of(lengths: np.ndarray, linear: float = LINEAR) -> np.ndarray:
    return linear * lengths + lengths.astype(np.float64) ** 2


def contenders(home: np.ndarray, lengths: np.ndarray, world_size: int) -> dict[str, Partition]:
    """By name, each called as (costs, world_size, tokens=, token_cap=)."""

    def weighted(alpha: float) -> Partition:
        return lambda costs, world, **cap: balance.segments(lengths**alpha, world, **cap)

    def uncapped(partition: Callable[[list[float], int], Any]) -> Partition:
        return lambda costs, world, **cap: np.array(partition(costs.tolist(), world))

    groups = np.arange(world_size) // HOST
    found: dict[str, Partition] = {
        "unbalanced": lambda costs, world, **cap: home,
        "lpt, by tokens": lambda costs, world, **cap: balance.lpt(lengths, world, **cap),
        "zigzag": balance.zigzag,
        "segments, L^1": weighted(1.0), "segments, L^1.5": weighted(1.5), "segments, L^2": weighted(2.0),
        "segments, cost": balance.segments,
        "karmarkar_karp": balance.karmarkar_karp,
        "the same, plain Python": uncapped(reference.karmarkar_karp),
        "lpt": balance.lpt,
        "equal_count": balance.equal_count,
        "equal_cost": balance.equal_cost,
        "rebalance": lambda costs, world, **cap: balance.rebalance(costs, world, home, **cap),
        f"within {HOST}, equal_count": lambda costs, world, **cap: balance.within(groups, balance.equal_count, costs,
                                                                                  home, **cap),
    }
    if world_size <= 64:
        found["differencing, any counts, plain Python"] = uncapped(reference.differencing)
    return found


def judge(ranks: np.ndarray, lengths: np.ndarray, home: np.ndarray, world_size: int,
          random: np.random.Generator) -> dict[str, float]:
    costs = cost_of(lengths)
    longest = np.zeros(world_size, np.int64)
    np.maximum.at(longest, ranks, lengths)
    padded = np.bincount(ranks, minlength=world_size) * cost_of(longest)
    tokens = balance.loads(lengths, ranks, world_size)
    return {
        "idle_tokens": balance.idle(lengths, ranks, world_size),
        "idle_cost": balance.idle(costs, ranks, world_size),
        "idle_error": balance.idle(costs * random.uniform(1 - ERROR, 1 + ERROR, len(costs)), ranks, world_size),
        "idle_wrong": balance.idle(cost_of(lengths, LINEAR / 1.5), ranks, world_size),
        "padding": balance.padding(lengths, ranks, world_size),
        "padded_step": float(padded.max() / costs.sum() * world_size),
        "peak_tokens": float(tokens.max() / tokens.mean()),
        "moved_tokens": balance.moved(ranks, home, tokens=lengths).token_share,
        "most_requests": float(np.bincount(ranks, minlength=world_size).max()),
    }


def partitions(world_size: int, capped: bool, batches: int, quick: bool) -> list[dict[str, Any]]:
    """A row a contender: medians over global batches."""
    found: dict[str, list[dict[str, float]]] = {}
    refused: dict[str, str] = {}
    for batch in range(batches):
        random = np.random.default_rng(batch)
        lengths = draw_lengths(world_size * REQUESTS, random)
        home, costs = np.arange(len(lengths)) % world_size, cost_of(lengths)
        how: dict[str, Any] = {}
        if capped:
            free = balance.loads(lengths, balance.equal_count(costs, world_size), world_size)
            how = {"tokens": lengths, "token_cap": (free.max() + free.mean()) / 2}
        for name, partition in contenders(home, lengths, world_size).items():
            if "plain" in name and (capped or quick or batch >= 2):
                continue
            try:
                ranks = partition(costs, world_size, **how)
            except ValueError as error:
                refused[name] = str(error)
                continue
            began = time.thread_time()
            again = partition(costs, world_size, **how)
            taken = 1e3 * (time.thread_time() - began)
            assert np.array_equal(ranks, again)
            found.setdefault(name, []).append(judge(ranks, lengths, home, world_size, np.random.default_rng(batch)) |
                                              {"own_ms": taken})
    rows = [{"partition": name, "batches": len(every), **middle(every)} for name, every in found.items()]
    return rows + [{"partition": name, "batches": 0, "refused": why} for name, why in refused.items()
                   if name not in found]


def middle(every: list[dict[str, float]]) -> dict[str, float]:
    """The median of each measure; of idle also the least and the most."""
    out = {}
    for key in every[0]:
        values = [one[key] for one in every]
        out[key] = statistics.median(values)
        if key.startswith("idle"):
            out[f"{key}_low"], out[f"{key}_high"] = min(values), max(values)
    return out


def by_length(world_size: int, batches: int) -> list[dict[str, Any]]:
    rows = []
    for cut in (256, 512, 1024, 2048, 4096, 8192, 16_384, CUT):
        idle: dict[str, list[float]] = {"unbalanced": [], "zigzag": [], "equal_count": []}
        for batch in range(batches):
            lengths = draw_lengths(world_size * REQUESTS, np.random.default_rng(batch), cut)
            costs = cost_of(lengths)
            for name, ranks in (("unbalanced", np.arange(len(costs)) % world_size),
                                ("zigzag", balance.zigzag(costs, world_size)),
                                ("equal_count", balance.equal_count(costs, world_size))):
                idle[name].append(balance.idle(costs, ranks, world_size))
        rows.append({"cut": cut, "mean_length": float(lengths.mean()),
                     **{name: statistics.median(values) for name, values in idle.items()}})
    return rows


def beside_karmarkar_karp(world_size: int, pairs: int) -> dict[str, float]:
    """``equal_count`` and Karmarkar-Karp at equal counts, both compiled, in turns on the same batches."""
    ours, theirs, idle, other = [], [], [], []
    for batch in range(pairs + 1):
        costs = cost_of(draw_lengths(world_size * REQUESTS, np.random.default_rng(1000 + batch)))
        for times, idles, partition in ((ours, idle, balance.equal_count), (theirs, other, balance.karmarkar_karp)):
            began = time.thread_time()
            ranks = partition(costs, world_size)
            times.append(time.thread_time() - began)
            idles.append(balance.idle(costs, ranks, world_size))
    ratios = sorted(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))
    return {"ranks": world_size, "equal_count_ms": 1e3 * statistics.median(ours[1:]),
            "karmarkar_karp_ms": 1e3 * statistics.median(theirs[1:]), "ratio": statistics.median(ratios),
            "ratio_low": ratios[0], "ratio_high": ratios[-1], "equal_count_idle": max(idle),
            "karmarkar_karp_idle": max(other)}


def show_partitions(rows: list[dict[str, Any]]) -> None:
    print(f"  {'partition':40}{'tokens':>9}{'cost':>11}{'±10 %':>8}{'(range)':>12}{'wrong':>8}{'padding':>9}"
          f"{'padded step':>13}{'peak':>8}{'moved':>8}{'most':>7}{'own ms':>9}")
    for row in rows:
        if "refused" in row:
            print(f"  {row['partition']:40}{row['refused']}")
            continue
        error = f"{100 * row['idle_error_low']:.1f}-{100 * row['idle_error_high']:.1f}"
        print(f"  {row['partition']:40}{100 * row['idle_tokens']:8.2f}%{100 * row['idle_cost']:10.4f}%"
              f"{100 * row['idle_error']:7.2f}%{error:>12}{100 * row['idle_wrong']:7.2f}%{100 * row['padding']:8.1f}%"
              f"{row['padded_step']:13.2f}{row['peak_tokens']:8.4f}{100 * row['moved_tokens']:7.1f}%"
              f"{row['most_requests']:7.0f}{row['own_ms']:9.2f}")


def asked(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What the figures of this run say to what is asked: (measure, asked, reached, met)."""
    def row(world: int, capped: bool, name: str) -> dict[str, Any]:
        rows = result["partitions"][f"{world}{' capped' if capped else ''}"]
        return next(one for one in rows if one["partition"] == name)

    lines = []

    def at_most(what: str, value: float, most: float, least: float = 0.0) -> None:
        bound = f"<= {100 * most:g} %" if not least else f"{100 * least:g}-{100 * most:g} %"
        lines.append((what, bound, f"{100 * value:.4f} %", least <= value <= most))

    if "partitions" in result:
        at_most("idle by cost, 64 ranks, unbalanced", row(64, False, "unbalanced")["idle_cost"], 0.35, 0.2)
        for name, most in (("zigzag", 0.015), ("equal_count", 0.003), ("equal_cost", 0.001)):
            at_most(f"the same, {name}, worst batch", row(64, False, name)["idle_cost_high"], most)
        at_most("idle by time, ±10 % a request, cap binds, equal_count", row(64, True, "equal_count")["idle_error"],
                0.024)
        for what, capped in (("", False), (", cap binds", True)):
            own = row(256, capped, "equal_count")["own_ms"]
            lines.append((f"256 ranks x 128 requests, equal_count{what}", "< 5 ms", f"{own:.2f} ms", own < 5))
    lines += [(f"equal_count beside Karmarkar-Karp, {pair['ranks']} ranks", "faster, idle no worse",
               f"{pair['ratio']:.2f}x faster ({pair['ratio_low']:.2f}-{pair['ratio_high']:.2f}), idle at most "
               f"{pair['equal_count_idle']:.1e} and {pair['karmarkar_karp_idle']:.1e}",
               pair["ratio"] > 1 and pair["equal_count_idle"] <= pair["karmarkar_karp_idle"] + balance.FINE)
              for pair in result.get("karmarkar_karp", [])]
    if "measured" in result:
        from benchmarks import balance_steps

        idle = {one["partition"]: one["idle_time"] for one in result["measured"]["rows"]}
        clock = idle[balance_steps.CLOCK]
        wrong = statistics.median(idle[name] for name in balance_steps.WRONG)
        lines += [(f"idle by measured step time, {name}", "<= 2.4 %",
                   f"{100 * value:.2f} %; the control, where there is none, shows {100 * clock:.2f} %",
                   value <= 0.024) for name, value in (
                       (balance_steps.CAPPED, idle[balance_steps.CAPPED]),
                       (f"{balance_steps.CAPPED}, ±10 %, median draw", wrong))]
    if "processes" in result:
        best = max(one["ratio"] for one in result["processes"])
        lines.append(("balanced against unbalanced, gloo, wall clock a step", ">= 1.3x where the tail is heavy",
                      ", ".join(f"{one['ratio']:.2f}x ({one['ranks']} ranks x {one['requests']})"
                                for one in result["processes"]), best >= 1.3))
    return lines


def show(result: dict[str, Any]) -> None:
    for case, rows in result.get("partitions", {}).items():
        world, *capped = case.split()
        print(f"\n{world} ranks x {REQUESTS} requests{', a cap of tokens that binds' if capped else ''}")
        show_partitions(rows)
    if "lengths" in result:
        print(f"\n  {'histories cut at':>16}{'mean length':>13}{'unbalanced':>12}{'zigzag':>9}{'equal_count':>13}")
        for row in result["lengths"]:
            print(f"  {row['cut']:16,}{row['mean_length']:13.0f}{100 * row['unbalanced']:11.1f}%"
                  f"{100 * row['zigzag']:8.3f}%{100 * row['equal_count']:12.5f}%")
    if "measured" in result or "processes" in result:
        from benchmarks import balance_steps

        balance_steps.show(result)
    print()
    for what, bound, reached, met in asked(result):
        print(f"  {what:66}{bound:>32}   {reached}   {'met' if met else 'NOT MET'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", type=int, default=9, help="global batches of a line")
    parser.add_argument("--ranks", type=int, default=64, help="of the measured steps")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of a rank, of the measured steps")
    parser.add_argument("--repeats", type=int, default=3, help="how often each measured step is timed")
    parser.add_argument("--quick", action="store_true", help="few batches, small steps: does it run")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    if min(arguments.batches, arguments.ranks, arguments.requests, arguments.repeats) < 1:
        parser.error("--batches, --ranks, --requests and --repeats must be at least 1")
    batches = min(arguments.batches, 2) if arguments.quick else arguments.batches
    result: dict[str, Any] = {}
    if "partitions" in arguments.parts:
        result["partitions"] = {f"{world}{' capped' if capped else ''}": partitions(world, capped, batches,
                                                                                    arguments.quick)
                                for world in (64, 256) for capped in (False, True)}
        result["karmarkar_karp"] = [beside_karmarkar_karp(world, 3 if arguments.quick else 25) for world in (64, 256)]
    if "lengths" in arguments.parts:
        result["lengths"] = by_length(64, batches)
    if "measured" in arguments.parts or "processes" in arguments.parts:
        from benchmarks import balance_steps

        if "measured" in arguments.parts:
            size = (16, 16, 3) if arguments.quick else (arguments.ranks, arguments.requests, arguments.repeats)
            result["measured"] = balance_steps.measured(*size)
        if "processes" in arguments.parts:
            result["processes"] = balance_steps.processes(arguments.quick)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

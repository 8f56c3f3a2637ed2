"""The table of ``benchmarks.sharing``, and the means that are taken over its models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any


def line(name: str, row: dict[str, Any]) -> str:
    cells = [f"{name:28}", f"{row['candidates']:6}{' ragged' if row['ragged'] else '       '}"]
    for column in ("naive", "tile", "shared", "cached"):
        ms = row["ms"].get(column)
        cells.append(f"{ms:9.2f}" if ms is not None else f"{'-':>9}")
    for column in ("tile", "shared", "cached"):
        ratio = row["speed_up"].get(column)
        cells.append(f"{ratio:6.2f}x" if ratio is not None else f"{'-':>7}")
    bound = row["slower_bound"].get("shared")
    cells.append(f"{100 * (bound - 1):+6.0f} %" if bound is not None else f"{'-':>8}")
    if row["flops"].get("naive"):
        cells.append(f"{row['flops']['shared'] / row['flops']['naive']:7.3f}")
        cells.append(f"{row['flops']['cached'] / row['flops']['naive']:7.3f}")
    else:
        cells.append(f"{'-':>7} {'-':>7}")
    cells.append(f"{row['relative_difference']:8.1e}" if "relative_difference" in row else f"{'-':>8}")
    return " ".join(cells)


HEADER = (f"{'model':28} {'N':>6}        {'naive ms':>9} {'tile':>9} {'shared':>9} {'cached':>9} {'tile':>7} "
          f"{'shared':>7} {'cached':>7} {'slower':>8} {'FLOPs':>7} {'cached':>7} {'diff':>8}")


def geometric_mean(values: Iterable[float]) -> float | None:
    found = [v for v in values if v > 0]
    return math.exp(statistics.fmean(map(math.log, found))) if found else None


def summary(results: dict[str, dict[str, Any]], candidates: int) -> dict[str, Any]:
    """The measures that the issue names. Models that are refused count in the first only; of those that did not come to
    an end what they had measured counts. ``unmeasured_as_1x``: the means over all that are not refused, those without a
    number at ``candidates`` taken as no faster."""
    taken = {name: r for name, r in results.items() if "rows" in r}
    not_run = {name: r["not_run"] for name, r in results.items() if "not_run" in r}
    at = {name: row for name, r in taken.items() for row in r["rows"]
          if row["candidates"] == candidates and not row["ragged"] and row["speed_up"]}
    halved = [row for row in at.values() if row["flops"].get("naive")
              and row["flops"]["shared"] <= row["flops"]["naive"] / 2]
    bounds = [(row["slower_bound"][column], name, row["candidates"], column, row["extra_us"][column])
              for name, r in taken.items() for row in r["rows"] for column in ("shared", "cached")
              if column in row["slower_bound"]]
    return {
        "models": len(results), "shared": len(taken),
        "refused": {name: r["refused"] for name, r in results.items() if "refused" in r},
        "not_run": not_run,
        "candidates": candidates,
        "measured": len(at),
        "tile": geometric_mean(row["speed_up"]["tile"] for row in at.values() if "tile" in row["speed_up"]),
        "request_included": geometric_mean(row["speed_up"]["shared"] for row in at.values()),
        "request_cached": geometric_mean(row["speed_up"]["cached"] for row in at.values()),
        "unmeasured_as_1x": {"models": len(taken) + len(not_run.keys() - taken.keys())} | {
            key: geometric_mean([row["speed_up"][column] for row in at.values()]
                                + [1.0] * len((taken.keys() | not_run.keys()) - at.keys()))
            for key, column in (("request_included", "shared"), ("request_cached", "cached"))},
        "flops_halved": {"models": len(halved),
                         "speed_up": geometric_mean(row["speed_up"]["shared"] for row in halved)},
        "worst_slower_bound": max(bounds, default=None),
        "float64_difference": max((r["float64_difference"] for r in taken.values()
                                   if r.get("float64_difference") is not None), default=None),
        "relative_difference": max((row["relative_difference"] for r in taken.values() for row in r["rows"]
                                    if "relative_difference" in row), default=None),
    }


def show(report: dict[str, Any]) -> None:
    def times(value: float | None) -> str:
        return f"{value:.2f}x" if value is not None else "-"

    print(f"\n{report['shared']} of {report['models']} models are shared unchanged, {len(report['refused'])} refused")
    for name, reason in report["not_run"].items():
        print(f"{name:28} not run to its end: {reason}")
    print(f"N = {report['candidates']}, geometric means: tile {times(report['tile'])}, shared "
          f"{times(report['request_included'])}, cached {times(report['request_cached'])}")
    least = report["unmeasured_as_1x"]
    if report["measured"] < least["models"]:
        print(f"{report['measured']} of them have a number there; the others taken as 1.0x: shared "
              f"{times(least['request_included'])}, cached {times(least['request_cached'])} ({least['models']} models)")
    halved = report["flops_halved"]
    print(f"FLOPs at half or less: {halved['models']} models, {times(halved['speed_up'])}")
    if report["worst_slower_bound"]:
        bound, name, candidates, column, extra = report["worst_slower_bound"]
        print(f"worst slow-down, upper bound: {100 * (bound - 1):+.0f} % ({name}, N = {candidates}, {column}; median "
              f"{extra:+.0f} microseconds)")
    print(f"largest difference: float64 {report['float64_difference']}, float32 over the output's scale "
          f"{report['relative_difference']}")
    if "cross_network" in report:
        row = report["cross_network"]
        print(f"DCNv2, N = {row['candidates']}: " + ", ".join(f"{n} {times(v)}" for n, v in row["speed_up"].items()))

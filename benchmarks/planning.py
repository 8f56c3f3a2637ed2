"""The planner against its targets: a full search, a step of 100,000 devices, and a grid of design points.

    python -m benchmarks.planning [search] [simulation] [grid] [--quick] [--json FILE [--resume]]

``search``      Llama-3 405B on 16,384 H100 in 5 buildings, everything allowed: seconds until the plans are there
``simulation``  one step of 102,400 devices by events: seconds, and the memory of the process
``grid``        240 design points (6 models x 2, 4 buildings x 5 distances x 4 oversubscriptions, 1,024 H100): the joint
                search beside the usual rule, optimizers of one dimension and planners of others, all judged by the same
                simulator. ``alone``: the joint search without its baselines' plans to begin with; with them it cannot
                be worse. The grid was written down before the search was first run on any of its points.

``--quick``: a smaller search and 6 points of the grid. ``--resume``: points of the grid that FILE holds are not run
again; it is written after each point.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from semel.planning import Cluster, Layout, Options, load_cluster, load_job
from semel.planning.baselines import BASELINES, SINGLE, run
from semel.planning.explorer import explore
from semel.planning.plan import operations
from semel.planning.sensitivity import family
from semel.planning.simulate import simulate
from semel.planning.workload import Infeasible, workload

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "deepseek-v3", "hstu-ranker")
BUILDINGS = (2, 4)
DISTANCES = ("1 km", "10 km", "40 km", "100 km", "1000 km")
RATIOS = (1.0, 2.8, 7.0, 16.0)
DEVICES = 1024
JOINT = Options(nodes=700, simulations=24, keep=3)
BASELINE = replace(JOINT, nodes=300, simulations=12)


def place(buildings: int, distance: str, ratio: float) -> Cluster:
    """1,024 H100 in hosts of 8, racks of 2 hosts, and buildings so far apart."""
    technologies = ["ecmp", "spraying", "deep-buffer"]
    return load_cluster({
        "name": f"{buildings} buildings, {distance}, 1:{ratio:g}", "device": "h100", "levels": [
            {"name": "host", "count": 8, "bandwidth": "450 GB/s", "latency": "1 us", "domain": True},
            {"name": "rack", "count": 2, "bandwidth": "400 Gbit/s", "latency": "4 us",
             "technologies": technologies[:2]},
            {"name": "building", "count": DEVICES // 16 // buildings, "bandwidth": "400 Gbit/s", "latency": "28 us",
             "technologies": technologies[:2]},
            {"name": "region", "count": buildings, "bandwidth": "400 Gbit/s", "latency": "60 us", "distance": distance,
             "oversubscription": ratio, "technologies": technologies}]})


def search_part(quick: bool) -> dict[str, Any]:
    cluster, job = load_cluster("meta-region-16k"), load_job("llama3-405b")
    explore(cluster, job, Options(nodes=20, simulations=2))  # loops are compiled
    options = Options(nodes=400, simulations=8) if quick else Options()
    began, cpu = time.perf_counter(), time.process_time()
    outcome = explore(load_cluster("meta-region-16k"), load_job("llama3-405b"), options)
    best = outcome.plans[0]
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu, "nodes": outcome.nodes,
            "simulated": outcome.simulated, "shapes": outcome.shapes, "gap": outcome.gap,
            "devices": best.layout.devices,
            "plan": best.title, "step": best.seconds, "mfu": best.mfu}


def simulation_part() -> dict[str, Any]:
    cluster, job = load_cluster("meta-region"), replace(load_job("llama3-405b"), batch=12_800)  # type: ignore[arg-type]
    layout = Layout({"tp": 8, "pp": 16, "dp": 800}, order=("tp", "pp", "dp"), schedule="interleaved", chunks=4,
                    recompute="selective")
    explore(load_cluster("host-h100"), load_job("llama3-8b"), Options(nodes=20, simulations=2))  # loops are compiled
    began, cpu = time.perf_counter(), time.process_time()
    work = workload(cluster, job, layout)
    trace = simulate(work, operations(layout, work))
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu, "devices": layout.devices,
            "operations": len(trace.op_start), "transfers": len(trace.records), "step": trace.seconds, "mfu": trace.mfu,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def point(model: str, buildings: int, distance: str, ratio: float) -> dict[str, Any]:
    """All planners on one design point: seconds a step, None where nothing of the kind fits."""
    cluster, job = place(buildings, distance, ratio), load_job(model)
    beside = {each.name: run(each.name, cluster, job, BASELINE) for each in BASELINES}
    starts = [plan.layout for plan in beside.values() if plan is not None]
    try:
        alone = explore(cluster, job, JOINT).plans[0]
        best = explore(cluster, job, replace(JOINT, nodes=JOINT.nodes // 4), start=[*starts, alone.layout]).plans[0]
    except Infeasible as reason:
        return {"model": model, "buildings": buildings, "distance": distance, "ratio": ratio, "joint": None,
                "why": str(reason)}
    return {"model": model, "buildings": buildings, "distance": distance, "ratio": ratio, "joint": best.seconds,
            "alone": alone.seconds, **{name: plan and plan.seconds for name, plan in beside.items()},
            "crosses": family(cluster, best.layout), "plan": best.title}


def grid_part(quick: bool, file: Path | None = None, known: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """``known``: rows of an earlier run. After each point, ``file`` holds the rows so far."""
    points = list(product(MODELS, BUILDINGS, DISTANCES, RATIOS))
    if quick:
        points = [points[number] for number in range(9, len(points), len(points) // 6)]
    done = {(row["model"], row["buildings"], row["distance"], row["ratio"]): row for row in known}
    rows = []
    for number, each in enumerate(points, start=1):
        began = time.process_time()
        rows.append(done[each] if each in done else point(*each) | {"cpu_seconds": time.process_time() - began})
        if file is not None:
            written(file, {"quick": quick, "grid": {"rows": rows}})
        print(f"\r{number} of {len(points)} points", end="", flush=True)
    print()
    fitting = [row for row in rows if row["joint"] is not None]
    for row in fitting:
        singles = [row[name] for name in SINGLE if row[name] is not None]
        row["best single"] = min(singles) if singles else None
    return {"points": len(points), "fitting": len(fitting), "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
            "rows": rows,
            "less": {name: less(fitting, "joint", name) for name in (
                "production", "best single", *SINGLE, "CrossPipe-like", "Sailor-like")},
            "alone": {name: less(fitting, "alone", name) for name in ("production", "best single")},
            "worse": sum(row["joint"] > row[name] * (1 + 1e-9) for row in fitting for name in (
                each.name for each in BASELINES) if row[name] is not None),
            "alone_worse": sum(row["best single"] is not None and row["alone"] > row["best single"] * (1 + 1e-9)
                               for row in fitting),
            "crosses": dict(Counter(row["crosses"] for row in fitting).most_common())}


def written(file: Path, result: dict[str, Any]) -> None:
    """All of it or nothing."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(file)


def less(rows: Sequence[dict[str, Any]], ours: str, theirs: str) -> dict[str, float]:
    """By how much our step is shorter, as a share of theirs: the distribution over the rows where both are."""
    shares = sorted(1 - row[ours] / row[theirs] for row in rows if row[theirs] is not None)
    if not shares:
        return {"points": 0}
    cuts = statistics.quantiles(shares, n=10, method="inclusive") if len(shares) > 1 else shares * 9
    return {"points": len(shares), "least": shares[0], "p10": cuts[0], "median": cuts[4], "p90": cuts[8],
            "most": shares[-1]}


def show(result: dict[str, Any]) -> None:
    if "search" in result:
        part = result["search"]
        print(f"search: {part['seconds']:.1f} s ({part['cpu_seconds']:.1f} s of CPU), must <= 60 s; {part['shapes']:,} "
              f"shapes, {part['nodes']:,} layouts estimated, {part['simulated']} simulated, gap {part['gap']:.1%}\n"
              f"  {part['devices']:,} devices: {part['plan']}: {part['step']:.3f} s, {part['mfu']:.1%}")
    if "simulation" in result:
        part = result["simulation"]
        print(f"simulation: {part['devices']:,} devices in {part['seconds']:.2f} s ({part['cpu_seconds']:.2f} s of "
              "CPU), "
              f"must <= 5 s; {part['peak_gib']:.2f} GiB, must <= 2 GiB; {part['operations']:,} operations, "
              f"{part['transfers']:,} transfers; a step of {part['step']:.3f} s")
    if "grid" in result:
        part = result["grid"]
        print(f"grid: {part['fitting']} of {part['points']} points have a plan; {part['cpu_seconds']:.0f} s of CPU")
        print(f"  {'step shorter than':28} points   least     p10  median     p90    most")
        for name, shares in [*part["less"].items(), *((f"alone: {key}", value) for key,
                                                      value in part["alone"].items())]:
            if shares["points"]:
                print(f"  {name:28} {shares['points']:6}" + "".join(
                    f"{shares[key]:8.1%}" for key in ("least", "p10", "median", "p90", "most")))
        print(f"  joint worse than a baseline: {part['worse']} times; alone worse than the best of one dimension: "
              f"{part['alone_worse']} times; crosses the outermost level: {part['crosses']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["search", "simulation", "grid"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    known: list[dict[str, Any]] = []
    if arguments.resume:
        if arguments.json is None:
            parser.error("--resume takes --json FILE, the file to go on with")
        if arguments.json.exists():
            known = json.loads(arguments.json.read_text()).get("grid", {}).get("rows", [])
    chosen = arguments.parts or ["simulation", "search", "grid"]
    result: dict[str, Any] = {"quick": arguments.quick}
    if "simulation" in chosen:
        result["simulation"] = simulation_part()
    if "search" in chosen:
        result["search"] = search_part(arguments.quick)
    if "grid" in chosen:
        result["grid"] = grid_part(arguments.quick, arguments.json, known)
    show(result)
    if arguments.json:
        written(arguments.json, result)


if __name__ == "__main__":
    main()

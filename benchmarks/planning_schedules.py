"""Pipeline schedules side by side, with half of the stages behind a long link; and what simulating them costs.

    python -m benchmarks.planning_schedules [--stages 8] [--microbatches 64] [--latencies 0 4 16] [--json FILE]

Forward, backward for the input and backward for the weights of a stage take 1 s each (of a chunk: its share); sends
take nothing but between the two halves, where a micro-batch is under way for ``--latencies``. For each schedule:
seconds of the step, the mean device's bubble, and the most activations (in stages) that a device holds: what hides a
link costs memory. Then one step of 100,000 devices with traffic on every axis (64 stages x 8 chunks x 512 micro-batches
and smaller), in CPU seconds of this process without what is compiled once a machine, and its peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from semel.planning.schedules import activations, schedule
from semel.planning.simulate import simulate
from semel.planning.workload import Chunk, Transfer, Workload

CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2),
         ("dualpipe_v", 2), ("greedy", 1), ("greedy", 2))
LARGE = ((16, 8, 128), (32, 8, 256), (64, 8, 512))


def halves(name: str, stages: int, microbatches: int, chunks: int, latency: float) -> dict[str, Any]:
    held, seconds = stages * chunks, 1 / chunks
    placement = schedule(name, stages, microbatches, chunks).placement

    def away(chunk: int) -> float:
        return latency if (placement[chunk] < stages // 2) != (placement[chunk + 1] < stages // 2) else 0.0

    sends = [away(chunk) for chunk in range(held - 1)]
    plan = schedule(name, stages, microbatches, chunks, forward=seconds, backward_input=seconds,
                    backward_weight=seconds, send=sends or 0.0)
    parts = tuple(Chunk(seconds, seconds, seconds, (), Transfer("pp", "send", 0.0, one, (), "forward", True), 0, 0, 0,
                        seconds, 0) for one in [*sends, 0.0])
    trace = simulate(Workload(parts, stages, stages, microbatches, {}, 1e9, 1.0, 1.0), plan)
    return {"schedule": name, "chunks": chunks, "seconds": trace.seconds, "bubble": trace.bubble_share,
            "held": float(activations(plan).max() / chunks)}


def region(stages: int, chunks: int, microbatches: int) -> Workload:
    """100,000 devices in ``stages`` groups; communication on every axis."""
    links = {"host": 4e11, "rack": 5e10, "building": 1e10}
    transfers = []
    for phase in ("forward", "backward"):
        transfers += [Transfer("tp", "all_reduce", 1e8, 1e-5, (("host", 1e8),), phase, False, 4),
                      Transfer("ep", "all_to_all", 1e7, 1e-4, (("rack", 1e7),), phase, True, 4)]
    transfers += [Transfer("fsdp", "all_gather", 1e7, 1e-4, (("rack", 1e7),), "forward", True, 4),
                  Transfer("fsdp", "reduce_scatter", 1e7, 1e-4, (("rack", 1e7),), "weight", True, 4),
                  Transfer("dp", "all_reduce", 1e9, 1e-3, (("building", 1e8), ("host", 1e9)), "end", True, 8)]
    send = Transfer("pp", "send", 1e7, 1e-4, (("rack", 1e7),), "forward", True)
    one = Chunk(0.01, 0.01, 0.01, tuple(transfers), send, 1e9, 1e9, 1e9, 1e8, 1e8)
    return Workload((one,) * (stages * chunks), 100_000, stages, microbatches, links, 8e10, 1e18, 1e20)


def cost(stages: int, chunks: int, microbatches: int) -> float:
    """CPU seconds of making and simulating an interleaved step."""
    simulate(region(2, 2, 2), schedule("interleaved", 2, 2, 2))
    begin = time.process_time()
    simulate(region(stages, chunks, microbatches), schedule("interleaved", stages, microbatches, chunks))
    return time.process_time() - begin


def run(stages: int, microbatches: int, latencies: list[float]) -> dict[str, Any]:
    rows = [{"latency": latency, **halves(name, stages, microbatches, chunks, latency)} for latency in latencies
            for name, chunks in CASES]
    large = [{"stages": p, "chunks": v, "microbatches": m, "cpu_s": cost(p, v, m)} for p, v, m in LARGE]
    return {"stages": stages, "microbatches": microbatches, "rows": rows, "large": large,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def show(result: dict[str, Any]) -> None:
    print(f"{result['stages']} stages, {result['microbatches']} micro-batches")
    print(f"  {'latency s':>9} {'schedule':14} {'step s':>8} {'bubble':>7} {'held':>5}")
    for row in result["rows"]:
        label = row["schedule"] + (f" x{row['chunks']}" if row["chunks"] > 1 else "")
        print(f"  {row['latency']:9g} {label:14} {row['seconds']:8.1f} {row['bubble']:7.1%} {row['held']:5.1f}")
    for row in result["large"]:
        print(f"  100,000 devices, {row['stages']} x {row['chunks']} x {row['microbatches']}: {row['cpu_s']:.2f} CPU s")
    print(f"  peak memory {result['peak_bytes'] / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64, help="a multiple of the stages, at least twice as many")
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 4.0, 16.0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.stages < 2 or arguments.microbatches % arguments.stages or min(arguments.latencies) < 0 or (
            arguments.microbatches < 2 * arguments.stages):
        parser.error("--stages must be at least 2, --microbatches a multiple of it and at least twice as many, "
                     "--latencies not negative")
    result = run(arguments.stages, arguments.microbatches, arguments.latencies)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

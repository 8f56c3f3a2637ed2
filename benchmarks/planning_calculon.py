"""The planner's model beside Calculon (arXiv 2305.15469) on Calculon's own validation cases: errors and run time.

    python -m benchmarks.planning_calculon --calculon FOLDER [--python PYTHON] [--json FILE]

FOLDER is a checkout of github.com/calculon-ai/calculon (caa4b11), PYTHON one that has pandas and psutil. Its command
``llm-validation`` prints, for four GPT models on A100 (arXiv 2205.05198, figures 1 and 7, table 5), what was published
and what it predicts; the published numbers are taken from there. Of the eight step times four were among the twelve
rows that our one number for A100 was fitted on. Run time: both commands from their start, all cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from semel.planning import Cluster, Layout, Transformer, estimate, load_cluster, load_job
from semel.planning.compute import transformer_layer
from semel.planning.memory import in_flight
from semel.planning.workload import unchecked

MODELS = {"megatron-22B": (48, 6144, 64, 1, 1, 4, 4), "gpt3-175B": (96, 12288, 96, 8, 3, 64, 1),
          "turing-530B": (105, 20480, 128, 35, 3, 280, 1), "megatron-1T": (128, 25600, 160, 64, 1, 512, 1)}
"""Layers, width, heads, pipeline stages, chunks, batch, micro-batch (arXiv 2205.05198, table 3)."""
MODES = {"none": ("none", False), "seq": ("none", True), "sel": ("selective", False), "seqsel": ("selective", True),
         "full": ("full", False)}
"""Recompute, sequence parallelism."""
TABLES = (("weights and optimizer, GiB", ("none", "seqsel")), ("activations, GiB", ("none", "seqsel")),
          ("activations, % of none", tuple(MODES)), ("step time, s", ("full", "seqsel")))
"""What ``llm-validation`` prints, in order, and the modes of its columns."""


def case(model: str, mode: str) -> tuple[Transformer, Layout]:
    layers, width, heads, stages, chunks, batch, microbatch = MODELS[model]
    recompute, parallel = MODES[mode]
    job = load_job({"like": "gpt3-175b", "layers": layers, "width": width, "feedforward": 4 * width, "heads": heads,
                    "batch": batch})
    assert isinstance(job, Transformer)
    return job, Layout({"tp": 8, "pp": stages}, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks,
                       microbatch=microbatch, recompute=recompute,  # type: ignore[arg-type]
                       sequence_parallel=parallel, zero=0, overlap=frozenset())


def activations(cluster: Cluster, model: str, mode: str) -> float:
    """GiB of the first stage, layers only, as the figures count them."""
    job, layout = case(model, mode)
    stages = layout.size("pp")
    held = sum(in_flight(layout.schedule, stages, job.batch // layout.microbatch, layout.chunks, 0))
    per_chunk = job.layers // (stages * layout.chunks)
    return held * per_chunk * transformer_layer(cluster.device, job, layout, False).activation / 2**30


def ours(cluster: Cluster, table: str, model: str, mode: str) -> float:
    if table.startswith("step"):
        job, layout = case(model, mode)
        return estimate(unchecked(cluster, job, layout), layout).seconds
    if table.startswith("weights"):
        job, layout = case(model, mode)
        layers = job.layers * job.layer_parameters(0)[0] / 8 / layout.size("pp")
        return layers * (2 + 4 + job.optimizer.state) / 2**30
    if table.endswith("GiB"):
        return activations(cluster, model, mode)
    return 100 * activations(cluster, model, mode) / activations(cluster, model, "none")


def parse(text: str) -> list[tuple[str, str, str, float, float]]:
    """(table, model, mode, published, Calculon's) of every cell that ``llm-validation`` printed. ValueError if its
    tables are not those of ``TABLES``."""
    found = []
    blocks = [[line for line in block if line.split(",")[0] in MODELS] for block in _blocks(text)]
    blocks = [block for block in blocks if block]
    if len(blocks) != len(TABLES):
        raise ValueError(f"expected {len(TABLES)} tables from llm-validation, found {len(blocks)}: another version?")
    for (table, modes), block in zip(TABLES, blocks, strict=True):
        for line in block:
            model, *cells = line.split(",|,")
            for mode, part in zip(modes, cells, strict=True):
                published, theirs = (float(number.strip("% ,")) for number in part.split(",")[:2])
                found.append((table, model, mode, published, theirs))
    return found


def _blocks(text: str) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        blocks[-1].append(line)
        if line.startswith("Max,"):
            blocks.append([])
    return blocks


def run(calculon: Path, python: str) -> dict[str, Any]:
    began = time.perf_counter()
    done = subprocess.run([python, "bin/calculon", "llm-validation"], cwd=calculon, capture_output=True, text=True,
                          env={"PYTHONPATH": ".", "PATH": ""}, check=False, timeout=600)
    theirs_took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"error: {calculon}: llm-validation failed: {done.stderr.strip().splitlines()[-1]}")
    cells = parse(done.stdout)
    began = time.perf_counter()
    asked = json.dumps([cell[:3] for cell in cells])
    subprocess.run([sys.executable, "-m", "benchmarks.planning_calculon", "--cells", asked], check=True,
                   capture_output=True, timeout=600)
    ours_took = time.perf_counter() - began
    rows = []
    cluster = load_cluster("selene")
    for table, _ in TABLES:
        mine = [(ours(cluster, *cell[:3]) / cell[3] - 1, cell[4] / cell[3] - 1) for cell in cells
                if cell[0] == table and not (table.endswith("none") and cell[2] == "none")]
        for_us, for_them = ([abs(pair[side]) for pair in mine] for side in (0, 1))
        rows.append({"cases": table, "count": len(mine), "mean": sum(for_us) / len(mine), "worst": max(for_us),
                     "calculon_mean": sum(for_them) / len(mine), "calculon_worst": max(for_them)})
    return {"rows": rows, "seconds": ours_took, "calculon_seconds": theirs_took}


def show(result: dict[str, Any]) -> None:
    print(f"{'absolute error':30s} {'cases':>5s} {'mean':>8s} {'worst':>8s} | {'Calculon':>8s} {'worst':>8s}")
    for row in result["rows"]:
        print(f"{row['cases']:30s} {row['count']:5d} {row['mean']:8.1%} {row['worst']:8.1%} | "
              f"{row['calculon_mean']:8.1%} {row['calculon_worst']:8.1%}")
    print(f"all cases, from the start of the process: {result['seconds']:.2f} s | {result['calculon_seconds']:.2f} s, "
          f"ratio {result['calculon_seconds'] / result['seconds']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calculon", type=Path, help="a checkout of calculon-ai/calculon")
    parser.add_argument("--python", default=sys.executable, help="a Python with pandas and psutil")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", help=argparse.SUPPRESS)  # our side alone, for its run time
    arguments = parser.parse_args()
    if arguments.cells:
        cluster = load_cluster("selene")
        print([ours(cluster, *cell) for cell in json.loads(arguments.cells)])
        return
    if arguments.calculon is None or not (arguments.calculon / "bin" / "calculon").is_file():
        parser.error("--calculon must be a checkout of github.com/calculon-ai/calculon")
    result = run(arguments.calculon, arguments.python)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

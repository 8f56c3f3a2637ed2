"""Semel's own trainer: fields of a recipe (``semel train RECIPE --config plan.toml``) and how many processes to start.

``semel train`` runs data parallel, with balanced requests; other axes are not its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.planning.emit.mesh import mesh_file

if TYPE_CHECKING:
    from semel.planning.plan import Plan

PRECISION = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16"}


def files(plan: Plan) -> dict[str, str]:
    layout, job = plan.layout, plan.job
    if job.kind != "recommender":
        raise ValueError(f"semel train trains sequence recommenders; {job.name} is a {job.kind}: emit for torchtitan "
                         "or "
                         "megatron")
    used = [axis for axis in ("tp", "cp", "ep", "pp", "fsdp") if layout.size(axis) > 1]
    if used:
        raise ValueError(f"semel train runs data parallel only, this plan uses {', '.join(used)}; search with "
                         'axes = ["dp", "table"]')
    if job.dtype not in PRECISION:
        raise ValueError(f"semel train computes in {', '.join(sorted(set(PRECISION.values())))}; the job asks for "
                         f"{job.dtype}")
    devices = layout.devices
    host = min(plan.cluster.levels[0].count, devices)
    pieces = max(1, -(-job.batch // (devices * layout.microbatch)))
    toml = ("# Written by semel plan --emit semel: semel train RECIPE --config plan.toml\n"
            f"batch = {job.batch}\npieces = {pieces * devices}\nprecision = \"{PRECISION[job.dtype]}\"\n"
            "overlap = true\nbalance = \"equal_count\"\n")
    launch = ("#!/usr/bin/env bash\n# Written by semel plan --emit semel. RECIPE and its store in \"$@\"; on several "
              "hosts "
              "start one on each,\n# with torchrun's rendezvous options in RENDEZVOUS.\nset -eu\n"
              f"torchrun --nnodes {devices // host} --nproc-per-node {host} ${{RENDEZVOUS:-}} -m semel.cli.train "
              "--config "
              "plan.toml \"$@\"\n")
    return {"plan.toml": toml, "run.sh": launch, "device_mesh.json": mesh_file(plan, ("table", "fsdp", "dp"))}

"""torchtitan (0.3): a launch script with ``--parallelism`` options, the schedule CSV, and the order of ranks.

torchtitan numbers ranks tp, cp, dp_shard, dp_replicate, pp from the inside (``ParallelDims``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.planning.emit.mesh import arguments, mesh_file, schedule_file
from semel.planning.job import Transformer

if TYPE_CHECKING:
    from semel.planning.plan import Plan

NUMBERED = ("tp", "cp", "fsdp", "dp", "pp")
CONFIGS = {
    "llama3-8b": ("llama3", "llama3_8b"), "llama3-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_405b"), "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}
"""Job -> (--module, --config) of torchtitan; others are set by hand."""
NAMES = {"fsdp": "dp_shard", "dp": "dp_replicate"}


def options(plan: Plan, csv: str = "schedule.csv") -> dict[str, object]:
    """Option -> value, as its command line takes them."""
    layout, job = plan.layout, plan.job
    if not isinstance(job, Transformer):
        raise ValueError(f"torchtitan trains transformers; {job.name} is a {job.kind}: emit for torchrec or semel")
    module, config = CONFIGS.get(job.name, ("MODULE", "CONFIG"))
    replicas = layout.size("dp") * layout.size("fsdp")
    found: dict[str, object] = {
        "--module": module, "--config": config,
        "--training.seq-len": job.sequence, "--training.local-batch-size": job.batch // replicas,
        "--training.global-batch-size": job.batch,
        "--parallelism.data-parallel-replicate-degree": layout.size("dp"),
        "--parallelism.data-parallel-shard-degree": layout.size("fsdp"),
        "--parallelism.context-parallel-degree": layout.size("cp"),
        "--parallelism.tensor-parallel-degree": layout.size("tp"),
        "--parallelism.expert-parallel-degree": layout.size("ep"),
        "--parallelism.pipeline-parallel-degree": layout.size("pp"),
    }
    if layout.size("pp") > 1:
        found |= {
            "--parallelism.pipeline-parallel-schedule": "_PipelineScheduleRuntime",
            "--parallelism.pipeline-parallel-schedule-csv": csv,
            "--parallelism.pipeline-parallel-microbatch-size": layout.microbatch,
            "--training.disable-cuda-graphs": True,  # they do not run under a pipeline yet
        }
    # Of all options this one is a subcommand, and must come last.
    found[f"activation-checkpoint:{layout.recompute}"] = None
    return found


def files(plan: Plan) -> dict[str, str]:
    launch = ("#!/usr/bin/env bash\n# Written by semel plan --emit torchtitan. Start one on each host, with "
              "torchrun's rendezvous "
              "options in \"$@\".\n"
              f"# Ranks lie on devices as device_mesh.json says. {plan.layout.devices} devices.\n"
              f"set -eu\ntorchrun --nproc-per-node {min(plan.cluster.levels[0].count, plan.layout.devices)} \"$@\" "
              "-m torchtitan.train \\\n")
    texts = {"run.sh": launch + arguments(options(plan)) + "\n", "device_mesh.json": mesh_file(plan, NUMBERED, NAMES)}
    if plan.layout.size("pp") > 1:
        texts["schedule.csv"] = schedule_file(plan)
    return texts

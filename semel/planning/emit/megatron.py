"""Megatron-LM (core 0.16 and later): a file of arguments, and the order of ranks.

Megatron numbers ranks tp, cp, dp, pp from the inside, or tp, cp, pp, dp with ``--use-tp-pp-dp-mapping``
(``megatron.core.parallel_state``). It runs 1F1B and interleaved 1F1B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.planning.emit.mesh import arguments, mesh_file
from semel.planning.job import Transformer

if TYPE_CHECKING:
    from semel.planning.plan import Plan

SCHEDULES = ("1f1b", "interleaved")


def numbered(plan: Plan) -> tuple[str, ...]:
    """The axes as Megatron will number them, innermost first: of its two orders the one nearer to the plan's."""
    order = [axis for axis in plan.layout.order if plan.layout.size(axis) > 1]
    data = [axis for axis in order if axis in ("dp", "fsdp")]
    inside = "pp" in order and data and order.index("pp") < min(order.index(axis) for axis in data)
    return ("tp", "cp", "pp", "fsdp", "dp") if inside else ("tp", "cp", "fsdp", "dp", "pp")


def options(plan: Plan) -> dict[str, object]:
    """Option -> value, as its command line takes them."""
    layout, job = plan.layout, plan.job
    if not isinstance(job, Transformer):
        raise ValueError(f"Megatron-LM trains transformers; {job.name} is a {job.kind}: emit for torchrec or semel")
    if layout.size("pp") > 1 and layout.schedule not in SCHEDULES:
        raise ValueError(f"Megatron-LM runs {' and '.join(SCHEDULES)}, not {layout.schedule}; pin schedule to one of "
                         "them "
                         "(pinned.schedule of the search file), or emit for torchtitan")
    found: dict[str, object] = {
        "--num-layers": job.layers, "--hidden-size": job.width, "--ffn-hidden-size": job.feedforward,
        "--num-attention-heads": job.heads, "--kv-channels": job.head_width,
        "--group-query-attention": job.kv_heads != job.heads,
        "--seq-length": job.sequence, "--max-position-embeddings": job.sequence, "--vocab-size": job.vocabulary,
        "--swiglu": job.gated, "--untie-embeddings-and-output-weights": not job.tied,
        "--disable-bias-linear": not job.biases, "--bf16": job.dtype == "bf16",
        "--micro-batch-size": layout.microbatch, "--global-batch-size": job.batch,
        "--tensor-model-parallel-size": layout.size("tp"), "--context-parallel-size": layout.size("cp"),
        "--pipeline-model-parallel-size": layout.size("pp"),
        "--sequence-parallel": layout.sequence_parallel and layout.size("tp") > 1,
        "--use-tp-pp-dp-mapping": numbered(plan)[2] == "pp" and layout.size("pp") > 1,
    }
    if job.kv_heads != job.heads:
        found["--num-query-groups"] = job.kv_heads
    if job.experts:
        found |= {"--num-experts": job.experts, "--moe-router-topk": job.top_k,
                  "--moe-ffn-hidden-size": job.expert_width,
                  "--expert-model-parallel-size": layout.size("ep"), "--moe-token-dispatcher-type": "alltoall"}
    if layout.size("pp") > 1:
        found["--pipeline-model-parallel-layout"] = f"'{stages(plan.layers)}'"
    if layout.size("fsdp") > 1:
        found |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params",
                  "--num-distributed-optimizer-instances": layout.size("dp"), "--use-distributed-optimizer": True,
                  "--no-gradient-accumulation-fusion": True}
    else:
        found["--use-distributed-optimizer"] = layout.zero > 0
    found["--overlap-grad-reduce"] = "dp" in layout.overlap or "fsdp" in layout.overlap
    if found.get("--use-distributed-optimizer"):
        found["--overlap-param-gather"] = found["--overlap-grad-reduce"]
    found["--tp-comm-overlap"] = "tp" in layout.overlap and layout.size("tp") > 1
    found["--grad-reduce-in-bf16"] = job.gradient_dtype == "bf16" or "bf16" in layout.compress.values()
    if layout.recompute == "selective":
        found["--recompute-granularity"] = "selective"
    elif layout.recompute == "full":
        found |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    return found


def stages(layers: tuple[int, ...]) -> str:
    """Layers of each virtual stage, in model order, as ``--pipeline-model-parallel-layout`` writes them: E embedding,
    t transformer layer, L loss, | between stages."""
    parts = [f"t*{count}" if count else "" for count in layers]
    return "E" + "|".join(parts) + "L"


def files(plan: Plan) -> dict[str, str]:
    order = numbered(plan)
    launch = ("#!/usr/bin/env bash\n# Written by semel plan --emit megatron. Start one on each host, with torchrun's "
              "rendezvous "
              "options in RENDEZVOUS,\n# and data, tokenizer, learning rate and checkpoints in \"$@\".\n"
              f"# Ranks lie on devices as device_mesh.json says. {plan.layout.devices} devices.\n"
              f"set -eu\ntorchrun --nproc-per-node {min(plan.cluster.levels[0].count, plan.layout.devices)} "
              "${RENDEZVOUS:-} pretrain_gpt.py \"$@\" \\\n")
    return {"run.sh": launch + arguments(options(plan)) + "\n", "device_mesh.json": mesh_file(plan, order)}

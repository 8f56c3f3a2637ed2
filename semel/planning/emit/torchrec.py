"""TorchRec (1.8): a topology and constraints for ``EmbeddingShardingPlanner``, as JSON.

``Topology(**topology)`` takes the first part as it is; ``ParameterConstraints(**c)`` each of the second, by table.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from semel.planning.emit.mesh import mesh_file

if TYPE_CHECKING:
    from semel.planning.plan import Plan

NUMBERED = ("table", "fsdp", "dp")


def plan_document(plan: Plan) -> dict[str, Any]:
    """``topology`` (bandwidths in bytes/ms, as torchrec counts), ``constraints`` by table, ``batch_size`` of a rank."""
    layout, job, cluster = plan.layout, plan.job, plan.cluster
    if job.kind != "recommender":
        raise ValueError(f"TorchRec shards embedding tables; {job.name} is a {job.kind}: emit for torchtitan or "
                         "megatron")
    devices = layout.devices
    host = min(cluster.levels[0].count, devices)
    links = plan.workload().links
    inside, across = links[cluster.levels[0].name], min(links.values())
    return {
        "topology": {
            "world_size": devices, "local_world_size": host, "compute_device": "cuda",
            "hbm_cap": int(cluster.device.memory - cluster.device.reserved),
            "intra_host_bw": inside / 1e3, "inter_host_bw": across / 1e3,
        },
        "batch_size": job.batch // devices,
        "constraints": {name: {"sharding_types": _sharding(width, layout.size("table") > 1, host),
                               "min_partition": None}
                        for name, width in _tables(job)},
    }


def _tables(job: Any) -> list[tuple[str, int]]:
    return [(table.name if table.count == 1 else f"{table.name}_{number}", table.width)
            for table in job.tables for number in range(table.count)]


def _sharding(width: int, sharded: bool, host: int) -> list[str]:
    """Tables whose ranks exchange rows are cut by rows (every rank holds a part of each), else each rank has its
    own."""
    if not sharded:
        return ["data_parallel"]
    return ["row_wise", "table_wise"] if width % 4 else ["row_wise", "table_wise", "column_wise"]


def files(plan: Plan) -> dict[str, str]:
    return {"torchrec.json": json.dumps(plan_document(plan), indent=1) + "\n",
            "device_mesh.json": mesh_file(plan, NUMBERED)}

"""Data parallelism for a training loop of your own: the model's file knows nothing of it.

``Trainer`` needs none of this: it sums gradients itself, since its pieces are computed by threads. A rewrite of the
model comes first: ``parallelize(share(model))``.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn


def parallelize(model: nn.Module, mesh: Any = None, *, dense: Literal["ddp", "fsdp"] = "ddp", bucket_mb: float = 25.0,
                find_unused_parameters: bool = False) -> nn.Module:
    """``model`` on all ranks, with gradients that are summed over them and not averaged.

    With the loss of a rank as ``sum over its samples / number of samples of all ranks`` (``Ranks().sum`` gives that
    number) the gradient is the one of the whole batch, however unequal the ranks' parts are; what DDP and FSDP do by
    themselves counts a sample of a small part for more. ``mesh``: a one-dimensional DeviceMesh, a ProcessGroup, or
    None for all processes. Weights and buffers start as rank 0's; buffers are not kept equal after that, so that
    statistics of a BatchNorm are each rank's own. One process: ``model`` as it is.

    ``dense``: "ddp", torch's DistributedDataParallel: each rank holds all weights; ``bucket_mb`` and
    ``find_unused_parameters`` are its own. "fsdp", torch's ``fully_shard``: each rank holds a part of every weight, its
    gradient and its optimizer state, and gathers the whole before it computes, each module of a ``ModuleList`` by
    itself and the rest together; parameters become DTensors, so make the optimizer afterwards. It is for models that
    do not fit, and slower where they do. Raises ValueError for a mesh of more dimensions or another ``dense``,
    SharingError for "fsdp" on what ``semel.share`` made: its graphs need their weights whole.
    """
    import torch.distributed as dist

    if dense not in ("ddp", "fsdp"):
        raise ValueError(f'dense must be "ddp" or "fsdp", got {dense!r}')
    if not (dist.is_available() and dist.is_initialized()):
        return model
    group = mesh
    if hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(f"a mesh of {mesh.ndim} dimensions: pass the one for data, as in mesh['data']")
        group = mesh.get_group()
    if dist.get_world_size(group) == 1:
        return model
    if dense == "fsdp":
        return _fully_sharded(model, mesh if group is not mesh else None, group)
    parallel = nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, broadcast_buffers=False,
        find_unused_parameters=find_unused_parameters)
    parallel.register_comm_hook(group, _sum)
    return parallel


def _fully_sharded(model: nn.Module, mesh: Any, group: Any) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    first = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), first, group=group)
    if mesh is None:
        kind = next(model.parameters()).device.type
        world: Any = group or dist.group.WORLD
        mesh = DeviceMesh.from_group(world, kind)
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo sums and knows no mean
    return model


def _sum(group, bucket):  # torch refuses annotations that are text, as they all are here
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

"""Data parallelism for a training loop of your own: the model's file knows nothing of it.

``Trainer`` needs none of this: it sums gradients itself, since its pieces are computed by threads. A rewrite of the
model comes first: ``parallelize(share(model))``.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def parallelize(model: nn.Module, mesh: Any = None, *, bucket_mb: float = 25.0, find_unused_parameters: bool = False
                ) -> nn.Module:
    """``model`` in torch's DistributedDataParallel, whose gradients are summed over ranks and not averaged.

    With the loss of a rank as ``sum over its samples / number of samples of all ranks`` (``Ranks().sum`` gives that
    number) the gradient is the one of the whole batch, however unequal the ranks' parts are; what DDP does by itself
    counts a sample of a small part for more. ``mesh``: a one-dimensional DeviceMesh, a ProcessGroup, or None for all
    processes. Weights and buffers start as rank 0's; buffers are not kept equal after that, so that statistics of a
    BatchNorm are each rank's own. One process: ``model`` as it is. Raises ValueError for a mesh of more dimensions.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return model
    if hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(f"a mesh of {mesh.ndim} dimensions: pass the one for data, as in mesh['data']")
        mesh = mesh.get_group()
    if dist.get_world_size(mesh) == 1:
        return model
    parallel = nn.parallel.DistributedDataParallel(
        model, process_group=mesh, bucket_cap_mb=bucket_mb, broadcast_buffers=False,
        find_unused_parameters=find_unused_parameters)
    parallel.register_comm_hook(mesh, _sum)
    return parallel


def _sum(group, bucket):  # torch refuses annotations that are text, as they all are here
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

"""The transports, and which of them to take. ``interface`` says what each offers, and what the order of calls means."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from semel.comm.collective import Alone, Collective, own_group
from semel.comm.copy_engine import CopyEngine, why_not
from semel.comm.interface import Handle, PeerLost, Transport, exchange_counts
from semel.comm.staged import Staged
from semel.comm.throttle import Throttled

__all__ = ["Alone", "Collective", "CopyEngine", "Handle", "PeerLost", "Staged", "Throttled", "Transport",
           "exchange_counts", "own_group", "transport"]


def transport(name: Literal["auto", "collective", "copy_engine", "staged"] = "auto", group: Any = None,
              device: Any = "cpu") -> Transport:
    """A transport for tensors on ``device`` among the ranks of ``group`` (None: all), on a process group of its own:
    all processes of the job must call this in the same order. One process without torch.distributed: ``Alone``.

    "auto": ``copy_engine`` where all ranks are GPUs of one host that reach each other's memory and NCCL can do it, else
    ``collective``. ``staged`` is never chosen by itself: it wins only where its time is hidden behind computation.
    Raises ValueError for another name, RuntimeError where the named one is not available.
    """
    if name not in ("auto", "collective", "copy_engine", "staged"):
        raise ValueError(f'transport must be "auto", "collective", "copy_engine" or "staged", got {name!r}')
    if not dist.is_initialized():
        if name == "copy_engine":
            return CopyEngine(group, device)  # says what is missing
        return Alone()
    cuda = torch.device(device).type == "cuda"
    if name == "copy_engine" or (name == "auto" and cuda and _one_domain(group, device)):
        return CopyEngine(group, device)
    ranks = None if group is None else dist.get_process_group_ranks(group)
    if name == "staged":
        return Staged(own_group(ranks, backend="gloo"), device)
    return Collective(own_group(ranks, backend="nccl" if cuda else "gloo"))


def _one_domain(group: Any, device: Any) -> bool:
    """Whether all ranks have copy engines that reach each other: they must all come to the same answer."""
    import socket

    reach = why_not(device) is None and all(
        torch.cuda.can_device_access_peer(torch.device(device), other)
        for other in range(torch.cuda.device_count()) if other != torch.device(device).index)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (socket.gethostname(), reach), group=group)
    return all(able for _, able in found) and len({host for host, _ in found}) == 1

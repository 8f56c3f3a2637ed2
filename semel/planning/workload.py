"""Cluster x job x layout -> what one step consists of, once for each distinct virtual stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.planning.cluster import Cluster
    from semel.planning.job import Job
    from semel.planning.layout import Layout


class Infeasible(ValueError):
    """A layout that cannot run: does not divide, or does not fit.

    ``term`` names what is over (a memory term, or the count that does not divide), ``over_by`` how much (bytes, or 0),
    ``change`` the smallest change that helps.
    """

    def __init__(self, reason: str, term: str = "", over_by: float = 0.0, change: str | Callable[[], str] = "") -> None:
        super().__init__(reason)
        self.reason, self.term, self.over_by = reason, term, over_by
        self._change = change

    @property
    def change(self) -> str:
        if not isinstance(self._change, str):
            self._change = self._change()  # looked for when somebody asks: a search raises thousands of these
        return self._change

    def __str__(self) -> str:
        return f"{self.reason}; {self.change}" if self.change else self.reason


@dataclass(frozen=True)
class Transfer:
    """One communication of one rank, as the simulator sees it."""

    axis: str
    """``tp``, ``cp``, ``ep``, ``pp``, ``dp``, ``fsdp`` or ``table``."""
    collective: str
    """``send``, ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``."""
    bytes: float
    """Payload of a rank."""
    latency: float
    """Seconds that no bandwidth takes away."""
    loads: tuple[tuple[str, float], ...]
    """(link name, bytes a device on it); a link name is a level of the cluster."""
    phase: str
    """``forward``, ``backward``, ``weight``; ``start``, ``end`` (of the step)."""
    hidden: bool
    """May run beside the compute of its own operation; else in line with it."""
    count: int = 1
    """Times an operation, e.g. once a layer."""


@dataclass(frozen=True)
class Chunk:
    """One virtual stage and one micro-batch of it."""

    forward: float
    backward_input: float
    backward_weight: float
    """Seconds of compute, alone."""
    transfers: tuple[Transfer, ...]
    send: Transfer | None
    """Activations to the next virtual stage (gradients come back as large); None behind the last."""
    weights: float
    gradients: float
    optimizer: float
    """Bytes kept all the time."""
    activation: float
    """Bytes held between forward and backward of one micro-batch."""
    peak: float
    """Bytes on top while an operation runs: recomputed layer, logits, gathered layer."""
    update: float = 0.0
    """Seconds of the optimizer at the end of the step."""


@dataclass(frozen=True)
class Workload:
    """One step of a plan."""

    chunks: tuple[Chunk, ...]
    """In model order, stages x chunks a device of them; which device holds which is the schedule's placement."""
    devices: int
    stages: int
    microbatches: int
    links: Mapping[str, float]
    """Link name -> bytes/s a device, after oversubscription, technology and sharing."""
    memory: float
    """Bytes that a device has for the job."""
    flops: float
    """Model FLOPs of a step without recompute, for MFU."""
    peak_flops: float
    """FLOP/s of all devices together in the job's dtype."""


def workload(cluster: Cluster, job: Job, layout: Layout) -> Workload:
    """What one step of ``job`` consists of when it is laid over ``cluster`` like this.

    Raises Infeasible for counts that do not divide and for what does not fit into a device's memory; KeyError for
    technologies or dtypes that the cluster does not have.
    """
    from semel.planning.memory import check, smallest_change

    work = unchecked(cluster, job, layout)
    check(work, layout, lambda: smallest_change(cluster, job, layout))
    return work


def unchecked(cluster: Cluster, job: Job, layout: Layout) -> Workload:
    """The same, however much memory it takes."""
    from semel.planning.job import Transformer
    from semel.planning.tables import recommender_workload
    from semel.planning.transformer import transformer_workload

    if isinstance(job, Transformer):
        return transformer_workload(cluster, job, layout)
    return recommender_workload(cluster, job, layout)

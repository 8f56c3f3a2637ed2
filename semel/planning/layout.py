"""What a planner chooses: how a job's parallel axes lie on a cluster, and how its step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

AXES = ("tp", "cp", "ep", "pp", "dp", "fsdp", "table")
"""Tensor, context, expert, pipeline, data, fully sharded data parallel, and table sharding. Sequence parallelism goes
with ``tp``; HSDP is ``dp`` over groups of ``fsdp``."""

V_SHAPED = ("zb_v", "dualpipe_v", "greedy")
"""Schedules that lay two chunks there and back: the second from the last device to the first."""


@dataclass(frozen=True)
class Layout:
    """One plan's choices.

    ``sizes``: ranks along each axis (absent = 1). The product of tp, cp, pp, dp, fsdp and table is the number of
    devices; ``ep`` takes its ranks from fsdp, dp and, if those do not do, cp: it divides their product.
    Tables are sharded over ``table`` and replicated over the rest; dense weights of a recommender are replicated, or
    sharded by ``fsdp``, over all ranks."""

    sizes: Mapping[str, int]
    order: tuple[str, ...] = ("tp", "cp", "table", "fsdp", "dp", "pp")
    """How axes are laid over the tree of levels, innermost first. Axes of one rank may be left out, and ``ep`` too: it
    lies over the innermost of the axes it is taken from."""
    schedule: str = "1f1b"
    chunks: int = 1
    """Model chunks (virtual stages) a device."""
    microbatch: int = 1
    """Sequences (samples) a micro-batch."""
    network: Mapping[str, str] = field(default_factory=dict)
    """Level -> technology, among those available there; absent = the level's first one."""
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = True
    zero: int = 1
    """Optimizer state sharded over ``dp`` (1) or kept whole (0). ``fsdp`` shards weights, gradients and optimizer;
    under a pipeline weights and gradients stay whole from the first micro-batch to the last, as in torchtitan."""
    compress: Mapping[str, str] = field(default_factory=dict)
    """Level -> dtype of gradients that cross it."""
    overlap: frozenset[str] = frozenset({"dp", "fsdp", "pp"})
    """Axes whose communication may hide beside compute."""

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    @property
    def devices(self) -> int:
        """Devices in use."""
        product = 1
        for axis in AXES:
            product *= self.sizes.get(axis, 1) if axis != "ep" else 1
        return product


@lru_cache(maxsize=10_000)
def placement(schedule: str, stages: int, chunks: int) -> tuple[int, ...]:
    """Virtual stage, in model order -> device of the pipeline: round after round, or there and back (``V_SHAPED``)."""
    if schedule in V_SHAPED and chunks == 2:
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages)) * chunks

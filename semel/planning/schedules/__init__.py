"""Pipeline schedules as explicit operation lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from semel.planning.schedules import fixed
from semel.planning.schedules.check import activations, check
from semel.planning.schedules.operations import KINDS, Op, Schedule, folded, looped
from semel.planning.schedules.torch_csv import read_csv, write_csv

__all__ = ["CHUNKS", "KINDS", "NAMES", "Op", "Schedule", "activations", "check", "folded", "looped", "read_csv",
           "schedule", "write_csv"]

CHUNKS = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, 1 << 30), "zb_h1": (1, 1), "zb_h2": (1, 1),
          "zb_v": (2, 2), "dualpipe_v": (2, 2), "greedy": (1, 1 << 30), "local": (1, 1 << 30)}
"""Fewest and most chunks a device that a schedule takes."""
NAMES = tuple(CHUNKS)
LOCAL_STEPS = 50


def schedule(name: str, stages: int, microbatches: int, chunks: int = 1, *,
             forward: float | Sequence[float] = 1.0, backward_input: float | Sequence[float] = 1.0,
             backward_weight: float | Sequence[float] = 1.0, send: float | Sequence[float] = 0.0,
             limit: int | None = None, sync_every: int = LOCAL_STEPS) -> Schedule:
    """The operation lists of ``name`` (one of ``NAMES``) for p stages, m micro-batches, v chunks a device.

    What only some take, the others ignore:

    greedy   forward, backward_input, backward_weight: seconds, one for all or one a virtual stage; send: seconds from
             each virtual stage to the next; limit: most activations (of one chunk) that a device may hold; see
             ``greedy.greedy``
    local    sync_every: local steps between two exchanges of parameters over the data-parallel axis (DiLoCo, Douillard
             et al., arXiv 2311.08105). The order is 1F1B's or interleaved's; ``exact`` is False

    Raises ValueError with the remedy for a name that is not known or sizes that the schedule does not take.
    """
    if name not in CHUNKS:
        raise ValueError(f"no schedule is called {name!r}: use one of {', '.join(NAMES)}")
    least, most = CHUNKS[name]
    if min(stages, microbatches, chunks) < 1:
        raise ValueError(f"stages, microbatches and chunks must be at least 1, got {stages}, {microbatches}, {chunks}")
    if not least <= chunks <= most:
        takes = f"{least}" if least == most else f"{least} or more"
        raise ValueError(f"{name} takes {takes} chunk{'' if most == 1 else 's'} a device, not {chunks}")
    if name == "greedy":
        from semel.planning.schedules.greedy import greedy

        return greedy(stages, microbatches, chunks, forward, backward_input, backward_weight, send, limit)
    return _fixed(name, stages, microbatches, chunks, sync_every if name == "local" else 1)


@lru_cache(maxsize=128)
def _fixed(name: str, stages: int, microbatches: int, chunks: int, sync_every: int) -> Schedule:
    """Remembered: a search asks for the same lists under many layouts."""
    if name == "interleaved":
        return fixed.interleaved(stages, microbatches, chunks)
    if name == "local":
        return fixed.local(stages, microbatches, chunks, sync_every)
    return {"gpipe": fixed.gpipe, "1f1b": fixed.one_f_one_b, "zb_h1": fixed.zb_h1, "zb_h2": fixed.zb_h2,
            "zb_v": fixed.zb_v, "dualpipe_v": fixed.dualpipe_v}[name](stages, microbatches)

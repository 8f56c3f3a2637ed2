"""What a pipeline schedule is: for each device the list of operations that it runs, in that order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

KINDS = "FBIW"
"""Forward, full backward, backward for the input, backward for the weights: the letters of torch's pipelining. An
operation's number in arrays is its place here."""
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)


class Op(NamedTuple):
    """One micro-batch through one virtual stage (``chunk``, numbered in model order)."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """Operation lists as flat arrays: those of device d lie at ``offsets[d]:offsets[d + 1]``.

    kinds, microbatches, chunks   [operations] int64: number of the kind, micro-batch, virtual stage
    offsets                       [devices + 1] int64
    placement                     virtual stage -> device that holds it
    exact                         False: changes the optimization (gradients are not summed over all replicas each step)
    sync_every                    steps between two exchanges over the data-parallel axis; above 1 only if not exact
    pairs                         [pairs] int64: operations that run together with the one that follows, as overlapped
                                  forward and backward of two micro-batches: the communication of one lies beside the
                                  computation of the other, and both end together
    """

    name: str
    kinds: np.ndarray
    microbatches: np.ndarray
    chunks: np.ndarray
    offsets: np.ndarray
    placement: tuple[int, ...]
    exact: bool = True
    sync_every: int = 1
    pairs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(cls, name: str, ops: Sequence[Iterable[Op]], placement: Sequence[int], **properties: object) -> Schedule:
        """From a list of operations a device; ``pairs`` counts through all of them. Raises ValueError for a letter that
        is no kind."""
        lists = [list(of_device) for of_device in ops]
        flat = [op for of_device in lists for op in of_device]
        unknown = next((op for op in flat if op.kind not in KINDS), None)
        if unknown is not None:
            raise ValueError(f"{unknown.kind!r} in {unknown} is no kind of operation: use one of {', '.join(KINDS)}")
        kinds = np.array([KINDS.index(op.kind) for op in flat], np.int64)
        microbatches = np.array([op.microbatch for op in flat], np.int64)
        chunks = np.array([op.chunk for op in flat], np.int64)
        offsets = np.cumsum([0, *map(len, lists)]).astype(np.int64)
        return cls(name, kinds, microbatches, chunks, offsets, tuple(placement), **properties)  # type: ignore[arg-type]

    @property
    def devices(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def count(self) -> int:
        """Micro-batches."""
        return int(self.microbatches.max()) + 1 if len(self.microbatches) else 0

    @cached_property
    def ops(self) -> tuple[tuple[Op, ...], ...]:
        """One tuple of operations a device."""
        return tuple(tuple(self._of(device)) for device in range(self.devices))

    def _of(self, device: int) -> Iterator[Op]:
        part = slice(self.offsets[device], self.offsets[device + 1])
        rows = zip(self.kinds[part].tolist(), self.microbatches[part].tolist(), self.chunks[part].tolist(), strict=True)
        return (Op(KINDS[kind], microbatch, chunk) for kind, microbatch, chunk in rows)


def looped(stages: int, chunks: int) -> tuple[int, ...]:
    """Virtual stages dealt to devices round and round, as interleaved schedules hold them."""
    return tuple(chunk % stages for chunk in range(stages * chunks))


def folded(stages: int) -> tuple[int, ...]:
    """Two virtual stages a device, the second half on the way back: the first and the last share a device ("V")."""
    return (*range(stages), *reversed(range(stages)))

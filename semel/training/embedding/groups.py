"""Equal values of an array, each once: which they are, and where they stand. What makes duplicates cost one row.

Sums over a group run in the order of its positions, always, so that they are the same bits however the work is cut.
On CPU compiled loops; elsewhere torch's (``plain_sums``, ``plain_spread``), which are also the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import torch
from torch import Tensor


@dataclass
class Groups:
    """Of an array [T]: ``values`` [U], each once; value u stands at ``order[start[u]:stop[u]]``, in ascending order."""

    values: Tensor
    order: Tensor
    start: Tensor
    stop: Tensor

    @classmethod
    def of(cls, array: Tensor) -> Groups:
        """``values`` ascending. ``array`` [T] int64."""
        ordered, order = torch.sort(array, stable=True)
        values, counts = torch.unique_consecutive(ordered, return_counts=True)
        stop = counts.cumsum(0)
        return cls(values, order, stop - counts, stop)

    def take(self, index: Tensor) -> Groups:
        """Some of the values, in the order of ``index``."""
        return Groups(self.values[index], self.order, self.start[index], self.stop[index])

    def spread(self, of_value: Tensor) -> Tensor:
        """What belongs to each value, [U], at each position, [T]."""
        out = of_value.new_empty(len(self.order))
        index = torch.repeat_interleave(self.stop - self.start, output_size=len(self.order))
        out[self.places()] = of_value[index]
        return out

    def places(self) -> Tensor:
        """All positions, those of the first value first."""
        lengths = self.stop - self.start
        ends = lengths.cumsum(0)
        shift = torch.repeat_interleave(self.start - ends + lengths, lengths)
        return self.order[shift + torch.arange(len(shift), device=shift.device)]

    def sums(self, array: Tensor) -> Tensor:
        """``array`` [T, D], one row a position -> [U, D]."""
        if array.device.type != "cpu":
            return plain_sums(self, array)
        out = array.new_empty(len(self.values), array.shape[1])
        _sums(array.numpy(), self.order.numpy(), self.start.numpy(), self.stop.numpy(), out.numpy())
        return out

    def write(self, rows: Tensor, out: Tensor) -> None:
        """``rows`` [U, D] into all of their positions of ``out`` [T, D]; other positions stay."""
        if out.device.type != "cpu":
            return plain_write(self, rows, out)
        _write(rows.numpy(), self.order.numpy(), self.start.numpy(), self.stop.numpy(), out.numpy())


def plain_sums(groups: Groups, array: Tensor) -> Tensor:
    lengths = groups.stop - groups.start
    return torch.segment_reduce(array[groups.places()], "sum", lengths=lengths, initial=0)


def plain_write(groups: Groups, rows: Tensor, out: Tensor) -> None:
    out[groups.places()] = torch.repeat_interleave(rows, groups.stop - groups.start, dim=0)


@numba.njit(cache=True, nogil=True)
def _sums(array, order, start, stop, out):
    for u in range(len(start)):
        row = out[u]
        first = array[order[start[u]]]
        for d in range(len(row)):
            row[d] = first[d]
        for t in range(start[u] + 1, stop[u]):
            more = array[order[t]]
            for d in range(len(row)):
                row[d] += more[d]


@numba.njit(cache=True, nogil=True)
def _write(rows, order, start, stop, out):
    for u in range(len(start)):
        for t in range(start[u], stop[u]):
            place = out[order[t]]
            for d in range(len(place)):
                place[d] = rows[u, d]

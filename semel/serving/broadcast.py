"""What sharing saves, for comparison: every candidate a request of its own, with a copy of its request's side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch

EVENTS = 1 << 16
"""Most events of a part: copies of long histories do not fit into memory all at once."""


def broadcast(batch: RequestBatch) -> Iterator[RequestBatch]:
    """The C candidates of ``batch`` in order, in parts of as many requests as candidates. Parts depend on the batch
    alone, so that the same batch is computed the same way again."""
    import torch

    from semel.batch import RequestBatch

    owner = batch.candidate_to_request()
    longest = int(batch.request["history"].lengths.max()) if batch.requests else 0
    step = max(1, EVENTS // (longest + 1))
    for start in range(0, batch.candidates, step):
        rows = torch.arange(start, min(start + step, batch.candidates))
        own = owner[rows]
        yield RequestBatch(
            batch.request_id[own.numpy()], {name: take_rows(value, own) for name, value in batch.request.items()},
            {name: take_rows(value, rows) for name, value in batch.candidate.items()}, torch.arange(len(rows) + 1))


def take_rows(value: Any, rows: Tensor) -> Any:
    """Rows of a tensor, a Jagged or a JaggedTable."""
    import torch

    from semel.batch import Jagged, JaggedTable

    if not isinstance(value, (Jagged, JaggedTable)):
        return value[rows]
    lengths = value.lengths[rows]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.arange(int(offsets[-1])) + torch.repeat_interleave(value.offsets[rows] - offsets[:-1], lengths)
    if isinstance(value, Jagged):
        return Jagged(value.values[place], offsets)
    return JaggedTable({name: column[place] for name, column in value.columns.items()}, offsets)

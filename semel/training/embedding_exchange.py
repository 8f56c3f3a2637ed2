"""How a batch's ids become vectors, and their gradients updates, between ranks: the four exchanges of a sharded table.

``ask``: each distinct id goes to its owner. ``answer``: owners send rows. ``give``: gradients, summed by distinct id,
go to the owners, who sum them over ranks in the order of ranks and update. ``compare``: owners find out which rows two
batches share. A schedule is an order of these (``semel.training.embedding_schedule``).

Each is a generator that yields where it would wait for bytes, so that those of several tables can run in lockstep
(``together``): the messages of all tables are under way before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from semel.training.embedding_groups import Groups

if TYPE_CHECKING:
    from semel.training.embedding import ShardedEmbedding

Result = TypeVar("Result")
Exchange: TypeAlias = Generator[None, None, Result]

ENDED = -1
"""Sent in place of a count by a rank that has no more data."""


@dataclass
class Part:
    """Some of a batch's rows. Of the rank that wants them: ``wanted`` [k], which of its distinct ids, and ``send``, how
    many of them each rank owns. Of the owner: ``asked`` [n], which of the rows asked for, ``receive``, how many by each
    rank, and ``rows`` [m], which of its distinct ones."""

    wanted: Tensor
    send: list[int]
    asked: Tensor
    receive: list[int]
    rows: Tensor


@dataclass
class Batch:
    """One batch of one table.

    ``wanted``: this rank's distinct keys in order of owner, at their positions in the batch; ``send``: how many each
    rank owns. ``rows``: slots of the distinct rows asked of this rank, at their positions in order of arrival;
    ``receive``: how many each rank asked for. ``fresh``: slots of rows that are new. ``vectors`` [T, D]: the answer.
    ``late`` are rows that the batch before uses too (collisions), ``early`` the others; ``urgent`` those that the
    batch after uses too, ``rest`` the others. As long as nothing is known of a neighbour it shares nothing.
    ``sent_bytes``: to other ranks, so far.
    """

    wanted: Groups
    send: list[int]
    rows: Groups
    receive: list[int]
    fresh: Tensor
    vectors: Tensor
    early: Part = field(init=False)
    late: Part = field(init=False)
    urgent: Part = field(init=False)
    rest: Part = field(init=False)
    sent_bytes: int = 0

    def part(self, wanted: Tensor, rows: Tensor) -> Part:
        """Of masks over the distinct keys and over the distinct rows."""
        asked = self.rows.spread(rows)
        return Part(wanted.nonzero()[:, 0], _counts(wanted, self.send), asked.nonzero()[:, 0],
                    _counts(asked, self.receive), rows.nonzero()[:, 0])


def together(works: Mapping[str, Exchange[Result]]) -> dict[str, Result]:
    """Runs exchanges in lockstep, which must yield equally often on all ranks; their results by name."""
    left, results = dict(works), {}
    while left:
        for name, work in list(left.items()):
            try:
                next(work)
            except StopIteration as end:
                results[name] = end.value
                del left[name]
    return results


def ask(table: ShardedEmbedding, ids: Tensor | None) -> Exchange[Batch | None]:
    """``ids`` [T] int64, or None from a rank that has no more. None if no rank has."""
    device, world_size = table.weight.device, table.transport.world_size
    wanted, send = by_owner(table, torch.empty(0, dtype=torch.int64, device=device) if ids is None else ids)
    counts = torch.tensor([ENDED] * world_size if ids is None else send, device=device)
    handle = table.transport.all_to_all(counts, [1] * world_size, [1] * world_size)
    yield
    received = handle.wait().tolist()
    if all(count == ENDED for count in received):
        return None
    receive = [max(count, 0) for count in received]
    handle = table.transport.all_to_all(wanted.values, send, receive)
    yield
    rows = Groups.of(handle.wait())
    rows.values, fresh = table.admit(rows.values)
    vectors = torch.empty(len(wanted.order), table.dim, device=device)
    batch = Batch(wanted, send, rows, receive, fresh, vectors)
    all_wanted, all_rows = (torch.ones_like(groups.values, dtype=torch.bool) for groups in (wanted, rows))
    batch.early = batch.rest = batch.part(all_wanted, all_rows)
    batch.late = batch.urgent = batch.part(~all_wanted, ~all_rows)
    batch.sent_bytes = 8 * (world_size - 1 + _to_others(table, send))
    return batch


def compare(table: ShardedEmbedding, before: Batch | None, after: Batch | None) -> Exchange[None]:
    """Finds the rows that two successive batches share, and tells the ranks that asked for them."""
    if before is None or after is None:
        return
    in_use, used = table.scratch, before.rows.values
    in_use[after.fresh] = True  # a row whose place was taken: what it still learns is forgotten anyway
    used[in_use[used] & (used >= 0)] = -1
    in_use[after.fresh] = False
    in_use[used[used >= 0]] = True
    late = in_use[after.rows.values]
    in_use[used[used >= 0]] = False
    in_use[after.rows.values] = True
    urgent = in_use[used] & (used >= 0)
    in_use[after.rows.values] = False

    sizes = [pair for counts in zip(after.receive, before.receive, strict=True) for pair in counts]
    pieces = list(zip(after.rows.spread(late).split(after.receive), before.rows.spread(urgent).split(before.receive),
                      strict=True))
    message = torch.cat([piece for pair in pieces for piece in pair]).to(torch.uint8)
    send = [sizes[2 * r] + sizes[2 * r + 1] for r in range(len(pieces))]
    receive = [a + b for a, b in zip(after.send, before.send, strict=True)]
    after.sent_bytes += _to_others(table, send)
    handle = table.transport.all_to_all(message, send, receive)
    yield
    answers = handle.wait().bool().split([pair for both in zip(after.send, before.send, strict=True) for pair in both])
    wanted_late, wanted_urgent = torch.cat(answers[0::2]), torch.cat(answers[1::2])
    after.late, after.early = after.part(wanted_late, late), after.part(~wanted_late, ~late)
    before.urgent, before.rest = before.part(wanted_urgent, urgent), before.part(~wanted_urgent, ~urgent)


def answer(table: ShardedEmbedding, batch: Batch, part: Part) -> Exchange[None]:
    """The rows of ``part``, as they are now, into ``batch.vectors``."""
    slots = batch.rows.spread(batch.rows.values)[part.asked]
    batch.sent_bytes += 4 * table.dim * _to_others(table, part.receive)
    handle = table.transport.all_to_all(table.weight[slots], part.receive, part.send)
    yield
    batch.wanted.take(part.wanted).write(handle.wait(), batch.vectors)


def give(table: ShardedEmbedding, batch: Batch, part: Part, gradient: Tensor, scale: float, learning_rate: float,
         step: int) -> Exchange[None]:
    """``gradient`` [T, D] of the batch's vectors, times ``scale``: the rows of ``part`` are updated, each once."""
    rows = batch.wanted.take(part.wanted).sums(gradient)
    if scale != 1:
        rows *= scale
    batch.sent_bytes += 4 * table.dim * _to_others(table, part.send)
    handle = table.transport.all_to_all(rows, part.send, part.receive)
    yield
    place = torch.empty(len(batch.rows.order), dtype=torch.int64, device=gradient.device)
    place[part.asked] = torch.arange(len(part.asked), device=gradient.device)
    groups = Groups(batch.rows.values, place[batch.rows.order], batch.rows.start, batch.rows.stop).take(part.rows)
    table.update(groups.values, groups.sums(handle.wait()), learning_rate, step)


def by_owner(table: ShardedEmbedding, ids: Tensor) -> tuple[Groups, list[int]]:
    """Distinct keys of ``ids`` in order of owner, then of key, and how many each rank owns."""
    groups = Groups.of(table.rows.keys(ids))
    owner = table.rows.owner(groups.values)
    counts = torch.bincount(owner, minlength=table.transport.world_size).tolist()
    return groups.take(torch.sort(owner, stable=True).indices), counts


def _counts(mask: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many of each run of ``mask`` are set."""
    if not len(mask):
        return [0] * len(sizes)
    owner = torch.repeat_interleave(torch.tensor(sizes, device=mask.device), output_size=len(mask))
    return torch.bincount(owner[mask], minlength=len(sizes)).tolist()


def _to_others(table: ShardedEmbedding, counts: Sequence[Any]) -> int:
    return sum(counts) - counts[table.transport.rank]

"""How a batch's ids become vectors, and their gradients updates, between ranks: the four exchanges of a sharded table.

``ask``: each distinct id goes to its owner. ``answer``: owners send rows. ``give``: gradients, summed by distinct id,
go to the owners, who sum them over ranks in the order of ranks and update. ``compare``: owners find out which rows two
batches share. A schedule is an order of these (``semel.training.embedding.schedule``).

Each is a generator that yields where it would wait for bytes, so that those of several tables can run in lockstep
(``together``): the messages of all tables are under way before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor

from semel.training.embedding.groups import Groups

if TYPE_CHECKING:
    from semel.training.embedding.table import ShardedEmbedding

Result = TypeVar("Result")
Exchange: TypeAlias = Generator[None, None, Result]

ENDED = -1
"""Sent in place of a count by a rank that has no more data."""


@dataclass
class Part:
    """Some of a batch's rows, with all that is needed to send them.

    At the rank that wants them: ``wanted``, distinct keys at their positions in the batch; ``send``, how many each rank
    owns. At the owner: ``slots`` [n] of the rows asked for, in order of arrival; ``receive``, how many by each rank;
    ``rows``, the distinct slots at their positions among the n.
    """

    wanted: Groups
    send: list[int]
    slots: Tensor
    receive: list[int]
    rows: Groups


@dataclass
class Batch:
    """One batch of one table: ``whole``, all of its rows; ``fresh``, slots of rows that are new; ``vectors`` [T, D],
    the answer. ``late`` are rows that the batch before uses too (collisions), ``early`` the others; ``urgent`` those
    that the batch after uses too, ``rest`` the others. As long as nothing is known of a neighbour it shares nothing
    (None). ``sent_bytes``: to other ranks, so far."""

    whole: Part
    fresh: Tensor
    vectors: Tensor
    early: Part
    late: Part | None
    urgent: Part | None
    rest: Part
    sent_bytes: int = 0

    def part(self, wanted: Tensor, rows: Tensor, asked: Tensor) -> Part:
        """Of masks over the distinct keys, over the distinct rows, and over the rows asked for."""
        whole = self.whole
        place = asked.cumsum(0) - 1
        groups = Groups(whole.rows.values, place[whole.rows.order], whole.rows.start, whole.rows.stop)
        return Part(whole.wanted.take(wanted.nonzero()[:, 0]), _counts(wanted, whole.send), whole.slots[asked],
                    _counts(asked, whole.receive), groups.take(rows.nonzero()[:, 0]))


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
    whole = Part(wanted, send, rows.spread(rows.values), receive, rows)
    vectors = torch.empty(len(wanted.order), table.dim, device=device)
    sent_bytes = 8 * (world_size - 1 + _to_others(table, send))
    return Batch(whole, fresh, vectors, whole, None, None, whole, sent_bytes)


def compare(table: ShardedEmbedding, before: Batch | None, after: Batch | None) -> Exchange[None]:
    """Finds the rows that two successive batches share, and tells the ranks that asked for them."""
    if before is None or after is None:
        return
    old, new = before.whole, after.whole
    in_use, used = table.scratch, old.rows.values
    if len(after.fresh):  # rows whose places were taken: what they still learn is forgotten anyway
        in_use[after.fresh] = True
        used[in_use[used] & (used >= 0)] = -1
        in_use[after.fresh] = False
    still = used[used >= 0]
    in_use[still] = True
    late = in_use[new.rows.values]
    in_use[still] = False
    in_use[new.rows.values] = True
    urgent = in_use[used] & (used >= 0)
    in_use[new.rows.values] = False

    late_asked, urgent_asked = new.rows.spread(late), old.rows.spread(urgent)
    message = _zip(late_asked, new.receive, urgent_asked, old.receive).to(torch.uint8)
    send = [a + b for a, b in zip(new.receive, old.receive, strict=True)]
    receive = [a + b for a, b in zip(new.send, old.send, strict=True)]
    after.sent_bytes += _to_others(table, send)
    handle = table.transport.all_to_all(message, send, receive)
    yield
    late_wanted, urgent_wanted = _unzip(handle.wait().bool(), new.send, old.send)
    after.late = after.part(late_wanted, late, late_asked)
    after.early = after.part(~late_wanted, ~late, ~late_asked)
    before.urgent = before.part(urgent_wanted, urgent, urgent_asked)
    before.rest = before.part(~urgent_wanted, ~urgent, ~urgent_asked)


def answer(table: ShardedEmbedding, batch: Batch, part: Part | None) -> Exchange[None]:
    """The rows of ``part``, as they are now, into ``batch.vectors``."""
    if part is None:
        return
    batch.sent_bytes += 4 * table.dim * _to_others(table, part.receive)
    handle = table.transport.all_to_all(table.weight.index_select(0, part.slots), part.receive, part.send)
    yield
    part.wanted.write(handle.wait(), batch.vectors)


def give(table: ShardedEmbedding, batch: Batch, part: Part | None, gradient: Tensor, scale: float,
         learning_rate: float, step: int) -> Exchange[None]:
    """``gradient`` [T, D] of the batch's vectors, times ``scale``: the rows of ``part`` are updated, each once."""
    if part is None:
        return
    rows = part.wanted.sums(gradient)
    if scale != 1:
        rows *= scale
    batch.sent_bytes += 4 * table.dim * _to_others(table, part.send)
    handle = table.transport.all_to_all(rows, part.send, part.receive)
    yield
    table.update(part.rows.values, part.rows.sums(handle.wait()), learning_rate, step)


def by_owner(table: ShardedEmbedding, ids: Tensor) -> tuple[Groups, list[int]]:
    """Distinct keys of ``ids`` in order of owner, then of key, and how many each rank owns."""
    groups = Groups.of(table.rows.keys(ids))
    owner = table.rows.owner(groups.values)
    counts = torch.bincount(owner, minlength=table.transport.world_size).tolist()
    return groups.take(torch.sort(owner, stable=True).indices), counts


def _counts(mask: Tensor, sizes: Sequence[int]) -> list[int]:
    """How many of each run of ``mask`` are set."""
    return [int(run.count_nonzero()) for run in mask.split(list(sizes))]


def _zip(first: Tensor, first_sizes: list[int], second: Tensor, second_sizes: list[int]) -> Tensor:
    """Runs of both in turn."""
    pairs = zip(first.split(first_sizes), second.split(second_sizes), strict=True)
    return torch.cat([run for pair in pairs for run in pair])


def _unzip(both: Tensor, first_sizes: list[int], second_sizes: list[int]) -> tuple[Tensor, Tensor]:
    runs = both.split([size for pair in zip(first_sizes, second_sizes, strict=True) for size in pair])
    return torch.cat(runs[0::2]), torch.cat(runs[1::2])


def _to_others(table: ShardedEmbedding, counts: Sequence[int]) -> int:
    return sum(counts) - counts[table.transport.rank]

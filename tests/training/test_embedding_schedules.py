"""Schedules of a sharded table: when rows travel, who waits, and what happens at the ends. Equal results:
``tests/promises/test_prioritized_is_blocking.py``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from semel.comm import Alone, run_threads
from semel.training.embedding import SGD, Adam, Blocking, Prioritized, ShardedEmbedding

BOTH = pytest.mark.parametrize("kind", [Blocking, Prioritized])


class Recorded:
    """A transport that notes the vectors (float32 rows) that pass, and can be held."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.rank, self.world_size = transport, transport.rank, transport.world_size
        self.rows: list[int] = []
        self.open = threading.Event()
        self.open.set()

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Any:
        assert self.open.wait(20)
        if values.dtype == torch.float32:
            self.rows.append(len(values))
        return self.transport.all_to_all(values, send, receive)

    def all_gather(self, values: Tensor) -> Any:
        return self.transport.all_gather(values)


def test_only_shared_rows_travel_between_backward_and_forward() -> None:
    link = Recorded(Alone())
    table = ShardedEmbedding(2, link, rows=100)
    schedule = Prioritized(table)
    schedule.announce(torch.arange(0, 10))
    schedule.forward()
    schedule.announce(torch.arange(7, 27))
    schedule.synchronize()
    assert link.rows == [10, 17]  # the first batch; of the second what the first does not use, before its step
    schedule.step()
    schedule.forward()
    schedule.announce(None)
    schedule.synchronize()
    assert link.rows[2:4] == [3, 3]  # the shared rows' gradients, and their new values
    assert link.rows[4:] == [7]  # the other gradients of the first batch
    schedule.step()
    schedule.close()
    assert link.rows[5:] == [20]
    first, second = schedule.report.steps
    assert (first.rows, first.collisions, second.rows, second.collisions) == (10, 0, 20, 3)
    assert schedule.report.collision_rate == 3 / 30


def test_the_loop_goes_on_while_rows_travel() -> None:
    """``announce`` and ``step`` return though the link is held; ``forward`` does not need what is still under way."""
    link = Recorded(Alone())
    schedule = Prioritized(ShardedEmbedding(2, link, rows=100))
    schedule.announce(torch.arange(10))
    schedule.forward()
    link.open.clear()
    schedule.announce(torch.arange(10, 20))
    schedule.step()
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (schedule.forward(), done.set()))
    waiting.start()
    assert not done.wait(0.05)  # here it must wait: the rows have not come
    link.open.set()
    assert done.wait(20)
    waiting.join()
    schedule.close()


@BOTH
def test_calls_out_of_order_are_refused(kind: type) -> None:
    schedule = kind(ShardedEmbedding(2, Alone(), rows=100))
    with pytest.raises(RuntimeError, match="announce"):
        schedule.forward()
    with pytest.raises(RuntimeError, match="forward"):
        schedule.step()
    schedule.announce(torch.arange(3))
    with pytest.raises(RuntimeError, match="announced last"):
        schedule.announce(torch.arange(3))
    schedule.forward()
    with pytest.raises(RuntimeError, match="announce the following"):
        schedule.step()
    schedule.announce(None)
    with pytest.raises(RuntimeError, match="before step"):
        schedule.forward()
    schedule.step()
    assert schedule.forward() is None
    schedule.close()


@BOTH
def test_ranks_may_run_out_of_data_at_different_times(kind: type) -> None:
    """Row 9 lies on rank 1 of 2, whose data end first."""
    def train(transport: Any) -> tuple[int, int, Tensor]:
        table = ShardedEmbedding(1, transport, rows=10, optimizer=SGD(1.0))
        batches = [[torch.tensor([9, 9]), torch.tensor([9]), torch.tensor([9, 4])], [torch.tensor([9])], []]
        schedule, seen = kind(table), 0
        for _, vectors in schedule(batches[transport.rank], ids=lambda ids: ids):
            seen += 1
            vectors.sum().backward()
            schedule.step()
        return seen, table.steps, table.read(torch.tensor([9, 4]))

    start = ShardedEmbedding(1, Alone(), rows=10).read(torch.tensor([9, 4]))
    results = run_threads(3, train)
    assert [seen for seen, _, _ in results] == [3, 1, 0] and {steps for _, steps, _ in results} == {3}
    for _, _, vectors in results:
        torch.testing.assert_close(vectors, start - torch.tensor([[5.0], [1.0]]))


@BOTH
@pytest.mark.parametrize("new_ids", ["dense", "zero_collision"])
def test_ranks_may_keep_no_rows_and_batches_may_be_empty(kind: type, new_ids: Any) -> None:
    """Three rows on four ranks (zero_collision: one partition, on the first)."""
    def train(transport: Any) -> tuple[int, Tensor]:
        table = ShardedEmbedding(1, transport, rows=3, new_ids=new_ids, optimizer=SGD(1.0))
        schedule = kind(table)
        for _, vectors in schedule([torch.arange(3)[: (transport.rank + step) % 4] for step in range(4)],
                                   ids=lambda ids: ids):
            vectors.sum().backward()
            schedule.step()
        return table.rows.slots, table.read(torch.arange(3))

    start = ShardedEmbedding(1, Alone(), rows=3).read(torch.arange(3))
    slots, vectors = zip(*run_threads(4, train), strict=True)
    assert list(slots) == ([1, 1, 1, 0] if new_ids == "dense" else [3, 0, 0, 0])
    for read in vectors:
        torch.testing.assert_close(read, start - torch.tensor([[12.0], [8.0], [4.0]]))


@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_gradient_is_that_of_the_global_mean(kind: type, world_size: int) -> None:
    """Unequal batches; the loss of each rank as DDP wants it, ``local sum * world / global count``."""
    random = torch.Generator().manual_seed(0)
    whole = [torch.randint(0, 12, (11,), generator=random) for _ in range(4)]
    cuts = [0, 2, 3, 9, 11]

    def train(transport: Any, world_size: int = 1) -> Tensor:
        table = ShardedEmbedding(3, transport, rows=12, optimizer=SGD(0.5))
        step = 4 // world_size
        low, high = cuts[transport.rank * step], cuts[(transport.rank + 1) * step]
        schedule = kind(table, gradient_scale=1 / world_size)
        for ids, vectors in schedule([batch[low:high] for batch in whole], ids=lambda ids: ids):
            loss = (vectors - ids[:, None] / 12).square().sum()
            (loss * world_size / 11).backward()
            schedule.step()
        return table.read(torch.arange(12))

    alone = train(Alone())
    for vectors in run_threads(world_size, lambda transport: train(transport, world_size)):
        torch.testing.assert_close(vectors, alone, rtol=1e-6, atol=1e-7)


@BOTH
def test_several_tables_each_with_their_own_ids(kind: type) -> None:
    def train(transport: Any) -> dict[str, Tensor]:
        tables = {"item": ShardedEmbedding(2, transport, rows=20, optimizer=SGD(0.5)),
                  "user": ShardedEmbedding(3, transport, rows=50, new_ids="zero_collision", optimizer=Adam(0.1))}
        random = torch.Generator().manual_seed(transport.rank)
        batches = [{"item": torch.randint(0, 20, (8,), generator=random),
                    "user": torch.randint(0, 2**40, (step,), generator=random) % 7} for step in range(5)]
        schedule = kind(tables)
        for batch, vectors in schedule(batches, ids=lambda batch: batch):
            assert vectors["item"].shape == (8, 2) and vectors["user"].shape == (len(batch["user"]), 3)
            (vectors["item"].square().sum() + vectors["user"].sum() * vectors["item"].mean()).backward()
            schedule.step()
        with pytest.raises(KeyError, match="item"):
            schedule.announce({"item": torch.arange(3)})
        return {name: table.read(torch.arange(20)) for name, table in tables.items()}

    results = run_threads(2, train)
    alone = run_threads(2, train)
    for result in results:
        assert all(torch.equal(result[name], alone[0][name]) for name in result)
    start = ShardedEmbedding(3, Alone(), rows=50, new_ids="zero_collision").read(torch.arange(20))
    assert (results[0]["user"][:7] != start[:7]).any(1).all() and torch.equal(results[0]["user"][7:], start[7:])


def test_both_schedules_with_skips_changing_rates_and_a_look_at_the_state_in_between() -> None:
    random = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 15, (9,), generator=random) for _ in range(6)]

    def train(kind: type) -> Iterator[dict[str, Tensor]]:
        table = ShardedEmbedding(2, Alone(), rows=15, optimizer=Adam(0.1))
        schedule = kind(table)
        for step, (_, vectors) in enumerate(schedule(batches, ids=lambda ids: ids)):
            table.optimizer.learning_rate = 0.1 / (1 + step)
            vectors.pow(3).sum().backward()
            schedule.skip() if step == 2 else schedule.step()
            yield table.state_dict()
        yield {"read": table.read(torch.arange(15))}

    for ours, theirs in zip(train(Blocking), train(Prioritized), strict=True):
        assert ours.keys() == theirs.keys()
        steps = [state.pop("clock")[:1] if "clock" in state else None for state in (ours, theirs)]
        assert steps[0] == steps[1] and all(torch.equal(ours[name], theirs[name]) for name in ours)


@BOTH
def test_a_loop_may_end_early_and_another_begin(kind: type) -> None:
    def rows(stop: int | None) -> Tensor:
        table = ShardedEmbedding(2, Alone(), rows=15, optimizer=SGD(0.1))
        schedule = kind(table)
        batches = [torch.arange(k, k + 6) for k in range(5)]
        for part in ([batches] if stop is None else [batches, batches[stop:]]):
            for step, (_, vectors) in enumerate(schedule(part, ids=lambda ids: ids)):
                vectors.square().sum().backward()
                schedule.step()
                if part is batches and step + 1 == stop:
                    break
        assert len(schedule.report.steps) == 5
        return table.read(torch.arange(15))

    assert torch.equal(rows(None), rows(2))


def test_a_failure_under_way_is_raised_where_the_loop_waits() -> None:
    class Broken(Recorded):
        def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Any:
            if len(self.rows) >= 2:
                raise OSError("the cable is out")
            return super().all_to_all(values, send, receive)

    schedule = Prioritized(ShardedEmbedding(2, Broken(Alone()), rows=50))
    with pytest.raises(OSError, match="the cable is out"):
        for _, vectors in schedule([torch.arange(k, k + 6) for k in range(5)], ids=lambda ids: ids):
            vectors.sum().backward()
            schedule.step()


def test_the_loop_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "embedding.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 22
    exec(code.replace("/tmp/items", str(tmp_path / "items")), {})
    assert "% collisions" in capsys.readouterr().out and (tmp_path / "items" / "index.json").exists()

"""Promise 5, embeddings: prioritized communication changes when rows travel, never the result, to the last bit.

Three ways to the same table: ``Blocking``, ``Prioritized``, and a dictionary of rows in one process
(``ReferenceEmbedding``), which sums gradients in the order that both promise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from semel.comm import run_threads, spawn
from semel.comm.transport import transport as make_transport
from semel.training.embedding import SGD, Adam, Blocking, Prioritized, RowWiseAdagrad, ShardedEmbedding
from semel.training.embedding.exchange import answer, together
from semel.training.embedding.reference import ReferenceEmbedding

DIM = 5
ROWS = 97
OPTIMIZERS = {"sgd": lambda: SGD(0.3), "adagrad": lambda: RowWiseAdagrad(0.2), "adam": lambda: Adam(0.1)}


def draw_batches(seed: int, overlaps: list[float], world_size: int, size: int) -> list[list[Tensor]]:
    """``[step][rank]`` ids: a share ``overlaps[step]`` of a rank's ids are ids of the global batch before, the others
    are not. Some ranks have none."""
    random = torch.Generator().manual_seed(seed)
    batches: list[list[Tensor]] = []
    before = torch.empty(0, dtype=torch.int64)
    for overlap in overlaps:
        other = torch.tensor(sorted(set(range(ROWS)) - set(before.tolist())))
        batch = []
        for _ in range(world_size):
            n = int(torch.randint(0, size + 1, (1,), generator=random))
            again = int((torch.rand(n, generator=random) < overlap).sum()) if len(before) else 0
            again = n if not len(other) else again
            parts = [before[torch.randint(0, max(len(before), 1), (again,), generator=random)],
                     other[torch.randint(0, max(len(other), 1), (n - again,), generator=random)]]
            ids = torch.cat(parts)
            batch.append(ids[torch.randperm(len(ids), generator=random)])
        batches.append(batch)
        before = torch.cat(batch).unique()
    return batches


def loss_of(vectors: Tensor, ids: Tensor, step: int) -> Tensor:
    """Its gradient depends on the vectors, so that a row that was read too early shows, and has a bound."""
    target = ((ids[:, None] * 7 + torch.arange(DIM) + step) % 11).float() / 11
    square = (vectors - target).square()
    return (square / (1 + square) * (1 + (ids % 3)[:, None])).sum()


class Naive(Prioritized):
    """Prefetches every row: those of the batch before are read before their update."""

    def _look_ahead(self, ids: Any) -> None:
        self._next = self._ask(ids)
        if self._next is not None:
            together({name: answer(self.tables[name], batch, batch.whole) for name, batch in self._next.items()})


def trained(transport: Any, kind: type, batches: list[list[Tensor]], optimizer: str, new_ids: str = "dense",
            rows: int = ROWS) -> dict[str, Any]:
    """Trains this rank's part of every batch; its rows and states by key, and the loss of each step."""
    table = ShardedEmbedding(DIM, transport, rows=rows, new_ids=new_ids, optimizer=OPTIMIZERS[optimizer](), seed=3)
    schedule = kind(table)
    mine = [(step, batch[transport.rank]) for step, batch in enumerate(batches)]
    losses = []
    for (step, ids), vectors in schedule(mine, ids=lambda item: item[1]):
        loss = loss_of(vectors, ids, step)
        loss.backward()
        losses.append(loss.item())
        schedule.step()
    state = table.state_dict()
    return {"state": {name: value.numpy() for name, value in state.items()}, "losses": losses, "steps": table.steps,
            "collision_rate": schedule.report.collision_rate}


def by_key(results: list[dict[str, Any]]) -> dict[int, bytes]:
    """Every row with all of its state, as bytes."""
    rows = {}
    for result in results:
        state = result["state"]
        for i, key in enumerate(state["key"].tolist()):
            rows[key] = b"".join(state[name][i].tobytes() for name in sorted(state) if name not in ("key", "clock"))
    return rows


def reference(batches: list[list[Tensor]], optimizer: str) -> tuple[dict[int, bytes], list[list[float]]]:
    table = ReferenceEmbedding(DIM, OPTIMIZERS[optimizer](), seed=3)
    losses = []
    table.vectors(torch.arange(ROWS))
    for step, batch in enumerate(batches):
        vectors = [table.vectors(ids).requires_grad_() for ids in batch]
        loss = [loss_of(v, ids, step) for v, ids in zip(vectors, batch, strict=True)]
        sum(loss).backward()  # type: ignore[union-attr]
        losses.append([one.item() for one in loss])
        table.step(batch, [v.grad for v in vectors])  # type: ignore[misc]
    used = torch.zeros(1, dtype=torch.int64).numpy()  # of a dense table
    rows = {key: b"".join([*(table.state[key][name][0].numpy().tobytes() for name in sorted(table.state[key])),
                           used.tobytes(), table.rows[key][0].numpy().tobytes()]) for key in table.rows}
    return rows, losses


@given(seed=st.integers(0, 2**20), world_size=st.integers(1, 4), steps=st.integers(0, 7),
       overlap=st.sampled_from([0.0, 0.03, 0.3, 0.7, 1.0]), size=st.integers(0, 30),
       optimizer=st.sampled_from(list(OPTIMIZERS)))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_three_ways_to_the_same_bits(seed: int, world_size: int, steps: int, overlap: float, size: int,
                                     optimizer: str) -> None:
    batches = draw_batches(seed, [overlap] * steps, world_size, size)
    rows, losses = reference(batches, optimizer)
    for kind in (Blocking, Prioritized):
        results = run_threads(world_size, lambda transport, kind=kind: trained(transport, kind, batches, optimizer))
        assert by_key(results) == rows
        assert [[result["losses"][step] for result in results] for step in range(steps)] == losses
        assert {result["steps"] for result in results} == {steps}


@given(seed=st.integers(0, 2**20), world_size=st.integers(1, 3), optimizer=st.sampled_from(list(OPTIMIZERS)),
       new_ids=st.sampled_from(["hashed", "zero_collision"]), overlap=st.sampled_from([0.0, 0.4, 1.0]),
       rows=st.sampled_from([3, 40]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(seed=0, world_size=1, optimizer="sgd", new_ids="zero_collision", overlap=0.0, rows=3)
def test_the_same_where_ids_share_rows_and_where_rows_are_taken_from_ids(
        seed: int, world_size: int, optimizer: str, new_ids: str, overlap: float, rows: int) -> None:
    """Of three rows most batches take some from the batch before, whose gradients are then still to come."""
    partition = 3 if rows == 3 else 10  # a global batch never has more ids
    batches = draw_batches(seed, [overlap] * 9, world_size, partition // world_size)
    blocking, prioritized = (
        run_threads(world_size, lambda rank, kind=kind: trained(rank, kind, batches, optimizer, new_ids, rows))
        for kind in (Blocking, Prioritized))
    assert by_key(blocking) == by_key(prioritized)
    assert [r["losses"] for r in blocking] == [r["losses"] for r in prioritized]


def test_naive_prefetch_gives_another_result() -> None:
    """Else the tests above could not see what they look for."""
    for overlap, same in ((0.0, True), (0.5, False)):
        batches = draw_batches(1, [overlap] * 6, 2, 20)
        rows, _ = reference(batches, "sgd")
        naive = run_threads(2, lambda transport, batches=batches: trained(transport, Naive, batches, "sgd"))
        assert (by_key(naive) == rows) == same


def on_process(overlaps: list[float]) -> list[Any]:
    """One rank's results for each optimizer, by both schedules."""
    transport = make_transport()
    batches = draw_batches(7, overlaps, transport.world_size, 40)
    return [[trained(transport, kind, batches, optimizer) for kind in (Blocking, Prioritized)]
            for optimizer in OPTIMIZERS]


def check_processes(world_size: int, overlaps: list[float]) -> None:
    ranks = spawn(on_process, world_size, overlaps)
    batches = draw_batches(7, overlaps, world_size, 40)
    for case, optimizer in enumerate(OPTIMIZERS):
        rows, losses = reference(batches, optimizer)
        assert np.isfinite(losses).all()
        for schedule in range(2):
            results = [rank[case][schedule] for rank in ranks]
            assert by_key(results) == rows, (world_size, optimizer, schedule)
            assert [list(step) for step in zip(*(r["losses"] for r in results), strict=True)] == losses
        assert all(0.2 < rank[case][1]["collision_rate"] < 0.8 for rank in ranks)


@pytest.mark.timeout(110)
def test_the_same_bits_in_two_processes() -> None:
    check_processes(2, [0.0, 0.5, 1.0, 0.5, 0.0, 1.0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_bits_after_500_steps(world_size: int) -> None:
    """The overlap goes from 0 to 100 % and back, a hundred steps each."""
    check_processes(world_size, [overlap for overlap in (0.0, 1.0, 0.05, 0.7, 0.3) for _ in range(100)])

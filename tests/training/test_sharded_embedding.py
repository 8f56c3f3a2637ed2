"""A table shared by ranks: which rows ids get, what rows start with, how they are updated, saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semel.batch import Jagged
from semel.comm import Alone, run_threads
from semel.features import stable_id
from semel.training.embedding import SGD, Adam, Blocking, Prioritized, RowOptimizer, RowWiseAdagrad, ShardedEmbedding
from semel.training.embedding.groups import Groups, plain_sums, plain_write
from semel.training.embedding.rows import ZeroCollisionRows, initial_rows, mix

OPTIMIZERS: list[RowOptimizer] = [SGD(0.3), RowWiseAdagrad(0.2), Adam(0.1)]


def learn(table: ShardedEmbedding, batches: list[Tensor], kind: type = Blocking) -> None:
    """Gradients that are small multiples of 1/8, whatever the vectors: their sums are exact in any order."""
    schedule = kind(table)
    for ids, vectors in schedule(batches, ids=lambda ids: ids):
        vectors.grad = ((ids[:, None] + torch.arange(table.dim)) % 5 - 2).float() / 8
        schedule.step()


# Ids and rows


def test_a_dense_table_refuses_ids_that_it_has_no_row_for() -> None:
    table = ShardedEmbedding(3, Alone(), rows=10)
    assert table.read(torch.arange(10)).shape == (10, 3)
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"id {bad} is outside 0 \.\. 9"):
            table.read(torch.tensor([3, bad]))
        with pytest.raises(ValueError, match=f"id {bad} "):
            Prioritized(table).announce(torch.tensor([bad]))


@pytest.mark.parametrize("arguments, message", [
    ({"dim": 0, "rows": 3}, "dim=0"), ({"dim": 2, "rows": 0}, "rows=0"),
    ({"dim": 2, "rows": 3, "new_ids": "mod"}, "'mod'")])
def test_what_describes_no_table_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedEmbedding(transport=Alone(), **arguments)


def test_ids_may_be_tensors_arrays_jagged_or_strings() -> None:
    table = ShardedEmbedding(4, Alone(), rows=1000, new_ids="zero_collision")
    ids = torch.tensor([7, 2**62, -5, 7])
    expected = table.read(ids)
    assert torch.equal(expected[0], expected[3]) and len(torch.unique(expected, dim=0)) == 3
    for same in (ids.numpy(), Jagged(ids, torch.tensor([0, 1, 1, 4])), ids.tolist(), ids[:, None]):
        assert torch.equal(table.read(same), expected)
    words = ["shoe", "hat", "shoe"]
    assert torch.equal(table.read(words), table.read(stable_id(words)))
    with pytest.raises(TypeError, match="float32"):
        table.read(torch.tensor([1.0]))


def test_hashed_ids_share_rows_and_all_of_the_rows_are_used() -> None:
    table = ShardedEmbedding(2, Alone(), rows=50, new_ids="hashed")
    ids = torch.arange(-500, 500) * 2**40
    vectors = table.read(ids)
    assert len(torch.unique(vectors, dim=0)) == 50
    learn(table, [ids[:1]])
    moved = (table.read(ids) != vectors).any(1)
    assert moved[0] and 1 < moved.sum() < 100  # what shares its row


@pytest.mark.parametrize("new_ids", ["dense", "hashed", "zero_collision"])
def test_a_row_starts_the_same_whoever_keeps_it_and_whenever_it_comes(new_ids: str) -> None:
    ids = torch.tensor([5, 3, 17, 3, 8])

    def read(transport: Any, order: Tensor) -> Tensor:
        table = ShardedEmbedding(6, transport, rows=400, new_ids=new_ids, seed=11)  # type: ignore[arg-type]
        schedule = Blocking(table)
        for _, _ in schedule([order], ids=lambda ids: ids):
            schedule.skip()
        return table.read(ids)

    first = read(Alone(), ids)
    for world_size in (2, 3):
        for vectors in run_threads(world_size, lambda transport: read(transport, ids.flip(0))):
            assert torch.equal(vectors, first)


def test_rows_start_uniform_around_zero_by_seed_and_id() -> None:
    rows = initial_rows(np.arange(20_000), 0, 8, 0.02)
    assert abs(rows.mean()) < 2e-4 and abs(rows.std() - 0.02) < 2e-4 and abs(rows).max() <= 0.02 * 3**0.5 + 1e-6
    assert abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.04
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.03
    assert not np.array_equal(rows, initial_rows(np.arange(20_000), 1, 8, 0.02))
    assert np.array_equal(rows[[7, 3]], initial_rows(np.array([7, 3]), 0, 8, 0.02))


class Plain:
    """A partition as one reads it: which ids have a row, and when each was used."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, dict[int, int]()

    def use(self, ids: list[int], batch: int) -> None:
        self.used |= {key: batch for key in ids if key in self.used}
        for key in sorted(set(ids) - set(self.used)):
            if len(self.used) == self.capacity:
                del self.used[min(self.used, key=lambda other: (self.used[other], other))]
            self.used[key] = batch


@given(st.lists(st.lists(st.integers(-30, 30), max_size=8), max_size=25), st.sampled_from([64, 100]),
       st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_row_that_was_used_longest_ago_goes(batches: list[list[int]], rows: int, world_size: int) -> None:
    ranks = [ZeroCollisionRows(rows, rank, world_size) for rank in range(world_size)]
    plain = [Plain(-(-rows // 8)) for _ in range(8)]
    for batch, ids in enumerate(batches, start=1):
        keys = np.unique(np.array(ids, np.int64))
        partition = mix(keys.astype(np.uint64)) % np.uint64(8)
        for p in range(8):
            plain[p].use(keys[partition == p].tolist(), batch)
        owner = ranks[0].owner(torch.from_numpy(keys)).numpy()
        for rank in range(world_size):
            slots, _ = ranks[rank].admit(keys[owner == rank], batch)
            assert len(np.unique(slots)) == len(slots) and np.array_equal(ranks[rank].find(keys[owner == rank]), slots)
    expected = {key: used for part in plain for key, used in part.used.items()}
    held = [rank.held() for rank in ranks]
    assert {int(k): int(u) for keys, _, used in held for k, u in zip(keys, used, strict=True)} == expected
    for rank, (keys, slots, _) in zip(ranks, held, strict=True):
        assert np.array_equal(rank.find(keys), slots) and (rank.find(np.array([31, 99])) == -1).all()


def test_a_row_that_is_taken_starts_anew() -> None:
    table = ShardedEmbedding(2, Alone(), rows=3, new_ids="zero_collision", optimizer=Adam(0.1))
    start = table.read(torch.tensor([0]))
    learn(table, [torch.tensor([0]), torch.tensor([1, 2])])
    learned = table.read(torch.tensor([0]))
    assert not torch.equal(learned, start) and len(table) == 3
    learn(table, [torch.tensor([3])])
    assert torch.equal(table.read(torch.tensor([0])), start) and len(table) == 3
    learn(table, [torch.tensor([0])])
    state = table.state_dict()
    assert state["key"].tolist() == [0, 2, 3]
    assert state["state.first"][0].tolist() == pytest.approx([-0.025, -0.0125])  # nothing left of its first life
    with pytest.raises(ValueError, match="give it more rows"):
        learn(table, [torch.arange(4)])


# Arithmetic


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_groups_do_what_their_reference_does(ids: list[int], seed: int) -> None:
    array, random = torch.tensor(ids), torch.Generator().manual_seed(seed)
    values = torch.randn(len(ids), 3, generator=random)
    groups = Groups.of(array)
    assert groups.values.tolist() == sorted(set(ids))
    assert torch.equal(groups.spread(groups.values), array)
    some = groups.take(torch.randperm(len(groups.values), generator=random)[:4])
    sums = some.sums(values)
    torch.testing.assert_close(sums, plain_sums(some, values))
    for key, total in zip(some.values.tolist(), sums, strict=True):
        rows = [row for one, row in zip(ids, values, strict=True) if one == key]
        expected = rows[0]
        for row in rows[1:]:
            expected = expected + row
        assert torch.equal(total, expected)  # in their order, to the bit
    out, plain = torch.zeros(len(ids), 3), torch.zeros(len(ids), 3)
    some.write(sums, out)
    plain_write(some, sums, plain)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_updates_do_what_their_reference_does(optimizer: RowOptimizer) -> None:
    random = torch.Generator().manual_seed(0)
    weight, plain = (torch.randn(9, 7, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    state, plain_state = ({name: torch.zeros(9, n) for name, n in optimizer.state(7).items()} for _ in range(2))
    start = weight.clone()
    for step in range(1, 6):
        slots = torch.tensor([4, -1, 0, 7])
        gradient = torch.randn(4, 7, generator=random)
        optimizer.update(weight, state, slots, gradient, 0.1 / step, step)
        optimizer.plain(plain, plain_state, slots, gradient, 0.1 / step, step)
    torch.testing.assert_close(weight, plain)
    for name, values in state.items():
        torch.testing.assert_close(values, plain_state[name])
    others = [1, 2, 3, 5, 6, 8]
    assert torch.equal(weight[others], start[others]) and (weight[[0, 4, 7]] != start[[0, 4, 7]]).all()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_a_table_learns_what_torch_learns(optimizer: RowOptimizer) -> None:
    """SGD and SparseAdam of torch on a sparse ``nn.Embedding``; row-wise Adagrad, which torch lacks, by its formula in
    float64."""
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 20, (15,), generator=random) for _ in range(6)]
    weights = [torch.randn(15, 4, generator=random) for _ in range(6)]
    table = ShardedEmbedding(4, Alone(), rows=20, optimizer=optimizer)
    other = torch.nn.Embedding(20, 4, sparse=True)
    other.weight.data = table.read(torch.arange(20)).clone()
    theirs = {SGD: lambda: torch.optim.SGD(other.parameters(), lr=0.3), RowWiseAdagrad: lambda: None,
              Adam: lambda: torch.optim.SparseAdam(other.parameters(), lr=0.1)}[type(optimizer)]()
    by_formula, total = other.weight.data.double(), torch.zeros(20, 1, dtype=torch.float64)
    schedule = Prioritized(table)
    for step, (ids, vectors) in enumerate(schedule(batches, ids=lambda ids: ids)):
        (vectors.sin() * weights[step]).sum().backward()
        schedule.step()
        if theirs is not None:
            theirs.zero_grad()
            (other(ids).sin() * weights[step]).sum().backward()
            theirs.step()
        else:
            leaf = by_formula.clone().requires_grad_()
            (leaf[ids].sin() * weights[step]).sum().backward()
            total += leaf.grad.square().mean(1, keepdim=True)  # type: ignore[union-attr]
            by_formula -= 0.2 * leaf.grad / (total.sqrt() + 1e-8)  # type: ignore[operator]
    expected = other.weight.data if theirs is not None else by_formula.float()
    torch.testing.assert_close(table.read(torch.arange(20)), expected, rtol=1e-5, atol=1e-6)


# Saved and loaded


@pytest.mark.parametrize("new_ids", ["dense", "zero_collision"])
@pytest.mark.parametrize("kind", [Blocking, Prioritized])
def test_four_ranks_save_and_any_number_goes_on(tmp_path: Path, new_ids: str, kind: type) -> None:
    """Gradients are exact in any order here, so that the world size leaves no trace at all: not in the rows, not in
    what is taken from whom."""
    random = torch.Generator().manual_seed(0)
    whole = [torch.randint(0, 60, (13,), generator=random) for _ in range(12)]
    rows = 60 if new_ids == "dense" else 50  # four partitions of 13

    def table_of(transport: Any) -> ShardedEmbedding:
        return ShardedEmbedding(3, transport, rows=rows, new_ids=new_ids, optimizer=Adam(0.1))  # type: ignore[arg-type]

    def share(batches: list[Tensor], transport: Any) -> list[Tensor]:
        return [batch[transport.rank :: transport.world_size] for batch in batches]

    def save(transport: Any) -> None:
        table = table_of(transport)
        learn(table, share(whole[:6], transport), kind)
        table.save(tmp_path / "table")

    def go_on(transport: Any) -> tuple[int, Tensor]:
        table = table_of(transport)
        learn(table, share(whole[9:], transport), kind)  # leaves no trace either
        table.load(tmp_path / "table")
        learn(table, share(whole[6:], transport), kind)
        return table.steps, table.read(torch.arange(60))

    def without_stop(transport: Any) -> Tensor:
        table = table_of(transport)
        learn(table, whole, kind)
        return table.read(torch.arange(60))

    run_threads(4, save)
    expected = without_stop(Alone())
    for world_size in (1, 2, 3):
        for steps, vectors in run_threads(world_size, go_on):
            assert steps == 12 and torch.equal(vectors, expected)


def test_what_does_not_fit_is_not_loaded(tmp_path: Path) -> None:
    table = ShardedEmbedding(3, Alone(), rows=8, optimizer=SGD())
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        table.load(tmp_path)
    table.save(tmp_path)
    with pytest.raises(ValueError, match="rows=8, this table has 9"):
        ShardedEmbedding(3, Alone(), rows=9, optimizer=SGD()).load(tmp_path)
    with pytest.raises(ValueError, match="optimizer='SGD', this table has 'Adam'"):
        ShardedEmbedding(3, Alone(), rows=8).load(tmp_path)
    with pytest.raises(ValueError, match=r"no state\.first of width 3"):
        ShardedEmbedding(3, Alone(), rows=8).load_state_dict([table.state_dict()])
    with pytest.raises(ValueError, match="4 of its 8 rows"):
        table.load_state_dict([{name: value[::2] if name != "clock" else value
                                for name, value in table.state_dict().items()}])
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        table.load(tmp_path)


def test_a_later_save_replaces_the_earlier_one(tmp_path: Path) -> None:
    table = ShardedEmbedding(3, Alone(), rows=8)
    table.save(tmp_path)
    learn(table, [torch.arange(8)])
    table.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "rank-00000-of-00001-1.safetensors"]
    again = ShardedEmbedding(3, Alone(), rows=8)
    again.load(tmp_path)
    assert torch.equal(again.read(torch.arange(8)), table.read(torch.arange(8))) and again.steps == 1


@pytest.mark.parametrize("new_ids", ["dense", "hashed"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_rows_go_in_and_come_out(new_ids: str, world_size: int) -> None:
    whole = torch.randn(11, 4)

    def one(link: Any) -> Tensor | None:
        table = ShardedEmbedding(4, link, rows=11, new_ids=new_ids)  # type: ignore[arg-type]
        table.start_at(whole)
        return table.gather()

    first, *others = run_threads(world_size, one)
    assert torch.equal(first, whole) and all(other is None for other in others)


def test_rows_that_are_known_by_id_have_no_whole() -> None:
    table = ShardedEmbedding(4, Alone(), rows=11, new_ids="zero_collision")
    with pytest.raises(ValueError, match="zero_collision"):
        table.gather()
    with pytest.raises(ValueError, match="zero_collision"):
        table.start_at(torch.zeros(11, 4))
    with pytest.raises(ValueError, match="11, 4"):
        ShardedEmbedding(4, Alone(), rows=11).start_at(torch.zeros(12, 4))

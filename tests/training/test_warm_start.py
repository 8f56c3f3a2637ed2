"""Item embeddings from co-occurrence: what is met together lies together."""

import torch

from semel.training.warm_start import co_occurrence_embeddings


def test_items_that_meet_are_near_and_others_are_not():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 11, (30,), generator=g) + 10 * (row % 2) for row in range(60)]  # two groups of ten items
    item = torch.cat([*rows, torch.tensor([0, 25, 0])])
    offsets = torch.cat([torch.arange(0, 1801, 30), torch.tensor([1803])])
    table = torch.nn.functional.normalize(co_occurrence_embeddings(item, offsets, 30, 4, window=3), dim=1)
    near = table @ table.T
    assert near[:10, :10].mean() > 0.5 and near[10:20, 10:20].mean() > 0.5
    assert near[:10, 10:20].mean() < 0.2


def test_the_same_seed_gives_the_same_table_and_leaves_the_callers_randomness_alone():
    item, offsets = torch.randint(1, 50, (500,)), torch.tensor([0, 250, 500])
    torch.manual_seed(3)
    first = co_occurrence_embeddings(item, offsets, 60, 8, window=2, seed=1)
    after = torch.rand(1)
    second = co_occurrence_embeddings(item, offsets, 60, 8, window=2, seed=1)
    assert torch.equal(first, second) and torch.isfinite(first).all() and first.shape == (60, 8)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


def test_nothing_to_count():
    empty = co_occurrence_embeddings(torch.empty(0, dtype=torch.int64), torch.tensor([0]), 10, 4, window=3)
    single = co_occurrence_embeddings(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), 10, 4, window=3)
    assert empty.shape == single.shape == (10, 4) and (empty.norm(dim=1) > 0).all()

"""Grouped lookups against lookups one by one, and what becomes of the graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from semel.sharing import share
from semel.sharing.lookup import lookup, separate

DEFAULTS = (-1, False, False)


@given(rows=st.integers(0, 9), widths=st.lists(st.integers(1, 9), min_size=1, max_size=6), apart=st.booleans(),
       kind=st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64]),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_equals_lookups_one_by_one(rows: int, widths: list[int], apart: bool, kind: torch.dtype, dtype: torch.dtype,
                                   seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    tables = [torch.randn(7 + i, width, generator=draw).to(dtype) for i, width in enumerate(widths)]
    tables[0] = torch.randn(7, 2 * widths[0], generator=draw).to(dtype)[:, : widths[0]]     # rows that lie apart
    if apart:
        sources = [torch.randint(0, 7, (rows,), generator=draw).to(kind) for _ in tables]
        columns = [-1] * len(tables)
    else:
        x = torch.randint(0, 7, (len(tables) + 2, rows), generator=draw).to(kind).T         # columns that lie apart
        sources, columns = [x] * len(tables), list(range(len(tables), 0, -1))
    options = [DEFAULTS] * len(tables)
    with torch.no_grad():
        assert torch.equal(lookup(tables, sources, columns, options), separate(tables, sources, columns, options))


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_that_is_no_row_is_an_error(index: int) -> None:
    tables = [torch.zeros(9, 2), torch.zeros(5, 3)]
    with torch.no_grad(), pytest.raises(IndexError, match="5 rows"):
        lookup(tables, [torch.tensor([1]), torch.tensor([index])], [-1, -1], [DEFAULTS] * 2)


def test_tables_may_change_move_and_grow() -> None:
    tables = [torch.randn(4, 3) for _ in range(5)]
    index = [torch.tensor([3, 0])] * 5
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(lookup(tables, index, [-1] * 5, [DEFAULTS] * 5),
                               torch.cat([table[[3, 0]] for table in tables], 1))
            tables[0] += 1.0
            tables[1] = torch.randn(9, 3)


class Fields(nn.Module):
    """[B, request fields], [B, candidate fields] of ids -> [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11, 3, padding_idx=0) for _ in range(10))
        self.head = nn.Linear(30, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        found = [table(user[:, i : i + 1].long()) for i, table in enumerate(self.tables[:5])]
        found += [table(item[:, i : i + 1].long()) for i, table in enumerate(self.tables[5:])]
        return self.head(torch.cat(found, 2).flatten(1)).squeeze(1)


def test_a_side_looks_up_once() -> None:
    torch.manual_seed(0)
    model = Fields().double()
    shared = share(model, (torch.zeros(4, 5), torch.zeros(4, 5)), request_inputs=("user",))
    calls: list[int] = []
    for program in shared._form().programs[True].values():
        graph: fx.Graph = program.module.graph
        assert not any(node.target is torch.ops.aten.embedding.default for node in graph.nodes)
        calls += [len(node.args[0]) for node in graph.nodes if node.target is lookup]
    assert calls == [5, 5]
    user, item = torch.randint(0, 11, (1, 5)).float(), torch.randint(0, 11, (6, 5)).float()
    item[0] = 0.0       # the padding index: no gradient
    expected = model(user.expand(6, 5), item)
    with torch.no_grad():
        assert float((shared({"user": user}, {"item": item}) - expected).abs().max()) < 1e-14
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    shared({"user": user}, {"item": item}).square().sum().backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None and float((p.grad - gradient).abs().max()) < 1e-12

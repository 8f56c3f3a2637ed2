"""``verify`` says yes to what is equal, and finds what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from semel.sharing import SharedModel, SharingError, share


class Ranker(nn.Module):
    """Ids, histories, numbers; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.norm, self.first, self.last = nn.LayerNorm(18), nn.Linear(18, 8), nn.Linear(8, 1)

    def forward(self, user: Tensor, history: Tensor, item: Tensor, numbers: Tensor) -> dict[str, Tensor]:
        e = torch.cat([self.items(history).mean(1), self.users(user), self.items(item), numbers], 1)
        return {"click": self.last(torch.relu(self.first(self.norm(e)))),
                "like": (self.users(user) * self.items(item)).sum(-1)}


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Every row the same: ids must be drawn from the tables for anything to be seen."""
    return torch.zeros(4).long(), torch.ones(4, 7).long(), torch.ones(4).long(), torch.ones(4, 6, dtype=dtype)


def shared_ranker(dtype: torch.dtype = torch.float64) -> SharedModel:
    torch.manual_seed(0)
    return share(Ranker().to(dtype), example(dtype), request_inputs=("user", "history"))


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equal(dtype: torch.dtype, allowed: float) -> None:
    shared = shared_ranker(dtype)
    found = shared.verify()
    assert shared.training      # as it was
    kinds = {c.what.split()[0] for c in found.comparisons}
    assert kinds == {"outputs", "gradients", "changing"}
    assert all(c.equal for c in found.comparisons)
    assert all(c.allowed <= 10 * allowed * max(c.scale, 1.0) for c in found.comparisons)
    assert {len(c.offsets) - 1 for c in found.comparisons} == {1, 3}
    text = str(found)
    assert "Ranker" in text and "gradients" in text and len(text.splitlines()) < 8
    assert not any(c.what == "gradients" for c in shared.verify(gradients=False).comparisons)


def test_a_wrong_weight_is_found_with_its_place() -> None:
    shared = shared_ranker()
    for programs in shared.eval()._form().programs.values():
        for program in programs.values():
            for node in program.module.graph.nodes:
                if node.target is torch.ops.aten.relu.default:
                    node.target = torch.ops.aten.sigmoid.default
            program.module.recompile()
    with pytest.raises(SharingError, match=r"Ranker is not the model: outputs .shared., 1 req.*\['click'\]\[\d, 0\]"):
        shared.verify()


class Mixing(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        scores = (user * item).sum(1)
        return scores + scores.flip(0)


def test_a_model_that_mixes_rows_is_named() -> None:
    shared = share(Mixing(), (torch.randn(4, 3), torch.randn(4, 3)), request_inputs=("user",))
    with pytest.raises(SharingError, match="Mixing mixes the rows of a batch"):
        shared.verify()


class Blind(nn.Module):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (user + item).sum(1) * 0.0


def test_nothing_seen_is_an_error() -> None:
    shared = share(Blind(), (torch.randn(4, 3), torch.randn(4, 3)), request_inputs=("user",))
    with pytest.raises(SharingError, match="the same output, so that nothing was seen"):
        shared.verify()


def test_given_rows_are_used() -> None:
    shared = shared_ranker()
    assert shared.verify(example_inputs=example()).comparisons
    with pytest.raises(SharingError, match="structure, dtypes and row shapes"):
        shared.verify(example_inputs=example()[:3])
    with pytest.raises(SharingError, match="structure, dtypes and row shapes"):
        shared.verify(example_inputs=example(torch.float32))


class Wide(nn.Module):
    """One wide matrix of floating-point ids and numbers, as deepctr-torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.out = nn.Embedding(7, 3), nn.Embedding(4, 3), nn.Linear(7, 1)

    def forward(self, X: Tensor) -> Tensor:
        user, item = self.users(X[:, 0:1].long()).flatten(1), self.items(X[:, 2].long())
        return self.out(torch.cat([user, item, X[:, 1:2]], 1))


def test_ids_in_a_wide_matrix_are_drawn_from_their_tables() -> None:
    from semel.sharing.drawing import Drawing

    shared = share(Wide(), (torch.ones(4, 3),), request_inputs={"X": [0, 1]})
    assert shared.verify().worst.difference < 1e-6
    (rows,) = Drawing(shared._form().model, [torch.ones(4, 3)], 0).rows(400)
    assert sorted(set(rows[:, 0].tolist())) == list(range(7)) and sorted(set(rows[:, 2].tolist())) == list(range(4))
    assert len(rows[:, 1].unique()) > 100 and float(rows[:, 1].min()) >= 0.7 and float(rows[:, 1].max()) <= 1.0

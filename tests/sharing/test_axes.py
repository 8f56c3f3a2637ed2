"""Axes and blocks: a view cuts an axis only where its blocks allow, and no axis is at two places of a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import check, normal
from torch import Tensor

from semel.sharing.axes import BATCH, Axis, mixed, size_of, split
from semel.sharing.errors import Unproved


def test_an_axis_is_split_row_major() -> None:
    group, pieces = split(Axis(6), [2, 3])
    assert [axis.size for axis in group] == [2, 3] and not pieces and size_of(group) == 6


def test_blocks_go_along_where_they_run_through_the_inner_axes() -> None:
    positions = [np.array([0, 1, 4, 5]), np.array([2, 3])]
    axis = mixed(positions, [(Axis(4),), (Axis(2),)], 6)
    group, pieces = split(axis, [3, 2])
    assert [a.size for a in group] == [3, 2]
    assert [list(block.positions) for block in group[0].blocks] == [[0, 2], [1]]
    assert [[a.size for a in pieces[number]] for number in (0, 1)] == [[2, 2], [1, 2]]
    assert repr(axis) == "64|2" and repr(BATCH) == "B"


@pytest.mark.parametrize("positions", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4, 5], [1, 3]], [[1, 2, 3, 4], [0, 5]]])
def test_a_view_that_cuts_a_block_is_not_proved(positions: list[list[int]]) -> None:
    axis = mixed([np.array(p) for p in positions], [(Axis(len(p)),) for p in positions], 6)
    with pytest.raises(Unproved):
        split(axis, [3, 2])


def outer(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = torch.cat([user, item], 1)
    return x[:, :, None] * x[:, None, :]


def outer_of_one_side(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return item[:, :, None] * item[:, None, :] + user.sum(1)[:, None, None]


def difference_with_its_own_part(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return torch.cat([user, item], 1)[:, None, :] - item[:, :, None]


def sum_with_its_transpose(w: Any, user: Tensor, item: Tensor) -> Tensor:
    y = item[:, :, None] * user[:, None, :]
    return y + y.transpose(1, 2)


def product_with_its_transpose(w: Any, user: Tensor, item: Tensor) -> Tensor:
    y = item[:, :, None] * user[:, None, :]
    return y @ y.transpose(1, 2) @ y


def beside_its_transpose(w: Any, user: Tensor, item: Tensor) -> Tensor:
    y = item[:, :, None] * user[:, None, :]
    return torch.cat([y, y.transpose(1, 2)], 1)


def beside_its_copies(w: Any, user: Tensor, item: Tensor) -> Tensor:
    return torch.cat([item[:, :, None] * user[:, None, :], item[:, None, :].expand(-1, 4, 4),
                      user[:, :, None].expand(-1, 4, 4), item[:, :, None].expand(-1, 4, 4)], 1)


def chosen_by_itself(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = torch.cat([user, item], 1)
    return torch.where(x[:, :, None] > x[:, None, :], x[:, :, None], item.sum(1)[:, None, None])


def its_tokens_with_all(w: Any, user: Tensor, item: Tensor) -> Tensor:
    x = torch.cat([user, item], 1)
    return torch.relu(item[:, :, None] @ x[:, None, :]) + item.sum(1)[:, None, None]


@pytest.mark.parametrize("model", [outer, outer_of_one_side, difference_with_its_own_part, sum_with_its_transpose,
                                   product_with_its_transpose, beside_its_transpose, beside_its_copies,
                                   chosen_by_itself, its_tokens_with_all], ids=lambda model: model.__name__)
def test_a_value_meets_itself_along_another_axis(model: Any) -> None:
    check(model, normal(3, 4, seed=1), normal(7, 4, seed=2))

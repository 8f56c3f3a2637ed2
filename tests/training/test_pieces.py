"""A step in pieces: even cuts, the gradient of the whole, and the same bits on any number of threads."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from semel.models.dropout import Dropout
from semel.training.pieces import Workers, add, cut_evenly


@settings(max_examples=200, deadline=None)
@given(cost=st.lists(st.integers(0, 1000), min_size=1, max_size=30), pieces=st.integers(1, 8))
def test_cuts_cover_all_rows_in_order_and_are_even(cost, pieces):
    runs = cut_evenly(np.array(cost), pieces)
    assert runs[0][0] == 0 and runs[-1][1] == len(cost) and 1 <= len(runs) <= pieces
    assert all(a < b for a, b in runs) and all(x[1] == y[0] for x, y in itertools.pairwise(runs))
    for a, b in runs[: 1 if pieces == 2 else 0]:
        assert abs(sum(cost[a:b]) - sum(cost) / 2) <= max(cost)


def gradients(threads, pieces, dropout=0.0, seed=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Dropout(dropout), nn.Linear(8, 1))
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    cuts = [0, *(40 * i // pieces for i in range(1, pieces)), 40]
    parts = [((x[a:b], y[a:b]), (b - a) / 40) for a, b in itertools.pairwise(cuts)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Workers(pieces, seed) as workers:
            losses = workers.losses([*enumerate(parts)], 7,
                                    lambda part, _: ((model(part[0][0]) - part[0][1]) ** 2).mean() * part[1])
            found = workers.gradients(list(model.parameters()), losses)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    return [sum(loss.detach() for loss in losses), *found]


def test_the_pieces_add_up_to_the_whole():
    for part, whole in zip(gradients(2, 4), gradients(1, 1), strict=True):
        torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pieces", [2, 3])
def test_the_number_of_threads_changes_no_bit(pieces):
    one = gradients(1, pieces, 0.5)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(one, gradients(threads, pieces, 0.5), strict=True))
    assert not torch.equal(one[1], gradients(1, pieces, 0.5, seed=1)[1])


def test_an_error_in_a_piece_is_raised():
    weight = torch.ones(1, requires_grad=True)

    def loss(piece, _):
        if piece:
            raise ValueError("piece 1 is bad")
        return weight.sum()

    with Workers(2, 0) as workers, pytest.raises(ValueError, match="piece 1 is bad"):
        workers.losses([(0, 0), (1, 1)], 0, loss)


def test_an_unused_parameter_has_no_gradient():
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with Workers(2, 0) as workers:
        losses = workers.losses([(0, 1.0), (1, 2.0)], 0, lambda piece, _: (used * piece).sum())
        first, second = workers.gradients([used, unused], losses)
    assert first is not None and float(first) == 3.0 and second is None


def test_a_pieces_random_numbers_follow_from_the_step_and_its_number_alone():
    def draws(step, pieces):
        with Workers(len(pieces), 3) as workers:
            return workers.losses([(i, i) for i in pieces], step, lambda _, source: torch.rand(4, generator=source))

    both, second = draws(5, [0, 1]), draws(5, [1])
    assert torch.equal(both[1], second[0])  # as on a rank that has the second piece only
    assert not torch.equal(both[0], both[1]) and not torch.equal(second[0], draws(6, [1])[0])


def test_parameters_that_share_a_gradient_are_not_summed_into_each_other():
    """Autograd gives p and q of p + q one tensor."""
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))]
    with Workers(2, 0) as workers:
        found = workers.gradients(parameters, [scale * (parameters[0] + parameters[1]).square().sum()
                                               for scale in (1.0, 2.0)])
        found = add(found, workers.gradients(parameters, [3.0 * (parameters[0] + parameters[1]).square().sum()]))
    assert [total.unique().tolist() for total in found] == [[24.0], [24.0]]
    with Workers(1, 0) as workers:
        one, other = workers.gradients(parameters, [(parameters[0] + parameters[1]).square().sum()])
    one.mul_(2)
    assert one.unique().tolist() == [8.0] and other.unique().tolist() == [4.0]

"""Dropout by bytes: the expectation stays, the share is what was asked for, and a seed decides."""

import pytest
import torch

from semel.models.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9])
def test_share_and_expectation(p):
    torch.manual_seed(0)
    out = Dropout(p)(torch.ones(1000, 1001))
    assert abs(float((out == 0).double().mean()) - p) < 0.003
    assert abs(float(out.double().mean()) - 1) < 0.01
    assert len(out.unique()) == 2


def test_gradient_passes_where_values_pass():
    x = torch.randn(33, 7, requires_grad=True)
    out = Dropout(0.3)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out)


def test_evaluation_and_zero_pass_everything():
    x = torch.randn(5, 3)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x
    assert Dropout(0.5)(torch.empty(0, 4)).shape == (0, 4)


def test_the_seed_decides():
    torch.manual_seed(3)
    first = Dropout(0.5)(torch.ones(64))
    torch.manual_seed(3)
    assert torch.equal(first, Dropout(0.5)(torch.ones(64)))


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_refuses_what_is_no_chance(p):
    with pytest.raises(ValueError, match=r"not in \[0, 1\)"):
        Dropout(p)

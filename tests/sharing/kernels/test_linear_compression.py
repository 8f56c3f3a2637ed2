"""``linear_compression`` against its plain form, which broadcasts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_equal, both_paths, counts, draw, offsets_of

from semel.sharing import kernels
from semel.sharing.kernels import reference


def shapes(lengths, m, k_candidate, k_request, d):
    return (m, k_candidate), (m, k_request), (sum(lengths), k_candidate, d), (len(lengths), k_request, d)


@both_paths
@settings(max_examples=20, deadline=None)
@given(lengths=counts, m=st.integers(1, 4), k_candidate=st.integers(0, 3), k_request=st.integers(0, 3),
       d=st.integers(1, 4), seed=st.integers(0, 99))
def test_equals_the_plain_form(path, lengths, m, k_candidate, k_request, d, seed):
    inputs = draw(seed, *shapes(lengths, m, k_candidate, k_request, d))
    assert_equal(path, kernels.linear_compression, reference.linear_compression, inputs, [offsets_of(lengths)])


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("lengths", "d"), [([9, 0, 3], 33), ([1, 1, 1, 1, 1], 48)])
def test_sizes_beyond_a_tile_and_off_its_edges(path, dtype, lengths, d):
    inputs = draw(1, *shapes(lengths, 137, 67, 149, d))
    assert_equal(path, kernels.linear_compression, reference.linear_compression, inputs, [offsets_of(lengths)], dtype)


def test_weight_gradients_over_more_candidates_than_are_held_at_once():
    lengths = [256, 3, 257]  # 256 at once
    inputs = draw(2, *shapes(lengths, 2, 3, 4, 2))
    assert_equal("plain", kernels.linear_compression, reference.linear_compression, inputs, [offsets_of(lengths)])


def test_gradients_are_those_of_finite_differences():
    lengths = [2, 0, 1]
    inputs = [x.requires_grad_() for x in draw(0, *shapes(lengths, 2, 3, 2, 2))]
    assert torch.autograd.gradcheck(lambda *x: kernels.linear_compression(*x, offsets_of(lengths)), inputs)


def test_inputs_that_are_not_contiguous():
    lengths = [2, 0, 3]
    w_candidate, w_request, e_candidate, e_request = draw(0, *shapes(lengths, 4, 3, 5, 6))
    wanted = kernels.linear_compression(w_candidate, w_request, e_candidate, e_request, offsets_of(lengths))
    w = torch.cat([w_request, w_candidate], 1)
    got = kernels.linear_compression(w[:, 5:], w[:, :5], e_candidate.mT.contiguous().mT, e_request, offsets_of(lengths))
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("change", "says"), [
    ({"w_candidate": (4, 2)}, "w_candidate takes 2 fields but e_candidate has 3"),
    ({"w_request": (4, 6)}, "w_request takes 6 fields but e_request has 5"),
    ({"w_request": (3, 5)}, "w_candidate makes 4 fields and w_request 3"),
    ({"e_request": (2, 5, 7)}, "e_candidate is 6 wide and e_request 7"),
    ({"e_request": (1, 5, 6)}, "3 entries but there are 1 requests"),
    ({"e_candidate": (4, 3, 6)}, "ends at 3 but e_candidate has 4 rows"),
    ({"e_candidate": (3, 6)}, "give \\[M, K\\] and \\[rows, K, D\\]"),
])
def test_tensors_that_do_not_fit(change, says):
    fitting = {"w_candidate": (4, 3), "w_request": (4, 5), "e_candidate": (3, 3, 6), "e_request": (2, 5, 6)}
    tensors = {name: torch.zeros(shape) for name, shape in (fitting | change).items()}
    with pytest.raises(ValueError, match=says):
        kernels.linear_compression(**tensors, offsets=offsets_of([1, 2]))

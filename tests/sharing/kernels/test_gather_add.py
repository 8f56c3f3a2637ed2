"""``gather_add`` and ``segment_sum`` against their plain forms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_equal, both_paths, counts, draw, offsets_of

from semel.sharing import kernels
from semel.sharing.kernels import reference
from semel.sharing.kernels.offsets import owners


@both_paths
@settings(max_examples=20, deadline=None)
@given(lengths=counts, width=st.sampled_from([(), (1,), (5,), (2, 3)]), seed=st.integers(0, 99))
def test_gather_add_equals_the_plain_form(path, lengths, width, seed):
    inputs = draw(seed, (sum(lengths), *width), (len(lengths), *width))
    assert_equal(path, kernels.gather_add, reference.gather_add, inputs, [offsets_of(lengths)])


@both_paths
@settings(max_examples=20, deadline=None)
@given(lengths=counts, width=st.sampled_from([(), (1,), (5,), (2, 3)]), seed=st.integers(0, 99))
def test_segment_sum_equals_the_plain_form(path, lengths, width, seed):
    inputs = draw(seed, (sum(lengths), *width))
    assert_equal(path, kernels.segment_sum, reference.segment_sum, inputs, [offsets_of(lengths)])


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_requests_longer_than_a_tile(path, dtype):
    lengths = [70, 0, 200, 64, 1]
    offsets = [offsets_of(lengths)]
    inputs = draw(0, (sum(lengths), 300), (len(lengths), 300))
    assert_equal(path, kernels.gather_add, reference.gather_add, inputs, offsets, dtype)
    assert_equal(path, kernels.segment_sum, reference.segment_sum, inputs[:1], offsets, dtype)


def test_gradients_are_those_of_finite_differences():
    offsets = offsets_of([2, 0, 1])
    c, r = (x.requires_grad_() for x in draw(0, (3, 2), (3, 2)))
    assert torch.autograd.gradcheck(lambda c, r: kernels.gather_add(c, r, offsets), (c, r))
    assert torch.autograd.gradcheck(lambda c: kernels.segment_sum(c, offsets), (c,))


def test_half_precision_is_summed_in_single():
    x = torch.full((4000, 1), 0.1, dtype=torch.float16)
    total = kernels.segment_sum(x, offsets_of([1500, 2500]))
    torch.testing.assert_close(total.float(), torch.tensor([[150.0], [250.0]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("offsets", "says"), [
    ([0, 2], r"2 entries but there are 2 requests; give R \+ 1 = 3"),
    ([0, 1, 2], "ends at 2 but candidate has 3 rows"),
    ([0, 1, 4], "ends at 4 but candidate has 3 rows"),
    ([1, 2, 3], r"offsets\[0\] is 1; offsets start at 0"),
    ([0, 4, 3], "falls from 4 to 3 at request 1"),
    ([0.0, 1.0, 3.0], "torch.float32"),
])
def test_offsets_that_do_not_cover_the_candidates(offsets, says):
    with pytest.raises(ValueError, match=says):
        kernels.gather_add(torch.zeros(3, 2), torch.zeros(2, 2), torch.tensor(offsets))


def test_tensors_that_do_not_fit():
    offsets = offsets_of([1, 2])
    with pytest.raises(ValueError, match="all axes but the first must be equal"):
        kernels.gather_add(torch.zeros(3, 2), torch.zeros(2, 3), offsets)
    with pytest.raises(ValueError, match=r"request is torch\.float64 on cpu but candidate is torch\.float32"):
        kernels.gather_add(torch.zeros(3, 2), torch.zeros(2, 2).double(), offsets)
    with pytest.raises(ValueError, match="give a floating-point tensor"):
        kernels.gather_add(torch.zeros(3, 2).long(), torch.zeros(2, 2).long(), offsets)


def test_offsets_in_int32_and_owners_as_a_device_finds_them():
    c, r = draw(0, (5, 2), (4, 2))
    offsets = offsets_of([2, 0, 3, 0])
    assert torch.equal(kernels.gather_add(c, r, offsets.int()), kernels.gather_add(c, r, offsets))
    found = torch.searchsorted(offsets[1:], torch.arange(5), right=True)
    assert found.tolist() == owners(offsets, 5).tolist() == reference.owners(offsets)

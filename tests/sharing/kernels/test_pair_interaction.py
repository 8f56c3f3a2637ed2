"""``pair_interaction`` against all pairs of broadcast fields."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_equal, both_paths, counts, draw, offsets_of

from semel.sharing import kernels
from semel.sharing.kernels import reference


def assembled(request, candidate, offsets):
    """The pairs of every candidate in the order of the plain form."""
    pairs = kernels.pair_interaction(request, candidate, offsets)
    columns = kernels.pair_columns(request.shape[1], candidate.shape[1])
    fields = request.shape[1] + candidate.shape[1]
    out = candidate.new_zeros(len(candidate), fields * (fields - 1) // 2)
    out[:, columns.request.to(out.device)] = pairs.request[reference.owners(offsets)]
    out[:, columns.cross.to(out.device)] = pairs.cross
    out[:, columns.candidate.to(out.device)] = pairs.candidate
    return out


@both_paths
@settings(max_examples=20, deadline=None)
@given(lengths=counts, request_fields=st.integers(1, 4), candidate_fields=st.integers(1, 4), k=st.integers(1, 5),
       seed=st.integers(0, 99))
def test_equals_all_pairs_of_broadcast_fields(path, lengths, request_fields, candidate_fields, k, seed):
    inputs = draw(seed, (len(lengths), request_fields, k), (sum(lengths), candidate_fields, k))
    assert_equal(path, assembled, reference.all_pairs, inputs, [offsets_of(lengths)])


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [[40, 0, 7], [1] * 20])
def test_sizes_beyond_a_tile_and_off_its_edges(path, dtype, lengths):
    inputs = draw(1, (len(lengths), 131, 70), (sum(lengths), 3, 70))
    assert_equal(path, assembled, reference.all_pairs, inputs, [offsets_of(lengths)], dtype)


def test_columns_are_each_pair_once():
    columns = kernels.pair_columns(5, 3)
    everything = torch.cat([columns.request, columns.cross.flatten(), columns.candidate])
    assert sorted(everything.tolist()) == list(range(8 * 7 // 2))


def test_gradients_are_those_of_finite_differences():
    for lengths in ([2, 0, 1], [4, 5]):  # gathered, and request by request
        request, candidate = (x.requires_grad_() for x in draw(0, (len(lengths), 3, 2), (sum(lengths), 3, 2)))
        o = offsets_of(lengths)
        assert torch.autograd.gradcheck(lambda r, c, o=o: tuple(kernels.pair_interaction(r, c, o)),
                                        (request, candidate))


def test_fields_of_other_widths_and_offsets_that_do_not_fit():
    with pytest.raises(ValueError, match="with the same K"):
        kernels.pair_interaction(torch.zeros(2, 3, 4), torch.zeros(3, 2, 5), offsets_of([1, 2]))
    with pytest.raises(ValueError, match="ends at 2 but candidate has 3 rows"):
        kernels.pair_interaction(torch.zeros(2, 3, 4), torch.zeros(3, 2, 4), offsets_of([1, 1]))

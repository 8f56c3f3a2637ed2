"""Fused re-indexing against slices and concatenations, and the round trips of an exchange."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.comm import jagged, reference

DTYPES = [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64, torch.bfloat16]
lengths_of_rows = st.lists(st.integers(0, 5), max_size=12)
widths = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])


def rows_of(lengths, width, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 100, (sum(lengths), *width), generator=random).to(dtype)
    return values, torch.tensor([0, *lengths]).cumsum(0)


def assert_same(ours, plain):
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of_rows, width=widths, dtype=st.sampled_from(DTYPES), data=st.data())
def test_permute_equals_slices(lengths, width, dtype, data):
    values, offsets = rows_of(lengths, width, dtype)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9)) if lengths else []
    order = torch.tensor(order, dtype=torch.int64)
    assert_same(jagged.permute(values, offsets, order), reference.permute(values, offsets, order))


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of_rows, width=widths, dtype=st.sampled_from(DTYPES), world=st.integers(1, 5), data=st.data())
def test_dispatch_equals_slices_and_combine_undoes_it(lengths, width, dtype, world, data):
    values, offsets = rows_of(lengths, width, dtype)
    ranks = torch.tensor(data.draw(st.lists(st.integers(0, world - 1), min_size=len(lengths), max_size=len(lengths))),
                         dtype=torch.int64)
    sent, plain = jagged.dispatch(values, offsets, ranks, world), reference.dispatch(values, offsets, ranks, world)
    assert_same(vars(sent).values(), vars(plain).values())
    assert_same(jagged.combine(sent.values, sent.lengths, sent.order),
                reference.combine(plain.values, plain.lengths, plain.order))
    assert_same(jagged.combine(sent.values, sent.lengths, sent.order), (values, offsets))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.integers(0, 4), min_size=1, max_size=4), keys=st.integers(1, 3), width=widths, data=st.data())
def test_transpose_equals_slices_and_untranspose_undoes_it(rows, keys, width, data):
    total = keys * sum(rows)
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=total, max_size=total))
    values, _ = rows_of(lengths, width, torch.int32)
    lengths, rows = torch.tensor(lengths, dtype=torch.int64), torch.tensor(rows)
    turned = jagged.transpose(values, lengths, rows, keys)
    assert_same(turned, reference.transpose(values, lengths, rows, keys))
    assert_same(jagged.untranspose(*turned, rows, keys), reference.untranspose(*turned, rows, keys))
    assert_same(jagged.untranspose(*turned, rows, keys), (values, lengths))


def test_numpy_in_numpy_out():
    values, offsets = np.arange(6, dtype=np.float32), np.array([0, 1, 1, 6])
    moved, new = jagged.permute(values, offsets, np.array([2, 0]))
    assert moved.dtype == np.float32 and moved.tolist() == [1, 2, 3, 4, 5, 0] and new.tolist() == [0, 5, 6]


def test_what_does_not_fit_is_refused():
    values, offsets = np.arange(3), np.array([0, 1, 3])
    with pytest.raises(IndexError, match="rows 0 to 2 of a jagged array of 2"):
        jagged.permute(values, offsets, np.array([0, 2]))
    with pytest.raises(ValueError, match="ranks run from 0 to 2, the world has 2"):
        jagged.dispatch(values, offsets, np.array([0, 2]), 2)
    with pytest.raises(ValueError, match="1 ranks for 2 rows"):
        jagged.dispatch(values, offsets, np.array([0]), 2)
    for places in ([0, 0], [0, 2], [0]):
        with pytest.raises(ValueError, match="places must be 0 to 1, each once"):
            jagged.combine(values, np.array([1, 2]), np.array(places))
    with pytest.raises(ValueError, match="3 lengths for 2 keys of 2 rows"):
        jagged.transpose(values, np.array([1, 1, 1]), np.array([1, 1]), 2)
    with pytest.raises(ValueError, match="Python objects"):
        jagged.permute(np.array(["a", "b", "c"], object), offsets, np.array([1]))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 3, 1500]), max_size=6), width=st.sampled_from([(), (3,)]),
       dtype=st.sampled_from(DTYPES), data=st.data())
def test_triton_copies_the_same_ranges(lengths, width, dtype, data):
    from semel.comm import triton_jagged

    device = "cuda" if torch.cuda.is_available() else "cpu"  # there under Triton's interpreter (tests/conftest.py)
    values, offsets = rows_of(lengths, width, dtype)
    order = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6)) if lengths else []
    order = torch.tensor(order, dtype=torch.int64)
    ours = triton_jagged.copy_ranges(values.to(device), offsets[order].to(device), offsets.diff()[order].to(device))
    assert_same([x.cpu() for x in ours], reference.permute(values, offsets, order))

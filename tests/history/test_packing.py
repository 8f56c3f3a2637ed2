"""Packed columns: every bit comes back, at any place, and damaged payloads are refused or read within bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from semel.history.packing import BLOCK, pack, unpack, view_packed

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?"]


def bits(array):
    return array.reshape(-1).view(f"u{array.dtype.itemsize}")


def round_trip(array):
    column = view_packed(pack(array), array.size)
    return unpack(column, array.size, array.dtype)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 400))))
def test_every_bit_comes_back(array):
    assert np.array_equal(bits(round_trip(array)), bits(array))


@pytest.mark.parametrize("array", [
    np.array([], np.int64), np.array([-(2**63), 2**63 - 1, 0, -1]), np.array([0, 2**64 - 1, 2**63], np.uint64),
    np.full(1000, -7, np.int16), np.array([np.nan, -0.0, 0.0, np.inf, -np.inf]),
    np.arange(1000) * 1_000_000 + 5, np.arange(BLOCK), np.arange(BLOCK + 1), np.arange(3 * BLOCK - 1, dtype=np.int32),
    np.full(300, 2**63 - 1), np.array([-(2**63)] * 200 + [2**63 - 1] * 200),
    np.array([5, 5 + 2**62, 5 + 2**63 - 2**62]),
], ids=lambda array: f"{array.dtype}{array.size}")
def test_extremes(array):
    assert np.array_equal(bits(round_trip(array)), bits(array))


def test_narrow_ranges_and_common_divisors_take_few_bits():
    seconds = np.random.default_rng(0).integers(0, 1 << 20, 12_800) * 1_000_000 + 1_700_000_000_000_000
    assert len(pack(seconds)) / len(seconds) < 20 / 8 + 0.2
    assert len(pack(np.zeros(12_800, np.int64))) / 12_800 < 0.06
    assert len(pack(np.random.default_rng(0).integers(0, 2, 12_800).astype(bool))) / 12_800 < 0.2
    floats = np.random.default_rng(0).integers(1, 6, 12_800).astype(np.float32)
    assert len(pack(floats)) / len(floats) < 1


@settings(max_examples=300, deadline=None)
@given(size=st.integers(0, 300), flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
       cut=st.integers(-9, 9), seed=st.integers(0, 5))
def test_a_damaged_payload_is_refused_or_read_within_bounds(size, flips, cut, seed):
    payload = pack(np.random.default_rng(seed).integers(-(10**seed), 10**seed, size))
    payload = np.concatenate([payload, np.zeros(16, np.uint8)])[: max(len(payload) + cut, 0)].copy()
    for place, value in flips:
        if len(payload):
            payload[place % len(payload)] = value
    try:
        column = view_packed(payload, size)
    except ValueError:
        return
    assert len(unpack(column, size, np.int64)) == size

"""Packed columns: every bit comes back, at any place, and damaged payloads are refused or read within bounds."""

import os
import signal
import time

import numba
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from semel.batch import Pointers
from semel.history import EventSchema, HistoryStore, Projection
from semel.history.kernels.packing import BLOCK, copy_range, pack, unpack, view_packed

copy_some = numba.njit(lambda column, first, count, out, to: copy_range(column, first, count, out, to))
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


def decoded(payload, count):
    """As docs/formats/history.md says, in Python's integers."""
    data = payload.tobytes()
    blocks = -(-count // 128)
    starts = np.frombuffer(data[len(data) - 4 * (blocks + 1):], "<u4").tolist()
    values = []
    for block in range(blocks):
        size, at = min(128, count - 128 * block), starts[block]
        bits, base_bytes, scale_bytes = data[at], data[at + 1] & 15, data[at + 1] >> 4
        at += 2
        base = int.from_bytes(data[at : at + base_bytes], "little", signed=True)
        at += base_bytes
        scale = int.from_bytes(data[at : at + scale_bytes], "little", signed=True) if scale_bytes else 1
        at += scale_bytes
        lanes, width = (4, 32) if bits <= 32 else (2, 64)
        words = -(-(-(-size // lanes) * bits) // width)
        assert at + 16 * words == starts[block + 1]
        lane = [0] * lanes
        for k in range(words):
            for which in range(lanes):
                place = at + (k * lanes + which) * width // 8
                lane[which] |= int.from_bytes(data[place : place + width // 8], "little") << (k * width)
        values += [(base + scale * (lane[i % lanes] >> (i // lanes * bits) & (1 << bits) - 1)) % 2**64
                   for i in range(size)]
    assert len(data) - 4 * (blocks + 1) - starts[-1] in range(16, 24)
    return values


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["i1", "i8", "u8", "f4"]).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 300))))
def test_the_bytes_are_those_of_the_format(array):
    mask = 2 ** (8 * array.dtype.itemsize) - 1
    assert [value & mask for value in decoded(pack(array), array.size)] == bits(array).tolist()


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 47, 63, 64])
@pytest.mark.parametrize("step", [1, 1000])
def test_any_range_of_any_width(width, step):
    """Each first and last value of a range, across the edges of rows of lanes and of blocks."""
    values = np.random.default_rng(width).integers(0, 2**width, 400, dtype=np.uint64, endpoint=width < 64)
    values = (values % np.uint64(2**width - 1) * np.uint64(step)).view(np.int64) - 5
    column = view_packed(pack(values), len(values))
    for first in (0, 1, 3, 4, 126, 127, 128, 129, 255):
        for count in (0, 1, 2, 3, 4, 5, 127, 128, 129, 145):
            out = np.full(count + 2, 7, np.uint64)
            copy_some(column, first, count, out, 1)
            assert np.array_equal(out[1:-1], values[first : first + count].view(np.uint64))
            assert out[0] == out[-1] == 7


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


def test_a_store_of_any_codec_answers_the_same_in_one_read_or_many(tmp_path):
    random = np.random.default_rng(0)
    count, users = 40_000, 300
    table = pa.table({
        "user_id": random.integers(0, users, count), "event_time": random.integers(0, 10**12, count),
        "item_id": pa.array(random.zipf(1.3, count), mask=random.random(count) < 0.01),
        "price": random.random(count).astype(np.float32), "small": random.integers(-9, 9, count).astype(np.int8),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(random.random(3 * count).astype(np.float16)), 3),
        "action": pa.array(random.choice(["view", "like"], count)).dictionary_encode(),
    })
    schema = EventSchema({"item_id": pa.int64(), "price": pa.float32(), "small": pa.int8(),
                          "vector": pa.list_(pa.float16(), 3), "action": pa.dictionary(pa.int8(), pa.string())},
                         group="action")
    asked = random.permutation(np.tile(np.arange(users), 10))
    pointers = Pointers(asked, np.int64(9 * 10**11), np.int64(2))
    answers = []
    for codec in ("packed", "plain", "cold"):
        with HistoryStore.create(tmp_path / codec, schema, shards=4) as store:
            store.append(table.slice(0, 30_000))
            store.compact(codec=codec)
            store.append(table.slice(30_000))
            for projection in (Projection(("item_id", "price", "small", "vector", "action")),
                               Projection(("item_id", "action"), last=7, groups=("like",), since=10**11)):
                whole = store.read(pointers, projection)  # enough values for several threads
                parts = [store.read(pointers[at : at + 100], projection) for at in range(0, len(pointers), 100)]
                for name, column in whole.columns.items():
                    assert np.array_equal(bits(column), np.concatenate([bits(part.columns[name]) for part in parts]))
                answers.append({**whole.columns, "offsets": whole.offsets, **{
                    f"{name} valid": valid for name, valid in (whole.validity or {}).items()}})
            assert store.stats()["generation"] == 1 and store.verify()
            store.compact(codec={"packed": "plain", "plain": "cold", "cold": "packed"}[codec])  # takes the log along
            assert store.read(pointers, Projection(("item_id",))).offsets[-1] == answers[-2]["offsets"][-1]
    for one, other in zip(answers[:2] * 2, answers[2:], strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(bits(one[name]), bits(other[name])) for name in one)


def test_another_codec_is_refused(tmp_path):
    with HistoryStore.create(tmp_path / "store", EventSchema({"item_id": pa.int64()})) as store, pytest.raises(
        ValueError, match="codec 'zip' is none of packed, plain, cold"
    ):
        store.compact(codec="zip")


def fill(store):
    random = np.random.default_rng(0)
    store.append(pa.table({"user_id": random.integers(0, 50, 20_000), "event_time": random.integers(0, 10**9, 20_000),
                           "item_id": random.integers(0, 10**6, 20_000)}))
    store.compact()
    return Pointers(np.tile(np.arange(50), 20), np.int64(10**9), np.int64(1))


@pytest.mark.timeout(60)
def test_a_forked_process_reads_on(tmp_path):
    """Threads do not come along into a child."""
    with HistoryStore.create(tmp_path / "store", EventSchema({"item_id": pa.int64()})) as store:
        pointers = fill(store)
        total = int(store.read(pointers, Projection(("item_id",))).columns["item_id"].sum())
        child = os.fork()
        if not child:
            found = int(store.read(pointers, Projection(("item_id",))).columns["item_id"].sum())
            os._exit(0 if found == total else 1)
        for _ in range(400):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = -1
        assert status == 0

"""Keys that were seen lately: the same as a plain ordered set of the last ones, in a sixth of its memory."""

import tracemalloc
from collections import OrderedDict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.examples import OutcomeLog
from semel.examples.recent_keys import BLOCKS, RecentKeys, digest_of


@given(st.lists(st.integers(0, 6), max_size=60), st.sampled_from([1, 3, 64, 200]))
def test_it_remembers_what_a_plain_ordered_set_does_up_to_a_block(posts, capacity):
    """All of the last ``capacity - block``, none before the last ``capacity``."""
    keys, plain = RecentKeys(capacity), OrderedDict()
    for at, post in enumerate(posts):
        digests = [*(digest_of(f"{at}-{one}") for one in range(post)), None]
        assert not any(keys.known(digests))
        keys.add(digests, at)
        plain.update(dict.fromkeys(digests[:-1]))
        assert len(keys) <= capacity
    last = list(plain)
    surely = last[len(last) - max(0, min(len(last), capacity - max(6, capacity // BLOCKS))):]
    assert all(keys.known(surely))
    assert not any(keys.known(last[:-capacity])) and keys.known([None, b"?" * 16]) == [False, False]


def test_a_window_forgets_whatever_the_capacity_is():
    keys = RecentKeys(1000, window_us=10)
    for at in range(100):
        keys.add([digest_of(str(at))], at)
    assert all(digest_of(str(at)) in keys for at in range(89, 100))
    assert not any(digest_of(str(at)) in keys for at in range(89 - 1000 // BLOCKS))
    keys.forget(1000)
    assert len(keys) == 0


def test_what_was_added_last_can_be_discarded():
    keys = RecentKeys(64)
    for at in range(10):
        keys.add([digest_of(str(at))], at)
        if at % 2:
            keys.discard([digest_of(str(at)), None])
    assert [digest_of(str(at)) in keys for at in range(10)] == [True, False] * 5


def test_a_full_set_takes_sixteen_bytes_a_key_and_does_not_grow():
    keys = RecentKeys(1 << 17)
    digest = [bytes([k & 255, k >> 8 & 255, k >> 16]) + b"-" * 13 for k in range(3 << 16)]
    tracemalloc.start()
    try:
        sizes = []
        for start in range(0, len(digest), 1 << 10):
            keys.add(digest[start : start + (1 << 10)], start)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    full = sizes[len(sizes) * 2 // 3 :]
    assert max(full) < 16 * (1 << 17) + 600_000
    assert max(full[len(full) // 2 :]) <= max(full[: len(full) // 2]) + 50_000


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        RecentKeys(0)


def outcomes(first, count, at):
    return pa.table({
        "request_id": ["r"] * count, "item_id": pa.array([1] * count, pa.int64()), "task": ["click"] * count,
        "value": pa.array([1.0] * count, pa.float32()), "received_at": pa.array([at] * count, pa.int64()),
        "outcome_key": [f"key-{number}" for number in range(first, first + count)]})


def test_outcome_keys_are_known_over_restarts_and_segments_and_forgotten_after_their_window(tmp_path):
    log = OutcomeLog(tmp_path, segment_bytes=1, window_us=1000)
    assert [log.append(outcomes(10 * number, 10, 100 * number)) for number in range(8)] == [10] * 8
    assert log.append(outcomes(0, 80, 750)) == 0
    log.close()
    again = OutcomeLog(tmp_path, segment_bytes=1, window_us=1000)
    assert again.append(outcomes(0, 81, 760)) == 1
    assert again.append(outcomes(81, 1, 5000)) == 1
    assert again.append(outcomes(0, 10, 5001)) == 10  # so late that nobody remembers; a join ignores it
    assert len(again.read()) == 92

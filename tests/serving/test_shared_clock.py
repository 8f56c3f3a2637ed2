"""One clock for several processes: what was stamped before is older, whoever stamps."""

import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.serving.shared_clock import SharedClock


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**7)), min_size=1, max_size=30))
def test_times_grow_over_processes_whatever_the_systems_clock_does(tmp_path_factory, stamps):
    path = tmp_path_factory.mktemp("clock") / "clock"
    SharedClock.create(path, 3)
    clocks = [SharedClock(path, slot) for slot in range(3)]
    real, times = time.time_ns, []
    try:
        for slot, microseconds in stamps:
            time.time_ns = lambda now=microseconds: now * 1000
            times.append(clocks[slot].now())
    finally:
        time.time_ns = real
    assert all(first < second for first, second in pairwise(times))
    assert times[0] == max(stamps[0][1], 1)


def test_a_restarted_process_goes_on_beyond_all(tmp_path):
    SharedClock.create(tmp_path / "clock", 2)
    last = SharedClock(tmp_path / "clock", 0).now()
    assert SharedClock(tmp_path / "clock", 0).now() > last
    with pytest.raises(ValueError, match="has 2 slots, there is no slot 2"):
        SharedClock(tmp_path / "clock", 2)

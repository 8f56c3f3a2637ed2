"""The event engine against its plain version, closed forms of collectives, and toys worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning import algorithms, reference
from semel.planning.events import Tasks, run

ALPHA, BETA = 0.5, 8.0


def even(a: int, b: int) -> float:
    return ALPHA


def finish(tasks: Tasks, done: list[int], bandwidth: float = BETA) -> float:
    _, end = run(tasks, dict.fromkeys(tasks.links, bandwidth))
    return float(end[done].max())


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_collectives_take_what_their_closed_forms_say(n):
    """On equal free links, exactly (numbers are such that nothing rounds)."""
    ranks, size = range(n), 16.0 * n
    for add, seconds in (
            (algorithms.ring_all_reduce, 2 * (n - 1) * (ALPHA + size / (n * BETA))),
            (algorithms.ring_all_gather, (n - 1) * (ALPHA + size / (n * BETA))),
            (algorithms.ring_reduce_scatter, (n - 1) * (ALPHA + size / (n * BETA))),
            (algorithms.all_to_all, (n - 1) * (ALPHA + size / (n * BETA))),
            (algorithms.tree_all_reduce, 2 * int(np.ceil(np.log2(n))) * (ALPHA + size / BETA))):
        tasks = Tasks()
        assert finish(tasks, add(tasks, ranks, size, even)) == seconds, add.__name__


@pytest.mark.parametrize(("groups", "each"), [(2, 2), (2, 4), (4, 2)])
def test_hierarchical_all_reduce(groups, each):
    """Reduce-scatter of b inside, all-reduce of b / m across, all-gather of b inside; latency by distance."""
    size = 16.0 * groups * each
    members = [range(g * each, (g + 1) * each) for g in range(groups)]
    tasks = Tasks()
    done = algorithms.hierarchical_all_reduce(tasks, members, size, lambda a, b: 0.5 if a // each == b // each else 4.0)
    inside = (each - 1) * (0.5 + size / (each * BETA))
    across = 2 * (groups - 1) * (4.0 + size / each / (groups * BETA))
    assert finish(tasks, done) == 2 * inside + across


def test_two_buildings_by_hand():
    """Two ranks a building, 8 bytes/s each, 10 bytes/s between the buildings, 3 s away. All four send 40 bytes across
    at once: two share each direction's 10 bytes/s: 5 each, 8 s, and 3 s on the way. Inside, 40 bytes at 8 take 5 s +
    0.5."""
    tasks = Tasks()
    across = [algorithms.message(tasks, a, b, 40.0, (), lambda a, b: 3.0, lambda a, b: [("link", a < b)])
              for a, b in ((0, 2), (1, 3), (2, 0), (3, 1))]
    inside = algorithms.message(tasks, 0, 1, 40.0, across[:1], even, algorithms.direct)
    bandwidth = {link: 10.0 if link[0] == "link" else 8.0 for link in tasks.links}
    start, end = run(tasks, bandwidth)
    assert end[across].tolist() == [11.0] * 4
    assert (start[inside], end[inside]) == (11.0, 16.5)


def test_max_min_by_hand():
    """One flow over both links, one over each: the narrow link's halves are 1, the wide link's rest is 9."""
    tasks = Tasks()
    tasks.add(0.0, loads=[("narrow", 2.0), ("wide", 2.0)])
    tasks.add(0.0, loads=[("narrow", 4.0)])
    tasks.add(0.0, loads=[("wide", 9.0)])
    _, end = run(tasks, {"narrow": 2.0, "wide": 10.0})
    assert end.tolist() == [2.0, 3.0, 1.0]  # 1/s, 1/s then 2/s, 9/s


def test_skewed_all_to_all_waits_for_its_fullest_rank():
    n, size = 4, np.full((4, 4), 8.0)
    size[:, 0] = 32.0  # everyone sends most to rank 0
    tasks = Tasks()
    seconds = finish(tasks, algorithms.all_to_all(tasks, range(n), size, even))
    even_tasks = Tasks()
    assert seconds >= (n - 1) * 32.0 / BETA
    assert seconds > finish(even_tasks, algorithms.all_to_all(even_tasks, range(n), 32.0, even))


@st.composite
def programs(draw):
    tasks = Tasks()
    links = ["a", "b", "c"]
    for number in range(draw(st.integers(1, 12))):
        follows = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        loads = draw(st.dictionaries(st.sampled_from(links), st.integers(0, 20), max_size=3))
        tasks.add(draw(st.integers(0, 5)), follows, [(link, float(size)) for link, size in loads.items()])
    return tasks, {link: float(draw(st.integers(1, 8))) for link in links}


@settings(deadline=None)
@given(programs())
def test_fast_and_plain_agree(program):
    tasks, bandwidth = program
    start, end = run(tasks, bandwidth)
    plain = reference.run_tasks(tasks, bandwidth)
    np.testing.assert_allclose(np.stack([start, end], 1), np.array(plain), rtol=1e-9, atol=1e-9)
    assert (run(tasks, bandwidth)[1] == end).all()  # the same bits again


@settings(deadline=None)
@given(programs())
def test_not_before_any_bound_and_not_after_all_in_a_row(program):
    tasks, bandwidth = program
    start, end = run(tasks, bandwidth)
    alone = np.array([seconds + max((size / bandwidth[link] for link, size in loads), default=0.0)
                      for seconds, loads in zip(tasks.seconds, tasks.loads, strict=True)])
    assert (end - start >= alone - 1e-9).all()
    for task, others in enumerate(tasks.follows):
        assert all(start[task] >= end[before] for before in others)
    for link, capacity in bandwidth.items():
        carried = sum(size for loads in tasks.loads for name, size in loads if name == link)
        assert end.max() >= carried / capacity - 1e-9
    # A shared link is always full: one after the other takes at most as long as each link's bytes in a row.
    assert end.max() <= sum(tasks.seconds) + sum(size / bandwidth[link] for loads in tasks.loads for link, size in loads
                                                 ) + 1e-9


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 4).map(float), min_size=1), min_size=1,
                max_size=6),
       st.fixed_dictionaries({link: st.integers(1, 9).map(float) for link in "abc"}))
def test_fair_rates_fill_a_link_of_every_flow(flows, bandwidth):
    rates = reference.fair(flows, bandwidth)
    used = {link: sum(rate * flow.get(link, 0.0) for rate, flow in zip(rates, flows, strict=True))
            for link in bandwidth}
    assert all(used[link] <= bandwidth[link] * (1 + 1e-9) for link in bandwidth)
    for rate, flow in zip(rates, flows, strict=True):  # max-min: on a full link no one on it has more than this flow
        assert any(used[link] >= bandwidth[link] * (1 - 1e-9) and all(
            other <= rate * (1 + 1e-9) for other, others in zip(rates, flows, strict=True) if link in others)
            for link in flow)


def test_a_faster_task_may_make_a_later_end_where_links_are_shared():
    """Graham's anomaly, kept in view: it is why ``simulate`` serves links in order of issue."""

    def last(first: float) -> float:
        tasks = Tasks()
        before = tasks.add(first)
        tasks.add(0.0, [before], [("link", 4.0)])
        tasks.add(10.0, loads=[("link", 4.0)])
        return float(run(tasks, {"link": 1.0})[1].max())

    assert last(4.0) == 14.0
    assert last(0.0) == 18.0


def test_bad_tasks_are_refused():
    tasks = Tasks()
    with pytest.raises(ValueError, match="no negative seconds or bytes, got -1"):
        tasks.add(-1)
    with pytest.raises(ValueError, match=r"task 0 can follow tasks 0 .. -1, not \(0,\)"):
        tasks.add(1, [0])
    tasks.add(1, loads=[("link", 1.0)])
    with pytest.raises(ValueError, match="bandwidth is above 0"):
        run(tasks, {"link": 0.0})
    with pytest.raises(KeyError, match="link"):
        run(tasks, {})
    assert run(Tasks(), {})[0].shape == (0,)

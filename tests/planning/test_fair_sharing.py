"""Max-min sharing between axes: as in order of issue where no two axes meet on a link and a phase has one transfer an
axis; by hand where they do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning.fair import simulate_fair
from semel.planning.schedules import Op, Schedule, schedule
from semel.planning.simulate import simulate
from semel.planning.workload import Chunk, Transfer, Workload

AXES = {"tp": "all_reduce", "ep": "all_to_all", "fsdp": "all_gather", "dp": "all_reduce", "table": "all_to_all"}
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2), ("greedy", 2)]


@st.composite
def cases(draw, own_links: bool):
    def load(axis):
        return ((axis if own_links else draw(st.sampled_from(["a", "b"])), float(draw(st.integers(0, 9)))),)

    name, each = draw(st.sampled_from(CASES))
    stages, laps = draw(st.integers(1, 3)), 2
    chunks = []
    for _ in range(stages * each):
        transfers = []
        for _ in range(draw(st.integers(0, 3))):
            axis = draw(st.sampled_from(sorted(AXES)))
            collective = draw(st.sampled_from(["all_gather", "reduce_scatter"])) if axis == "fsdp" else AXES[axis]
            count = draw(st.sampled_from([1, 2, 4]))
            latency = draw(st.sampled_from([0.0, 0.5])) if count == 1 else 0.0
            phase = draw(st.sampled_from(["forward", "backward", "weight", "start", "end"]))
            if own_links and any((one.axis, one.phase) == (axis, phase) for one in transfers):
                continue  # parts of two transfers of one axis take turns here, and follow each other there
            transfers.append(Transfer(axis, collective, 1.0, latency, load(axis), phase, draw(st.booleans()), count))
        send = Transfer("pp", "send", 1.0, draw(st.sampled_from([0.0, 4.0])), load("pp"), "forward",
                        draw(st.booleans()))
        seconds = [float(draw(st.integers(1, 4))) for _ in range(3)]
        chunks.append(Chunk(*seconds, tuple(transfers), send, 0, 0, 0, 1, 0, draw(st.sampled_from([0.0, 1.0]))))
    links = dict.fromkeys([*AXES, "pp", "a", "b"], 2.0)
    return (Workload(tuple(chunks), stages, stages, laps * stages, links, 1e9, 1.0, 1.0),
            schedule(name, stages, laps * stages, each))


@settings(deadline=None, max_examples=60)
@given(cases(own_links=True))
def test_where_axes_have_links_of_their_own_order_of_issue_is_fair(case):
    work, plan = case
    fair, in_order = simulate_fair(work, plan), simulate(work, plan)
    np.testing.assert_allclose(fair.op_end, in_order.op_end, rtol=1e-9)
    np.testing.assert_allclose(fair.op_start, in_order.op_start, rtol=1e-9, atol=1e-9)
    assert fair.seconds == pytest.approx(in_order.seconds, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(cases(own_links=False))
def test_no_shorter_than_bounds_and_no_longer_than_all_in_a_row(case):
    work, plan = case
    fair, in_order = simulate_fair(work, plan), simulate(work, plan)
    busy = in_order.busy
    link = max(load.max() for load in in_order.link_load.values()) * in_order.seconds
    assert fair.seconds >= max(busy.max(), link) * (1 - 1e-9)
    alone = sum(in_order.records["end"] - in_order.records["start"])
    assert fair.seconds <= (busy.sum() + alone) * (1 + 1e-9)


def test_two_axes_halve_a_link():
    """Beside 4 s of computation 4 s of ``ep`` and 2 s of ``tp``: shared, both at half rate until 4 s, then the rest of
    ``ep`` alone until 6 s. Order of issue ends as late."""
    beside = tuple(Transfer(axis, "all_reduce", 1.0, 0.0, (("link", size),), "forward", True)
                   for axis, size in (("ep", 4.0), ("tp", 2.0)))
    one = Chunk(4.0, 1.0, 1.0, beside, None, 0, 0, 0, 1, 0)
    plan = Schedule.of("by hand", [[Op("F", 0, 0), Op("B", 0, 0)]], (0,))
    work = Workload((one,), 1, 1, 1, {"link": 1.0}, 1e3, 1.0, 1.0)
    assert simulate_fair(work, plan).op_end.tolist() == [6.0, 8.0]
    assert simulate(work, plan).op_end.tolist() == [6.0, 8.0]


def test_a_send_does_not_wait_for_gradients_that_were_issued_before_it():
    """Device 1 scatters 6 s of gradients behind B0, and sends B1's 1 s: at half rate, while both are under way."""
    scatter = Transfer("fsdp", "reduce_scatter", 1.0, 0.0, (("link", 6.0),), "weight", True)
    send = Transfer("pp", "send", 1.0, 0.0, (("link", 1.0),), "forward", True)
    plain, last = Chunk(1.0, 1.0, 1.0, (), send, 0, 0, 0, 1, 0), Chunk(1.0, 1.0, 1.0, (scatter,), None, 0, 0, 0, 1, 0)
    plan = Schedule.of("by hand", [[Op("F", 0, 0), Op("F", 1, 0), Op("B", 0, 0), Op("B", 1, 0)],
                                   [Op("F", 0, 1), Op("B", 0, 1), Op("F", 1, 1), Op("B", 1, 1)]], (0, 1))
    work = Workload((plain, last), 2, 2, 2, {"link": 1.0}, 1e3, 1.0, 1.0)
    fair, in_order = simulate_fair(work, plan), simulate(work, plan)
    assert fair.op_start[3] < in_order.op_start[3]  # B1 of device 0

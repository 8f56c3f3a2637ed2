"""Promise 9: the plan is checkable. More bandwidth, less latency, less work never make a plan slower whose order of
operations is fixed; names of ranks do not matter; a step is no shorter than any bound and no longer than its parts in a
row; every second of every device is accounted for; the fast simulation is the plain one.

Closed forms are in tests/planning/test_schedules.py and test_events.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning import encoding, reference
from semel.planning.schedules import Schedule, schedule
from semel.planning.simulate import simulate
from semel.planning.workload import Chunk, Transfer, Workload

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2),
         ("dualpipe_v", 2), ("greedy", 1), ("greedy", 2), ("greedy", 3), ("local", 1)]
KINDS_OF_TRANSFER = [("tp", "all_reduce"), ("ep", "all_to_all"), ("fsdp", "all_gather"), ("fsdp", "reduce_scatter"),
                     ("dp", "all_reduce"), ("table", "all_to_all")]
CLOSE = 1e-9
many = settings(deadline=None, max_examples=60)


@st.composite
def transfers(draw, links):
    axis, collective = draw(st.sampled_from(KINDS_OF_TRANSFER))
    loads = draw(st.dictionaries(st.sampled_from(links), st.integers(0, 12).map(float), max_size=2))
    return Transfer(axis, collective, 1.0, draw(st.sampled_from([0.0, 0.25, 2.0])), tuple(loads.items()),
                    draw(st.sampled_from(["forward", "backward", "weight", "start", "end"])), draw(st.booleans()),
                    draw(st.integers(1, 4)))


@st.composite
def cases(draw):
    name, each = draw(st.sampled_from(CASES))
    stages, laps = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    links = ["host", "rack", "building"]
    chunks = []
    for _ in range(stages * each):
        send = Transfer("pp", "send", 1.0, draw(st.sampled_from([0.0, 0.5, 5.0])),
                        ((draw(st.sampled_from(links)), draw(st.integers(0, 8).map(float))),), "forward",
                        draw(st.booleans()))
        seconds = draw(st.tuples(*[st.integers(1, 6).map(float)] * 3))
        chunks.append(Chunk(*seconds, tuple(draw(st.lists(transfers(links), max_size=4))), send, 3.0, 2.0, 1.0, 1.0,
                            0.5, draw(st.sampled_from([0.0, 1.5]))))
    work = Workload(tuple(chunks), stages * 8, stages, laps * stages,
                    {link: draw(st.integers(1, 8).map(float)) for link in links}, 1e9, 1.0, 1.0)
    return work, schedule(name, stages, laps * stages, each, send=draw(st.sampled_from([0.0, 2.0])))


def seconds(work: Workload, plan: Schedule) -> float:
    return simulate(work, plan).seconds


@many
@given(cases(), st.sampled_from(["host", "rack", "building"]), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(case, link, factor):
    work, plan = case
    faster = replace(work, links={**work.links, link: work.links[link] * factor})
    assert seconds(faster, plan) <= seconds(work, plan) * (1 + CLOSE)


@many
@given(cases(), st.floats(0, 1), st.floats(0, 1))
def test_less_latency_and_less_work_are_never_slower(case, latency, work_left):
    work, plan = case

    def quicker(one: Transfer) -> Transfer:
        return replace(one, latency=one.latency * latency)

    less = replace(work, chunks=tuple(replace(chunk, send=quicker(chunk.send), transfers=tuple(map(
        quicker, chunk.transfers))) for chunk in work.chunks))
    assert seconds(less, plan) <= seconds(work, plan) * (1 + CLOSE)
    lighter = replace(less, chunks=tuple(replace(chunk, forward=chunk.forward * work_left) for chunk in less.chunks))
    assert seconds(lighter, plan) <= seconds(less, plan) * (1 + CLOSE)


@many
@given(cases())
def test_the_fast_simulation_is_the_plain_one(case):
    work, plan = case
    trace = simulate(work, plan)
    times, total = reference.run(work, plan)
    flat = np.array([row for listed in times for row in listed])
    np.testing.assert_allclose(np.stack([trace.op_start, trace.op_end], 1), flat, rtol=1e-12, atol=1e-12)
    assert trace.seconds == pytest.approx(total, rel=1e-12)


@many
@given(cases(), st.randoms(use_true_random=False))
def test_names_of_ranks_do_not_matter(case, random):
    work, plan = case
    order = list(range(plan.devices))
    random.shuffle(order)  # new device -> old one
    starts = np.cumsum([0] + [len(plan.ops[old]) for old in order])
    pairs = np.concatenate([np.empty(0, np.int64)] + [
        plan.pairs[(plan.pairs >= plan.offsets[old]) & (plan.pairs < plan.offsets[old + 1])] - plan.offsets[old] + start
        for old, start in zip(order, starts[:-1], strict=True)])
    again = Schedule.of(plan.name, [plan.ops[old] for old in order], [order.index(d) for d in plan.placement],
                        sync_every=plan.sync_every, pairs=pairs)
    here, there = simulate(work, plan), simulate(work, again)
    assert there.seconds == here.seconds
    assert there.busy.tolist() == here.busy[order].tolist()


@many
@given(cases())
def test_no_shorter_than_any_bound_and_no_longer_than_its_parts(case):
    work, plan = case
    trace = simulate(work, plan)
    assert trace.seconds >= trace.busy.max() * (1 - CLOSE)
    for load in trace.link_load.values():
        assert (load <= 1 + CLOSE).all()  # no link carries more than it can
    there_and_back = sum(chunk.forward + chunk.backward_input for chunk in work.chunks)  # of one micro-batch
    crossed = [chunk.send for chunk, a, b in zip(work.chunks, plan.placement, plan.placement[1:], strict=False)
               if a != b]
    assert trace.seconds >= (there_and_back + 2 * sum(encoding.seconds_of(one, work) for one in crossed)) * (1 - CLOSE)
    alone = sum(encoding.seconds_of(trace.table[record["transfer"]], work) for record in trace.records)
    assert trace.seconds <= (trace.busy.sum() + alone) * (1 + CLOSE)


@many
@given(cases())
def test_every_second_is_accounted_for(case):
    work, plan = case
    trace = simulate(work, plan)
    parts = trace.busy + trace.waiting + sum(trace.exposed.values())
    np.testing.assert_allclose(parts, trace.seconds, rtol=1e-9)
    assert sum(trace.bubble.values()) == pytest.approx(trace.seconds - trace.busy.mean(), abs=1e-9 * trace.seconds)
    assert min(trace.bubble.values()) >= -1e-9 * trace.seconds
    assert all(values.min() >= 0 for values in trace.exposed.values())
    for device in range(plan.devices):
        times, held = trace.memory(device)
        assert (np.diff(times) >= 0).all()
        assert held[-1] == pytest.approx(held[0])  # all activations are gone
        assert held.min() >= held[0] - 1e-9


@many
@given(cases())
def test_the_same_again(case):
    work, plan = case
    assert (simulate(work, plan).op_end == simulate(work, plan).op_end).all()

"""Steps worked out by hand, one mechanism at a time."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planning_schedules import cost
from semel.planning.schedules import Op, Schedule, schedule
from semel.planning.simulate import hints, simulate
from semel.planning.trace import chrome_trace, write_chrome_trace
from semel.planning.workload import Chunk, Transfer, Workload

LINK = {"link": 1.0, "other": 1.0}


def step(ops, *transfers: Transfer, send: Transfer | None = None, links=LINK, stages: int = 1,
         durations=(8.0, 4.0, 4.0)):
    """A trace of lists such as ["F0 B0"], one a device."""
    one = Chunk(*durations, transfers, send, 30.0, 20.0, 10.0, 5.0, 1.0)
    lists = [[Op(word[0], int(word[1:]), d) for word in words.split()] for d, words in enumerate(ops)]
    plan = Schedule.of("by hand", lists, range(stages))
    return simulate(Workload((one,) * stages, stages, stages, plan.count, links, 1e3, 1.0, 1.0), plan)


def transfer(axis, collective, seconds, phase, hidden=True, count=1, link="link", latency=0.0):
    return Transfer(axis, collective, seconds, latency, ((link, seconds),) if seconds else (), phase, hidden, count)


def ends(trace):
    return [op.end for op in trace.ops]


@pytest.mark.parametrize(("each", "first", "second"), [(1.0, 9.0, 17.0), (3.0, 14.0, 26.0)])
def test_gathers_run_one_layer_and_one_operation_ahead(each, first, second):
    """Four layers of 2 s: the first gather is seen, the others where they take longer than a layer: 1 + 8; 3 + 3 x 3 +
    2. The next operation's begin at once: fetched by then (9 + 8), or the link is the bound (24 + 2)."""
    trace = step(["F0 F1 B0 B1"], transfer("fsdp", "all_gather", each, "forward", count=4))
    assert ends(trace)[:2] == [first, second]
    assert trace.exposed["fsdp", "link"][0] == second - 16


@pytest.mark.parametrize(("each", "end"), [(1.0, 17.0), (3.0, 8 + 2 + 12.0)])
def test_scattered_gradients_trail(each, end):
    """Backward from 8 to 16 in four layers: the last scatter comes after it, or all one after the other from 10 on."""
    trace = step(["F0 B0"], transfer("fsdp", "reduce_scatter", each, "weight", count=4))
    assert (ends(trace), trace.seconds) == ([8.0, 16.0], end)


@pytest.mark.parametrize(("each", "end"), [(0.5, 24.5), (4.0, 18 + 16.0)])
def test_data_parallel_buckets_go_with_the_last_backward(each, end):
    """F0 B0 F1 B1 of 8 s: buckets of B1 (24 to 32) from 26 on. Without overlap all of them come after it."""
    trace = step(["F0 B0 F1 B1"], transfer("dp", "all_reduce", each, "end", count=4))
    assert trace.seconds == end + 8
    after = step(["F0 B0 F1 B1"], transfer("dp", "all_reduce", each, "end", hidden=False, count=4))
    assert after.seconds == 32 + 4 * each


def test_expert_exchange_beside_and_in_line():
    """8 s of computation, beside it 6 s or 10 s of all-to-all; in line it adds."""
    for seconds, end in ((6.0, 8.0), (10.0, 10.0)):
        assert ends(step(["F0 B0"], transfer("ep", "all_to_all", seconds, "forward")))[0] == end
    assert ends(step(["F0 B0"], transfer("ep", "all_to_all", 6.0, "forward", hidden=False)))[0] == 14.0


def test_transfers_of_one_link_take_turns_and_of_two_links_do_not():
    beside = [transfer("ep", "all_to_all", 6.0, "forward"), transfer("tp", "all_reduce", 6.0, "forward")]
    assert ends(step(["F0 B0"], *beside))[0] == 12.0
    assert ends(step(["F0 B0"], beside[0], replace(beside[1], loads=(("other", 6.0),))))[0] == 8.0


def test_weights_at_the_start():
    late = step(["F0 B0"], transfer("dp", "all_gather", 3.0, "start"))
    assert (late.op_start[0], late.seconds) == (3.0, 19.0)


def test_the_optimizer_comes_last():
    every = transfer("dp", "all_reduce", 4.0, "end", hidden=False)
    one = Chunk(1.0, 1.0, 1.0, (every,), None, 0, 0, 0, 1, 0, update=2.5)
    trace = simulate(Workload((one,), 1, 1, 4, LINK, 1e3, 1.0, 1.0), schedule("1f1b", 1, 4))
    assert (trace.seconds, trace.busy[0], sum(trace.bubble.values())) == (12 + 4 + 2.5, 14.5, 4.0)


def test_two_buildings_by_hand():
    """Two stages, 3 s apart, F = 1, B = 2. Device 0: F0 F1, then B0 comes at 7 + 3 and B1 at 10 + 3; device 1: F0 at
    4."""
    send = transfer("pp", "send", 0.0, "forward", latency=3.0)
    trace = step(["F0 F1 B0 B1", "F0 B0 F1 B1"], send=send, stages=2, durations=(1.0, 1.0, 1.0))
    assert ends(trace) == [1, 2, 12, 15, 5, 7, 8, 10]
    assert trace.seconds == 15
    assert trace.exposed["pp", ""].tolist() == [4.0, 3.0]  # B0 and B1 on their way, less what B0 computes; F0
    assert trace.bubble["fill and drain"] == pytest.approx(9 - 6)  # 1F1B without the distance takes (m + p - 1) x 3
    assert trace.bubble["pp", ""] == pytest.approx(15 - 9)


def test_a_send_in_line_holds_its_device():
    send = transfer("pp", "send", 3.0, "forward", hidden=False)
    trace = step(["F0 F1 B0 B1", "F0 B0 F1 B1"], send=send, stages=2, durations=(1.0, 1.0, 1.0))
    assert trace.op_start[:2].tolist() == [0.0, 4.0]


def test_local_updates_exchange_every_so_many_steps():
    every = transfer("dp", "all_reduce", 50.0, "end", hidden=False)
    work = Workload((Chunk(1.0, 1.0, 1.0, (every,), None, 0, 0, 0, 1, 0),), 1, 1, 4, LINK, 1e3, 1.0, 1.0)
    assert simulate(work, schedule("1f1b", 1, 4)).seconds == 12 + 50
    local = schedule("local", 1, 4, sync_every=25)
    assert (simulate(work, local).seconds, local.exact) == (12 + 2, False)


def test_memory_and_load_over_time():
    trace = step(["F0 F1 B0 B1"], transfer("ep", "all_to_all", 4.0, "forward"))
    times, held = trace.memory(0)
    assert held.max() == 60 + 2 * 5 + 1 == trace.peak_memory[0]
    assert held[np.searchsorted(times, 20.0, "right") - 1] == 60 + 10 + 1
    assert held[-1] == 60
    assert trace.link_load["link"].tolist() == [8 / 32]
    load = trace.load_over_time("link", bins=8)  # two transfers of 4 s at 0 and at 8, bins of 4 s
    np.testing.assert_allclose(load, [[1, 0, 1, 0, 0, 0, 0, 0]], atol=1e-12)
    assert not trace.load_over_time("other").any()


def test_a_slow_stage_is_a_straggler():
    chunks = [Chunk(seconds, seconds, seconds, (), None, 0, 0, 0, 1, 0) for seconds in (1.0, 1.0, 3.0, 1.0)]
    trace = simulate(Workload(tuple(chunks), 4, 4, 8, {}, 1e3, 1.0, 1.0), schedule("1f1b", 4, 8))
    assert trace.bubble["fill and drain"] == pytest.approx((8 + 3) * 4.5 - 8 * 4.5)
    assert trace.bubble["straggler"] > 8 * 4.5 / 2


def test_hints_let_greedy_fit_the_memory():
    send = transfer("pp", "send", 2.0, "forward")
    reduce = transfer("tp", "all_reduce", 0.5, "forward", hidden=False)
    one = Chunk(1.0, 1.0, 1.0, (reduce,), send, 30.0, 20.0, 10.0, 5.0, 1)
    work = Workload((one,) * 4, 4, 4, 16, LINK, 60 + 1 + 6 * 5 + 2, 1.0, 1.0)
    known = hints(work)
    assert (known["forward"], known["send"], known["limit"]) == ([1.5] * 4, [2.0] * 3, 6)
    assert simulate(work, schedule("greedy", 4, 16, **known)).peak_memory.max() <= work.memory
    assert hints(replace(work, memory=1e9))["limit"] is None


def test_what_does_not_belong_together_is_refused():
    one = Chunk(1.0, 1.0, 1.0, (), None, 0, 0, 0, 1, 0)
    work = Workload((one,) * 2, 2, 2, 4, {"link": 1.0}, 1e3, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"1f1b is for 2 virtual stages on 2 devices and 8 micro-batches, .* and 4"):
        simulate(work, schedule("1f1b", 2, 8))
    for wrong, message in ((transfer("tp", "all_reduce", 1.0, "forward", link="lnik"), "loads 'lnik', the .* are link"),
                           (transfer("tp", "all_reduce", 1.0, "foreward"), "called 'foreward': use one of forward"),
                           (transfer("tp", "all_reduce", 1.0, "forward", latency=-1.0), "latency and bytes >= 0")):
        with pytest.raises(ValueError, match=message):
            simulate(replace(work, chunks=(replace(one, transfers=(wrong,)), one)), schedule("1f1b", 2, 4))
    with pytest.raises(ValueError, match="not negative"):
        simulate(replace(work, chunks=(replace(one, forward=-1.0), one)), schedule("1f1b", 2, 4))


def test_chrome_trace(tmp_path):
    """What Perfetto reads: complete events with microseconds, one stream a device and axis."""
    send = transfer("pp", "send", 0.0, "forward", latency=3.0)
    trace = step(["F0 F1 B0 B1", "F0 B0 F1 B1"], send=send, stages=2, durations=(1.0, 1.0, 1.0))
    write_chrome_trace(trace, tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    computed = {(event["pid"], event["name"]): (event["ts"] / 1e6, event["dur"] / 1e6) for event in spans
                if event["tid"] == 0}
    assert computed[1, "1B0"] == (5.0, 2.0)
    assert len(computed) == 8
    assert sorted(event["ts"] / 1e6 for event in spans if event["name"].startswith("pp send")) == [1, 2, 7, 10]
    names = [(event["pid"], event["args"]["name"]) for event in found["traceEvents"] if event["ph"] == "M"]
    assert names == [(0, "stage 0"), (0, "compute"), (0, "pp"), (1, "stage 1"), (1, "compute"), (1, "pp")]
    held = [event["args"]["bytes"] for event in found["traceEvents"] if event["ph"] == "C"]
    assert max(held) == trace.peak_memory.max()
    assert chrome_trace(trace, most=1)["otherData"]["events left out"] == 3 + 3 + 1 + 1


def test_a_step_of_a_hundred_thousand_devices():
    assert cost(16, 8, 128) <= 5.0


@pytest.mark.slow
def test_the_largest_step_in_time_and_memory():
    """64 stages, 8 chunks, 512 micro-batches: half a million operations, three million transfers."""
    assert cost(64, 8, 512) <= 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 <= 2 << 30

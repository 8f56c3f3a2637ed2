"""Operation lists: valid, as many activations as published, and idle exactly as their closed forms say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning.schedules import NAMES, Op, Schedule, activations, check, read_csv, schedule, write_csv
from semel.planning.simulate import simulate
from semel.planning.workload import Chunk, Workload

CHUNKED = {"zb_v": 2, "dualpipe_v": 2, "interleaved": 2}


def workload(stages: int, microbatches: int, chunks: int = 1, durations=(1.0, 1.0, 1.0)) -> Workload:
    one = Chunk(*durations, transfers=(), send=None, weights=0, gradients=0, optimizer=0, activation=1, peak=0)
    return Workload((one,) * (stages * chunks), stages, stages, microbatches, {}, 1e9, 1.0, 1.0)


def idle(name: str, stages: int, microbatches: int, chunks: int = 1, durations=(1.0, 1.0, 1.0), **hints):
    """Seconds that each device computes nothing, of the step and of the period."""
    plan = schedule(name, stages, microbatches, chunks, **hints)
    check(plan)
    trace = simulate(workload(stages, microbatches, chunks, durations), plan)
    assert np.ptp(trace.busy) == 0
    return trace.seconds - trace.busy[0], trace.period - trace.busy[0], trace


@pytest.mark.parametrize("durations", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 2.0, 5.0)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 2), (4, 4), (4, 8), (8, 24), (16, 64)])
def test_bubbles_of_gpipe_1f1b_and_interleaved(stages, microbatches, durations):
    """(p - 1) / (m + p - 1), and (p - 1) / (v m + p - 1), of the step (arXiv 2104.04473, section 2.2)."""
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        wasted, _, trace = idle(name, stages, microbatches, chunks, durations)
        assert wasted == (stages - 1) * sum(durations)
        assert wasted / trace.seconds == (stages - 1) / (chunks * microbatches + stages - 1)


@pytest.mark.parametrize("durations", [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.0, 3.0, 1.0), (4.0, 5.0, 3.0)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 24), (16, 64)])
def test_bubble_of_zero_bubble_h1(stages, microbatches, durations):
    """(p - 1)(F + B - 2 W) with B the whole backward (table of github.com/deepseek-ai/DualPipe, row ZB1P)."""
    forward, backward_input, weight = durations
    wasted, _, _ = idle("zb_h1", stages, microbatches, durations=durations)
    assert wasted == (stages - 1) * (forward + (backward_input + weight) - 2 * weight)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 16), (8, 24)])
def test_zero_bubble_h2_and_v_leave_no_device_idle_between_its_first_and_last_operation(stages, microbatches):
    """Where F = I = W (arXiv 2401.10241, sections 2.2 and 6); over many steps the period counts, not the step."""
    for name, chunks in (("zb_h2", 1), ("zb_v", 2)):
        _, in_period, _ = idle(name, stages, microbatches, chunks)
        assert in_period == 0


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 20), (8, 40)])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_bubble_of_dualpipe_v(stages, microbatches, scale):
    """(p - 1)(F&B + B - 3 W), chunks of p devices with two each (DualPipe's table has PP = 2 p), where F = I = W and a
    pair takes as long as its parts: F&B = F + B."""
    wasted, _, _ = idle("dualpipe_v", stages, microbatches, 2, (scale, scale, scale))
    forward, backward, weight = scale, 2 * scale, scale
    assert wasted == (stages - 1) * ((forward + backward) + backward - 3 * weight)


def test_activations_that_are_held():
    p, m = 4, 16
    held = {name: activations(schedule(name, p, m, CHUNKED.get(name, 1))).tolist()
            for name in NAMES if name != "greedy"}
    assert held["gpipe"] == [m] * p
    assert held["1f1b"] == held["local"] == [4, 3, 2, 1]
    assert held["zb_h1"] == [p] * p
    assert held["zb_h2"] == [2 * p - 1] * p
    assert held["zb_v"] == [2 * p] * p
    assert held["dualpipe_v"] == [2 * p + 1] * p  # PP + 1 with PP = 2 p
    assert held["interleaved"] == [2 * (p - 1 - d) + p + 1 for d in range(p)]


def drawn(draw) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    stages = draw(st.integers(1, 5))
    chunks = {"interleaved": st.integers(2, 3), "zb_v": st.just(2), "dualpipe_v": st.just(2),
              "greedy": st.integers(1, 3), "local": st.integers(1, 2)}.get(name, st.just(1))
    chunks = draw(chunks)
    laps = draw(st.integers(2 if name == "dualpipe_v" else 1, 4))
    multiple = name in ("interleaved", "local")
    return schedule(name, stages, laps * stages if multiple or name == "dualpipe_v" else laps + stages - 1, chunks,
                    send=draw(st.sampled_from([0.0, 0.3, 7.0])))


@settings(deadline=None)
@given(st.data())
def test_every_schedule_is_one(data):
    plan = drawn(data.draw)
    check(plan)
    simulate(workload(plan.devices, plan.count, len(plan.placement) // plan.devices), plan)
    assert Schedule.of(plan.name, plan.ops, plan.placement).ops == plan.ops


@settings(deadline=None)
@given(st.data())
def test_a_broken_list_is_found(data):
    plan = drawn(data.draw)
    ops = [list(listed) for listed in plan.ops]
    device = data.draw(st.integers(0, plan.devices - 1))
    at = data.draw(st.integers(0, len(ops[device]) - 1))
    damage = data.draw(st.sampled_from(["lost", "twice", "elsewhere"]))
    op = ops[device][at]
    if damage == "lost":
        del ops[device][at]
    elif damage == "twice":
        ops[device].insert(at, op)
    else:
        ops[device][at] = op._replace(chunk=op.chunk + 1)
    with pytest.raises(ValueError, match=r"listed|never comes|cannot be|holds no operations"):
        check(Schedule.of(plan.name, ops, plan.placement))


def test_a_standstill_names_the_operation():
    ops = [[Op("F", 0, 0), Op("B", 0, 0)], [Op("B", 0, 1), Op("F", 0, 1)]]
    plan = Schedule.of("mine", ops, (0, 1))
    with pytest.raises(ValueError, match=r"mine: 0B0 on device 0 waits|mine: 1B0 on device 1 waits"):
        check(plan)
    with pytest.raises(ValueError, match="mine comes to a standstill"):
        simulate(workload(2, 1), plan)


def test_errors_name_value_and_remedy():
    for arguments, message in ((("1f2b", 4, 8), "no schedule is called '1f2b': use one of gpipe"),
                               (("interleaved", 4, 10, 2), "multiple of its 4 stages in .*, not 10: use 8 or 12"),
                               (("zb_v", 4, 8, 3), "zb_v takes 2 chunks a device, not 3"),
                               (("interleaved", 4, 8, 1), "interleaved takes 2 or more chunks a device, not 1"),
                               (("dualpipe_v", 4, 7, 2), "at least 8 micro-batches, not 7"),
                               (("1f1b", 0, 8), "at least 1, got 0, 8, 1")):
        with pytest.raises(ValueError, match=message):
            schedule(*arguments)
    with pytest.raises(ValueError, match="sync_every must be at least 1 step, got 0"):
        schedule("local", 2, 4, sync_every=0)
    with pytest.raises(ValueError, match="at least one activation of each of its 2 chunks a device, limit is 1"):
        schedule("greedy", 2, 4, 2, limit=1)


def test_greedy_hides_a_long_link_that_1f1b_waits_for():
    """Two buildings: the middle boundary takes as long as two micro-batches."""
    p, m, away = 4, 32, [0.0, 6.0, 0.0]
    plan = schedule("greedy", p, m, send=away)
    check(plan)
    from semel.planning.workload import Transfer

    def run(plan: Schedule) -> float:
        work = workload(p, m)
        chunks = list(work.chunks)
        chunks[1] = Chunk(1.0, 1.0, 1.0, (), Transfer("pp", "send", 1.0, 6.0, (), "forward", True), 0, 0, 0, 1, 0)
        return simulate(Workload(tuple(chunks), p, p, m, {}, 1e9, 1.0, 1.0), plan).seconds

    busy = 3 * m
    assert run(plan) <= busy + 3 + 2 * 6 + 3  # fill, and each way over the link once
    assert run(schedule("1f1b", p, m)) > 1.25 * run(plan)


def test_greedy_keeps_its_limit():
    for limit in (4, 6, 9):
        assert activations(schedule("greedy", 4, 24, send=3.0, limit=limit)).max() <= limit


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 64), st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]),
       st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 60))
def test_greedy_runs_under_any_limit_that_holds_one_of_each_chunk(stages, chunks, microbatches, send, weight, more):
    """Each chunk's place is kept for it: no number of micro-batches brings it to a standstill."""
    limit = chunks + more
    plan = schedule("greedy", stages, microbatches, chunks, backward_weight=weight, send=send, limit=limit)
    check(plan)
    assert activations(plan).max() <= limit


def test_greedy_of_more_microbatches_than_its_trial_sees():
    """Once a standstill: what was under way left later chunks no place, which only shows after the trial."""
    for stages, chunks, send, limit in ((2, 2, 30.0, 56), (3, 3, 5.0, 27), (4, 4, 5.0, 56)):
        check(schedule("greedy", stages, 64, chunks, send=send, limit=limit))


@pytest.mark.parametrize("name", NAMES)
def test_csv_there_and_back(name, tmp_path: Path):
    plan = schedule(name, 4, 8, CHUNKED.get(name, 1))
    write_csv(plan, tmp_path / "plan.csv")
    found = read_csv(tmp_path / "plan.csv")
    assert (found.ops, found.placement, found.pairs.tolist()) == (plan.ops, plan.placement, plan.pairs.tolist())


def test_csv_that_is_none(tmp_path: Path):
    path = tmp_path / "plan.csv"
    for text, message in (("0F0,0X0\n", r"row 1: '0X0' is no operation"), ("", "holds no operations"),
                          ("0F0,2F0\n", "virtual stage 1 is on no rank"), ("0F0,0B0,0B0\n", "listed 2 times")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_csv(path)


def test_torch_loads_the_csv(tmp_path: Path):
    """Torch's own loader validates the order and adds sends and gathers; its dry run finds no deadlock."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in NAMES:
        plan = schedule(name, 4, 8, CHUNKED.get(name, 1))
        write_csv(plan, tmp_path / f"{name}.csv")
        runtime = object.__new__(schedules._PipelineScheduleRuntime)
        runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 4, len(plan.placement), 8
        runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
        runtime._load_csv(str(tmp_path / f"{name}.csv"))
        assert runtime.stage_index_to_group_rank == dict(enumerate(plan.placement))
        read = [[action for action in runtime.pipeline_order[rank] if action is not None] for rank in range(4)]
        flat = [[str(part) for action in actions for part in (action.sub_actions or [action])] for actions in read]
        assert flat == [[str(op) for op in listed] for listed in plan.ops]
        if not len(plan.pairs):  # the dry run knows neither pairs nor shards
            known = {rank: [action for action in actions if "SHARD" not in str(action) and "REDUCE" not in str(action)]
                     for rank, actions in runtime.pipeline_order_with_comms.items()}
            assert schedules._simulate_comms_compute(known, plan.placement.__getitem__, len(plan.placement))

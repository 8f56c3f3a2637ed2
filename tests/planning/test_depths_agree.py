"""Closed form and events are two models of one step, written apart: they agree on ready jobs."""

from __future__ import annotations

import pytest

from semel.planning import Layout, estimate, load_cluster, load_job
from semel.planning.schedules import activations, schedule
from semel.planning.simulate import hints, simulate
from semel.planning.workload import unchecked

FACTOR = 1.05
"""No estimate is more than this times the events' seconds."""
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2),
         ("dualpipe_v", 2), ("greedy", 1), ("local", 1)]
JOBS = [("selene", "gpt3-175b", {"tp": 8, "pp": 8, "dp": 8}), ("selene", "gpt3-175b", {"tp": 8, "pp": 16, "dp": 4}),
        ("meta-region-16k", "llama3-405b", {"tp": 8, "pp": 16, "cp": 2, "dp": 64}),
        ("meta-region-16k", "llama3-405b", {"tp": 8, "pp": 16, "cp": 2, "dp": 8, "fsdp": 8})]


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize(("cluster", "job", "sizes"), JOBS)
def test_the_estimate_and_its_lower_bound(cluster, job, sizes, name, chunks):
    layout = Layout(sizes, schedule=name, chunks=chunks)
    work = unchecked(load_cluster(cluster), load_job(job), layout)
    trace = simulate(work, schedule(name, work.stages, work.microbatches, chunks, **hints(work)))
    found = estimate(work, layout)
    assert found.lower <= trace.seconds * (1 + 1e-9)
    assert found.seconds <= FACTOR * trace.seconds
    if name in ("gpipe", "1f1b", "zb_h1", "dualpipe_v"):
        assert found.seconds == pytest.approx(trace.seconds, rel=0.06)


@pytest.mark.parametrize(("name", "chunks"), [case for case in CASES if case[0] != "greedy"])
def test_memory_is_what_the_lists_hold(name, chunks):
    layout = Layout({"tp": 8, "pp": 8, "dp": 8}, schedule=name, chunks=chunks)
    work = unchecked(load_cluster("selene"), load_job("gpt3-175b"), layout)
    plan = schedule(name, work.stages, work.microbatches, chunks)
    peak = simulate(work, plan).peak_memory
    for device, memory in enumerate(estimate(work, layout).memory):
        assert peak[device] == pytest.approx(memory.total, rel=0.03)
    assert activations(plan).max() <= work.microbatches * chunks

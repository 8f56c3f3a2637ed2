"""The estimate against textbook formulas, its lower bound, and what must hold whatever the cluster."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.planning import Chunk, Layout, Transfer, Workload, estimate, load_cluster, load_job
from semel.planning.workload import unchecked

F, B, W = 1.0, 1.5, 0.75  # seconds of a forward, a backward for the input, one for the weight


def uniform(stages, microbatches, chunks=1, send=0.0, latency=0.0, transfers=()):
    """A workload of equal virtual stages, with ``send`` bytes on a link of 1 byte/s between them."""
    count = stages * chunks
    hop = Transfer("pp", "send", send, latency, (("net", send),) if send else (), "forward", True)
    inner = Chunk(F / chunks, B / chunks, W / chunks, tuple(transfers), hop if send or latency else None, 1, 1, 1, 1, 0)
    return Workload((*[inner] * (count - 1), replace(inner, send=None)), stages, stages, microbatches,
                    {"net": 1.0, "host": 10.0}, 1e12, 1.0, 1.0)


def seconds(work, **layout):
    return estimate(work, Layout({"pp": work.stages}, **layout)).seconds


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (8, 32, 4), (2, 2, 2), (16, 64, 1)])
def test_bubbles_are_the_textbook_s(p, m, v):
    t = F + B + W
    assert seconds(uniform(p, m), schedule="1f1b") == pytest.approx((m + p - 1) * t)
    assert seconds(uniform(p, m), schedule="gpipe") == pytest.approx((m + p - 1) * t)
    if v > 1:
        assert seconds(uniform(p, m, v), schedule="interleaved", chunks=v) == pytest.approx(m * t + (p - 1) * t / v)
    assert seconds(uniform(p, m), schedule="zb_h1") == pytest.approx(m * t + (p - 1) * (F + B - W))
    idle = seconds(uniform(p, m, 2), schedule="dualpipe_v", chunks=2) - m * t
    assert idle == pytest.approx((p - 1) * (F + 2 * (B + W) - 3 * W) / 2)  # of chunks, half as long


def test_one_stage_is_its_work():
    assert seconds(uniform(1, 5)) == pytest.approx(5 * (F + B + W))


def test_a_round_trip_that_nothing_hides():
    """1F1B has p micro-batches under way at its first stage: a hop of s costs each of them 2 (p - 1) s / p."""
    p, m, s = 4, 64, 0.5
    t = F + B + W
    work = uniform(p, m, send=0.0, latency=s)
    period = t + 2 * (p - 1) * s / p
    assert seconds(work) == pytest.approx(m * period + (p - 1) * t + 2 * (p - 1) * s)
    hidden = seconds(replace(uniform(p, m, 4, latency=0.05)), schedule="interleaved", chunks=4)
    assert hidden == pytest.approx(m * t + (p - 1) * t / 4 + 2 * (p - 1) * 0.05)  # slack of the warm-up takes it


def test_transfers_in_line_add_and_beside_hide():
    line = Transfer("tp", "all_reduce", 1.0, 0.1, (("host", 2.0),), "forward", False, 3)
    beside = replace(line, hidden=True)
    plain = estimate(uniform(1, 10), Layout({}))
    shown = estimate(uniform(1, 10, transfers=[line]), Layout({}))
    assert shown.seconds - plain.seconds == pytest.approx(10 * 3 * (0.1 + 0.2))
    assert shown.exposed == {("tp", "host"): pytest.approx(10 * 3 * 0.3)}
    assert estimate(uniform(1, 10, transfers=[beside]), Layout({})).seconds == pytest.approx(plain.seconds)
    longer = replace(beside, count=20)  # 6 s beside 1 s of compute
    assert estimate(uniform(1, 10, transfers=[longer]), Layout({})).seconds == pytest.approx(plain.seconds + 10 * 5.0)


def test_transfers_once_a_step():
    reduce = Transfer("dp", "all_reduce", 1.0, 0.0, (("net", 5.0),), "end", False)
    work = uniform(1, 4, transfers=[reduce])
    assert estimate(work, Layout({})).seconds == pytest.approx(4 * (F + B + W) + 5.0)
    assert estimate(work, Layout({}, schedule="local")).seconds == pytest.approx(4 * (F + B + W) + 5.0 / 50)
    hidden = uniform(1, 4, transfers=[replace(reduce, hidden=True, loads=(("net", 0.5),), count=10)])
    assert estimate(hidden, Layout({})).seconds == pytest.approx(4 * (F + B + W) + 5.0 - (B + W))
    short = uniform(1, 4, transfers=[replace(reduce, hidden=True, loads=(("net", 0.1),), count=10)])
    assert estimate(short, Layout({})).seconds == pytest.approx(4 * (F + B + W) + 0.1)  # the last bucket shows


def test_parts_sum_to_the_whole():
    cluster, job = load_cluster("meta-region-16k"), load_job("llama3-405b")
    layout = Layout({"tp": 8, "pp": 16, "dp": 128}, schedule="interleaved", chunks=4, recompute="selective")
    found = estimate(unchecked(cluster, job, layout), layout)
    assert found.seconds == pytest.approx(found.compute + found.bubble + sum(found.exposed.values()))
    assert {axis for axis, _ in found.exposed} >= {"tp", "dp"}
    assert 0 < found.mfu < 1
    assert len(found.memory) == 16


BUILDINGS, LLAMA = load_cluster("two-buildings-40km"), load_job("llama3-405b")
LAYOUTS = st.sampled_from([
    ({"tp": 8, "pp": 16, "dp": 16}, "1f1b", 1), ({"tp": 8, "pp": 16, "dp": 16}, "interleaved", 4),
    ({"tp": 8, "pp": 16, "dp": 16}, "zb_h1", 1), ({"tp": 8, "pp": 16, "dp": 16}, "zb_v", 2),
    ({"tp": 8, "pp": 8, "fsdp": 16, "dp": 2}, "gpipe", 1), ({"tp": 8, "fsdp": 128, "dp": 2}, "1f1b", 1),
    ({"tp": 4, "cp": 2, "pp": 16, "dp": 16}, "dualpipe_v", 2), ({"tp": 8, "pp": 16, "dp": 16}, "zb_h2", 1),
])
PATHS = st.sampled_from(["levels.campus.bandwidth", "levels.building.bandwidth", "levels.host.bandwidth",
                         "levels.rack.bandwidth", "devices.h100.memory_bandwidth", "devices.h100.reached.bf16"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LAYOUTS, PATHS, st.floats(1.0, 3.0),
       st.sampled_from([("tp", "cp", "fsdp", "dp", "pp"), ("tp", "pp", "cp", "fsdp", "dp")]))
def test_faster_parts_never_make_a_step_slower(chosen, path, factor, order):
    """Promise 9 of the estimate, and its lower bound below it."""
    sizes, schedule, chunks = chosen
    cluster, job = BUILDINGS, LLAMA
    layout = Layout(sizes, order=order, schedule=schedule, chunks=chunks)
    before = estimate(unchecked(cluster, job, layout), layout)
    after = estimate(unchecked(cluster.scaled(path, factor), job, layout), layout)
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert before.lower <= before.seconds
    assert after.lower <= before.lower * (1 + 1e-9)


@pytest.mark.parametrize("path", ["levels.campus.latency", "levels.campus.distance", "levels.campus.oversubscription"])
def test_longer_and_thinner_links_never_make_a_step_faster(path):
    cluster, job = load_cluster("two-buildings-40km"), load_job("llama3-405b")
    last = 0.0
    for factor in (1.0, 2.0, 10.0):
        layout = Layout({"tp": 8, "pp": 16, "dp": 16}, schedule="interleaved", chunks=4)
        found = estimate(unchecked(cluster.scaled(path, factor), job, layout), layout).seconds
        assert found >= last
        last = found


def test_two_buildings_by_hand():
    """Data parallelism across two buildings, nothing else: compute, then rings of gradients of which each device has
    half, over its share of the thin link."""
    device = {"name": "d", "peak": {"bf16": "100 Tflop/s"}, "memory": "64 GiB", "memory_bandwidth": "1 PB/s",
              "matmul": 0.5, "attention": 0.5, "vector": 1.0, "kernel": "0 us", "reserved": "0 B"}
    cluster = load_cluster({"name": "two", "device": device, "levels": [
        {"name": "host", "count": 2, "bandwidth": "100 GB/s", "latency": "0 us", "domain": True},
        {"name": "campus", "count": 2, "bandwidth": "1 GB/s", "latency": "1 ms", "oversubscription": 4.0}]})
    job = load_job({"name": "toy", "kind": "transformer", "layers": 2, "width": 256, "feedforward": 1024, "heads": 4,
                    "vocabulary": 512, "sequence": 128, "batch": 4, "kv_heads": 4})
    layout = Layout({"dp": 4}, zero=0, overlap=frozenset())
    work = unchecked(cluster, job, layout)
    gradients = 4 * job.parameters()
    inside = gradients / 100e9 + 0.0  # 2 (2-1)/2 of it
    across = 2 * 1e-3 + gradients / 2 / (1e9 / 4)
    chunk = work.chunks[0]
    compute = chunk.forward + chunk.backward_input + chunk.backward_weight
    found = estimate(work, layout)
    assert across > inside  # the levels are pipelined: the longer one counts
    assert found.seconds == pytest.approx(compute + across + chunk.update, rel=1e-9)

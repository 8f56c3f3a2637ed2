"""The network by its closed forms: collectives on one level, technologies on long links, groups over a tree."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning import Level, Technology, load_cluster
from semel.planning.axes import crossing
from semel.planning.network import (
    Fabric,
    Span,
    collision_share,
    go_back_n_share,
    hierarchical_all_reduce,
    pairwise_all_to_all,
    queue_pairs,
    rate,
    ring_all_gather,
    ring_all_reduce,
    span,
    tree_all_reduce,
)

DEVICE = {"name": "toy", "peak": {"bf16": "100 Tflop/s"}, "memory": "16 GiB", "memory_bandwidth": "1 TB/s",
          "matmul": 0.5, "attention": 0.5, "vector": 0.8, "kernel": "1 us", "reserved": "0 B"}


def flat(n, collective="ring", latency="10 us", bandwidth="10 GB/s", **more):
    return load_cluster({"name": "flat", "device": DEVICE, "levels": [{
        "name": "net", "count": n, "bandwidth": bandwidth, "latency": latency,
        "technologies": [{"name": "t", "collective": collective, **more}]}]})


def tree(inner=8, outer=4, collective="hierarchical"):
    technologies = [{"name": "t", "collective": collective}]
    return load_cluster({"name": "tree", "device": DEVICE, "levels": [
        {"name": "host", "count": inner, "bandwidth": "100 GB/s", "latency": "1 us", "domain": True},
        {"name": "rack", "count": outer, "bandwidth": "10 GB/s", "latency": "10 us", "technologies": technologies}]})


BUILDINGS = load_cluster("two-buildings-100km")


def seconds(fabric, kind, group, size, **how):
    return fabric.seconds(*fabric.collective(kind, group, size, **how))


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 512), st.floats(1, 1e10))
def test_one_level_is_the_closed_form_exactly(n, size):
    fabric = Fabric.choose(flat(n), {})
    group, alpha, beta = Span(n, (n,)), 10e-6, 10e9
    assert seconds(fabric, "all_reduce", group, size) == pytest.approx(ring_all_reduce(n, size, alpha, beta), rel=1e-12)
    for kind in ("all_gather", "reduce_scatter"):
        assert seconds(fabric, kind, group, size) == pytest.approx(ring_all_gather(n, size, alpha, beta), rel=1e-12)
    assert seconds(fabric, "all_to_all", group, size, skew=1.5) == pytest.approx(
        pairwise_all_to_all(n, size, alpha, beta, 1.5), rel=1e-12)
    trees = Fabric.choose(flat(n, "tree"), {})
    assert seconds(trees, "all_reduce", group, size) == pytest.approx(tree_all_reduce(n, size, alpha, beta), rel=1e-12)


def test_the_closed_forms_by_hand():
    assert ring_all_reduce(4, 8.0, 1.0, 2.0) == 2 * 3 * (1 + 8 / (4 * 2))
    assert ring_all_gather(4, 8.0, 1.0, 2.0) == 3 * (1 + 8 / (4 * 2))
    assert pairwise_all_to_all(4, 8.0, 1.0, 2.0) == 3 * (1 + 8 / (4 * 2))
    assert tree_all_reduce(4, 8.0, 1.0, 2.0) == 2 * 2 * 1 + 2 * 3 / 4 * 8 / 2
    assert hierarchical_all_reduce(2, 4, 8.0, (1.0, 2.0), (10.0, 1.0)) == 2 * 3 * (1 + 1) + 2 * (10 + 2 / 2)
    assert ring_all_reduce(1, 8.0, 1.0, 2.0) == tree_all_reduce(1, 8.0, 1.0, 2.0) == 0.0


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([2, 3, 4, 16]), st.floats(1e3, 1e9))
def test_hierarchical_all_reduce_moves_its_bytes_level_by_level(inner, outer, size):
    """Pipelined, it takes the longer of the two levels' bytes; one after the other they are the closed form."""
    cluster = tree(inner, outer)
    fabric = Fabric.choose(cluster, {})
    latency, loads = fabric.collective("all_reduce", span(cluster, [(1, inner * outer)]), size)
    loads = dict(loads)
    in_turn = latency + loads["host"] / 100e9 + loads["rack"] / 10e9
    closed = hierarchical_all_reduce(outer, inner, size, (1e-6, 100e9), (10e-6, 10e9))
    assert in_turn == pytest.approx(closed, rel=1e-12)


def test_in_network_reduction_halves_what_is_sent():
    ring = Fabric.choose(flat(64), {}).collective("all_reduce", Span(64, (64,)), 1e9)
    switch = Fabric.choose(flat(64, "in-network"), {}).collective("all_reduce", Span(64, (64,)), 1e9)
    assert switch[1][0][1] / ring[1][0][1] == pytest.approx(1 / (2 * 63 / 64))
    assert switch[0] == pytest.approx(2 * 10e-6)


def test_outer_traffic_passes_the_ports_of_inner_levels_but_not_nvlink():
    cluster = load_cluster("meta-region")
    fabric = Fabric.choose(cluster, {})
    loads = dict(fabric.collective("all_reduce", span(cluster, [(24576, 4)]), 1e9)[1])  # one rank a building
    assert set(loads) == {"rack", "zone", "building", "region"}
    assert len(set(loads.values())) == 1


def test_a_token_crosses_once_a_host_where_the_all_to_all_is_hierarchical():
    group = span(tree(8, 8), [(1, 64)])
    plain = dict(Fabric.choose(tree(8, 8, "ring"), {}).collective("all_to_all", group, 8e6, copies=8)[1])["rack"]
    once = dict(Fabric.choose(tree(8, 8), {}).collective("all_to_all", group, 8e6, copies=8)[1])["rack"]
    limited = dict(Fabric.choose(tree(8, 8), {}).collective("all_to_all", group, 8e6, copies=8, units=4)[1])["rack"]
    assert plain == pytest.approx(8e6 * 56 / 64)
    assert once / plain == pytest.approx(8 * (1 - (7 / 8) ** 8) / 8)
    assert limited / plain == pytest.approx(4 / 8)


def test_collisions_of_hashed_flows_are_those_of_balls_in_bins():
    """The closed form against drawing: the fullest of 64 paths, 64 flows each."""
    random = np.random.default_rng(0)
    fullest = [np.bincount(random.integers(0, 64, 64 * 64), minlength=64).max() for _ in range(200)]
    assert 64 / np.mean(fullest) == pytest.approx(collision_share(64, 64), rel=0.08)
    assert collision_share(1, 4) == 1.0


def test_go_back_n_against_sending_packets():
    random, loss, window = np.random.default_rng(1), 0.01, 50
    sent = delivered = 0
    while delivered < 20_000:
        delivered, sent = (delivered + 1, sent + 1) if random.random() >= loss else (delivered, sent + window)
    assert delivered / sent == pytest.approx(go_back_n_share(loss, window), rel=0.05)
    assert go_back_n_share(0.0, window) == 1.0


def level(**changed):
    return Level("long", 2, 50e9, 20e-6, **changed)


def test_long_links():
    near, far = level(), level(distance=1000e3)
    assert far.delay == pytest.approx(5e-3 + 20e-6)
    window = Technology("w", queue_pairs=4, segment=2**20, outstanding=8)
    assert rate(near, window) == min(50e9, 4 * 8 * 2**20 / 40e-6)
    assert rate(far, window) == pytest.approx(4 * 8 * 2**20 / (2 * far.delay))  # window over round trip
    grows = Technology("g", queue_pairs=4, most_queue_pairs=512, segment=2**20, outstanding=8)
    assert queue_pairs(near, grows) == 4
    assert queue_pairs(far, grows) == math.ceil(50e9 * 2 * far.delay / (8 * 2**20))
    assert rate(far, grows) == pytest.approx(50e9)
    shallow = Technology("s", queue_pairs=512, buffer=16 * 2**20)
    deep = Technology("d", queue_pairs=512, buffer=2 * 2**30)
    assert rate(far, shallow) == pytest.approx(16 * 2**20 / (2 * far.delay))  # headroom of pauses
    assert rate(far, deep) == 50e9
    lost = level(distance=1000e3, loss=1e-4)
    back = Technology("b", queue_pairs=512, lossless=False, retransmit="go-back-n")
    select = Technology("r", queue_pairs=512, lossless=False)
    assert rate(lost, select) == pytest.approx(50e9 * (1 - 1e-4))
    assert rate(lost, back) == pytest.approx(50e9 * go_back_n_share(1e-4, 50e9 * 2 * lost.delay / 4096))
    assert rate(lost, Technology("l", queue_pairs=512)) == 50e9  # lossless: nothing is dropped


def test_sharing_and_oversubscription():
    assert rate(level(sharing="unit"), Technology("t"), unit=8) == 50e9 / 8
    assert rate(level(oversubscription=2.8), Technology("t")) == pytest.approx(50e9 / 2.8)
    hashed = Technology("e", routing="ecmp", paths=16, queue_pairs=4)
    assert rate(level(), hashed) == pytest.approx(50e9 * collision_share(16, 4))


def test_incast_in_a_shallow_buffer():
    group = Span(64, (64,))
    calm = Fabric.choose(flat(64, concurrent=16, buffer="64 MiB", segment="1 MiB"), {})
    full = Fabric.choose(flat(64, concurrent=16, buffer="4 MiB", segment="1 MiB"), {})
    size = 64 * 2.0**20
    assert full.collective("all_to_all", group, size)[1][0][1] == pytest.approx(
        4 * calm.collective("all_to_all", group, size)[1][0][1])


def test_optical_circuits_turn_only_when_a_step_needs_two_patterns():
    fabric = Fabric.choose(flat(4, "hierarchical", routing="circuit", reconfiguration="10 ms"), {})
    group = Span(4, (4,))
    alone = fabric.collective("all_reduce", group, 1e6, patterns={0: 1})
    both = fabric.collective("all_reduce", group, 1e6, patterns={0: 2})
    assert both[0] - alone[0] == pytest.approx(10e-3)


def test_compression_on_one_level():
    cluster = tree()
    fabric = Fabric.choose(cluster, {})
    group = span(cluster, [(1, 32)])
    plain = dict(fabric.collective("all_reduce", group, 1e9)[1])
    small = dict(fabric.collective("all_reduce", group, 1e9, ratio={"rack": 0.25})[1])
    assert small["rack"] == plain["rack"] / 4
    assert small["host"] == plain["host"]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(["ecmp", "deep-buffer", "spraying", "lossy", "lossy-selective", "optical"]), st.floats(1.0, 4.0),
       st.sampled_from(["bandwidth", "latency"]), st.floats(1e3, 1e9), st.sampled_from(["all_reduce", "all_to_all"]))
def test_more_bandwidth_and_less_latency_never_slow_a_collective(technology, factor, what, size, kind):
    cluster = BUILDINGS
    better = cluster.scaled(f"levels.campus.{what}", factor if what == "bandwidth" else 1 / factor)
    group = span(cluster, [(8, 1024)])
    before = seconds(Fabric.choose(cluster, {"campus": technology}), kind, group, size)
    after = seconds(Fabric.choose(better, {"campus": technology}), kind, group, size)
    assert after <= before * (1 + 1e-12)


def test_groups_over_the_tree():
    cluster = load_cluster("meta-region-16k")  # hosts of 8, racks of 16, zones of 1,024, buildings of 4,096 and 2,048
    assert span(cluster, [(1, 8)]).factors == (8, 1, 1, 1, 1)
    assert span(cluster, [(8, 16)]).factors == (1, 2, 8, 1, 1)
    assert span(cluster, [(128, 128)]).factors == (1, 1, 8, 2, 5)  # the smallest building has 2 zones
    assert span(cluster, [(1, 8), (128, 8)]).factors == (8, 1, 8, 1, 1)
    assert span(cluster, [(1, 12)]).factors == (8, 1, 1, 1, 2)  # some group of 12 straddles two buildings
    assert span(cluster, [(4096, 2)]).top == 4


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=4), st.data())
def test_groups_against_counting_members(counts, data):
    """All groups of (stride, n) on a full tree, device by device: members in a unit of each level."""
    total = math.prod(counts)
    stride = 2 ** data.draw(st.integers(0, int(math.log2(total)) - 1))
    n = 2 ** data.draw(st.integers(1, int(math.log2(total // stride))))
    levels = [{"name": f"l{index}", "count": count, "bandwidth": "1 GB/s", "latency": "1 us"}
              for index, count in enumerate(counts)]
    found = span(load_cluster({"name": "tree", "device": DEVICE, "levels": levels}), [(stride, n)])
    sizes = list(np.cumprod(counts))
    for base in range(total):
        if base % (stride * n) < stride:
            group = np.arange(n) * stride + base
            inside = [max(np.bincount(group // size)) for size in sizes]
            factors = [after // before for before, after in zip([1, *inside], inside, strict=False)]
            assert tuple(factors) == found.factors
    assert found.top == max(index for index, factor in enumerate(found.factors) if factor > 1)


def test_crossing_between_devices():
    cluster = load_cluster("meta-region-16k")
    assert crossing(cluster, 0, 0) == -1
    assert [crossing(cluster, 0, other) for other in (1, 8, 16, 1024, 4096)] == [0, 1, 2, 3, 4]
    assert crossing(cluster, 12287, 12288) == 4  # the first small building begins


def test_sends_of_one_stage_have_the_uplinks_that_other_stages_leave_idle():
    cluster = load_cluster("two-buildings-10km")
    fabric = Fabric.choose(cluster, {})
    loads = dict(fabric.send(3, 1e6, stride=1024)[1])
    assert loads["campus"] == pytest.approx(1e6 * 1024 / 4096)
    assert loads["rack"] == loads["building"] * 4096 / 1024 or loads["rack"] == pytest.approx(1e6)


def test_an_unknown_technology_names_the_known_ones():
    with pytest.raises(KeyError, match="there are: ecmp, deep-buffer"):
        Fabric.choose(load_cluster("two-buildings-10km"), {"campus": "carrier-pigeon"})
    with pytest.raises(KeyError, match="has no level 'moon'"):
        Fabric.choose(load_cluster("two-buildings-10km"), {"moon": "ecmp"})

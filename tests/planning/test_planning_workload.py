"""What a step consists of: bytes on links by hand, compute by hand, stages that differ."""

import math

import numpy as np
import pytest

from semel.planning import Infeasible, Layout, load_cluster, load_job, workload
from semel.planning.axes import split_layers
from semel.planning.compute import harmonic, product
from semel.planning.job import Lengths
from semel.planning.tables import moments
from semel.planning.workload import unchecked

SELENE, DGX = load_cluster("selene"), load_cluster("dgx-h100")


def found(work, index=0, **wanted):
    return [t for t in work.chunks[index].transfers if all(getattr(t, name) == value for name, value in wanted.items())]


def total(transfers):
    return sum(t.bytes * t.count for t in transfers)


def test_flops_are_the_paper_s_formula():
    """arXiv 2104.04473, section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh) with every forward twice, hence 72 without; the
    formula's logits have no recompute, and its factor for them is the same."""
    job = load_job("gpt3-175b")
    b, s, h, v = job.batch, job.sequence, job.width, job.vocabulary
    formula = 72 * b * s * job.layers * h**2 * (1 + s / (6 * h) + v / (12 * job.layers * h))
    assert job.flops() == pytest.approx(formula, rel=2e-3)  # biases and norms are the rest


def test_a_product_is_a_roofline():
    device = SELENE.device
    big = product(device, "bf16", 8192, 8192, 8192)
    assert big == pytest.approx(2 * 8192**3 / (312e12 * device.matmul(8192) * device.reached["bf16"]) + device.kernel)
    thin = product(device, "bf16", 1, 8192, 8192)  # a matrix times a vector reads its weights
    moved = 2 * (8192 + 8192**2 + 8192)
    assert thin == pytest.approx(moved / (device.memory_bandwidth * device.vector) + device.kernel)
    assert harmonic(8, 8, 8) == pytest.approx(8)
    with pytest.raises(KeyError, match="has no peak for 'fp4'"):
        product(device, "fp4", 8, 8, 8)


def test_tensor_parallel_bytes():
    """Two all-reduces of s b h forward and two backward a layer (arXiv 1909.08053, section 3)."""
    job = load_job("gpt3-175b")
    block = 2 * job.sequence * job.width
    plain = unchecked(SELENE, job, Layout({"tp": 8, "pp": 8}, sequence_parallel=False))
    assert total(found(plain, 1, axis="tp", phase="forward")) == block * 2 * 12
    assert total(found(plain, 1, axis="tp", phase="backward")) == block * 2 * 12
    parallel = unchecked(SELENE, job, Layout({"tp": 8, "pp": 8}))
    assert total(found(parallel, 1, axis="tp", phase="forward", collective="all_gather")) == block * 2 * 12
    in_line = found(parallel, 1, axis="tp", phase="backward", collective="all_gather", hidden=False)
    assert total(in_line) == block * 2 * 12
    full = unchecked(SELENE, job, Layout({"tp": 8, "pp": 8}, recompute="full", sequence_parallel=False))
    assert total(found(full, 1, axis="tp", phase="backward")) == block * 4 * 12
    assert all(t.loads[0][0] == "host" for t in found(plain, 1, axis="tp"))


def test_pipeline_sends_cross_the_level_between_stages():
    job = load_job("llama3-405b")
    work = unchecked(DGX, job, Layout({"tp": 8, "pp": 16, "dp": 32}))
    sends = [chunk.send for chunk in work.chunks]
    assert sends[-1] is None
    assert all(send.bytes == 2 * 8192 * 16384 / 8 for send in sends[:-1])
    inner_first = unchecked(DGX, job, Layout({"tp": 8, "pp": 16, "dp": 32}, order=("tp", "pp", "dp")))
    assert {send.loads[0][0] for send in [c.send for c in inner_first.chunks[:-1]]} == {"unit"}
    assert {send.loads[-1][0] for send in sends[:-1]} == {"fabric"}  # 256 devices a stage: a unit's worth
    back = unchecked(DGX, job, Layout({"tp": 8, "pp": 16, "dp": 32}, schedule="zb_v", chunks=2))
    assert back.chunks[15].send is None  # the turn of the V stays on its device


def test_gradients_once_a_step_by_kind_of_sharding():
    job = load_job({"like": "llama3-8b", "batch": 256})
    weights = job.parameters()

    def kinds(layout):
        work = unchecked(DGX, job, layout)
        return {(t.axis, t.collective, t.phase): t.bytes * t.count for t in work.chunks[0].transfers}

    assert kinds(Layout({"dp": 64}, zero=0)) == {("dp", "all_reduce", "end"): pytest.approx(4 * weights)}
    assert kinds(Layout({"dp": 64})) == {("dp", "reduce_scatter", "end"): pytest.approx(4 * weights),
                                         ("dp", "all_gather", "start"): pytest.approx(2 * weights)}
    assert kinds(Layout({"fsdp": 64})) == {("fsdp", "all_gather", "forward"): pytest.approx(2 * weights),
                                           ("fsdp", "all_gather", "backward"): pytest.approx(2 * weights),
                                           ("fsdp", "reduce_scatter", "weight"): pytest.approx(4 * weights)}
    hybrid = kinds(Layout({"fsdp": 8, "dp": 8}))
    assert hybrid["dp", "all_reduce", "end"] == pytest.approx(4 * weights / 8)  # HSDP: shards across, whole inside


def test_gradients_compressed_on_the_level_that_is_thin():
    cluster, job = load_cluster("two-buildings-40km"), load_job("llama3-70b")
    plain = unchecked(cluster, job, Layout({"tp": 8, "dp": 1024}))
    small = unchecked(cluster, job, Layout({"tp": 8, "dp": 1024}, compress={"campus": "fp8"}))
    before, after = (dict(found(work, axis="dp", phase="end")[0].loads) for work in (plain, small))
    assert after["campus"] == pytest.approx(before["campus"] / 4)


def test_experts_take_their_ranks_from_data_parallelism():
    job = load_job({"like": "deepseek-v3", "batch": 1024})
    work = unchecked(DGX, job, Layout({"pp": 8, "dp": 256, "ep": 64}, recompute="selective"))
    tokens = [t for t in work.chunks[4].transfers if t.axis == "ep"]
    assert {t.collective for t in tokens} == {"all_to_all"}
    assert all(t.bytes == 2 * job.sequence * job.top_k * job.width for t in tokens)
    whole = unchecked(DGX, job, Layout({"pp": 8, "dp": 256}, recompute="selective"))
    routed = job.layer_parameters(60)[1]
    shared = job.layer_parameters(60)[0]
    assert work.chunks[4].weights == pytest.approx(2 * 8 * (shared + routed / 64))
    assert whole.chunks[4].weights == pytest.approx(2 * 8 * (shared + routed))
    with pytest.raises(Infeasible, match="ep = 64 does not divide"):
        workload(DGX, job, Layout({"pp": 8, "dp": 32, "ep": 64}))


def test_layers_go_round_evenly_and_the_ends_get_fewer():
    assert split_layers(96, [1.0] * 8) == [12] * 8
    assert split_layers(126, [1.0] * 128) == [0] + [1] * 126 + [0]
    assert split_layers(61, [1.0] * 16)[0] < split_layers(61, [1.0] * 16)[5]
    assert sum(split_layers(61, [1.0] * 16)) == 61
    assert split_layers(30, [2.0, 1.0]) == [20, 10]
    assert sum(split_layers(31, [3.0, 2.0, 1.0])) == 31


def test_stages_on_slower_devices_get_fewer_layers():
    levels = [{"name": "host", "count": 8, "bandwidth": "300 GB/s", "latency": "1 us", "domain": True},
              {"name": "building", "count": 2, "bandwidth": "25 GB/s", "latency": "5 us"},
              {"name": "region", "count": 2, "bandwidth": "5 GB/s", "latency": "1 ms"}]
    mixed = load_cluster({"name": "mixed", "levels": levels, "units": [{"device": "h100"}, {"device": "a100-80"}]})
    job = load_job({"like": "llama3-8b", "batch": 32})
    work = unchecked(mixed, job, Layout({"tp": 8, "pp": 4}, recompute="selective"))
    weights = [chunk.weights for chunk in work.chunks]
    assert weights[1] > 1.5 * weights[2]
    seconds = [chunk.forward for chunk in work.chunks[1:3]]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.15)
    assert work.memory == min(unit.device.memory - unit.device.reserved for unit in mixed.units)


def test_recommender_bytes():
    job = load_job("dlrm")
    cluster = load_cluster("dgx-h100")
    work = unchecked(cluster, job, Layout({"table": 8, "dp": 8}, microbatch=1024))
    vectors = found(work, axis="table", collective="all_to_all", phase="forward", hidden=False)
    assert max(t.bytes for t in vectors) == 1024 * 26 * 128 * 2  # pooled: a vector a feature, in fp16
    rows = 5 * 40e6 + 21 * 5e5
    assert work.chunks[0].weights == pytest.approx(rows * 128 * 4 / 8 + 2 * job.dense_parameters())
    with pytest.raises(Infeasible, match="laid over dp, fsdp and table"):
        workload(cluster, job, Layout({"tp": 8}))
    with pytest.raises(Infeasible, match="does not divide"):
        workload(cluster, job, Layout({"table": 24}))
    with pytest.raises(Infeasible) as error:
        workload(load_cluster("host-h100"), load_job("hstu-ranker"), Layout({"table": 8}, microbatch=8))
    assert error.value.term == "weights"


def test_length_moments_against_drawing():
    random = np.random.default_rng(0)
    drawn = np.clip(random.lognormal(math.log(1500) - 0.5, 1.0, 400_000), 16, 8192)
    mean, square = moments(Lengths(1500, 1.0, 16, 8192))
    assert mean == pytest.approx(drawn.mean(), rel=0.01)
    assert square == pytest.approx((drawn**2).mean(), rel=0.02)
    assert moments(Lengths(100, 0.0)) == (100, 10_000)

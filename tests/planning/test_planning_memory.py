"""Memory by stage against published numbers and by hand; what is said when nothing fits."""

from dataclasses import dataclass, replace

import pytest

from semel.planning import Infeasible, Layout, load_cluster, load_job, workload
from semel.planning.memory import by_stage, in_flight, over_time, peak_of
from semel.planning.workload import unchecked

GIB = 2.0**30


@dataclass(frozen=True)
class Op:
    kind: str
    microbatch: int
    chunk: int


def one_f_one_b(stages, microbatches, device):
    """The textbook order, for this test only."""
    warm = min(microbatches, stages - device - 1)
    ops = [Op("F", k, device) for k in range(warm)]
    for k in range(microbatches - warm):
        ops += [Op("F", warm + k, device), Op("B", k, device)]
    return ops + [Op("B", k, device) for k in range(microbatches - warm, microbatches)]


def gpt(layers, width, heads, batch):
    return load_job({"like": "gpt3-175b", "layers": layers, "width": width, "feedforward": 4 * width, "heads": heads,
                     "batch": batch})


MODELS = {  # arXiv 2205.05198, table 3: layers, width, heads, pipeline, chunks, batch, micro-batch
    "22B": (48, 6144, 64, 1, 1, 4, 4), "175B": (96, 12288, 96, 8, 3, 64, 1), "530B": (105, 20480, 128, 35, 3, 280, 1),
    "1T": (128, 25600, 160, 64, 1, 512, 1)}
# arXiv 2205.05198, figure 1, in GiB (calculon-ai/calculon caa4b11, validation.py): weights and optimizer; activations
# without recompute; with sequence parallelism and selective recompute
FIGURE_1 = {"22B": (45.5625, 59.25, 9.5625), "175B": (45.5625, 66.84375, 12.3515625),
            "530B": (31.640625, 114.0234375, 23.076171875), "1T": (32.958984375, 131.25, 26.5625)}
# Figure 7: activations in percent of those without recompute: sequence parallel; selective; both; full
FIGURE_7 = {"22B": (66.84, 49.42, 16.18), "175B": (62.04, 56.53, 18.49), "530B": (58.31, 62.04, 20.27),
            "1T": (58.31, 62.04, 20.27)}


def layout_of(name, recompute="none", sequence_parallel=False):
    layers, width, heads, pp, chunks, batch, micro = MODELS[name]
    return gpt(layers, width, heads, batch), Layout(
        {"tp": 8, "pp": pp}, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks, microbatch=micro,
        recompute=recompute, sequence_parallel=sequence_parallel, zero=0)


def layers_only(name, recompute, sequence_parallel):
    """Activations of the most loaded stage without embedding and head, as the figures count them: those of an inner
    chunk times what stage 0 has in flight."""
    job, layout = layout_of(name, recompute, sequence_parallel)
    work = unchecked(load_cluster("selene"), job, layout)
    count = sum(in_flight(layout.schedule, work.stages, work.microbatches, layout.chunks, 0))
    if len(work.chunks) == 1:
        from semel.planning.compute import transformer_layer

        return job.layers * transformer_layer(load_cluster("selene").device, job, layout, False).activation
    return work.chunks[1].activation * count


@pytest.mark.parametrize("name", MODELS)
def test_published_activations(name):
    _, none, selective = FIGURE_1[name]
    assert layers_only(name, "none", False) / GIB == pytest.approx(none, rel=0.01)
    assert layers_only(name, "selective", True) / GIB == pytest.approx(selective, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_published_savings(name):
    base = layers_only(name, "none", False)
    kinds = [("none", True), ("selective", False), ("selective", True)]
    for (recompute, parallel), percent in zip(kinds, FIGURE_7[name], strict=True):
        assert 100 * layers_only(name, recompute, parallel) / base == pytest.approx(percent, rel=0.015)


@pytest.mark.parametrize("name", ["175B", "530B", "1T"])
def test_published_weights_and_optimizer(name):
    job, layout = layout_of(name)
    work = unchecked(load_cluster("selene"), job, layout)
    inner = work.chunks[1]
    kept = layout.chunks * (inner.weights + inner.gradients + inner.optimizer)
    assert kept / GIB == pytest.approx(FIGURE_1[name][0], rel=2e-3)


def test_in_flight_counts_by_hand():
    assert [in_flight("1f1b", 4, 8, 1, d) for d in range(4)] == [(4,), (3,), (2,), (1,)]
    assert in_flight("gpipe", 4, 8, 1, 0) == (8,)
    assert [in_flight("zb_h2", 4, 8, 1, d) for d in range(4)] == [(7,)] * 4
    assert [in_flight("zb_h1", 4, 8, 1, d) for d in range(4)] == [(4,)] * 4
    assert in_flight("1f1b", 4, 2, 1, 0) == (2,)
    # interleaved, device 0: (v - 1) p + 2 p - 1 chunk activations, p (1 + (p - 1) / (p v)) of a device's layers
    assert sum(in_flight("interleaved", 8, 64, 3, 0)) == 3 * 8 + 8 - 1
    assert in_flight("interleaved", 4, 8, 2, 3) == (4, 1)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (2, 2), (5, 16), (1, 3)])
def test_peak_over_operations_is_the_closed_form(stages, microbatches):
    cluster, job = load_cluster("selene"), gpt(20, 1024, 16, 64)
    layout = Layout({"pp": stages}, microbatch=64 // microbatches if 64 % microbatches == 0 else 4)
    work = unchecked(cluster, job, layout)
    orders = [one_f_one_b(stages, work.microbatches, device) for device in range(stages)]
    for memory, peak in zip(by_stage(work, layout), peak_of(work, orders), strict=True):
        assert peak == pytest.approx(memory.total)
    after = over_time(work, orders[0])[-1][1]
    first = work.chunks[0]
    assert after == pytest.approx(first.weights + first.gradients + first.optimizer)  # all activations are freed


def test_split_backwards_free_at_their_later_half():
    work = unchecked(load_cluster("selene"), gpt(2, 1024, 16, 2), Layout({"pp": 2}))
    ops = [Op("F", 0, 0), Op("F", 1, 0), Op("I", 0, 0), Op("I", 1, 0), Op("W", 0, 0), Op("W", 1, 0)]
    held = [after for _, after in over_time(work, ops)]
    one = work.chunks[0].activation
    assert [round((value - held[-1]) / one) for value in held] == [1, 2, 2, 2, 1, 0]


def test_what_does_not_fit_is_named_with_the_smallest_change():
    cluster, job = load_cluster("dgx-h100"), load_job("llama3-405b")
    layout = Layout({"tp": 8, "pp": 16, "dp": 64}, schedule="interleaved", chunks=8)
    with pytest.raises(Infeasible) as error:
        workload(cluster, job, layout)
    assert error.value.term == "activations"
    assert error.value.over_by > 0
    assert "\n" not in str(error.value)
    assert "over by" in str(error.value)
    assert "recompute = 'selective'" in error.value.change
    work = workload(cluster, job, replace(layout, recompute="selective"))  # and it does fit
    assert all(memory.total <= work.memory for memory in by_stage(work, layout))


def test_the_remedy_of_too_many_weights_is_more_sharding():
    with pytest.raises(Infeasible) as error:
        workload(load_cluster("dgx-h100"), load_job({"like": "llama3-8b", "batch": 64}),
                 Layout({"dp": 64}, zero=0, recompute="full"))
    assert error.value.term == "optimizer"
    assert "zero = 1" in error.value.change
    with pytest.raises(Infeasible) as error:
        workload(load_cluster("host-h100"), load_job({"like": "llama3-405b", "batch": 8}), Layout({"fsdp": 8}))
    assert "no single change fits" in error.value.change


def test_more_memory_never_refuses_what_fitted():
    cluster, job = load_cluster("dgx-h100"), load_job("llama3-70b")
    layout = Layout({"tp": 8, "pp": 4, "dp": 64}, recompute="selective")
    workload(cluster, job, layout)
    workload(cluster.scaled("devices.h100.memory", 1.5), job, layout)


@pytest.mark.parametrize(("sizes", "said"), [
    ({"tp": 3}, "does not divide 128 heads"), ({"pp": 200}, "are more than 126 layers"),
    ({"ep": 2, "dp": 2}, "experts"),
    ({"dp": 3}, "a batch of 2048 does not divide"), ({"dp": 1 << 20}, "devices"), ({"moon": 2}, "unknown axis 'moon'"),
    ({"table": 2}, "no tables"), ({"cp": 3}, "cp = 3"), ({"dp": 0}, "at least 1"),
])
def test_counts_that_do_not_divide(sizes, said):
    with pytest.raises(Infeasible, match=said):
        workload(load_cluster("dgx-h100"), load_job("llama3-405b"), Layout(sizes))

"""The closed-form estimate beside the simulation of every operation, on layouts drawn at random."""

import random
import statistics

import pytest

from semel.planning import Infeasible, Layout, estimate, load_cluster, load_job
from semel.planning.workload import unchecked

simulation = pytest.importorskip("semel.planning.simulate")
schedules = pytest.importorskip("semel.planning.schedules")

CLUSTERS = ("meta-region-16k", "two-buildings-100km", "three-regions", "cloud-zones", "selene")
JOBS = ({"like": "llama3-70b", "batch": 256}, {"like": "deepseek-v3", "batch": 256, "dtype": "bf16"},
        {"like": "llama3-8b", "batch": 128}, {"like": "gpt3-175b", "batch": 192})


def drawn(count, seed=5):
    """(estimate, seconds of the simulation, schedule) of feasible counts on every ready kind of cluster."""
    choose = random.Random(seed)
    clusters, jobs = [load_cluster(name) for name in CLUSTERS], [load_job(job) for job in JOBS]
    found = []
    while len(found) < count:
        cluster, job = choose.choice(clusters), choose.choice(jobs)
        sizes = {"tp": choose.choice([1, 2, 4, 8]), "pp": choose.choice([1, 2, 4, 8]), "dp": choose.choice([1, 2, 4]),
                 "fsdp": choose.choice([1, 1, 4, 8]), "cp": choose.choice([1, 1, 2]),
                 "ep": choose.choice([1, 2, 4]) if job.experts else 1}
        name = choose.choice(schedules.NAMES)
        least, most = schedules.CHUNKS[name]
        order = ["tp", "cp", "fsdp", "dp", "pp"]
        choose.shuffle(order)
        layout = Layout(
            sizes, order=tuple(order), schedule=name,
            chunks=choose.choice([chunks for chunks in (1, 2, 4) if least <= chunks <= most]),
            microbatch=choose.choice([1, 2]), recompute=choose.choice(["none", "selective", "full"]),
            sequence_parallel=choose.random() < 0.7, zero=choose.choice([0, 1]),
            overlap=frozenset(axis for axis in ("tp", "cp", "ep", "pp", "dp", "fsdp") if choose.random() < 0.6),
            network={level.name: choose.choice(level.technologies).name for level in cluster.levels})
        try:
            work = unchecked(cluster, job, layout)
            plan = schedules.schedule(
                name, work.stages, work.microbatches, layout.chunks, forward=[c.forward for c in work.chunks],
                backward_input=[c.backward_input for c in work.chunks],
                backward_weight=[c.backward_weight for c in work.chunks])
        except (Infeasible, KeyError, ValueError):  # counts that do not divide
            continue
        found.append((estimate(work, layout), simulation.simulate(work, plan).seconds, name))
    return found


def judge(found):
    """Links of clouds and of continents are drawn too: there a step is all communication, and estimates are worst."""
    for guess, seconds, name in found:
        assert guess.lower <= seconds * (1 + 1e-9), name
        assert 0.65 * seconds <= guess.seconds <= 1.6 * seconds, name
    ratios = [guess.seconds / seconds for guess, seconds, _ in found]
    assert 0.97 < statistics.median(ratios) < 1.03
    assert sum(abs(ratio - 1) < 0.1 for ratio in ratios) > 0.8 * len(ratios)
    return ratios


def test_the_estimate_is_near_the_simulation_and_its_bound_below_it():
    judge(drawn(40))


@pytest.mark.slow
def test_the_same_on_many_layouts(capsys):
    ratios = judge(drawn(400, seed=7))
    near = sum(abs(ratio - 1) < 0.1 for ratio in ratios) / len(ratios)
    with capsys.disabled():
        print(f"\nestimate / simulation: {min(ratios):.3f} .. {max(ratios):.3f}, "
              f"median {statistics.median(ratios):.4f}, {near:.0%} within 10 %")

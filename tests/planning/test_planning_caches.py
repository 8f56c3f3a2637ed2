"""What is remembered between calls is what a fresh process would say."""

import random
import subprocess
import sys

import pytest

from semel.planning import Infeasible, Layout, axes, estimate, load_cluster, load_job, transformer
from semel.planning.workload import unchecked

SIZES = [{"tp": 8, "pp": 8, "dp": 4}, {"tp": 4, "cp": 2, "pp": 4, "dp": 8}, {"tp": 8, "fsdp": 32},
         {"fsdp": 16, "dp": 16}, {"pp": 16, "dp": 16, "ep": 8}]


def forget():
    for known in (axes._SPANS, axes._HOPS, transformer._CHUNKS, transformer._FABRICS, transformer._PARTS,
                  transformer._FLOPS):
        known.clear()


def test_in_any_order_the_answers_are_those_of_a_fresh_start():
    clusters = [load_cluster("two-buildings-10km"), load_cluster("meta-region-16k")]
    jobs = [load_job({"like": "llama3-70b", "batch": 512}), load_job({"like": "deepseek-v3", "batch": 512})]
    cases = [(cluster, job, Layout(sizes, schedule=schedule, chunks=chunks, recompute=recompute, microbatch=micro,
                                   overlap=overlap, compress=compress))
             for cluster in clusters for job in jobs for sizes in SIZES
             for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2))
             for recompute, micro, overlap, compress in (
                 ("none", 1, frozenset({"dp", "pp"}), {}), ("full", 2, frozenset(), {cluster.levels[-1].name: "bf16"}))]

    def answer(case):
        try:
            return estimate(unchecked(*case), case[2])
        except Infeasible as error:
            return str(error)

    fresh = []
    for case in cases:
        forget()
        fresh.append(answer(case))
    assert sum(not isinstance(each, str) for each in fresh) > 60
    forget()
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    for index in order * 2:
        assert answer(cases[index]) == fresh[index]


@pytest.mark.timeout(60)
def test_the_room_needs_no_torch():
    code = ("import sys, semel.planning; from semel.planning import calibrate; "
            "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'pandas')))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

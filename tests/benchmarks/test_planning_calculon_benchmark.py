"""The comparison with Calculon reads its tables, and its own side is the model's."""

import pytest

from benchmarks import planning_calculon as benchmark
from semel.planning import load_cluster

PRINTED = """*Params & Opt,|,none,,,|,seqsel,,,
Model,|,Profile,Calc,Delta,|,Profile,Calc,Delta,
gpt3-175B,|,45.5625,40.93,10.17%,|,45.5625,40.93,10.17%,
Ave,,8.49%
Max,,10.84%
,
gpt3-175B,|,66.84375,66.94,-0.14%,|,12.3515625,12.69,-2.75%,
Max,,8.74%
gpt3-175B,|,100.0%,100.00%,0.00%,|,62.04%,62.03%,0.02%,|,56.53%,48.32%,1%,|,18.49%,18.96%,-2%,|,8.71%,9.63%,-1%,
Max,,30.41%
gpt3-175B,|,18.13,18.03,0.56%,48.10,|,13.75,13.64,0.81%,54.07,
Max,,8.87%
"""


def test_what_it_prints_is_read():
    cells = benchmark.parse(PRINTED)
    assert len(cells) == 2 + 2 + 5 + 2
    assert cells[0] == ("weights and optimizer, GiB", "gpt3-175B", "none", 45.5625, 40.93)
    assert cells[-1] == ("step time, s", "gpt3-175B", "seqsel", 13.75, 13.64)
    assert ("activations, % of none", "gpt3-175B", "sel", 56.53, 48.32) in cells
    with pytest.raises(ValueError, match="found 1: another version"):
        benchmark.parse(PRINTED.split("Max")[0])


def test_our_side_is_near_what_was_published():
    cluster = load_cluster("selene")
    for table, model, mode, published, _ in benchmark.parse(PRINTED):
        bound = 0.2 if table.startswith("step") else 0.02
        assert benchmark.ours(cluster, table, model, mode) == pytest.approx(published, rel=bound), (table, mode)

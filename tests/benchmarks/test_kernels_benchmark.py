"""The kernels' benchmark at toy shapes: every contender computes the same."""

import pytest
import torch

from benchmarks import kernels

POINTS = {
    "linear_compression": lambda: kernels.linear_compression("cpu", torch.float32, 7, 3, 4, 3, 5, 2),
    "broadcast_attention": lambda: kernels.broadcast_attention("cpu", torch.float32, 7, 3, 2, 2, 4, 9, True),
    "pair_interaction": lambda: kernels.pair_interaction("cpu", torch.float32, 7, 3, 4, 3, 5),
    "gather_add": lambda: kernels.gather_add("cpu", torch.float32, 7, 3, 5),
}


@pytest.mark.parametrize("name", POINTS)
def test_contenders_agree_and_are_timed(name):
    rows = kernels.measure(POINTS[name](), "cpu", rounds=2)
    assert {row["against"] for row in rows} and any(row["backward"] for row in rows)
    for row in rows:
        assert "failed" not in row, row
        assert row["kernel"] == name and row["ratio"] > 0
        assert row["error"] < 1e-5 and row["other_error"] < 1e-5


def test_a_contender_that_does_not_run_is_a_line():
    point = POINTS["gather_add"]()
    point.others["broken"] = lambda c, r: c @ c
    rows = kernels.measure(point, "cpu", rounds=1)
    assert [row["against"] for row in rows if "failed" in row] == ["broken", "broken"]

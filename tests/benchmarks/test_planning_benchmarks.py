"""The planner against real processes: ten plans that differ are predicted in order and in time."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import planning_real
from semel.planning.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]


def test_the_ten_plans_differ_and_need_both_axes():
    chosen = planning_real.apart(planning_real.candidates(), 10)
    assert len(chosen) == 10
    seconds = [predicted for _, predicted in chosen]
    assert all(after >= 1.1 * before for before, after in pairwise(seconds))
    assert len({plan.ranks for plan, _ in chosen}) >= 4
    assert len({plan.schedule.name for plan, _ in chosen}) >= 3


def test_kendall():
    assert planning_real.kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert planning_real.kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert planning_real.kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_a_replica_stands_for_all():
    """Half the micro-batches, and the sum of gradients in a ring over the slow level: by hand."""
    plan = planning_real.make(((0, 1), (2, 3)), "gpipe", buckets=False)
    computed = 3 * 0.12 / 2 * (4 + 1) + 2 * (0.001 + 1e6 / 400e6)
    reduced = 2 * (0.05 + 12e6 / 2 / 40e6)
    assert simulate(plan.work, plan.schedule).seconds == pytest.approx(computed + reduced)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_predicted_is_measured(tmp_path: Path):
    out = subprocess.run([sys.executable, "-m", "benchmarks.planning_real", "--json", str(tmp_path / "found.json")],
                         cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert out.returncode == 0, out.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert len(result["plans"]) == 10
    assert result["tau"] >= 0.8
    assert result["worst_error"] <= 0.15

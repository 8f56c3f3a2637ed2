"""The benchmarks of embeddings run: small, on this machine as it is, so that only what cannot vary is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, folder: Path, *arguments: str) -> Any:
    out = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(folder / "out.json")],
                         cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert out.returncode == 0, out.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overlap_prints_what_it_is_asked_for(tmp_path: Path) -> None:
    result = run("embedding_overlap", tmp_path, "--shares", "0.1", "1", "--rows", "200", "--compute-ms", "30",
                 "--rounds", "1")
    assert [round(case["share"], 2) for case in result["cases"][:2]] == [0.1, 1.0]
    assert result["cases"][2]["workload"] == "site" and 0.02 < result["cases"][2]["share"] < 0.08
    for case in result["cases"]:
        assert case["prioritized"]["median_ms"] > 0 and case["blocking"]["median_ms"] > 0
        (late,) = case["late_ms"]
        assert late >= 0 and case["calm_rounds"] == (late <= 1)
        bound = 1.3 * case["share"] * case["blocking"]["median_ms"] + 2
        assert case["met"] == (case["prioritized"]["median_ms"] <= bound)
        assert case["sent_mb"]["prioritized"] == pytest.approx(case["sent_mb"]["blocking"], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gradients_under_backward_are_held_against_one_sum_after_it(tmp_path: Path) -> None:
    found = run("gradient_overlap", tmp_path, "--layers", "12", "--rows", "64", "--megabytes", "20", "--steps", "3")
    assert found["buckets"] == 4 and found["link_ms"] == pytest.approx(158.1, abs=0.01)
    assert found["after"]["exposed"]["median_ms"] >= found["link_ms"]  # it slept that long after backward
    assert found["under"]["exposed"]["median_ms"] >= found["last_bucket_ms"]
    assert found["alone"]["whole"]["median_ms"] > 0 and found["times_less"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_numbers_as_torchrec(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="semel[torchrec] is not installed")
    result = run("embedding_torchrec", tmp_path, "--rows", "3000", "--dim", "8", "--positions", "512", "--rounds", "2")
    for case in result["cases"]:
        assert case["compared"] == 3000 and case["largest_difference"] < 1e-5 * case["largest"]

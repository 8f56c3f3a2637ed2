"""The benchmark of request sharing runs, compares with the unmodified model, and its bound is a bound."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sharing import interleaved, sizes_of_requests, summary, upper_rank

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(230)
def test_it_prints_one_document() -> None:
    out = subprocess.run([sys.executable, "-m", "benchmarks.sharing", "--quick", "--json", "--models", "own.DLRM",
                          "own.DCNv2"], cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    for name in ("own.DLRM", "own.DCNv2"):
        model = result["models"][name]
        assert [(row["candidates"], row["ragged"]) for row in model["rows"]] == [(1, False), (16, False), (16, True)]
        assert model["float64_difference"] <= 1e-10
        for row in model["rows"]:
            assert row["relative_difference"] <= 1e-5
            assert row["ms"].keys() >= {"naive", "shared", "cached"} and min(row["ms"].values()) > 0
            assert row["slower_bound"]["shared"] >= 1 / row["speed_up"]["shared"]
        assert 0 < model["rows"][1]["flops"]["cached"] <= model["rows"][1]["flops"]["naive"]
    assert "tile" in result["models"]["own.DLRM"]["rows"][1]["ms"]
    assert result["summary"]["shared"] == 2 and result["summary"]["candidates"] == 16
    assert result["summary"]["cross_network"]["speed_up"].keys() == {
        "exact", "exact, cached", "parallel exact", "parallel exact, cached", "rDCN", "rDCN, cached"}


def test_the_bound_covers_the_median_as_often_as_it_says() -> None:
    assert upper_rank(15) == 12
    assert upper_rank(3) == 3
    for rounds in (5, 15, 31, 100):
        rank = upper_rank(rounds)
        covered = sum(math.comb(rounds, i) for i in range(rank)) / 2**rounds
        assert covered >= 0.95 and covered - math.comb(rounds, rank - 1) / 2**rounds < 0.95
    rng = random.Random(0)
    below = sum(sorted(rng.gauss(0, 1) for _ in range(15))[upper_rank(15) - 1] < 0 for _ in range(4000))
    assert below / 4000 < 0.05


def test_rounds_are_interleaved_in_turning_order() -> None:
    calls: list[str] = []
    times = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, 6, 10.0)
    assert all(len(values) == 6 for values in times.values())
    firsts = [name for name, previous in zip(calls[6:], calls[5:], strict=False) if name != previous]
    assert firsts[:7] == ["a", "b", "c", "b", "c", "a", "c"]     # rounds abc, bca, cab: no place is one column's own


def test_the_ragged_case_has_an_empty_request() -> None:
    offsets = sizes_of_requests(512, ragged=True)
    assert offsets[0] == 0 and offsets[-1] == 512
    assert (offsets[1:] - offsets[:-1]).tolist().count(0) == 1


def test_the_summary_counts_what_is_refused_and_means_what_is_not() -> None:
    def row(speed: float, shared_flops: int) -> dict[str, object]:
        return {"candidates": 512, "ragged": False, "speed_up": {"shared": speed, "cached": 2 * speed},
                "slower_bound": {"shared": 1 / speed, "cached": 0.5}, "flops": {"naive": 100, "shared": shared_flops},
                "relative_difference": 1e-7}

    report = summary({"a": {"rows": [row(2.0, 80)], "float64_difference": 1e-15},
                      "b": {"rows": [row(8.0, 50)], "float64_difference": None}, "c": {"refused": "why"}}, 512)
    assert report["models"] == 3 and report["shared"] == 2 and report["refused"] == {"c": "why"}
    assert report["request_included"] == pytest.approx(4.0) and report["request_cached"] == pytest.approx(8.0)
    assert report["flops_halved"] == {"models": 1, "speed_up": pytest.approx(8.0)}
    assert report["worst_slower_bound"] == (0.5, "b", 512, "cached") or report["worst_slower_bound"][0] == 0.5
    assert report["float64_difference"] == 1e-15 and report["tile"] is None

"""The benchmarks of the item memory run, and what they print makes sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def printed(*arguments: str) -> dict:
    out = subprocess.run([sys.executable, "-m", *arguments, "--json"], cwd=ROOT, capture_output=True, text=True,
                         timeout=170)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.timeout(180)
def test_rows_freshness_and_latency() -> None:
    result = printed("benchmarks.memory", "--rows", "20000", "--dim", "8", "--batch", "2000", "--rounds", "3",
                     "--seconds", "2")
    assert min(result["rows"]["million_rows_per_second"].values()) > 0
    assert 0 < result["fresh"]["p50"] <= result["fresh"]["p99"] and result["fresh"]["rows"] > 0
    assert result["latency"]["upper_bound"]["layer"] >= result["latency"]["ratio"]["layer"] > 0


@pytest.mark.timeout(180)
def test_a_candidate_in_a_predictor() -> None:
    result = printed("benchmarks.memory_serving", "--candidates", "100", "--rounds", "6", "--calls", "2")
    each = result["microseconds_a_candidate"]
    assert set(each) == {"memory", "rows", "frozen"} and min(each.values()) > 0
    assert result["upper_bound"]["memory"] >= result["ratio"]["memory"] > 0


@pytest.mark.timeout(180)
def test_skew() -> None:
    (result,) = printed("benchmarks.memory_skew", "--seconds", "330", "--items", "2000", "--seeds", "1", "--reads",
                        "live")["live"]
    served = result["served"]
    assert served["memory"]["coverage"] == 1.0 > served["frozen"]["coverage"]
    assert all(0 < one["ne"] < 2 for one in served.values())
    assert result["tower_rows"]["memory"] > 0


@pytest.mark.timeout(180)
def test_skew_of_ratings_by_their_own_clock(tmp_path: Path) -> None:
    # Two sittings of 300 ratings, an hour apart, and one of new items a minute behind the second.
    times = [*range(300), *range(3600, 3900), *range(3960, 4000)]
    ratings = [f"{n % 7},{n % 50 if n < 600 else 50 + n % 3},{1 + n % 5},{time}" for n, time in enumerate(times)]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *ratings]))
    films = [f"{item},Film {item} (2000),Drama" for item in range(53)]
    (tmp_path / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]))
    (result,) = printed("benchmarks.memory_skew", "--data", str(tmp_path), "--speedup", "1", "--seeds", "1", "--reads",
                        "live")["live"]
    # A bulk job runs every 300 s, 14 times, the last at 3,900 s: it knows nothing of what came at 3,960 s.
    assert result["served"]["frozen"]["tower_rows_beside_training"] == 14 * 50 - 49
    assert result["served"]["frozen"]["found"] < result["served"]["memory"]["coverage"] == 1.0
    assert result["served"]["memory"]["gap"] < result["served"]["frozen"]["gap"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_loop_through_a_server() -> None:
    result = printed("benchmarks.memory_loop", "--seconds", "6", "--every", "3")
    for name in ("rows", "events"):
        assert 0 < result[name]["p50"] <= result[name]["p99"] and result[name]["count"] > 0
    assert result["coverage"] == 1.0
    assert result["replay"]["exact"] and result["replay"]["bit_equal"] == result["replay"]["requests"] > 0

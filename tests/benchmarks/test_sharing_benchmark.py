"""The benchmark of request sharing runs, compares with the unmodified model, and its bound is a bound."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharing
from benchmarks.sharing import interleaved, sizes_of_requests, summary, upper_rank


@pytest.mark.timeout(230)
def test_it_prints_one_document(printed: Callable[..., Any]) -> None:
    result = printed("sharing", "--quick", "--models", "own.DLRM", "own.DCNv2")
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
                "slower_bound": {"shared": 1 / speed, "cached": 0.5}, "extra_us": {"shared": 1.0, "cached": 2.0},
                "flops": {"naive": 100, "shared": shared_flops},
                "relative_difference": 1e-7}

    report = summary({"a": {"rows": [row(2.0, 80)], "float64_difference": 1e-15},
                      "b": {"rows": [row(8.0, 50)], "float64_difference": None}, "c": {"refused": "why"}}, 512)
    assert report["models"] == 3 and report["shared"] == 2 and report["refused"] == {"c": "why"}
    assert report["request_included"] == pytest.approx(4.0) and report["request_cached"] == pytest.approx(8.0)
    assert report["flops_halved"] == {"models": 1, "speed_up": pytest.approx(8.0)}
    assert report["worst_slower_bound"] == (0.5, "b", 512, "cached") or report["worst_slower_bound"][0] == 0.5
    assert report["float64_difference"] == 1e-15 and report["tile"] is None


def row(speed_up: float) -> dict[str, Any]:
    return {"candidates": 16, "ragged": False, "ms": {"naive": 1.0, "shared": 1 / speed_up, "cached": 1 / speed_up},
            "speed_up": {"shared": speed_up, "cached": speed_up}, "flops": {}, "relative_difference": 1e-7,
            "slower_bound": {"shared": 1 / speed_up, "cached": 1 / speed_up},
            "extra_us": {"shared": -1.0, "cached": -1.0}}


def swept(monkeypatch: pytest.MonkeyPatch, path: Path, *more: str) -> list[str]:
    """Runs a sweep in which three models take no time, and says which of them were run."""
    ran: list[str] = []

    def instead(function: Any, arguments: tuple[Any, ...], limit: float, seen: Any) -> str | None:
        ran.append(arguments[0])
        if arguments[0] == "b":
            seen({"share_seconds": 1.0, "rows": []})
            return f"stopped after {limit:g} s"
        seen({"refused": "a branch"} if arguments[0] == "c" else {"share_seconds": 1.0, "rows": [row(4.0)]})
        return None

    monkeypatch.setattr(sharing, "run_apart", instead)
    monkeypatch.setattr(sharing, "parts_of", lambda models, names: ["a", "b", "c"])
    monkeypatch.setattr(sys, "argv", ["sharing", "--quick", "--json", str(path), *more])
    sharing.main()
    return ran


def test_a_sweep_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zoo.json"
    assert swept(monkeypatch, path, "--limit", "5") == ["a", "b", "c"]
    found = json.loads(path.read_text())
    assert found["summary"]["not_run"] == {"b": "stopped after 5 s"}
    assert found["summary"]["refused"] == {"c": "a branch"}
    assert found["summary"]["request_included"] == pytest.approx(4.0)
    assert found["summary"]["unmeasured_as_1x"] == {
        "models": 2, "request_included": pytest.approx(2.0), "request_cached": pytest.approx(2.0)}
    assert "1 of them have a number there; the others taken as 1.0x: shared 2.00x" in capsys.readouterr().out
    assert swept(monkeypatch, path, "--limit", "5", "--resume") == []
    assert swept(monkeypatch, path, "--limit", "6", "--resume") == ["b"]     # it may end now
    assert json.loads(path.read_text())["models"]["a"] == found["models"]["a"]


def test_a_sweep_keeps_a_file_that_it_does_not_go_on_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    swept(monkeypatch, path)
    before = path.read_text()
    for more, word in (([], "--resume"), (["--resume", "--sizes", "3"], "sizes"),
                       (["--resume", "--compiled"], "runtime")):
        with pytest.raises(SystemExit, match=word):
            swept(monkeypatch, path, *more)
    assert path.read_text() == before
    path.write_text("{}")
    with pytest.raises(SystemExit, match="no results of this benchmark"):
        swept(monkeypatch, path, "--resume")
    assert path.read_text() == "{}"


def test_what_a_call_costs_is_told_for_each_kind_of_inputs() -> None:
    from benchmarks.sharing_call import measured

    for kind in ("matrix", "separate", "named"):
        found = measured(kind, 10, 5, 7)
        assert found["call_us"] > found["model_us"] > 0 and found["extra_us_bound"] >= found["extra_us"] > 0

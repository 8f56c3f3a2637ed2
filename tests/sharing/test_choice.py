"""Timing the ways of computing: each counts, none is run for longer than it must be, and a call takes the fastest."""

from __future__ import annotations

import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from semel.sharing import choice, share
from semel.sharing.choice import ROUNDS, fastest, timed
from semel.sharing.runtime import ORIGINAL


class Ways:
    """Functions that take a while (seconds each), and how often each was run."""

    def __init__(self, **seconds: float) -> None:
        self.runs: Counter[str] = Counter()
        self.ways = {name: lambda name=name, wait=wait: self.run(name, wait) for name, wait in seconds.items()}

    def run(self, name: str, seconds: float) -> None:
        self.runs[name] += 1
        self.now += seconds

    now = 0.0

    def timed(self, *args: object, **kwargs: object) -> dict[str, float]:
        with mock.patch.object(choice.time, "perf_counter", lambda: self.now):
            return timed(self.ways, *args, **kwargs)  # type: ignore[arg-type]


def test_each_way_is_run_in_every_round_and_once_before() -> None:
    ways = Ways(a=0.01, b=0.02)
    assert ways.timed() == pytest.approx({"a": 0.01, "b": 0.02})
    assert ways.runs == {"a": ROUNDS + 1, "b": ROUNDS + 1}


def test_a_way_that_has_clearly_lost_is_not_run_again() -> None:
    ways = Ways(a=0.01, slow=0.09)
    ways.timed()
    assert ways.runs == {"a": ROUNDS + 1, "slow": 2}


def test_a_way_has_lost_only_where_it_has_lost_against_each_of_its_rivals() -> None:
    ways = Ways(original=0.1, call=0.09, score=0.001)
    assert ways.timed([("original", "call"), ("original", "score")]) == pytest.approx(
        {"original": 0.1, "call": 0.09, "score": 0.001})
    assert ways.runs == {"original": ROUNDS + 1, "call": ROUNDS + 1, "score": ROUNDS + 1}


def test_rounds_end_when_the_time_is_over_and_long_first_runs_count() -> None:
    ways = Ways(a=0.9, b=1.0)
    assert ways.timed(seconds=4.0) == pytest.approx({"a": 0.9, "b": 1.0})
    assert ways.runs == {"a": 3, "b": 2}    # 1.9 s before the rounds, and until 4.0 s are over
    long = Ways(a=30.0, b=20.0)
    assert long.timed(seconds=4.0) == pytest.approx({"a": 30.0, "b": 20.0})
    assert long.runs == {"a": 1, "b": 1}


def test_a_first_run_that_compiles_neither_counts_nor_takes_the_rounds_time() -> None:
    ways = Ways(a=30.0, b=20.0)
    ways.timed(seconds=4.0, compiled=True)
    assert ways.runs == {"a": 2, "b": 2}


def test_a_way_that_fails_is_none() -> None:
    def fails() -> None:
        raise ValueError("one row")

    assert timed({"a": lambda: None, "b": fails}).keys() == {"a"}


def test_the_original_is_left_for_a_clear_gain_only() -> None:
    assert fastest({ORIGINAL: 1.0, "shared": 0.95}, ORIGINAL) == ORIGINAL
    assert fastest({ORIGINAL: 1.0, "shared": 0.8}, ORIGINAL) == "shared"
    assert fastest({"shared": 0.8}, ORIGINAL) == "shared"


class Slow(nn.Module):
    """Takes two milliseconds a row: a model that always loses, and for long."""

    rows = 0

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            Slow.rows += len(user)
            time.sleep(2e-3 * len(user))
        return (user * item).sum(1)


def test_an_original_that_has_lost_is_not_run_for_many_candidates() -> None:
    Slow.rows = 0
    shared = share(Slow().eval(), (torch.ones(2, 3), torch.ones(2, 3)), ["user"], candidates_hint=4096)
    assert Slow.rows < 4096
    tried = [ORIGINAL in c.seconds for c in shared.choices["call", False]]
    assert tried[0] and not tried[-1]
    assert {c.way for c in shared.choices["call", False]} == {"shared"}
    shared.choose([1, 2], seconds=0.0)
    assert [c.candidates for c in shared.choices["score", False]] == [1, 2]

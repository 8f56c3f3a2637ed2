"""Parts in processes of their own: what they say arrives, and what does not end costs itself only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.apart import run_apart, write_whole

pytestmark = pytest.mark.timeout(60)


def counts(say: Callable[[Any], None], until: int) -> None:
    for i in range(until):
        say({"i": i})
    say(None)


def hangs(say: Callable[[Any], None]) -> None:
    say("first")
    time.sleep(50)


def dies(say: Callable[[Any], None]) -> None:
    say("first")
    os._exit(7)


def test_everything_it_says_is_seen_in_order() -> None:
    seen: list[Any] = []
    assert run_apart(counts, (3,), 40, seen.append) is None
    assert seen == [{"i": 0}, {"i": 1}, {"i": 2}, None]


def test_a_part_that_hangs_is_stopped_and_keeps_what_it_said() -> None:
    seen: list[Any] = []
    begin = time.monotonic()
    assert run_apart(hangs, (), 8, seen.append) == "stopped after 8 s"
    assert seen == ["first"] and time.monotonic() - begin < 30


def test_a_part_that_dies_is_told_apart_from_one_that_ends() -> None:
    seen: list[Any] = []
    assert run_apart(dies, (), 40, seen.append) == "its process ended with code 7"
    assert seen == ["first"]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_whole(path, {"a": 1})
    write_whole(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2} and [p.name for p in tmp_path.iterdir()] == ["found.json"]
    with pytest.raises(TypeError):
        write_whole(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}

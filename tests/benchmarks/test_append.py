"""The benchmark of appends runs, and counts what it appended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(110)
def test_it_prints_one_document(printed: Callable[..., Any], tmp_path: Path) -> None:
    result = printed("append", "--appends", "4", "--rows", "20", "--rounds", "1", "--folder", str(tmp_path))
    assert len(result["events_per_second"]) == 5 and all(value > 0 for value in result["events_per_second"].values())
    assert len(result["over_sqlite"]) == 3
    assert list(tmp_path.iterdir()) == []

"""The benchmark of reading runs; that the contestants agree it asserts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(110)
def test_it_prints_one_document(printed: Callable[..., Any], tmp_path: Path) -> None:
    result = printed("history", "--users", "200", "--requests", "1024", "--seconds", "0.1", "--folder", str(tmp_path))
    assert result["bytes_per_event"]["cold"] < result["bytes_per_event"]["packed"] < result["bytes_per_event"]["plain"]
    assert {"raw numba gather (limit)", "store.read, packed", "store.read, cold"} <= result["from_the_disk"].keys()
    assert all(figures["sequences_per_second"] > 0 for figures in result["from_the_disk"].values())
    assert list(tmp_path.iterdir()) == []

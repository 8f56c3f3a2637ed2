"""The benchmark of reading runs; that the contestants agree it asserts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(110)
def test_it_prints_one_document(tmp_path: Path) -> None:
    out = subprocess.run([sys.executable, "-m", "benchmarks.history", "--users", "200", "--requests", "1024",
                          "--seconds", "0.1", "--folder", str(tmp_path), "--json"], cwd=ROOT, capture_output=True,
                         text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    assert result["bytes_per_event"]["cold"] < result["bytes_per_event"]["packed"] < result["bytes_per_event"]["plain"]
    assert {"raw numba gather (limit)", "store.read, packed", "store.read, cold"} <= result["from_the_disk"].keys()
    assert all(figures["sequences_per_second"] > 0 for figures in result["from_the_disk"].values())
    assert list(tmp_path.iterdir()) == []

"""The benchmark of appends runs, and counts what it appended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(110)
def test_it_prints_one_document(tmp_path: Path) -> None:
    out = subprocess.run([sys.executable, "-m", "benchmarks.append", "--appends", "4", "--rows", "20", "--rounds", "1",
                          "--folder", str(tmp_path), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    assert len(result["events_per_second"]) == 5 and all(value > 0 for value in result["events_per_second"].values())
    assert len(result["over_sqlite"]) == 3
    assert list(tmp_path.iterdir()) == []

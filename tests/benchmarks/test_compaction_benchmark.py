"""The benchmark of compaction runs, and finds in the generation what it appended (it asserts that itself)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(110)
def test_it_prints_one_document(tmp_path: Path) -> None:
    out = subprocess.run([sys.executable, "-m", "benchmarks.compaction", "--events", "20000", "--old", "0.4",
                          "--memory-limit", "8MiB", "--folder", str(tmp_path), "--json"], cwd=ROOT, capture_output=True,
                         text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    assert result["events"] == 20_000 and result["old"] == 8000 and result["events_per_second"] > 0
    assert result["peak_bytes"] >= result["before_bytes"] > 0
    assert list(tmp_path.iterdir()) == []

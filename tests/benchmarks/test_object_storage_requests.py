"""The benchmark of object storage runs, and a warm read asks the bucket for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(110)
def test_it_prints_one_document(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    out = subprocess.run([sys.executable, "-m", "benchmarks.object_storage", "--users", "50", "--pointers", "20",
                          "--json"], cwd=ROOT, capture_output=True, text=True, timeout=100,
                         env={**os.environ, "TMPDIR": str(tmp_path)})
    assert out.returncode == 0, out.stderr
    measures = json.loads(out.stdout)["measures"]
    assert measures["20 pointers, warm"]["requests"] == measures["one pointer, warm"]["requests"] == 0
    assert measures["append of 1,000 events"]["requests"] == 2
    assert measures["20 pointers, cold"]["bytes"] > 0
    assert list(tmp_path.iterdir()) == []

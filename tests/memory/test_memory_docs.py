"""The code in docs/memory.md runs, word for word."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_the_code_runs(tmp_path: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict = {}
    exec(first, names)
    assert names["scores"].shape == (64,) and len(names["model"].item.memory) > 50
    names["candidates"] = names["item"]
    exec(second.replace("s3://bucket/deltas", str(tmp_path)), names)
    names["publisher"].close()
    assert names["hit"].all() and names["vectors"].shape == (64, 32)

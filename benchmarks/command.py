"""What every benchmark that writes files does: a folder of its own, then a table or JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_and_show(run: Callable[[Path], Any], show: Callable[[Any], None], as_json: bool,
                 parent: Path | None = None) -> None:
    """``run`` in an empty folder, which is removed, under ``parent`` (None: where temporary files go)."""
    with tempfile.TemporaryDirectory(prefix="semel-benchmark-", dir=parent) as folder:
        result = run(Path(folder))
    if as_json:
        print(json.dumps(result))
    else:
        show(result)

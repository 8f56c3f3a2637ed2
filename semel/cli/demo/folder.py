"""Where a demo works: a folder of its own, made fresh each time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

MARK = "semel-demo.json"
"""The file that says that a folder is a demo's, and may be replaced by the next one."""


def fresh(folder: Path) -> bool:
    """Make ``folder`` new and empty; True if an earlier demo's was replaced.

    Raises ValueError for a folder (or file) that holds anything else: a demo never removes what it did not make.
    """
    replaced = False
    if folder.is_dir() and (folder / MARK).is_file():
        shutil.rmtree(folder)
        replaced = True
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and was not made by a demo; name another folder with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(json.dumps({"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}) + "\n")
    return replaced

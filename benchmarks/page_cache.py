"""What a read costs when nothing of the files is in memory: the page cache is dropped before each."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def drop(path: Path) -> None:
    """Have the system forget the file, or the files below the folder. What a process has mapped, or has not yet on the
    disk, stays; so whoever reads it must be closed, and the bytes synced here first."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def disk_bytes() -> int:
    """That this process has had read from a disk so far; 0 where the system does not say (a tmpfs is no disk)."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines).get("read_bytes", 0))


def cold_medians(contestants: dict[str, tuple[Path, Callable[[], Any]]], rounds: int) -> dict[str, dict[str, float]]:
    """(files, what opens them anew and reads) by name -> ``seconds`` and ``disk_bytes`` of one run each, taking turns.
    A run of each goes before, so that compiling does not count."""
    for _, run in contestants.values():
        run()
    figures: dict[str, list[tuple[float, int]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (path, run) in contestants.items():
            gc.collect()  # whatever still maps them
            drop(path)
            before, start = disk_bytes(), time.perf_counter()
            run()
            figures[name].append((time.perf_counter() - start, disk_bytes() - before))
    return {name: {"seconds": float(np.median([seconds for seconds, _ in taken])),
                   "disk_bytes": float(np.median([count for _, count in taken]))} for name, taken in figures.items()}

"""One time for the processes of a server: what one of them has stamped lies before what another stamps next."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np


class SharedClock:
    """``now()`` as of ``Clock``, over processes: each writes its last time into a slot of the file ``path`` and goes
    beyond the last of all (a Lamport clock). So an event that was acknowledged is older than every request after it,
    wherever both were handled, and even where the system's clock was set back between them.

    ``slot``: this process's own, from 0; no two share one. An aligned 8-byte store is one store on the machines that
    Semel runs on, so nobody reads half a time.
    """

    def __init__(self, path: str | os.PathLike[str], slot: int):
        handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)
        self._times = np.frombuffer(self._map, np.int64)
        if not 0 <= slot < len(self._times):
            raise ValueError(f"the clock at {path} has {len(self._times)} slots, there is no slot {slot}")
        self._slot, self._lock = slot, threading.Lock()

    @staticmethod
    def create(path: Path, slots: int) -> None:
        path.write_bytes(bytes(8 * slots))

    def now(self) -> int:
        with self._lock:
            time_us = max(int(self._times.max()) + 1, time.time_ns() // 1000)
            self._times[self._slot] = time_us
            return time_us

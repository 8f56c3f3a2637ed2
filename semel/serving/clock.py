"""The time of this process in microseconds, never twice the same and never backwards."""

from __future__ import annotations

import threading
import time


class Clock:
    """``now()``: microseconds since 1970, strictly increasing within the process even where the system's clock is set
    back. An event stamped before a request is therefore strictly older than it, which is what ``as_of`` asks for."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def now(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns() // 1000)
            return self._last

"""One writer at a time: an advisory lock on a file that names the holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from semel.history.errors import StoreLocked


class WriterLock:
    """Held from construction to ``release``, and released by the system when the process dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise StoreLocked(f"{path.parent} is open for appending in process {holder}; close it there, or open it "
                              'here with mode="r"') from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

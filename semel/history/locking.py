"""One writer at a time: an advisory lock on a file that names its owner, and fencing of an owner that lost it."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from semel.history.errors import StoreLocked, WriterFenced
from semel.history.files import sync

_OWNER_BYTES = 64  # more than a process id and a nonce take


class WriterLock:
    """Held from construction to ``release``, and released by the system when the process dies, however it dies.

    ``abandoned``: the owner before did not release it in order (it was killed, or the file system lost its lock while
    it lives on), so it may still have a write under way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._in_place():  # taken away between open and lock
                raise BlockingIOError
        except BlockingIOError:
            holder = owner(path)
            os.close(self._handle)
            raise StoreLocked(f"{path.parent} is open for appending in process {holder}; close it there, or open it "
                              'here with mode="r"') from None
        self.abandoned = bool(os.pread(self._handle, 1, 0))
        self._owner = f"{os.getpid()} {secrets.token_hex(8)}\n".encode()
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, self._owner, 0)
        sync(self._handle)

    def check(self) -> None:
        """Raise WriterFenced unless this is still the lock's owner. Costs two system calls, no disk access."""
        if not self._in_place() or os.pread(self._handle, _OWNER_BYTES, 0) != self._owner:
            raise WriterFenced(f"{self.path} is no longer this writer's (its owner now: process {owner(self.path)}); "
                               "nothing more is written through this handle")

    def _in_place(self) -> bool:
        try:
            return self._handle >= 0 and os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle >= 0:
            if os.pread(self._handle, _OWNER_BYTES, 0) == self._owner:
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1


def owner(path: Path) -> str:
    """The process id in a lock file, or "unknown"."""
    try:
        return path.read_text("ascii", "replace").split()[0]
    except (OSError, IndexError):
        return "unknown"

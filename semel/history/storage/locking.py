"""One writer at a time: an advisory lock on a file that names its owner, and fencing of an owner that lost it.

The file also says how much of the log is on the disk (``docs/formats/history.md``): readers in other processes go no
further, so nobody reads through a version that a power cut could still take back."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
import zlib
from functools import cache
from pathlib import Path

from semel.history.durable import sync
from semel.history.errors import CorruptFile, StoreLocked, WriterFenced

_OWNER = "{pid:<10} {nonce} {boot:<36}\n"  # of one length, so that a new owner is written over the old one at once
_MARK = "{segment:010d} {size:020d} {crc:08x}\n"
_OWNER_BYTES, _MARK_BYTES = 65, 41
_NOBODY = b" " * (_OWNER_BYTES - 1) + b"\n"

Mark = tuple[int, int]
"""(segment, bytes of it): all records up to there were on the disk."""


class WriterLock:
    """Held from construction to ``release``, and released by the system when the process dies, however it dies.

    ``abandoned``: the owner before did not release it in order (it was killed, or the file system lost its lock while
    it lives on), so it may still have a write under way. ``found``: the mark that it left.
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
            raise StoreLocked(f"{path.parent} is open for appending in process {holder}; stop that (a server, an "
                              'ingest), or open it here with mode="r"') from None
        try:
            self._before = before = os.pread(self._handle, _OWNER_BYTES + _MARK_BYTES, 0)
            self._marked = False
            self.found = _mark_in(before)
            self.abandoned = bool(before[:_OWNER_BYTES].strip())
            self._owner = _OWNER.format(pid=os.getpid(), nonce=secrets.token_hex(8), boot=boot()).encode()
            # It limits readers until this owner has looked itself; void after a power cut.
            kept = before[_OWNER_BYTES:] if _boot_of(before) == boot() or not self.abandoned else b""
            os.pwrite(self._handle, self._owner + kept, 0)
            os.ftruncate(self._handle, _OWNER_BYTES + len(kept))
            sync(self._handle)
        except BaseException:
            os.close(self._handle)
            raise

    def mark(self, segment: int, size: int) -> None:
        """The log is on the disk up to byte ``size`` of ``segment``. Not synced itself: after a power cut it limits
        nobody, since what the disk then has is on the disk."""
        os.pwrite(self._handle, _MARK.format(segment=segment, size=size, crc=_crc(segment, size)).encode(),
                  _OWNER_BYTES)
        self._marked = True

    def check(self) -> None:
        """Raise WriterFenced unless this is still the lock's owner. Costs two system calls, no disk access."""
        if not self._in_place() or os.pread(self._handle, _OWNER_BYTES, 0) != self._owner:
            raise WriterFenced(f"{self.path} is no longer this writer's (its owner now: process {owner(self.path)}); "
                               "nothing more is written through this handle")

    confirm = check

    def _in_place(self) -> bool:
        try:
            return self._handle >= 0 and os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            return False

    def release(self, in_order: bool = True) -> None:
        """``in_order``: all that the log has is on the disk, and no write is under way. An owner that has marked
        nothing leaves the file as it was."""
        if self._handle >= 0:
            if in_order and os.pread(self._handle, _OWNER_BYTES, 0) == self._owner:
                os.pwrite(self._handle, _NOBODY if self._marked else self._before, 0)
                if not self._marked:
                    os.ftruncate(self._handle, len(self._before))
            os.close(self._handle)
            self._handle = -1


def owner(path: Path) -> str:
    """The process id in a lock file, or "unknown"."""
    try:
        return path.read_text("ascii", "replace").split()[0]
    except (OSError, IndexError):
        return "unknown"


def durable_end(path: Path) -> tuple[Mark | None, bool]:
    """(the mark: up to there all records must be whole, whether a reader may go no further). None where there is no
    mark. A reader may go further where the writer closed the log in order, or the computer was started again since, or
    (where a system names no boot) nobody can say."""
    for attempt in range(50):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None, False
        mark, current = _mark_in(content), bool(boot()) and _boot_of(content) == boot()
        if mark is not None or not current or len(content) == _OWNER_BYTES:
            return mark, current and mark is not None
        time.sleep(0.0001 * attempt)  # it was being written
    raise CorruptFile(f"{path}: it does not say how much of the log is on the disk; open the store for appending once")


def _mark_in(content: bytes) -> Mark | None:
    try:
        segment, size, crc = content[_OWNER_BYTES:].decode("ascii").split()
        if int(crc, 16) == _crc(int(segment), int(size)):
            return int(segment), int(size)
    except ValueError:
        pass
    return None


def _crc(segment: int, size: int) -> int:
    return zlib.crc32(f"{segment} {size}".encode())


def _boot_of(content: bytes) -> str:
    """The boot in a lock file, "" where it names none (empty, or of an older format)."""
    parts = content[:_OWNER_BYTES].decode("ascii", "replace").split()
    return parts[2] if len(parts) == 3 and len(content) >= _OWNER_BYTES else ""


@cache
def boot() -> str:
    """What names this start of the computer; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""

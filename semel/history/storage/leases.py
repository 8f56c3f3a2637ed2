"""Leases: a reader keeps the generation that it reads on the disk, files that it has not opened yet included.

A lease is a shared lock (flock) on the generation's ``generation.json``. The system releases it with the last handle
of the process, however that ends, so there is no stale lease to recognize. Whoever removes a generation takes the
same lock exclusively, which fails while somebody reads it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import weakref
from collections import deque
from pathlib import Path

from semel.history.errors import GenerationGone
from semel.history.generation.generation import NAME


class Lease:
    """On the generation in ``folder``, from construction until it is released and the last read within it (``with``)
    has ended. A handle releases it when it moves on: to wait until nothing refers to it is not enough, since a
    traceback or a frame that the garbage collector has not come to yet would keep the generation on the disk.

    Raises GenerationGone where the generation is not there or is being removed. A file system that knows no locks
    gives none: its readers go on with the next generation when theirs is removed, as they do without a lease.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise GenerationGone(f"{path} is missing") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise GenerationGone(f"{path} is being removed") from None
        except OSError:
            pass
        self._let_go = weakref.finalize(self, os.close, handle)  # also where a handle is not closed
        self._reads: deque[None] = deque()  # one entry each; appending to it and taking from it need no lock
        self._released = False

    def __enter__(self) -> None:
        self._reads.append(None)

    def __exit__(self, *_: object) -> None:
        self._reads.pop()
        if self._released and not self._reads:
            self._let_go()

    def release(self) -> None:
        """Nothing begins a read within it any more. (One that had just got its view goes on without it, and finds the
        next generation where this one's files are gone.)"""
        self._released = True
        if not self._reads:
            self._let_go()


def remove_generations(folder: Path, current: int, keep: int, leased: bool = False) -> list[int]:
    """Remove from the folder ``generations`` all but the ``keep`` newest up to ``current`` and (unless ``leased``)
    those that are leased, and what killed compactions left; the numbers that were removed."""
    numbers = {int(path.name): path for path in folder.iterdir() if re.fullmatch(r"[0-9]{8,}", path.name)}
    kept = sorted(number for number in numbers if number <= current)[-keep:]
    removed = [number for number in sorted(numbers) if number not in kept and _remove(numbers[number], leased)]
    for path in folder.iterdir():
        if re.fullmatch(r"\.[0-9]{8,}\.(building|removed)", path.name):  # what else lies there is not ours
            shutil.rmtree(path, ignore_errors=True)
    return removed


def _remove(path: Path, leased: bool) -> bool:
    """Remove a generation's folder, unless it is leased and ``leased`` is False."""
    try:
        handle = os.open(path / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a folder without it was never a generation
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    try:
        if not leased:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = path.with_name(f".{path.name}.removed")  # one step: nobody finds half a generation
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
    except OSError:  # leased (BlockingIOError); or the folder is read-only, which the next cleaning meets again
        return False
    finally:
        os.close(handle)

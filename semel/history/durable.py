"""Durable files: synced, swapped in one step, JSON that says whether it is whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semel.history.errors import CorruptFile


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An error of the disk (full, over a quota) says which file it is about; calls on an open one do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync(handle: int) -> None:
    """Force a file's bytes to the disk. macOS's fsync stops at the drive's cache, F_FULLFSYNC does not."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """``sync`` for many files, together: a file system commits them as one group, 10-20 times faster than in turn."""
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sync_folder, paths):
            pass


def sync_folder(path: Path) -> None:
    """Make names created in, renamed into or removed from the folder ``path`` durable (or a file's bytes)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Swap ``path`` for ``content``: a reader sees the old or the new file, a crash leaves one of them."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path, option: str) -> Iterator[Path]:
    """A folder to fill, hidden beside ``path``; renamed to it where the block ends well, removed where it does not.
    Raises FileExistsError, naming ``option``, where ``path`` is there and not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path} exists already; remove it (rm -r {path}) or choose another {option}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield scratch / path.name
        os.rename(scratch / path.name, path)  # also over an empty folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def dump_json(body: dict[str, Any]) -> bytes:
    """JSON whose last entry, ``checksum``, is the CRC-32 of all bytes before the comma that precedes it."""
    text = json.dumps(body, ensure_ascii=False, indent=1).removesuffix("\n}").encode()
    return text + f',\n "checksum": {zlib.crc32(text)}\n}}\n'.encode()


def parse_json(content: bytes, path: Path | str) -> dict[str, Any]:
    """The inverse of ``dump_json``; CorruptFile where text and checksum disagree."""
    try:
        text, _, tail = content.rpartition(b',\n "checksum": ')
        if tail != f"{zlib.crc32(text)}\n}}\n".encode():
            raise ValueError("checksum")
        return dict(json.loads(content))
    except ValueError:
        raise CorruptFile(f"{path}: not valid, or does not match its checksum") from None

"""Generations on object storage, and compressed columns in a folder, read as if they were mapped files: a bounded local
cache of blocks.

Each object has a sparse local file of its size (decompressed), mapped as a local generation's file is, so the kernels
are the same. Before they run, the checksum blocks that hold the rows to be read are fetched, checked, decompressed
where they are compressed, and written into it; the rest of the file stays a hole. Objects never change, so no block is
ever stale. Beyond the bound whole files are let go of, least recently used first; arrays that a read still holds stay
valid, as mappings of removed files do.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semel.history.errors import CorruptFile, GenerationGone
from semel.history.generation.array_files import (
    BLOCK_BYTES,
    CODEC_COLD,
    CODEC_PLAIN,
    HEADER_BYTES,
    Header,
    check_block,
    check_rows,
    decompressed,
    parse_footer,
    parse_header,
)
from semel.history.storage.objects import Objects, Unanswered

if TYPE_CHECKING:
    from semel.history.generation.generation import Rows
    from semel.history.kernels.packing import Packed

AT_ONCE = 4 * BLOCK_BYTES
"""An object up to this size is fetched whole: one request, where ranges need two or three."""
PIECE = 32 << 20
"""Bytes in memory on their way to the disk, for each thread that fetches."""
GAP = 1
"""Blocks between two that are needed which are fetched with them, since a request costs more than they do."""


class Source(Protocol):
    """What objects are read from: ``objects.Objects``, or ``cold_files.Folder``. ``near``: a request more costs less
    than a block more."""

    near: bool

    def where(self, name: str) -> str: ...
    def size(self, name: str) -> int: ...
    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[Any]: ...


class Opened(Protocol):
    """A file that a read holds: see ``CachedFile.column``."""

    def column(self, dtype: np.dtype, shape: tuple[int, ...], rows: Rows | None, offline: bool = False,
               ) -> np.ndarray | Packed | None: ...


class Opening(Protocol):
    """The ``Files`` that ``ReadFiles`` read."""

    def info(self) -> bytes: ...
    def open(self, file: str, entry: dict[str, int]) -> Opened: ...


class CachedFiles:
    """The ``Files`` of a generation whose objects are in ``folder`` of ``objects``."""

    def __init__(self, objects: Objects, folder: str, cache: BlockCache) -> None:
        self._objects, self._folder, self._cache = objects, folder, cache

    def for_read(self) -> ReadFiles:
        return ReadFiles(self)

    def info(self) -> bytes:
        from semel.history.generation.generation import NAME

        name = f"{self._folder}/{NAME}"
        try:
            found = self._objects.get(name)
        except FileNotFoundError:
            raise GenerationGone(f"{self._objects.where(name)} is missing") from None
        assert found is not None
        return found[0]

    def column(self, file: str, entry: dict[str, int], dtype: Any, shape: tuple[int, ...], rows: Rows | None = None,
               ) -> np.ndarray | Packed:
        return self.for_read().column(file, entry, dtype, shape, rows)

    def open(self, file: str, entry: dict[str, int]) -> CachedFile:
        return self._cache.open(self._objects, f"{self._folder}/{file}", entry)


class NotHere(Exception):
    """What was asked for must be fetched, and ``offline`` forbids that."""


class ReadFiles:
    """The same for one read: what it has asked for stays here until the read is done, whatever the cache lets go of.
    ``offline``: raise NotHere instead of fetching."""

    def __init__(self, files: Opening) -> None:
        self._files = files
        self.offline = False
        self._held: dict[str, tuple[Opened, list[Rows | None]]] = {}

    def for_read(self) -> ReadFiles:
        return ReadFiles(self._files)

    def info(self) -> bytes:
        return self._files.info()

    def column(self, file: str, entry: dict[str, int], dtype: Any, shape: tuple[int, ...], rows: Rows | None = None,
               ) -> np.ndarray | Packed:
        cached, asked = self._held.get(file) or (self._files.open(file, entry), [])
        column = cached.column(np.dtype(dtype), shape, rows, self.offline)
        asked = [*asked, rows]
        while column is None:
            if self.offline:
                raise NotHere
            cached = self._files.open(file, entry)  # the cache let go of it, and with it of what was asked for before
            columns = [cached.column(np.dtype(dtype), shape, each) for each in asked]
            column = columns[-1] if all(each is not None for each in columns) else None
        self._held[file] = cached, asked
        return column


class BlockCache:
    """At most ``most_bytes`` of blocks in a folder of its own in ``folder``; any number of threads. The folder goes
    with ``close``, with the handle, or (where the process was killed) with the next cache made beside it.
    ``fetched``: bytes that were asked of the object storage so far."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
            raise ValueError(f"cache_bytes must be a number of bytes, got {most_bytes!r}")
        self._folder, self._most_bytes = folder, most_bytes
        self.fetched = 0
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._own: Path | None = None
        self._names = count()
        self._files: OrderedDict[str, CachedFile] = OrderedDict()
        self.close: Any = lambda: None

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # forked: the folder, and the files in it, are the parent's
            self._begin()

    @property
    def bytes(self) -> int:
        """Of the blocks that it holds now."""
        with self._lock:
            return sum(file.kept for file in self._files.values())

    def open(self, objects: Source, name: str, entry: dict[str, int]) -> CachedFile:
        """The object ``name``, as far as it is here."""
        self._check_process()
        with self._lock:
            file = self._files.get(name)
            if file is None:
                path = self._folder_of_its_own() / f"{next(self._names)}"
                file = self._files[name] = CachedFile(objects, name, entry, path, self._bound)
            self._files.move_to_end(name)
            return file

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder, removed in the end."""
        with self._lock:
            path = self._folder_of_its_own() / f"{next(self._names)}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def keep_only(self, folder: str) -> None:
        """Let go of the objects that do not lie in ``folder``."""
        self._check_process()
        with self._lock:
            gone = [self._files.pop(name) for name in list(self._files) if not name.startswith(f"{folder}/")]
        for file in gone:
            file.remove()

    def _bound(self, fetched: int) -> None:
        """Let go of the files used longest ago, but the newest."""
        gone: list[CachedFile] = []
        with self._lock:
            self.fetched += fetched
            kept = sum(file.kept for file in self._files.values())
            while kept > self._most_bytes and len(self._files) > 1:
                _, file = self._files.popitem(last=False)
                kept -= file.kept
                gone.append(file)
        for file in gone:
            file.remove()

    def _folder_of_its_own(self) -> Path:
        if self._own is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            _sweep(self._folder)
            own = Path(tempfile.mkdtemp(dir=self._folder, prefix="handle-"))
            handle = os.open(own / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.rename(own / "new", own / "lock")  # whoever finds a lock file finds it locked
            self._own, self.close = own, weakref.finalize(self, _close, own, handle, os.getpid())
        return self._own


def cache_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Where caches are made: ``folder``, or the user's own place for such."""
    if folder is not None:
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("semel", appauthor=False)) / "blocks"


def _close(folder: Path, handle: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child leaves its parent's folder alone
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    for lock in folder.glob("handle-*/lock"):
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # in use, or a file system without locks: its owner removes it
            pass
        finally:
            os.close(handle)


class CachedFile:
    """One object, as far as it was fetched. ``kept``: bytes of its blocks that are here."""

    def __init__(self, objects: Source, name: str, entry: dict[str, int], path: Path,
                 fetched: Callable[[int], None]) -> None:
        self._objects, self._name, self._entry, self._path = objects, name, entry, path
        self._tell_fetched = fetched
        self._where = objects.where(name)
        self._lock = threading.Lock()
        self._gone = False
        self._head: Header | None = None
        self._column: np.ndarray | Packed | None = None
        self._missing = 1  # blocks
        self._fetched = 0
        self.kept = 0

    def column(self, dtype: np.dtype, shape: tuple[int, ...], rows: Rows | None, offline: bool = False,
               ) -> np.ndarray | Packed | None:
        """The column with these rows of it (None: all); None where they are not here and the file was removed, or
        ``offline`` forbids to fetch them. One thread fetches at a time; others that want the same object wait."""
        column = self._column
        if column is not None and (not self._missing or not (self._blocks_of(rows) & ~self._present).any()):
            return column
        if offline:
            return None
        with self._lock:
            column, fetched = self._fetch_rows(dtype, shape, rows)
        if fetched:
            self._tell_fetched(fetched)
        return column

    def _fetch_rows(self, dtype: np.dtype, shape: tuple[int, ...], rows: Rows | None,
                    ) -> tuple[np.ndarray | Packed | None, int]:
        """(the column, bytes that had to be fetched)."""
        self._fetched = 0
        if not self._gone:
            if self._head is None:
                self._begin(rows is None)
            assert self._head is not None
            if self._column is None:
                check_rows(self._head, dtype, shape, self._where)
                self._values = self._head.width // dtype.itemsize
                self._column = self._map(dtype, shape)
        if self._column is not None and self._missing:
            needed = self._blocks_of(rows) & ~self._present
            if self._gone and needed.any():
                return None, 0
            self._fetch(needed)
        return self._column, self._fetched

    def remove(self) -> None:
        with self._lock:
            self._gone = True
            self._path.unlink(missing_ok=True)

    def _begin(self, whole: bool) -> None:
        """Fetch the header and what lies behind the values, with the last blocks on the way."""
        size = self._entry["bytes"]
        if self._objects.near:
            (head,) = self._ask([0], [HEADER_BYTES])
            start, rest = size, b""
        elif size <= AT_ONCE or (whole and size <= PIECE):
            (content,) = self._ask([0], [size])
            start, head, rest = HEADER_BYTES, content[:HEADER_BYTES], content[HEADER_BYTES:]
        else:
            blocks = -(-(size - HEADER_BYTES) // (BLOCK_BYTES + 4))  # unless the file's are of another size
            start = HEADER_BYTES + max(0, blocks - 2) * BLOCK_BYTES
            head, rest = self._ask([0, start], [HEADER_BYTES, size])
        header = parse_header(head, self._entry, self._where)
        footer_at = HEADER_BYTES + header.stored
        if footer_at < start:
            (more,) = self._ask([footer_at], [start])
            start, rest = footer_at, more + rest
        self._checksums, self._starts = parse_footer(rest[footer_at - start :], header, self._where)
        self._present = np.zeros(header.blocks, bool)
        self._missing = header.blocks
        with open(self._path, "xb") as file:
            file.truncate(HEADER_BYTES + header.count)
        with open(self._path, "rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        first = int(np.searchsorted(self._starts, start - HEADER_BYTES))
        self._head = header
        self._keep(first, memoryview(rest)[HEADER_BYTES + int(self._starts[first]) - start : footer_at - start])

    def _map(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | Packed:
        head = self._head
        assert head is not None
        if head.codec == CODEC_PLAIN:
            return np.frombuffer(self._mapped, dtype, head.count // dtype.itemsize, HEADER_BYTES).reshape(
                head.rows, *shape)
        from semel.history.kernels.packing import directory_at, view_directory

        values = head.rows * head.width // dtype.itemsize
        try:
            needed = np.zeros(len(self._present), bool)
            needed[directory_at(head.count, values) // head.block :] = True
            self._fetch(needed & ~self._present)
            return view_directory(np.frombuffer(self._mapped, np.uint8, head.count, HEADER_BYTES), values)
        except ValueError as error:
            raise CorruptFile(f"{self._where}: {error}") from None

    def _blocks_of(self, rows: Rows | None) -> np.ndarray:
        """[blocks] bool: those that hold the rows."""
        head = self._head
        assert head is not None
        needed = np.ones(len(self._present), bool)
        if rows is None:
            return needed
        begin, end = rows
        some = begin < end
        begin, end = begin[some] * self._values, end[some] * self._values
        if isinstance(self._column, tuple):
            from semel.history.kernels.packing import BLOCK

            starts = self._column[-1]
            first, last = starts[begin // BLOCK].astype(np.int64), starts[-(-end // BLOCK)].astype(np.int64)
        else:
            size = head.width // self._values
            first, last = begin * size, end * size
        size = len(needed) + 1
        edges = np.bincount(first // head.block, minlength=size) - np.bincount((last - 1) // head.block + 1,
                                                                              minlength=size)
        return np.cumsum(edges[:-1]) > 0

    def _fetch(self, missing: np.ndarray) -> None:
        """Fetch these blocks [blocks]: neighbours together, many ranges in one call."""
        head = self._head
        assert head is not None
        missing = np.flatnonzero(missing)
        if not len(missing):
            return
        cuts = np.flatnonzero(np.diff(missing) > (1 if self._objects.near else 1 + GAP)) + 1
        most = max(1, PIECE // head.block)
        runs = [(at, min(at + most, int(run[-1]) + 1))
                for run in np.split(missing, cuts) for at in range(int(run[0]), int(run[-1]) + 1, most)]
        while runs:
            now: list[tuple[int, int]] = []
            size = 0
            while runs and (not now or size + runs[0][1] - runs[0][0] <= most):
                now.append(runs.pop(0))
                size += now[-1][1] - now[-1][0]
            starts = [HEADER_BYTES + int(self._starts[first]) for first, _ in now]
            ends = [HEADER_BYTES + int(self._starts[last]) for _, last in now]
            for (first, _), data in zip(now, self._ask(starts, ends), strict=True):
                self._keep(first, memoryview(data))

    def _keep(self, first: int, data: memoryview) -> None:
        """Check consecutive blocks and write them where they belong."""
        head = self._head
        assert head is not None
        if not len(data):
            return
        starts = self._starts - self._starts[first]
        last = int(np.searchsorted(starts, len(data)))
        blocks = [data[starts[index] : starts[index + 1]] for index in range(first, last)]
        for index, block in enumerate(blocks, first):
            check_block(block, self._checksums, index, head, self._where)
        if head.codec == CODEC_COLD:
            data = memoryview(b"".join(
                decompressed(block, index, head, self._where) for index, block in enumerate(blocks, first)))
        try:
            with open(self._path, "r+b", buffering=0) as file:
                at = 0
                while at < len(data):
                    at += os.pwrite(file.fileno(), data[at:], HEADER_BYTES + first * head.block + at)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: choose another cache_folder, or less cache_bytes",
                          str(self._path.parent)) from None
        self._present[first:last] = True
        self._missing = int(len(self._present) - np.count_nonzero(self._present))
        self.kept = int(np.count_nonzero(self._present)) * head.block
        if self._present[-1]:
            self.kept -= -head.count % head.block

    def _ask(self, starts: list[int], ends: list[int]) -> list[bytes]:
        size = self._entry["bytes"]
        try:
            parts = [bytes(part) for part in self._objects.ranges(self._name, starts, ends)]
        except FileNotFoundError:
            raise GenerationGone(f"{self._where} is missing") from None
        except Unanswered:
            if (found := self._objects.size(self._name)) != size:  # a range beyond the end is an error of its own
                raise CorruptFile(f"{self._where}: {found} bytes, its manifest says {size}") from None
            raise
        if [len(part) for part in parts] != [b - a for a, b in zip(starts, ends, strict=True)]:
            raise CorruptFile(f"{self._where}: shorter than the {size} bytes that its manifest says")
        self._fetched += sum(map(len, parts))
        return parts

"""A generation in a folder of which some columns are compressed: their blocks are decompressed when they are first
read, into the block cache; all other files are mapped where they lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.history.generation.generation import LocalFiles
from semel.history.storage.block_cache import BlockCache, Opened, ReadFiles

if TYPE_CHECKING:
    from semel.history.generation.generation import Rows
    from semel.history.kernels.packing import Packed


class ColdFiles:
    """The ``Files`` of a generation in the folder ``path``."""

    def __init__(self, path: Path, cache: BlockCache) -> None:
        self._folder, self._cache, self._local = Folder(path.parent), cache, LocalFiles(path)
        self._name = path.name
        self._mapped: dict[str, Mapped] = {}

    def for_read(self) -> ReadFiles:
        return ReadFiles(self)

    def info(self) -> bytes:
        return self._local.info()

    def column(self, file: str, entry: dict[str, int], dtype: Any, shape: tuple[int, ...], rows: Rows | None = None,
               ) -> np.ndarray | Packed:
        return self.for_read().column(file, entry, dtype, shape, rows)

    def open(self, file: str, entry: dict[str, int]) -> Opened:
        if "decompressed" in entry:
            return self._cache.open(self._folder, f"{self._name}/{file}", entry)
        mapped = self._mapped.get(file)
        return mapped or self._mapped.setdefault(file, Mapped(self._local, file, entry))


class Mapped:
    """A file that is not compressed."""

    def __init__(self, files: LocalFiles, file: str, entry: dict[str, int]) -> None:
        self._files, self._file, self._entry = files, file, entry
        self._column: np.ndarray | Packed | None = None

    def column(self, dtype: np.dtype, shape: tuple[int, ...], rows: Rows | None, offline: bool = False,
               ) -> np.ndarray | Packed | None:
        """All of it, checked when it is first mapped; see ``CachedFile.column``."""
        if self._column is None and not offline:
            self._column = self._files.column(self._file, self._entry, dtype, shape)
        return self._column


class Folder:
    """The files below ``path`` as a ``block_cache.Source``."""

    near = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def where(self, name: str) -> str:
        return str(self._path / name)

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        with open(self._path / name, "rb", buffering=0) as file:
            return [os.pread(file.fileno(), end - start, start) for start, end in zip(starts, ends, strict=True)]

"""The read-optimized tier: for each shard sorted users, offsets and one mapped file a column. Written once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from semel.history.errors import CorruptFile, GenerationGone, StoreError
from semel.history.files import (
    dump_json,
    map_array,
    parse_json,
    replace_file,
    split_strings,
    sync_files,
    write_array,
    write_strings,
)
from semel.history.schema import EventSchema
from semel.history.tail import bits

MAGIC = "semel-generation"
FORMAT = 1
NAME = "generation.json"
NO_VALIDITY = np.empty(0, bool)
NO_VALIDITY.flags.writeable = False
_TIMES = {"event_time": np.int64, "version": np.int64}


class Shard:
    """One shard's files, each mapped and checked when first asked for."""

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation, self.index = generation, index
        self._arrays: dict[str, np.ndarray] = {}
        self._words: dict[str, np.ndarray] = {}
        self._valid: dict[str, np.ndarray] = {}
        self.rows, self.user_count = int(generation.info["rows"][index]), int(generation.info["users"][index])

    def _array(self, name: str, dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = self._generation.array(shard_file(self.index, name), dtype, shape)
        return array

    @property
    def users(self) -> np.ndarray:
        """[U] int64 ascending (integer keys)."""
        return self._array("users", np.int64)

    @property
    def user_strings(self) -> tuple[np.ndarray, np.ndarray]:
        """(offsets [U + 1], UTF-8 bytes), ascending by bytes (string keys)."""
        return self._array("users.offsets", np.int64), self._array("users.bytes", np.uint8)

    @property
    def offsets(self) -> np.ndarray:
        return self._array("offsets", np.int64)

    @property
    def first(self) -> np.ndarray:
        """[U] the lowest version of each user."""
        return self._array("first_version", np.int64)

    @property
    def last(self) -> np.ndarray:
        """[U] the highest version of each user."""
        return self._array("last_version", np.int64)

    def column(self, name: str) -> np.ndarray:
        """[rows, *shape] of a schema column, ``event_time`` or ``version``."""
        if name in _TIMES:
            return self._array(name, np.int64)
        position, column = self._generation.positions[name]
        return self._array(f"column-{position:03d}", column.dtype, column.shape)

    def words(self, name: str) -> np.ndarray:
        """The same as ``bits``."""
        words = self._words.get(name)
        if words is None:
            words = self._words[name] = bits(self.column(name))
        return words

    def valid(self, name: str) -> np.ndarray:
        """[rows] bool, or empty where no value of the shard is null."""
        valid = self._valid.get(name)
        if valid is None:
            file = "" if name in _TIMES else f"column-{self._generation.positions[name][0]:03d}.valid"
            listed = shard_file(self.index, file) in self._generation.info["files"]
            valid = self._valid[name] = self._array(file, bool) if listed else NO_VALIDITY
        return valid

    def user_keys(self) -> list[bytes]:
        return split_strings(*self.user_strings)


class Generation:
    """A generation's folder. ``number`` 0 is the empty generation of a new store."""

    def __init__(self, folder: Path | None, number: int, schema: EventSchema, shards: int, seal: int = 0) -> None:
        self.folder, self.number, self.schema = folder, number, schema
        self.positions = {name: (i, column) for i, (name, column) in enumerate(schema.layout.items())}
        self.info: dict[str, Any] = {"rows": [0] * shards, "users": [0] * shards, "files": {}}
        self._lock = threading.Lock()
        if folder is not None:
            path = folder / NAME
            try:
                content = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise GenerationGone(f"{path} is missing") from None
            self.info = parse_json(content, path)
            if self.info.get("magic") != MAGIC or self.info["checksum"] != seal:
                raise CorruptFile(f"{path} is not the file that the store's manifest names")
            if self.info["format"] != FORMAT:
                raise StoreError(f"{path}: format {self.info['format']}, this Semel reads {FORMAT}")
        self.shards = [Shard(self, index) for index in range(shards)]

    def array(self, file: str, dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
        with self._lock:  # so that two threads do not check the same file twice
            return map_array(self._path(file), self._entry(file), dtype, shape)

    def strings(self, name: str) -> list[str]:
        offsets, data = self.array(f"{name}.offsets", np.int64), self.array(f"{name}.bytes", np.uint8)
        return [value.decode() for value in split_strings(offsets, data)]

    def dictionary(self, name: str) -> list[str]:
        return self.strings(f"dictionary-{self.positions[name][0]:03d}")

    def tokens(self) -> dict[str, int]:
        if self.folder is None:
            return {}
        versions = self.array("token_versions", np.int64).tolist()
        return dict(zip(self.strings("tokens"), versions, strict=True))

    def _path(self, file: str) -> Path:
        assert self.folder is not None
        return self.folder / file

    def _entry(self, file: str) -> dict[str, int]:
        try:
            return dict(self.info["files"][file])
        except KeyError:
            raise CorruptFile(f"{self.folder}: {NAME} does not list {file}") from None

    @property
    def rows(self) -> int:
        return sum(self.info["rows"])

    @property
    def nbytes(self) -> int:
        return sum(entry["bytes"] for entry in self.info["files"].values())

    def verify(self) -> tuple[int, int]:
        """Check every block of every file, and that the shards' parts fit together; (files, bytes). Raises
        CorruptFile."""
        for file, entry in self.info["files"].items():
            path = self._path(file)
            width = read_width(path)
            map_array(path, entry, np.uint8, (width,))
        for shard in self.shards:
            if not shard.rows:
                continue
            offsets, times = shard.offsets, shard.column("event_time")
            inside = np.ones(max(len(times) - 1, 0), bool)
            inside[offsets[1:-1] - 1] = False
            if offsets[-1] != shard.rows or (np.diff(offsets) <= 0).any() or (np.diff(times)[inside] < 0).any():
                raise CorruptFile(f"{self.folder}: shard {shard.index} is not in order")
        return len(self.info["files"]), self.nbytes


def read_width(path: Path) -> int:
    """Bytes a row of a sealed array file, as its (yet unchecked) header says."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(20)[16:20], "little") or 1
    except FileNotFoundError:
        raise GenerationGone(f"{path} is missing") from None


def shard_file(index: int, name: str) -> str:
    return f"shard-{index:04d}/{name}"


class GenerationWriter:
    """Writes a generation's files into ``folder`` (which nobody reads yet); ``finish`` returns its seal."""

    def __init__(self, folder: Path, schema: EventSchema, shards: int) -> None:
        self.folder, self.schema = folder, schema
        folder.mkdir(parents=True)
        self._info: dict[str, Any] = {"magic": MAGIC, "format": FORMAT, "rows": [0] * shards, "users": [0] * shards,
                                      "files": {}}

    def array(self, file: str, array: np.ndarray) -> None:
        self._info["files"][file] = write_array(self.folder / file, array)

    def strings(self, name: str, values: list[bytes]) -> None:
        parent = Path(name).parent
        for file, entry in write_strings(self.folder / name, values).items():
            self._info["files"][(parent / file).as_posix()] = entry

    def shard(self, index: int, users: np.ndarray | list[bytes], offsets: np.ndarray, first: np.ndarray,
              last: np.ndarray, columns: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]]) -> None:
        """One shard. ``columns[name]()`` makes (values, validity or empty), so that one column is in memory."""
        (self.folder / shard_file(index, "")).mkdir()
        self._info["rows"][index], self._info["users"][index] = int(offsets[-1]), len(users)
        if isinstance(users, list):
            self.strings(shard_file(index, "users"), users)
        else:
            self.array(shard_file(index, "users"), users)
        for name, array in {"offsets": offsets, "first_version": first, "last_version": last}.items():
            self.array(shard_file(index, name), array)
        files = {name: f"column-{i:03d}" for i, name in enumerate(self.schema.layout)}
        for name, make in columns.items():
            values, valid = make()
            self.array(shard_file(index, files.get(name, name)), values)
            if len(valid) and not valid.all():
                self.array(shard_file(index, f"{files[name]}.valid"), valid)

    def finish(self, dictionaries: dict[str, list[bytes]], tokens: dict[str, int]) -> int:
        for i, name in enumerate(self.schema.layout):
            if name in dictionaries:
                self.strings(f"dictionary-{i:03d}", dictionaries[name])
        self.strings("tokens", [token.encode() for token in tokens])
        self.array("token_versions", np.array(list(tokens.values()), np.int64))
        files = [self.folder / file for file in self._info["files"]]
        sync_files([*files, *{file.parent for file in files}])
        path = self.folder / NAME
        content = dump_json(self._info)
        replace_file(path, content)
        return int(parse_json(content, path)["checksum"])

"""The read-optimized tier: for each shard sorted users, offsets and one mapped file a column. Written once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semel.history.durable import dump_json, parse_json, replace_file, sync_files
from semel.history.errors import CorruptFile, GenerationGone, StoreError
from semel.history.generation.array_files import (
    Codec,
    checked,
    map_column,
    split_strings,
    write_array,
    write_pieces,
    write_strings,
)
from semel.history.generation.lookup import TIME_STEP, Lookup
from semel.history.generation.marks import NEVER, Marks
from semel.history.schema import EventSchema

if TYPE_CHECKING:
    from semel.history.kernels.packing import Packed

MAGIC = "semel-generation"
FORMAT = 2
NAME = "generation.json"
NO_VALIDITY = np.empty(0, bool)
NO_VALIDITY.flags.writeable = False
PIECE_VALUES = 1 << 16
"""Of a column that is written: with all that is made of them they stay in the processor's cache."""
_TIMES = ("event_time", "version")


Rows = tuple[np.ndarray, np.ndarray]
"""Ranges of a shard's rows: where each begins, where it ends."""


class Files(Protocol):
    """Where a generation's files lie: ``LocalFiles``, ``cold_files.ColdFiles`` where some are compressed, or
    ``block_cache.CachedFiles`` before object storage."""

    def for_read(self) -> Files | None:
        """The same for one read, where what is asked for must be fetched and then be kept for it; None where all of
        the files is there anyway."""

    def info(self) -> bytes:
        """What ``generation.json`` holds. Raises GenerationGone."""

    def column(self, file: str, entry: dict[str, int], dtype: Any, shape: tuple[int, ...], rows: Rows | None,
               ) -> np.ndarray | Packed:
        """The column in a file, at least the ``rows`` of it (None: all). Raises CorruptFile, GenerationGone."""


class LocalFiles:
    """The files of a folder, mapped whole (or decompressed whole into memory)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def for_read(self) -> None:
        return None

    def info(self) -> bytes:
        path = self._folder / NAME
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise GenerationGone(f"{path} is missing") from None

    def column(self, file: str, entry: dict[str, int], dtype: Any, shape: tuple[int, ...], rows: Rows | None = None,
               ) -> np.ndarray | Packed:
        with self._lock:  # so that two threads do not check the same file twice
            return map_column(self._folder / file, entry, dtype, shape)


class Shard:
    """One shard's files, each mapped and checked when first asked for."""

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation, self.index = generation, index
        self._arrays: dict[str, np.ndarray] = {}
        self._columns: dict[str, np.ndarray | Packed] = {}
        self._valid: dict[str, np.ndarray | Packed] = {}
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

    @property
    def last_time(self) -> np.ndarray:
        """[U] the latest event_time of each user."""
        return self._array("last_time", np.int64)

    @property
    def time_index(self) -> np.ndarray:
        """[ceil(rows / TIME_STEP)] the event_time of every TIME_STEP-th row."""
        return self._array("time_index", np.int64)

    def column(self, name: str) -> np.ndarray | Packed:
        """A schema column, ``event_time`` or ``version``, as kernels take it: [rows, *shape], or packed."""
        column = self._columns.get(name)
        if column is None:
            file, dtype, shape = self._generation.place(name)
            column = self._columns[name] = self._generation.column(shard_file(self.index, file), dtype, shape)
        return column

    def values(self, name: str) -> np.ndarray:
        """[rows, *shape] of the same; a packed column is unpacked anew each time."""
        _, dtype, shape = self._generation.place(name)
        return _plain(self.column(name), self.rows, dtype, shape)

    def valid(self, name: str) -> np.ndarray | Packed:
        """[rows] bool as kernels take it, or empty where no value of the shard is null."""
        valid = self._valid.get(name)
        if valid is None:
            file = shard_file(self.index, f"{self._generation.place(name)[0]}.valid")
            valid = self._valid[name] = (
                self._generation.column(file, np.dtype(bool), ()) if self.has_nulls(name) else NO_VALIDITY)
        return valid

    def has_nulls(self, name: str) -> bool:
        return shard_file(self.index, f"{self._generation.place(name)[0]}.valid") in self._generation.info["files"]

    def fetch(self, name: str, rows: Rows) -> None:
        """Have these rows of a column, and their validity, here; ``column`` and ``valid`` promise no other ones from
        then on. For a read on object storage (``Generation.for_read``)."""
        file, dtype, shape = self._generation.place(name)
        self._columns[name] = self._generation.column(shard_file(self.index, file), dtype, shape, rows)
        file = shard_file(self.index, f"{file}.valid")
        if file in self._generation.info["files"]:
            self._valid[name] = self._generation.column(file, np.dtype(bool), (), rows)

    def validity(self, name: str) -> np.ndarray:
        """[rows] bool, or empty where no value of the shard is null."""
        valid = self.valid(name)
        return valid if valid is NO_VALIDITY else _plain(valid, self.rows, np.dtype(bool), ())

    @property
    def nbytes(self) -> int:
        """Of its files, as they are read."""
        prefix = shard_file(self.index, "")
        return sum(entry.get("decompressed", entry["bytes"]) for file, entry in self._generation.info["files"].items()
                   if file.startswith(prefix))

    def user_keys(self) -> list[bytes]:
        return split_strings(*self.user_strings)


def _plain(column: np.ndarray | Packed, rows: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    from semel.history.kernels.packing import unpack

    return unpack(column, rows * int(np.prod(shape, dtype=np.int64)), dtype).reshape(rows, *shape)


class Generation:
    """A generation in ``folder``, a local one unless ``files`` say where else. ``number`` 0 is the empty generation of
    a new store."""

    def __init__(self, folder: Path | str | None, number: int, schema: EventSchema, shards: int, seal: int = 0,
                 files: Files | None = None, info: dict[str, Any] | None = None) -> None:
        self.folder, self.number, self.schema, self.seal = folder, number, schema, seal
        self.positions = {name: (i, column) for i, (name, column) in enumerate(schema.layout.items())}
        self.info: dict[str, Any] = {"rows": [0] * shards, "users": [0] * shards, "files": {}}
        self.files: Files = files or LocalFiles(Path(folder or ""))
        if info is not None:
            self.info = info
        elif folder is not None:
            path = f"{folder}/{NAME}"
            self.info = parse_json(self.files.info(), path)
            if self.info.get("magic") != MAGIC or self.info["checksum"] != seal:
                raise CorruptFile(f"{path} is not the file that the store's manifest names")
            if self.info["format"] != FORMAT:
                raise StoreError(f"{path}: format {self.info['format']}, this Semel reads {FORMAT}; ingest the events "
                                 "again, or export them with the Semel that wrote it")
        self.shards = [Shard(self, index) for index in range(shards)]
        self.lookup = Lookup(self)

    def for_read(self) -> Generation | None:
        """The same generation for one read (``Files.for_read``): its shards hold what the read has asked for."""
        files = self.files.for_read() if self.number else None
        if files is None:
            return None
        one = Generation(self.folder, self.number, self.schema, len(self.shards), self.seal, files, self.info)
        one.lookup = self.lookup.for_read(one)
        one.__dict__.update(deleted=self.deleted, expired=self.expired)  # cached properties: they are read once
        return one

    def array(self, file: str, dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
        array = self.files.column(file, self._entry(file), dtype, shape, None)
        if isinstance(array, tuple):
            raise CorruptFile(f"{self.folder}/{file} is packed, which is for columns only")
        return array

    def column(self, file: str, dtype: np.dtype, shape: tuple[int, ...], rows: Rows | None = None,
               ) -> np.ndarray | Packed:
        return self.files.column(file, self._entry(file), dtype, shape, rows)

    def place(self, name: str) -> tuple[str, np.dtype, tuple[int, ...]]:
        """(file within a shard, dtype, shape of a row) of a schema column, ``event_time`` or ``version``."""
        if name in _TIMES:
            return name, np.dtype(np.int64), ()
        position, column = self.positions[name]
        return f"column-{position:03d}", column.dtype, column.shape

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

    @cached_property
    def deleted(self) -> Marks:
        """Of deletions that compactions have carried out."""
        return self._marks("deleted")

    @cached_property
    def expired(self) -> Marks:
        """Of what retention has taken: what it took of a user is one mark."""
        return self._marks("expired")

    @property
    def expired_before(self) -> int:
        """Events of an earlier ``event_time`` (microseconds) are gone; 0 where retention took nothing."""
        return int(self.info.get("expired_before", 0))

    @property
    def oldest(self) -> int:
        """The lowest ``event_time``; above all times where there are no events."""
        return int(self.info.get("oldest", NEVER if self.folder is None else 0))

    def _marks(self, name: str) -> Marks:
        strings = self.schema.string_keys
        if self.folder is None or f"{name}.first_version" not in self.info["files"]:
            return Marks.empty(strings)
        users: np.ndarray = self.array(f"{name}.users", np.int64) if not strings else np.array(
            self.strings(f"{name}.users"), object)
        first, time = (self.array(f"{name}.{part}", np.int64) for part in ("first_version", "first_time"))
        until = self.array(f"{name}.version", np.int64) if name == "deleted" else np.full(len(users), NEVER)
        return Marks(users, first, time, until)

    def _entry(self, file: str) -> dict[str, int]:
        try:
            return dict(self.info["files"][file])
        except KeyError:
            raise CorruptFile(f"{self.folder}: {NAME} does not list {file}") from None

    @property
    def codec(self) -> Codec | None:
        """How its columns lie, None of the empty generation of a new store."""
        return self.info.get("codec")

    @property
    def rows(self) -> int:
        return sum(self.info["rows"])

    @property
    def nbytes(self) -> int:
        return sum(entry["bytes"] for entry in self.info["files"].values())

    def verify(self) -> tuple[int, int]:
        """Check every block of every file, which must lie in a local folder, and that the shards' parts fit together;
        (files, bytes). Raises CorruptFile."""
        for file, entry in self.info["files"].items():
            checked(Path(self.folder or "") / file, entry)
        for shard in self.shards:
            if not shard.rows:
                continue
            shard = Shard(self, shard.index)  # what it holds goes with it
            for name in self.positions:
                shard.column(name), shard.valid(name)  # packed blocks must lie where they should
            offsets, times = shard.offsets, shard.values("event_time")
            inside = np.ones(max(len(times) - 1, 0), bool)
            inside[offsets[1:-1] - 1] = False
            if offsets[-1] != shard.rows or (np.diff(offsets) <= 0).any() or (np.diff(times)[inside] < 0).any():
                raise CorruptFile(f"{self.folder}: shard {shard.index} is not in order")
            if (shard.last_time != times[offsets[1:] - 1]).any() or (shard.time_index != times[::TIME_STEP]).any():
                raise CorruptFile(f"{self.folder}: shard {shard.index} has times that its index does not")
        return len(self.info["files"]), self.nbytes


def shard_file(index: int, name: str) -> str:
    return f"shard-{index:04d}/{name}"


@dataclass(frozen=True)
class WrittenShard:
    """What ``generation.json`` says of a shard; ``files`` in the order in which they were written. ``oldest``: its
    lowest ``event_time``; ``codes``: those in use, by dictionary column, where that was asked for; ``expired``: the
    users, lowest versions and lowest times of what retention took. All as JSON has them."""

    index: int
    rows: int = 0
    users: int = 0
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    oldest: int = NEVER
    codes: dict[str, list[int]] = field(default_factory=dict)
    expired: tuple[list[Any], list[int], list[int]] = ([], [], [])


class FileWriter:
    """Writes array files below ``folder``; ``files``: what ``generation.json`` keeps of each."""

    def __init__(self, folder: Path, codec: Codec) -> None:
        self.folder, self.codec = folder, codec
        self.files: dict[str, dict[str, int]] = {}

    def array(self, file: str, array: np.ndarray) -> None:
        self.files[file] = write_array(self.folder / file, array)

    def column(self, file: str, pieces: Iterable[np.ndarray], rows: int, dtype: np.dtype, shape: tuple[int, ...] = (),
               ) -> None:
        """[rows, *shape] values, piece by piece; see ``whole`` and ``piece_rows``."""
        self.files[file] = write_pieces(self.folder / file, pieces, rows, dtype, shape, self.codec)

    def whole(self, file: str, values: np.ndarray) -> None:
        """A column that is in memory."""
        step = piece_rows(values.shape[1:])
        self.column(file, (values[at : at + step] for at in range(0, len(values), step)), len(values), values.dtype,
                    values.shape[1:])

    def strings(self, name: str, values: list[bytes]) -> None:
        parent = Path(name).parent
        for file, entry in write_strings(self.folder / name, values).items():
            self.files[(parent / file).as_posix()] = entry

    def marks(self, name: str, marks: Marks) -> None:
        """Files ``NAME.users`` and so on."""
        if marks.users.dtype == object:
            self.strings(f"{name}.users", [user.encode() for user in marks.users])
        else:
            self.array(f"{name}.users", marks.users)
        self.array(f"{name}.first_version", marks.first)
        self.array(f"{name}.first_time", marks.time)
        if name == "deleted":
            self.array(f"{name}.version", marks.until)


def piece_rows(shape: tuple[int, ...]) -> int:
    """How many rows of a column are taken, packed and written at a time: whole blocks of any codec."""
    return max(PIECE_VALUES // int(np.prod(shape, dtype=np.int64)) // 128, 1) * 128


def write_shard(folder: Path, schema: EventSchema, codec: Codec, index: int, users: np.ndarray | list[bytes],
                offsets: np.ndarray, times: np.ndarray, versions: np.ndarray,
                columns: Callable[[str], tuple[Iterable[np.ndarray], np.ndarray]]) -> WrittenShard:
    """Write one shard's files into a generation's folder. ``columns(name)``: (pieces of a column's values, its validity
    or empty), so that no column need be in memory."""
    from semel.history.kernels.gather import version_range

    (folder / shard_file(index, "")).mkdir()
    writer, rows = FileWriter(folder, codec), len(times)
    if isinstance(users, list):
        writer.strings(shard_file(index, "users"), users)
    else:
        writer.array(shard_file(index, "users"), users)
    writer.array(shard_file(index, "offsets"), offsets)
    first, last = np.empty(len(users), np.int64), np.empty(len(users), np.int64)
    version_range(offsets, versions, first, last)
    writer.array(shard_file(index, "first_version"), first)
    writer.array(shard_file(index, "last_version"), last)
    writer.whole(shard_file(index, "version"), versions)
    writer.whole(shard_file(index, "event_time"), times)
    writer.array(shard_file(index, "last_time"), times[offsets[1:] - 1])
    writer.array(shard_file(index, "time_index"), times[::TIME_STEP])
    for i, (name, column) in enumerate(schema.layout.items()):
        pieces, valid = columns(name)
        writer.column(shard_file(index, f"column-{i:03d}"), pieces, rows, column.dtype, column.shape)
        if len(valid) and not valid.all():
            writer.whole(shard_file(index, f"column-{i:03d}.valid"), valid)
        del pieces, valid
    return WrittenShard(index, rows, len(users), writer.files, int(times.min()))


def finish_generation(folder: Path, schema: EventSchema, codec: Codec, shards: list[WrittenShard],
                      dictionaries: dict[str, list[bytes]], tokens: dict[str, int],
                      marks: tuple[Marks, Marks, int]) -> int:
    """Write what all ``shards`` have in common and ``generation.json``, and make all durable; the generation's
    seal. ``marks``: of what was deleted, of what expired, and the time before which events expired (0: none)."""
    shards = sorted(shards, key=lambda shard: shard.index)
    writer = FileWriter(folder, codec)
    for shard in shards:
        writer.files.update(shard.files)
    for i, name in enumerate(schema.layout):
        if name in dictionaries:
            writer.strings(f"dictionary-{i:03d}", dictionaries[name])
    writer.strings("tokens", [token.encode() for token in tokens])
    writer.array("token_versions", np.array(list(tokens.values()), np.int64))
    deleted, expired, expired_before = marks
    for name, of_kind in {"deleted": deleted, "expired": expired}.items():
        if len(of_kind):
            writer.marks(name, of_kind)
    files = [folder / file for file in writer.files]
    sync_files([*files, *{file.parent for file in files}])
    path = folder / NAME
    content = dump_json({"magic": MAGIC, "format": FORMAT, "codec": codec, "rows": [shard.rows for shard in shards],
                         "users": [shard.users for shard in shards],
                         "oldest": min((shard.oldest for shard in shards), default=NEVER),
                         "expired_before": expired_before, "files": writer.files})
    replace_file(path, content)
    return int(parse_json(content, path)["checksum"])

"""A store on object storage: every object is written once, except the manifest, which is swapped by conditional puts.

One object is one commit of the log, named by its first version and put only where that name is free, so no two writers
own a version. Opening for appending takes the store over: it swaps the manifest. A writer acknowledges an append after
it has seen, behind its put, that the manifest still is its own; so what was acknowledged before a takeover is in the
log that the next owner reads, and nothing is acknowledged after it. Such a put may still land after the next owner has
read the log: it takes the version that the owner's first append wants, which the owner then reads as a record
(``Overtaken``). ``docs/object-storage.md``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from semel.history.durable import parse_json
from semel.history.errors import (
    CorruptFile,
    GenerationGone,
    Overtaken,
    StoreError,
    StoreExists,
    StoreNotFound,
    WriterFenced,
)
from semel.history.generation.generation import NAME as GENERATION_NAME
from semel.history.generation.generation import Generation
from semel.history.log.ranges import PlaceOf, Take, versions_in
from semel.history.log.records import span
from semel.history.log.segments import decode_object, encode_object
from semel.history.schema import EventSchema
from semel.history.storage import block_cache
from semel.history.storage.block_cache import BlockCache, CachedFiles
from semel.history.storage.leases import Lease
from semel.history.storage.manifest import NAME, Manifest, parse_manifest
from semel.history.storage.objects import Changed, Objects, Tag, Unanswered, gathered

ONE_BY_ONE = 3
"""Log objects that are looked for by name before all later ones are listed."""
AT_ONCE = 64
"""Log objects in memory at a time, where many are read."""


def log_name(version: int) -> str:
    return f"log/{version:020d}.log"


@dataclass(frozen=True)
class LogObject:
    """Where a record lies."""

    objects: Objects
    name: str

    def __str__(self) -> str:
        return self.objects.where(self.name)

    def read(self) -> tuple[dict[str, Any], pa.RecordBatch]:
        """Its (metadata, batch). Raises FileNotFoundError, CorruptFile."""
        found = self.objects.get(self.name)
        assert found is not None
        return decode_object(found[0], str(self))


@dataclass(frozen=True)
class ObjectRange:
    """The events of one record: a ``ranges.Range``."""

    place: LogObject
    rows: int
    first: int
    last: int

    def joined(self, other: ObjectRange) -> None:
        return None

    def read(self) -> Iterator[tuple[pa.RecordBatch, int | np.ndarray]]:
        try:
            metadata, batch = self.place.read()
        except FileNotFoundError:
            raise GenerationGone(f"{self.place} is missing") from None
        yield batch, versions_in(metadata, batch)


class ObjectStorage:
    """The ``Storage`` of a URL that obstore knows."""

    segmented = False

    def __init__(self, url: str, options: Mapping[str, Any] | None, cache_bytes: int,
                 cache_folder: str | os.PathLike[str] | None) -> None:
        self.objects = Objects(url, options)
        self.path = self.objects.url
        self.cache = BlockCache(block_cache.cache_folder(cache_folder), cache_bytes)
        self._known: tuple[bytes, Tag] | None = None
        self._claim: Claim | None = None

    def close(self) -> None:
        self.cache.close()

    def stats(self) -> dict[str, Any]:
        return {"cache": {"bytes": self.cache.bytes, "fetched": self.cache.fetched}}

    # -- the manifest and who owns it ---------------------------------------------------------------------------

    def manifest(self) -> bytes:
        known = self._known
        try:
            found = self.objects.get(NAME, unless=known[1] if known else None)
        except FileNotFoundError:
            raise StoreNotFound(f"no history store at {self.path}: there is no {NAME} under that prefix") from None
        if found is not None:
            self._known = known = found
        assert known is not None
        return known[0]

    def swap(self, content: bytes) -> None:
        assert self._claim is not None
        self._claim.swap(content)

    def create(self, manifest: Manifest) -> Claim:
        stale = self.objects.entries("log")
        if stale and not self._exists():
            raise StoreExists(f"{self.objects.where(stale[0][0])} lies where a new store's log would; choose another "
                              "prefix")
        content = manifest.replace(active=0, writer=secrets.token_hex(8)).content()
        try:
            tag = _put(self.objects, NAME, content)
        except FileExistsError:
            raise StoreExists(f"there is a history store at {self.path} already; open it, or choose another prefix"
                              ) from None
        self._claim = Claim(self.objects, tag)
        return self._claim

    def _exists(self) -> bool:
        try:
            self.objects.tag(NAME)
        except FileNotFoundError:
            return False
        return True

    def claim(self) -> Claim:
        while True:
            manifest = parse_manifest(self.manifest(), self.path)
            assert self._known is not None
            content = manifest.replace(writer=secrets.token_hex(8)).content()
            try:
                self._claim = Claim(self.objects, _put(self.objects, NAME, content, self._known[1]))
                return self._claim
            except Changed:  # by the owner's compaction, or by another one that opens it: the last of all has it
                continue

    # -- the log ------------------------------------------------------------------------------------------------

    def start(self, manifest: Manifest) -> tuple[int, int]:
        return manifest.compacted_version + 1, 0

    def read_log(self, manifest: Manifest, position: tuple[int, int], durable_only: bool, take: Take,
                 ) -> tuple[int, int]:
        version = position[0]
        for place, (metadata, batch) in self._records(version):
            take(metadata, batch, place, partial(ObjectRange, place))
            version = _span(metadata, place)[1] + 1
        present = parse_manifest(self.manifest(), self.path)
        if (present.generation, present.folder) != (manifest.generation, manifest.folder):
            raise GenerationGone(f"{self.path} was compacted, and the end of its log may have been removed")
        return version, 0

    def _records(self, version: int) -> Iterator[tuple[LogObject, tuple[dict[str, Any], pa.RecordBatch]]]:
        """All records from the one whose first version is ``version`` on."""
        for _ in range(ONE_BY_ONE):
            place = LogObject(self.objects, log_name(version))
            try:
                record = place.read()
            except FileNotFoundError:
                return
            yield place, record
            version = _span(record[0], place)[1] + 1
        places = [LogObject(self.objects, name) for name, _ in self.objects.entries("log", after=place.name)]
        for at in range(0, len(places), AT_ONCE):
            some = places[at : at + AT_ONCE]
            yield from zip(some, gathered(LogObject.read, some), strict=True)

    def check_log(self, manifest: Manifest) -> tuple[int, int]:
        sizes = dict(self.objects.entries("log"))
        checked = [sizes.get(place.name, 0) for place, _ in self._records(self.start(manifest)[0])]
        return len(checked), sum(checked)

    def log_bytes(self) -> int:
        return sum(size for _, size in self.objects.entries("log"))

    def log(self, number: int, fresh: bool = False) -> ObjectLog:
        assert self._claim is not None
        return ObjectLog(self.objects, self._claim)

    def place_of(self, log: Any, start: int) -> PlaceOf:
        return partial(ObjectRange, log.path)

    def clean_log(self, manifest: Manifest) -> None:
        names = [name for name, _ in self.objects.entries("log") if name < log_name(manifest.compacted_version + 1)]
        self._delete(names)

    # -- generations --------------------------------------------------------------------------------------------

    def generation(self, manifest: Manifest) -> tuple[Generation, Lease | None]:
        prefix = f"generations/{manifest.folder}"
        generation = Generation(self.objects.where(prefix), manifest.generation, manifest.schema, manifest.shards,
                                manifest.generation_seal, CachedFiles(self.objects, prefix, self.cache))
        self.cache.keep_only(prefix)
        return generation, None

    @contextmanager
    def as_local(self, generation: Generation) -> Iterator[Generation]:
        if not generation.number:
            yield generation
            return
        where = str(generation.folder)
        prefix = where.removeprefix(f"{self.path}/")
        with self.cache.scratch() as folder:
            files = [GENERATION_NAME, *generation.info["files"]]
            for parent in {(folder / file).parent for file in files}:
                parent.mkdir(exist_ok=True)
            try:
                self.objects.download({f"{prefix}/{file}": folder / file for file in files})
            except FileNotFoundError as error:
                if self._claim is not None:
                    self._claim.confirm()  # else its owner now has removed it
                raise GenerationGone(str(error)) from None
            try:
                yield Generation(folder, generation.number, generation.schema, len(generation.shards),
                                 generation.info["checksum"])
            except CorruptFile as error:
                raise CorruptFile(str(error).replace(str(folder), where)) from None

    def building(self, number: int) -> AbstractContextManager[Path]:
        @contextmanager
        def folder() -> Iterator[Path]:
            with self.cache.scratch() as scratch:
                yield scratch / "generation"

        return folder()

    def publish(self, building: Path, number: int, schema: EventSchema, shards: int, seal: int,
                ) -> tuple[str, Generation, Lease | None]:
        folder = f"{number:08d}-{secrets.token_hex(4)}"  # never a name that a fenced writer may still write to
        files = {f"generations/{folder}/{file.relative_to(building).as_posix()}": file
                 for file in building.rglob("*") if file.is_file()}
        last = f"generations/{folder}/{GENERATION_NAME}"
        self.objects.upload({name: file for name, file in files.items() if name != last})
        self.objects.upload({last: files[last]})
        info = parse_json((building / GENERATION_NAME).read_bytes(), building / GENERATION_NAME)
        prefix = f"generations/{folder}"
        return folder, Generation(self.objects.where(prefix), number, schema, shards, seal,
                                  CachedFiles(self.objects, prefix, self.cache), info), None

    def clean_generations(self, manifest: Manifest, keep: int, leased: bool = False) -> list[int]:
        by_folder: dict[str, list[str]] = {}
        for name, _ in self.objects.entries("generations"):
            by_folder.setdefault(name.split("/")[1], []).append(name)
        numbers = {folder: int(folder.partition("-")[0]) for folder in by_folder if folder[:8].isdigit()}
        older = sorted({number for number in numbers.values() if number < manifest.generation})
        removed = older[: max(0, len(older) - (keep - 1))]
        kept = {folder for folder, number in numbers.items() if number in older and number not in removed}
        kept.add(manifest.folder)
        self._delete([name for folder, names in by_folder.items() if folder not in kept for name in names])
        self.cache.keep_only(f"generations/{manifest.folder}")
        return removed

    def _delete(self, names: list[str]) -> None:
        """``names`` were listed before this looks who owns the store: what a later owner writes is not among them."""
        if names:
            assert self._claim is not None
            self._claim.confirm()
            self.objects.delete(names)


class Claim:
    """The right to append, as long as the manifest is the one that this handle has put."""

    abandoned = False  # whatever the owner before may still put, the store's names keep apart

    def __init__(self, objects: Objects, tag: Tag) -> None:
        self._objects, self._tag = objects, tag

    def confirm(self) -> None:
        """Raise WriterFenced where another writer took the store over. One request."""
        if self._objects.tag(NAME) != self._tag:
            raise _fenced(self._objects.url)

    def swap(self, content: bytes) -> None:
        try:
            self._tag = _put(self._objects, NAME, content, self._tag)
        except Changed:
            raise _fenced(self._objects.url) from None
        except Unanswered as error:
            raise StoreError(f"whether {self._objects.where(NAME)} was replaced is unknown ({error}); reopen the store"
                             ) from error

    def check(self) -> None:
        """Nothing: puts and swaps find out by themselves."""

    def mark(self, segment: int, size: int) -> None:
        """Nothing: an object is durable before it is visible."""

    def release(self, in_order: bool = True) -> None:
        """Nothing: the next one takes over without asking."""


class ObjectLog:
    """Appends, an object each."""

    size = 0

    def __init__(self, objects: Objects, claim: Claim) -> None:
        self._objects, self._claim = objects, claim
        self.path: Any = objects.where("log")  # from the first append on where the last one lies
        self._writer = secrets.token_hex(8)  # so that no other writer's record equals one of this
        self.usable = True

    def append(self, batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any] | None = None) -> None:
        """Put one record; it is durable, and this writer still owned the store then, when this returns. Raises
        Overtaken, WriterFenced; StoreError where it is unknown whether the record is there."""
        metadata = {**(metadata or {}), "writer": self._writer}
        version = span(metadata)[0]
        content = encode_object(batch, metadata)
        self.usable = False  # until the record is known to be there, or not to be
        try:
            self.path = LogObject(self._objects, log_name(version))
            _put(self._objects, self.path.name, content)
        except FileExistsError:
            self._claim.confirm()
            self.usable = True
            raise Overtaken(log_name(version)) from None
        except Unanswered as error:
            raise StoreError(f"whether version {version} is in the store is unknown ({error}); reopen the store and "
                             "append again, with the same token") from error
        except OSError:
            self.usable = True
            raise
        self._claim.confirm()
        self.usable = True

    def close(self) -> None:
        self.usable = False


def _fenced(url: str) -> WriterFenced:
    return WriterFenced(f"{url} was opened for appending elsewhere since; nothing more is written through this handle. "
                        "What it was about to append may be in the store: append that again with the same token, "
                        "through a handle opened anew")


def _span(metadata: dict[str, Any], place: LogObject) -> tuple[int, int]:
    try:
        return span(metadata)
    except (KeyError, TypeError) as error:
        raise CorruptFile(f"{place}: does not say which versions it holds ({error!r})") from None


def _put(objects: Objects, name: str, content: bytes, replacing: Tag | None = None) -> Tag:
    """``Objects.put`` where the answer may get lost: what is there then tells. ``content`` is nobody else's."""
    try:
        return objects.put(name, content, replacing)
    except (FileExistsError, Changed, Unanswered):
        try:
            found = objects.get(name)
        except (OSError, StoreError):
            found = None
        if found is not None and found[0] == content:
            return found[1]
        raise

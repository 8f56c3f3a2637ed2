"""A store in a local folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from semel.history.durable import replace_file, sync_folder
from semel.history.errors import GenerationGone, StoreError, StoreExists
from semel.history.generation.generation import Generation
from semel.history.log.ranges import LogRange, PlaceOf, Take
from semel.history.log.segments import SEGMENT_HEADER, SegmentWriter, last_record_end, read_records
from semel.history.schema import EventSchema
from semel.history.storage.block_cache import BlockCache, cache_folder
from semel.history.storage.cold_files import ColdFiles
from semel.history.storage.interface import CACHE_BYTES, Log, Owner
from semel.history.storage.leases import Lease, remove_generations
from semel.history.storage.locking import WriterLock, durable_end
from semel.history.storage.manifest import NAME, Manifest, generation_path, parse_manifest, read_manifest, segment_path


class LocalStorage:
    """A folder: segments that grow, one writer by flock, generations that readers map. Raises ValueError for what is no
    number of bytes."""

    segmented = True

    def __init__(self, path: Path, cache_bytes: int = CACHE_BYTES, cache: str | os.PathLike[str] | None = None) -> None:
        self.path = path
        self.cache = BlockCache(cache_folder(cache), cache_bytes)
        self._lock: WriterLock | None = None  # of the handle that appends

    def manifest(self) -> bytes:
        return read_manifest(self.path)

    def swap(self, content: bytes) -> None:
        before = self.manifest()
        try:
            replace_file(self.path / NAME, content)
        except BaseException as error:
            if self.manifest() != before:
                raise StoreError(f"{self.path / NAME} could not be made durable ({error}); reopen the store") from error
            raise

    def generation(self, manifest: Manifest) -> tuple[Generation, Lease | None]:
        folder = generation_path(self.path, manifest.generation)
        lease = Lease(folder)  # first, so that it is not removed while it is being opened
        generation = self._open(folder, manifest.generation, manifest.schema, manifest.shards, manifest.generation_seal)
        self.cache.keep_only(folder.name)
        return generation, lease

    def _open(self, folder: Path, number: int, schema: EventSchema, shards: int, seal: int) -> Generation:
        generation = Generation(folder, number, schema, shards, seal)
        if generation.codec == "cold":
            return Generation(folder, number, schema, shards, seal, ColdFiles(folder, self.cache), generation.info)
        return generation

    def start(self, manifest: Manifest) -> tuple[int, int]:
        return manifest.first_segment, SEGMENT_HEADER

    def read_log(self, manifest: Manifest, position: tuple[int, int], durable_only: bool, take: Take,
                 ) -> tuple[int, int]:
        sealed = {segment.number: segment.bytes for segment in manifest.sealed}
        active, most = manifest.active, None
        if durable_only or self._lock is None:
            mark, limited = durable_end(self.path / "writer.lock")
        else:
            mark, limited = self._lock.found, False
        if mark is not None and limited:
            if mark[0] > active:
                raise GenerationGone(f"segment {mark[0]} of the log is not in {NAME}")
            most = mark[1] if mark[0] == active else SEGMENT_HEADER
        sound = mark[1] if mark is not None and mark[0] == active else 0
        number, offset = position
        while True:
            path = segment_path(self.path, number)
            ends = (most, sound) if number == active else (None, 0)
            for metadata, batch, end in read_records(path, offset, sealed.get(number), *ends):
                take(metadata, batch, path, partial(LogRange, path, offset, end))
                offset = end
            if number == active:
                return number, offset
            number, offset = number + 1, SEGMENT_HEADER

    def check_log(self, manifest: Manifest) -> tuple[int, int]:
        sealed = {segment.number: segment.bytes for segment in manifest.sealed}
        numbers = (*sealed, manifest.active)
        marked, sound = durable_end(self.path / "writer.lock")[0] or (0, 0)
        return len(numbers), sum(last_record_end(segment_path(self.path, number), sealed.get(number),
                                                 sound if number == marked else 0) for number in numbers)

    def log_bytes(self) -> int:
        size = 0
        for file in (self.path / "log").glob("*.log"):
            try:
                size += file.stat().st_size
            except FileNotFoundError:  # a compaction has just removed it
                continue
        return size

    def create(self, manifest: Manifest) -> Owner:
        self._refuse_existing()
        for folder in (self.path, self.path / "log", self.path / "generations"):
            folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(self.path / "writer.lock")
        try:
            self._refuse_existing()
            SegmentWriter(segment_path(self.path, manifest.active)).close()
            manifest.save(self.path)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        return lock

    def _refuse_existing(self) -> None:
        if self.path.is_file():
            raise StoreExists(f"{self.path} is a file; choose another folder")
        if (self.path / NAME).exists():
            raise StoreExists(f"there is a history store at {self.path} already; open it, or choose another folder")
        for stale in (self.path / "log").glob("*.log"):
            if stale.stat().st_size > SEGMENT_HEADER:  # a create that was killed leaves no more than that
                raise StoreExists(f"{stale} lies where a new store's log would; choose another folder")

    def claim(self) -> Owner:
        parse_manifest(self.manifest(), self.path)  # before a lock file is left in a foreign folder
        self._lock = WriterLock(self.path / "writer.lock")
        return self._lock

    def log(self, number: int, fresh: bool = False) -> Log:
        path = segment_path(self.path, number)
        if fresh:
            path.unlink(missing_ok=True)  # left by a roll that did not come to its manifest
        return SegmentWriter(path)

    def place_of(self, log: Log, start: int) -> PlaceOf:
        return partial(LogRange, log.path, start, log.size)

    def as_local(self, generation: Generation) -> AbstractContextManager[Generation]:
        if generation.codec != "cold":
            return nullcontext(generation)
        return nullcontext(Generation(generation.folder, generation.number, generation.schema, len(generation.shards),
                                      generation.seal, info=generation.info))

    @contextmanager
    def building(self, number: int) -> Iterator[Path]:
        final = generation_path(self.path, number)
        building = final.with_name(f".{final.name}.building")
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        try:
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def publish(self, building: Path, number: int, schema: EventSchema, shards: int, seal: int,
                ) -> tuple[str, Generation, Lease | None]:
        final = generation_path(self.path, number)
        os.rename(building, final)
        sync_folder(final.parent)
        return "", self._open(final, number, schema, shards, seal), Lease(final)

    def clean_log(self, manifest: Manifest) -> None:
        log = {segment_path(self.path, number).name
               for number in (*(s.number for s in manifest.sealed), manifest.active)}
        for file in (self.path / "log").glob("*.log"):
            if file.name not in log and re.fullmatch(r"[0-9]{8,}\.log", file.name):
                file.unlink(missing_ok=True)

    def clean_generations(self, manifest: Manifest, keep: int, leased: bool = False) -> list[int]:
        removed = remove_generations(self.path / "generations", manifest.generation, keep, leased)
        self.cache.keep_only(generation_path(self.path, manifest.generation).name)
        return removed

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.cache.close()

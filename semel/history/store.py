"""``HistoryStore``: a handle on a store. Files: ``docs/formats/history.md``; meaning: ``docs/as-of.md``."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from semel.batch import JaggedTable, Pointers, ids_array
from semel.history.errors import CorruptFile, GenerationGone, StoreError, StoreExists, VersionNotVisible
from semel.history.files import sync_folder
from semel.history.following import RETRIES, Follower, View, keys_of, verify
from semel.history.generation import CODECS, Codec, Generation
from semel.history.locking import WriterLock
from semel.history.log import SEGMENT_HEADER, SegmentWriter
from semel.history.manifest import (
    NAME,
    Manifest,
    Segment,
    generation_path,
    local_path,
    parse_manifest,
    read_manifest,
    segment_path,
)
from semel.history.schema import EventSchema, Projection, check_events
from semel.history.tail import frozen

T = TypeVar("T")
SEGMENT_BYTES = 128 << 20  # a segment that has grown beyond this is sealed


class HistoryStore:
    """The histories of a site, kept once. Open one with ``create`` or ``open``; usable as a context manager.

    Any number of threads may read through one handle while one appends (``mode="a"``); any number of processes may
    open the store with ``mode="r"``. A read is answered from an immutable view, so readers never wait for a writer.
    """

    def __init__(self, path: Path, mode: str, lock: WriterLock | None) -> None:
        self.path, self.mode = path, mode
        self._lock = lock
        self._moving = threading.RLock()  # held by whoever moves the view
        self._compacting = threading.Lock()
        self._closed = False
        self._failed = ""  # why memory and disk may disagree, after which nothing more is written
        self._checked: set[Projection] = set()
        self._follower = Follower(path)
        self.schema = self._follower.schema
        self._writer: SegmentWriter | None = None
        self._follower.refresh()
        self._tokens: dict[str, int] = {}
        if mode == "a":  # after the log was read: a segment that is missing must not be made anew
            self._writer = SegmentWriter(segment_path(path, self._follower.manifest.active))
            self._tokens = {**self._view.generation.tokens(), **self._follower.tokens}
            self._clean()

    # -- opening and closing ------------------------------------------------------------------------------------

    @classmethod
    def create(cls, url: str | os.PathLike[str], schema: EventSchema, shards: int = 16) -> HistoryStore:
        """Make an empty store at a local path (or file:// URL) and open it for appending. Raises StoreExists where
        there is one, ValueError for a bad schema or shard count."""
        path = local_path(url)
        if not isinstance(schema, EventSchema):
            raise ValueError(f"schema must be an EventSchema, got {type(schema).__name__}")
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= 9999:
            raise ValueError(f"shards must be between 1 and 9999, got {shards!r}")
        _refuse_existing(path)
        for folder in (path, path / "log", path / "generations"):
            folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(path / "writer.lock")
        try:
            _refuse_existing(path)
            SegmentWriter(segment_path(path, 1)).close()
            Manifest.new(schema, shards).save(path)
            return cls(path, "a", lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, url: str | os.PathLike[str], mode: str = "r") -> HistoryStore:
        """Open a store to read ("r") or to read and append ("a": one at a time). Raises StoreNotFound, StoreLocked
        (naming the process that appends), CorruptFile, StoreError for a format that this version does not know."""
        path = local_path(url)
        if mode not in ("r", "a"):
            raise ValueError(f'mode must be "r" or "a", got {mode!r}')
        parse_manifest(read_manifest(path), path)  # before a lock file is left in a foreign folder
        lock = WriterLock(path / "writer.lock") if mode == "a" else None
        try:
            return cls(path, mode, lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def close(self) -> None:
        """Release the lock and the files. Arrays that were read stay valid."""
        with self._compacting, self._moving:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HistoryStore({str(self.path)!r}, mode={self.mode!r}, version={self.version})"

    # -- what this handle sees ----------------------------------------------------------------------------------

    @property
    def _view(self) -> View:
        return self._follower.view

    @property
    def version(self) -> int:
        """The latest committed version that this handle sees; 0 for an empty store."""
        return self._view.version

    @property
    def generation(self) -> int:
        """The number of the generation that this handle reads; 0 for none."""
        return self._view.generation.number

    def refresh(self) -> int:
        """See what was committed since the last refresh (an appending handle always does); the version now."""
        self._check_open()
        if self.mode == "r":
            with self._moving:
                self._follower.refresh()
        return self.version

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the handle on {self.path} is closed")

    def _check_mode(self, verb: str) -> None:
        self._check_open()
        if self.mode != "a":
            raise StoreError(f'{self.path} is open with mode="r"; open it with mode="a" to {verb}')

    def _check_sound(self) -> None:  # with the lock held: a write in progress counts as failed until it ends
        self._check_open()
        if self._failed:
            raise StoreError(f"{self.path}: an earlier write failed ({self._failed}); reopen the store")

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Around what changes files and memory together, with the lock held. The disk's refusal (OSError) leaves both
        as they were; after anything else, a signal in the middle included, this handle writes no more."""
        self._check_sound()
        self._failed = f"{what} did not end"
        try:
            yield
        except OSError as error:
            self._failed = "" if self._writer is not None and self._writer.usable else str(error)
            raise
        except StoreError as error:
            self._failed = str(error)
            raise
        self._failed = ""

    # -- appending ----------------------------------------------------------------------------------------------

    def append(self, data: Any, token: str | None = None) -> int:
        """Append events (pa.Table, RecordBatch or anything with __arrow_c_stream__); the version they got.

        On disk when this returns, all rows or none after a crash. ``token``: a name for this append; a second append
        with a token that the store has seen does nothing and returns the first one's version. Raises ValueError for
        rows that do not fit the schema, OSError where the disk refuses (nothing is appended then).
        """
        self._check_mode("append")
        if token is not None and not isinstance(token, str):
            raise ValueError(f"token must be a string, got {token!r}")
        if token is not None:
            token.encode()  # a lone surrogate is an error here, not in the middle of a write
        arrays = check_events(data, self.schema)
        with self._moving:
            self._check_sound()
            if token in self._tokens:
                return self._tokens[token]
            if not len(arrays["event_time"]) and token is None:
                return self.version
            with self._writing("an append"):
                return self._commit(arrays, token)

    def _commit(self, arrays: dict[str, pa.Array], token: str | None) -> int:
        view, version = self._view, self._view.version + 1
        metadata: dict[str, Any] = {"version": version}
        if token is not None:
            metadata["token"] = token
        grown: dict[str, Any] = {}
        for name in view.dictionaries.names:
            arrays[name], new = view.dictionaries.encode(name, arrays[name])
            if new:
                grown[name] = {"start": view.dictionaries.size(name), "values": new}
        if grown:
            metadata["dictionaries"] = grown
        stored = self.schema.stored
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in stored.names], schema=stored)
        writer = self._writer
        assert writer is not None
        if writer.size > SEGMENT_BYTES:
            writer = self._roll()
        writer.append(batch, metadata)
        for name, added in grown.items():
            view.dictionaries.extend(name, added["start"], added["values"], writer.path)
        if token is not None:
            self._tokens[token] = version
        self._follower.view = replace(view, tail=view.tail.append(batch, version), version=version)
        return version

    def _roll(self) -> SegmentWriter:
        """Seal the active segment and go on in a new one."""
        writer, manifest = self._writer, self._follower.manifest
        assert writer is not None
        number = manifest.active + 1
        path = segment_path(self.path, number)
        path.unlink(missing_ok=True)  # left by a roll that did not come to its manifest
        new = SegmentWriter(path)
        try:
            self._follower.swap(manifest.replace(
                sealed=(*manifest.sealed, Segment(manifest.active, writer.size, self.version)), active=number,
                versions=(self.version,) * manifest.shards))
        except BaseException:
            new.close()
            raise
        self._writer = new
        writer.close()
        return new

    # -- reading ------------------------------------------------------------------------------------------------

    def point(self, user_ids: Any, as_of: Any) -> Pointers:
        """Pointers at this handle's current version. ``user_ids`` [P]; ``as_of`` [P] or a scalar, microseconds."""
        return Pointers(self._ids(user_ids), as_of, np.array(self._view.version))

    def read(self, pointers: Pointers, projection: Projection) -> JaggedTable:
        """The histories that ``pointers`` name: events with ``event_time < as_of`` and ``version <= version``, in the
        order (event_time, version, position in the append).

        Strings come as int32 codes with ``dictionaries`` (code -1 and validity False where null; other nulls are
        zero with validity False), timestamps as int64 in their unit. ``status`` [P]: see ``Status``. Raises
        VersionNotVisible for a pointer that is newer than the store, ValueError for a column that it lacks.
        """
        from semel.history import reading

        return self._answer(reading.read, pointers, projection)

    def lengths(self, pointers: Pointers, projection: Projection) -> tuple[np.ndarray, np.ndarray]:
        """([P] int64 lengths of the histories that ``read`` would return, [P] bool whether each is exact rather than
        an upper bound); no column but the group's is read."""
        from semel.history import reading

        chosen = self._answer(reading.select, pointers, projection)
        return chosen.count, np.ones(len(pointers), bool)

    def shards_of(self, user_ids: Any) -> np.ndarray:
        """[P] int64: the shard that keeps each user's events. Reads that ask for users of one shard touch its files
        only."""
        from semel.history import gather
        from semel.history.compaction import packed

        ids, shards = self._ids(user_ids), len(self._view.generation.shards)
        out = np.empty(len(ids), np.int64)
        if self.schema.string_keys:
            gather.shards_of_strings(*packed([text.encode() for text in ids]), shards, out)
        else:
            gather.shards_of_integers(frozen(np.ascontiguousarray(ids)), shards, out)
        return out

    def _answer(self, function: Callable[..., T], pointers: Pointers, projection: Projection) -> T:
        from semel.history import reading

        self._check_open()
        if projection not in self._checked:
            reading.check_projection(projection, self.schema)
            self._checked.add(projection)
        ids = self._ids(pointers.user_id)
        if ids is not pointers.user_id:
            pointers = Pointers(ids, pointers.as_of, pointers.version)
        newest = int(pointers.version.max(initial=0))
        if newest > self._view.version:
            self.refresh()
        if newest > self._view.version:
            raise VersionNotVisible(f"a pointer names version {newest}, the store at {self.path} is at version "
                                    f"{self._view.version} here, also after a refresh")
        return self._again(lambda view: function(view, self.schema, pointers, projection))

    def _again(self, function: Callable[[View], T]) -> T:
        """``function`` of the view, once more where a compaction removed files that it had yet to map: the next
        generation answers the same."""
        for _ in range(RETRIES):
            view = self._view
            try:
                return function(view)
            except GenerationGone as error:
                self.refresh()
                if self._view.generation is view.generation:
                    raise CorruptFile(str(error)) from None
        raise StoreError(f"{self.path} was compacted {RETRIES} times during one read; try again")

    def _ids(self, ids: Any) -> np.ndarray:
        ids = ids_array(ids, self.schema.key)
        if not len(ids):
            return np.empty(0, object if self.schema.string_keys else np.int64)
        if (ids.dtype == object) != self.schema.string_keys:
            want, have = ("strings", "integers") if self.schema.string_keys else ("integers", "strings")
            raise ValueError(f"{self.schema.key}s are {want} in this store, got {have} ({ids[0]!r}, ...)")
        return ids

    def keys(self) -> np.ndarray:
        """All user ids in the store, sorted: int64, or an object array of strings."""
        self._check_open()
        return self._again(keys_of)

    def shards_of(self, user_ids: Any) -> np.ndarray:
        """[P] int64: the shard in which each user's events lie, or would."""
        from semel.history.compaction import shards_of

        ids = self._ids(user_ids)
        keys = [text.encode() for text in ids] if self.schema.string_keys else np.ascontiguousarray(ids)
        return shards_of(keys, len(self._view.generation.shards))

    # -- housekeeping -------------------------------------------------------------------------------------------

    def compact(self, progress: Callable[[int, int], None] | None = None, codec: Codec = "packed") -> int:
        """Move the log into a new generation; its number. Readers and appends go on meanwhile; a crash leaves the old
        generation in place. ``progress(shards done, shards)``. ``codec``: ``packed`` columns, or ``plain`` ones, larger
        and a little faster to read; ValueError for another one."""
        from semel.history.compaction import write_generation

        self._check_mode("compact")
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r} is none of {', '.join(CODECS)}")
        with self._compacting:
            with self._moving:
                self._check_sound()
                if self._follower.manifest.compacted_version == self.version and (
                    self._view.generation.codec in (codec, None)
                ):
                    return self.generation
                with self._writing("a compaction"):
                    self._roll()
                view, tokens = self._view, dict(self._tokens)
            number = view.generation.number + 1
            final = generation_path(self.path, number)
            building = final.with_name(f".{final.name}.building")
            shutil.rmtree(building, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            try:
                seal = write_generation(building, view, tokens, codec, progress)
                os.rename(building, final)
                sync_folder(final.parent)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            generation = Generation(final, number, self.schema, len(view.generation.shards), seal)
            with self._moving, self._writing("a compaction"):
                manifest = self._follower.manifest
                self._follower.swap(manifest.replace(
                    generation=number, generation_seal=seal, compacted=(view.version,) * manifest.shards,
                    versions=(self.version,) * manifest.shards,
                    sealed=tuple(s for s in manifest.sealed if s.last_version > view.version)))
                now = self._view
                self._follower.view = replace(now, generation=generation, tail=now.tail.after(view.version))
            self._clean()
            return number

    def _clean(self) -> None:
        """Remove what the manifest does not name: compacted segments, older generations, leftovers of a crash. Arrays
        that readers have mapped stay valid until they let go of them."""
        manifest = self._follower.manifest
        keep = generation_path(self.path, manifest.generation).name
        for folder in (self.path / "generations").iterdir():
            if folder.name != keep:
                shutil.rmtree(folder, ignore_errors=True)
        with self._moving:
            manifest = self._follower.manifest
            log = {segment_path(self.path, number).name
                   for number in (*(s.number for s in manifest.sealed), manifest.active)}
            for file in (self.path / "log").glob("*.log"):
                if file.name not in log:
                    file.unlink(missing_ok=True)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: version, generation, shards, users, events (``generation``, ``log``, ``total``), bytes on
        disk (same keys)."""
        self._check_open()
        view = self._view
        log = 0
        for file in (self.path / "log").glob("*.log"):
            try:
                log += file.stat().st_size
            except FileNotFoundError:  # a compaction has just removed it
                continue
        kept, recent = view.generation.rows, view.tail.rows
        return {
            "version": view.version, "generation": view.generation.number, "shards": len(view.generation.shards),
            "users": len(self.keys()),
            "events": {"generation": kept, "log": recent, "total": kept + recent},
            "bytes": {"generation": view.generation.nbytes, "log": log, "total": view.generation.nbytes + log},
        }

    def verify(self) -> dict[str, int]:
        """Read every byte of the store and check it; ``{"files", "bytes"}``. Raises CorruptFile naming the first
        damaged file."""
        self._check_open()
        return verify(self.path)


def _refuse_existing(path: Path) -> None:
    if (path / NAME).exists():
        raise StoreExists(f"there is a history store at {path} already; open it, or choose another folder")
    for stale in (path / "log").glob("*.log"):
        if stale.stat().st_size > SEGMENT_HEADER:  # a create that was killed leaves no more than that
            raise StoreExists(f"{stale} lies where a new store's log would; choose another folder")

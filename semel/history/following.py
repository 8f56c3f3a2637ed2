"""How a handle keeps up with the files: manifest + generation + log -> an immutable ``View``."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from semel.history.deletions import Deletion, Deletions, deletion_in
from semel.history.errors import CorruptFile, GenerationGone, StoreError
from semel.history.generation import Generation
from semel.history.leases import Lease
from semel.history.locking import durable_end
from semel.history.log import SEGMENT_HEADER, last_record_end, read_records
from semel.history.manifest import NAME, Manifest, generation_path, parse_manifest, read_manifest, segment_path
from semel.history.positions import Tokens
from semel.history.ranges import LogRange
from semel.history.records import appends_of, versions_of
from semel.history.tail import Dictionaries, Tail

RETRIES = 50  # how often a reader starts again because a compaction moved what it was opening


@dataclass(frozen=True)
class View:
    """What a handle sees at a moment. Immutable (``dictionaries`` only grow), so a reader that holds one needs no
    lock. ``deletions``: those that the generation does not know. ``compacted``: the highest version in the generation,
    which ``lease`` keeps on the disk."""

    generation: Generation
    tail: Tail
    version: int
    dictionaries: Dictionaries
    deletions: Deletions
    compacted: int = 0
    lease: Lease | None = None


class Follower:
    """The newest view that a handle knows of. Whoever moves it holds ``moving``. ``durable_only``: leave out what the
    writer has written but not synced yet (the writer itself takes all)."""

    def __init__(self, path: Path, durable_only: bool = True) -> None:
        self.path, self.durable_only = path, durable_only
        self.moving = threading.RLock()
        self._content = read_manifest(path)
        self.manifest = parse_manifest(self._content, path)
        self.schema = schema = self.manifest.schema
        dictionaries = Dictionaries(schema.dictionaries)
        self.view = View(Generation(None, 0, schema, self.manifest.shards), Tail.empty(schema), 0, dictionaries,
                         Deletions((), schema, dictionaries))
        self.tokens = Tokens()  # of the log's records
        self._position = (self.manifest.first_segment, SEGMENT_HEADER)
        self._adopted = False

    @property
    def position(self) -> tuple[int, int]:
        """(segment, bytes of it) that the view holds."""
        return self._position

    def refresh(self) -> None:
        """Move the view to the manifest and log as they are now; again where a compaction got in between."""
        for attempt in range(RETRIES):
            content = read_manifest(self.path)
            try:
                if content != self._content or not self._adopted:
                    self._adopt(parse_manifest(content, self.path))
                    self._content, self._adopted = content, True
                self._read_log()
                return
            except (GenerationGone, FileNotFoundError, CorruptFile) as error:
                if read_manifest(self.path) == content:  # nobody moved it: it is really missing, or damaged
                    raise error if isinstance(error, CorruptFile) else CorruptFile(f"{self.path}: {error}") from None
                time.sleep(0.001 * attempt)
        raise StoreError(f"{self.path} changed {RETRIES} times while it was being opened; try again")

    def _adopt(self, manifest: Manifest) -> None:
        view = self.view
        if manifest.generation != view.generation.number:
            folder = generation_path(self.path, manifest.generation)
            lease = Lease(folder)  # first, so that it is not removed while it is being opened
            schema = manifest.schema
            generation = Generation(folder, manifest.generation, schema, manifest.shards, manifest.generation_seal)
            view.dictionaries.include(schema.dictionaries)
            for name in view.dictionaries.names:
                view.dictionaries.extend(name, 0, generation.dictionary(name), folder)
            upto = manifest.compacted_version
            tail = view.tail.after(upto)
            if schema != self.schema:
                self.schema, tail = schema, tail.with_schema(schema)
            self.view = replace(view, generation=generation, tail=tail,
                                version=max(view.version, upto), deletions=view.deletions.after(upto),
                                compacted=upto, lease=lease)
        if self._position[0] < manifest.first_segment:
            self._position = (manifest.first_segment, SEGMENT_HEADER)
        self.manifest = manifest

    def _read_log(self) -> None:
        """Read the log from where this handle stands."""
        sealed = {segment.number: segment.bytes for segment in self.manifest.sealed}
        active, most = self.manifest.active, None
        durable = durable_end(self.path / "writer.lock") if self.durable_only else None
        if durable is not None:
            if durable[0] > active:
                raise GenerationGone(f"segment {durable[0]} of the log is not in {NAME}")
            most = durable[1] if durable[0] == active else SEGMENT_HEADER
        while True:
            number, offset = self._position
            path = segment_path(self.path, number)
            for metadata, batch, end in read_records(path, offset, sealed.get(number),
                                                     most if number == active else None):
                self._take(metadata, batch, path, self._position[1], end)
                self._position = (number, end)
            if number == active:
                return
            self._position = (number + 1, SEGMENT_HEADER)

    def _take(self, metadata: dict[str, Any], batch: pa.RecordBatch, path: Path, start: int, end: int) -> None:
        """Add one record, the bytes ``start`` to ``end`` of ``path``, to the view, unless the generation has its events
        already."""
        view = self.view
        try:
            if "delete" in metadata:
                self._take_deletion(deletion_in(metadata, batch), path)
                return
            appends = appends_of(metadata, batch.num_rows)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile(f"{path}: the record after version {view.version} cannot be read: {error!r}") from None
        if batch.num_columns > len(self.schema.stored.names):
            raise GenerationGone(f"{path} has a column that {NAME} did not have")
        first, last = appends[0].version, appends[-1].version
        if last <= view.version:
            return
        self._check_next(first, path)
        for name, added in metadata.get("dictionaries", {}).items():
            view.dictionaries.extend(name, added["start"], added["values"], path)
        versions = last if len(appends) == 1 else versions_of(appends)
        place = LogRange(path, start, end, batch.num_rows, first, last)
        self.view = replace(view, tail=view.tail.append(batch, versions, place), version=last)
        for append in appends:
            if append.token is not None:
                self.tokens.add(append.token, append.version)

    def _take_deletion(self, deletion: Deletion, path: Path) -> None:
        view = self.view
        if deletion.version > view.version:
            self._check_next(deletion.version, path)
            self.view = replace(view, deletions=view.deletions.add(deletion), version=deletion.version)

    def _check_next(self, version: int, path: Path) -> None:
        if version != self.view.version + 1:
            raise CorruptFile(f"{path}: version {version} follows {self.view.version}; records are missing")

    def swap(self, manifest: Manifest) -> None:
        """Replace the manifest (the one writer does). StoreError where nobody can tell which one is on the disk; any
        other error leaves the old one in place."""
        try:
            manifest.save(self.path)
        except BaseException as error:
            if read_manifest(self.path) != self._content:
                raise StoreError(f"{self.path / NAME} could not be made durable ({error}); reopen the store") from error
            raise
        self.manifest, self._content = manifest, read_manifest(self.path)


def verify(path: Path) -> dict[str, int]:
    """Check every byte of the store at ``path``: {"files", "bytes"}; CorruptFile for the first that is damaged."""
    for _ in range(RETRIES):
        content = read_manifest(path)
        manifest = parse_manifest(content, path)
        try:
            files, size = 1, len(content)
            if manifest.generation:
                folder = generation_path(path, manifest.generation)
                counts = Generation(folder, manifest.generation, manifest.schema, manifest.shards,
                                    manifest.generation_seal).verify()
                files, size = files + counts[0], size + counts[1]
            sealed = {segment.number: segment.bytes for segment in manifest.sealed}
            for number in (*sealed, manifest.active):
                files += 1
                size += last_record_end(segment_path(path, number), sealed.get(number))
            return {"files": files, "bytes": size}
        except (GenerationGone, FileNotFoundError, CorruptFile) as error:
            if read_manifest(path) == content:  # else a compaction moved what was being checked
                raise error if isinstance(error, CorruptFile) else CorruptFile(f"{path}: {error}") from None
    raise StoreError(f"{path} was compacted {RETRIES} times while it was being checked; try again")

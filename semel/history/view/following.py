"""How a handle keeps up with the files: manifest + generation + log -> an immutable ``View``."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from semel.history.errors import CorruptFile, GenerationGone, StoreError
from semel.history.generation.generation import Generation
from semel.history.log.positions import Tokens
from semel.history.log.ranges import PlaceOf
from semel.history.log.records import appends_of, versions_of
from semel.history.log.tail import Dictionaries, Tail
from semel.history.storage.interface import Storage
from semel.history.storage.leases import Lease
from semel.history.storage.manifest import NAME, Manifest, parse_manifest
from semel.history.view.deletions import Deletion, Deletions, deletion_in

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

    def __init__(self, storage: Storage, durable_only: bool = True) -> None:
        self.storage, self.path, self.durable_only = storage, storage.path, durable_only
        self.moving = threading.RLock()
        self._content = storage.manifest()
        self.manifest = parse_manifest(self._content, self.path)
        self.schema = schema = self.manifest.schema
        dictionaries = Dictionaries(schema.dictionaries)
        self.view = View(Generation(None, 0, schema, self.manifest.shards), Tail.empty(schema), 0, dictionaries,
                         Deletions((), schema, dictionaries))
        self.tokens = Tokens()  # of the log's records
        self._position = storage.start(self.manifest)
        self._adopted = False

    @property
    def position(self) -> tuple[int, int]:
        """(segment, bytes of it) that the view holds."""
        return self._position

    def refresh(self) -> None:
        """Move the view to the manifest and log as they are now; again where a compaction got in between."""
        for attempt in range(RETRIES):
            content = self.storage.manifest()
            try:
                if content != self._content or not self._adopted:
                    self._adopt(parse_manifest(content, self.path))
                    self._content, self._adopted = content, True
                self._read_log()
                return
            except (GenerationGone, FileNotFoundError, CorruptFile) as error:
                if self.storage.manifest() == content:  # nobody moved it: it is really missing, or damaged
                    raise error if isinstance(error, CorruptFile) else CorruptFile(f"{self.path}: {error}") from None
                time.sleep(0.001 * attempt)
        raise StoreError(f"{self.path} changed {RETRIES} times while it was being opened; try again")

    def _adopt(self, manifest: Manifest) -> None:
        view = self.view
        if manifest.generation != view.generation.number:
            schema = manifest.schema
            generation, lease = self.storage.generation(manifest)
            view.dictionaries.include(schema.dictionaries)
            for name in view.dictionaries.names:
                view.dictionaries.extend(name, 0, generation.dictionary(name), generation.folder)
            upto = manifest.compacted_version
            tail = view.tail.after(upto)
            if schema != self.schema:
                self.schema, tail = schema, tail.with_schema(schema)
            self.move_to(replace(view, generation=generation, tail=tail,
                                 version=max(view.version, upto), deletions=view.deletions.after(upto, schema),
                                 compacted=upto, lease=lease))
        self._position = max(self._position, self.storage.start(manifest))
        self.manifest = manifest

    def move_to(self, view: View) -> None:
        """Take a view of another generation, and let go of the one before."""
        before, self.view = self.view.lease, view
        if before is not None:
            before.release()

    def _read_log(self) -> None:
        """Read the log from where this handle stands."""
        self._position = self.storage.read_log(self.manifest, self._position, self.durable_only, self._take)

    def _take(self, metadata: dict[str, Any], batch: pa.RecordBatch, path: Any, place_of: PlaceOf) -> None:
        """Add one record, read from ``path``, to the view, unless the generation has its events already."""
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
        place = place_of(batch.num_rows, first, last)
        self.view = replace(view, tail=view.tail.append(batch, versions, place), version=last)
        for append in appends:
            if append.token is not None:
                self.tokens.add(append.token, append.version)

    def _take_deletion(self, deletion: Deletion, path: Any) -> None:
        view = self.view
        if deletion.version > view.version:
            self._check_next(deletion.version, path)
            self.view = replace(view, deletions=view.deletions.add(deletion), version=deletion.version)

    def _check_next(self, version: int, path: Any) -> None:
        if version != self.view.version + 1:
            raise CorruptFile(f"{path}: version {version} follows {self.view.version}; records are missing")

    def swap(self, manifest: Manifest) -> None:
        """Replace the manifest (the one writer does). Raises what ``Storage.swap`` raises."""
        content = manifest.content()
        self.storage.swap(content)
        self.manifest, self._content = manifest, content
        self._position = max(self._position, self.storage.start(manifest))


def verify(storage: Storage) -> dict[str, int]:
    """Check every byte of the store: {"files", "bytes"}; CorruptFile for the first that is damaged."""
    for _ in range(RETRIES):
        content = storage.manifest()
        manifest = parse_manifest(content, storage.path)
        try:
            files, size = 1, len(content)
            if manifest.generation:
                generation, _lease = storage.generation(manifest)
                with storage.as_local(generation) as local:
                    counts = local.verify()
                files, size = files + counts[0], size + counts[1]
            counts = storage.check_log(manifest)
            return {"files": files + counts[0], "bytes": size + counts[1]}
        except (GenerationGone, FileNotFoundError, CorruptFile) as error:
            if storage.manifest() == content:  # else a compaction moved what was being checked
                raise error if isinstance(error, CorruptFile) else CorruptFile(f"{storage.path}: {error}") from None
    raise StoreError(f"{storage.path} was compacted {RETRIES} times while it was being checked; try again")

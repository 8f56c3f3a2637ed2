"""Where a store lives: a local folder (``local``), or a prefix of object storage (``object_storage``).

A handle has one ``Storage``. Everything else in the store's code is the same for both: a generation is a set of array
files, a log is a sequence of records, a manifest names them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from semel.history.generation.generation import Generation
from semel.history.log.ranges import PlaceOf, Take
from semel.history.schema import EventSchema
from semel.history.storage.leases import Lease
from semel.history.storage.manifest import Manifest, local_path

CACHE_BYTES = 8 << 30


class Owner(Protocol):
    """The right to append. ``abandoned``: the owner before may still have a write under way, which must be kept from
    the log by sealing the segment."""

    abandoned: bool

    def check(self) -> None:
        """Raise WriterFenced where it is seen at once that the right is lost; ``confirm`` asks, whatever it costs."""

    def confirm(self) -> None: ...
    def mark(self, segment: int, size: int) -> None: ...
    def release(self, in_order: bool = True) -> None: ...


class Log(Protocol):
    """What appends go to. ``usable``: False where nobody knows what the storage holds after a failed write."""

    size: int
    path: Any

    @property
    def usable(self) -> bool: ...
    def append(self, batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any] | None = None) -> None: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """``path``: what messages call it. ``segmented``: the log lies in segments, which a manifest seals, not in one
    object a commit."""

    segmented: bool

    @property
    def path(self) -> Path | str: ...

    def manifest(self) -> bytes:
        """The manifest as it is now. Raises StoreNotFound."""

    def swap(self, content: bytes) -> None:
        """Replace the manifest (the owner does). StoreError where nobody can tell which one is stored now,
        WriterFenced where another writer took over; any other error leaves the old one in place."""

    def generation(self, manifest: Manifest) -> tuple[Generation, Lease | None]:
        """The manifest's generation, and what keeps it from being removed. Raises GenerationGone."""

    def start(self, manifest: Manifest) -> tuple[int, int]:
        """The position of the first record that the generation does not have."""

    def read_log(self, manifest: Manifest, position: tuple[int, int], durable_only: bool, take: Take,
                 ) -> tuple[int, int]:
        """``take`` the log's records from ``position`` on; the position behind them. Raises GenerationGone where
        the manifest turned out not to be the present one."""

    def check_log(self, manifest: Manifest) -> tuple[int, int]:
        """Read all of the log: (files, bytes). Raises CorruptFile."""

    def log_bytes(self) -> int: ...

    def stats(self) -> dict[str, Any]:
        """What only this kind of storage has to say in ``HistoryStore.stats``."""

    def create(self, manifest: Manifest) -> Owner:
        """A new store. Raises StoreExists."""

    def claim(self) -> Owner:
        """The right to append. Raises StoreLocked where that is somebody else's."""

    def log(self, number: int, fresh: bool = False) -> Log:
        """Segment ``number`` to append to, continued or (``fresh``) made anew."""

    def place_of(self, log: Log, start: int) -> PlaceOf:
        """What makes the range of the record that ``log``, ``start`` bytes long before, has appended last."""

    def as_local(self, generation: Generation) -> AbstractContextManager[Generation]:
        """The generation with all its files in a local folder: for what reads all of them."""

    def building(self, number: int) -> AbstractContextManager[Path]:
        """The name of a local folder for a new generation's files; removed in the end."""

    def publish(self, building: Path, number: int, schema: EventSchema, shards: int, seal: int,
                ) -> tuple[str, Generation, Lease | None]:
        """Put the files of ``building`` where generations lie: its folder for the manifest, and the generation."""

    def clean_log(self, manifest: Manifest) -> None:
        """Remove what of the log the generation has."""

    def clean_generations(self, manifest: Manifest, keep: int, leased: bool = False) -> list[int]:
        """Remove all but the ``keep`` newest generations and (unless ``leased``) those that are leased, and what
        crashed compactions left; the numbers of those that were removed."""

    def close(self) -> None: ...


def storage_of(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, cache_bytes: int = CACHE_BYTES,
               cache_folder: str | os.PathLike[str] | None = None) -> Storage:
    """The storage that a path or URL names. Raises ValueError for a URL or options that it does not know."""
    text = os.fspath(url)
    if isinstance(url, Path):
        text = re.sub(r"^(?!file:)([a-z][a-z0-9+]+):/(?=[^/])", r"\1://", text)  # a URL that was taken for a path
    if "://" in text and not text.startswith("file:"):
        from semel.history.storage.object_storage import ObjectStorage

        return ObjectStorage(text, options, cache_bytes, cache_folder)
    if options:
        raise ValueError(f"storage_options are for object storage; {text} is a local folder")
    from semel.history.storage.local import LocalStorage

    return LocalStorage(local_path(text), cache_bytes, cache_folder)

"""``HistoryStore``: a handle on a store. Files: ``docs/formats/history.md``; meaning: ``docs/as-of.md``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from semel.batch import JaggedTable, Pointers, ids_array
from semel.history.durations import microseconds, now
from semel.history.errors import CorruptFile, GenerationGone, NotCompacted, StoreError, VersionNotVisible
from semel.history.generation.array_files import CODECS, Codec
from semel.history.log.positions import Position, Tokens
from semel.history.log.tail import Tail
from semel.history.schema import RESERVED, EventSchema, Projection, check_named_events
from semel.history.storage.interface import CACHE_BYTES, Owner, Storage, storage_of
from semel.history.storage.manifest import Manifest
from semel.history.view.following import RETRIES, Follower, View, verify
from semel.history.writing.writer import Writer

if TYPE_CHECKING:
    from semel.history.compaction.backfill import AddedColumn, Backfill
    from semel.history.compaction.engines import Engine

T = TypeVar("T")


class HistoryStore:
    """The histories of a site, kept once. Open one with ``create`` or ``open``; usable as a context manager.

    Any number of threads may read through one handle while one appends (``mode="a"``); any number of processes may
    open the store with ``mode="r"``. A read is answered from an immutable view, so readers never wait for a writer.
    """

    def __init__(self, storage: Storage, mode: str, lock: Owner | None, at_version: int | None = None) -> None:
        self._storage, self.path, self.mode, self.at_version = storage, storage.path, mode, at_version
        self._compacting = threading.RLock()  # held by whoever makes or removes generations
        self._closed = False
        self._checked: set[tuple[Any, ...]] = set()
        self._follower = Follower(storage, durable_only=lock is None)
        self._follower.refresh()
        if at_version is not None and at_version > self._follower.view.version:
            raise VersionNotVisible(f"{self.path} cannot be opened at version {at_version}: it is at version "
                                    f"{self._follower.view.version}")
        self._writer: Writer | None = None
        if lock is not None:  # after the log was read: a segment that is missing must not be made anew
            self._writer = Writer(self._follower, lock)
            try:
                self._clean(self._writer, keep=1)
            except BaseException:
                self._writer.close()
                raise

    # -- opening and closing ------------------------------------------------------------------------------------

    @classmethod
    def create(cls, url: str | os.PathLike[str], schema: EventSchema, shards: int = 16, *,
               storage_options: Mapping[str, Any] | None = None, cache_bytes: int = CACHE_BYTES,
               cache_folder: str | os.PathLike[str] | None = None) -> HistoryStore:
        """Make an empty store at a local path (or file:// URL) or at a URL of object storage, and open it for
        appending; the last three as for ``open``. Raises StoreExists where there is one, ValueError for a bad schema
        or shard count."""
        if not isinstance(schema, EventSchema):
            raise ValueError(f"schema must be an EventSchema, got {type(schema).__name__}")
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= 9999:
            raise ValueError(f"shards must be between 1 and 9999, got {shards!r}")
        storage = storage_of(url, storage_options, cache_bytes, cache_folder)
        return cls._holding(storage, storage.create(Manifest.new(replace(schema, since={}), shards)))

    @classmethod
    def open(cls, url: str | os.PathLike[str], mode: str = "r", at_version: int | None = None, *,
             storage_options: Mapping[str, Any] | None = None, cache_bytes: int = CACHE_BYTES,
             cache_folder: str | os.PathLike[str] | None = None) -> HistoryStore:
        """Open a store to read ("r") or to read and append ("a": one at a time). ``at_version``: a frozen view for
        reading; it stays at this version whatever is appended or compacted.

        Blocks that were read from object storage, or decompressed from ``cold`` columns, are kept in at most
        ``cache_bytes`` of ``cache_folder`` (the user's cache folder). On object storage (``docs/object-storage.md``)
        ``storage_options`` are keyword arguments of ``obstore.store.from_url``, and opening with "a" takes the store
        over from a writer that lives.

        Raises StoreNotFound, StoreLocked (naming the process that appends), CorruptFile, StoreError for a format that
        this version does not know, VersionNotVisible for an ``at_version`` that the store has not reached."""
        if mode not in ("r", "a"):
            raise ValueError(f'mode must be "r" or "a", got {mode!r}')
        if at_version is not None:
            if mode != "r":
                raise ValueError(f'a view frozen at version {at_version} is for reading: open it with mode="r"')
            if isinstance(at_version, bool) or int(at_version) != at_version or at_version < 0:
                raise ValueError(f"at_version must be a version (0 or more) or None, got {at_version!r}")
            at_version = int(at_version)
        storage = storage_of(url, storage_options, cache_bytes, cache_folder)
        if mode == "a":
            return cls._holding(storage, storage.claim())
        return cls(storage, mode, None, at_version)

    @classmethod
    def _holding(cls, storage: Storage, lock: Owner) -> HistoryStore:
        try:
            return cls(storage, "a", lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Release the lock, the lease and the files. Arrays that were read stay valid."""
        with self._compacting, self._follower.moving:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
            if self._follower.view.lease is not None:
                self._follower.view.lease.release()
            self._storage.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HistoryStore({str(self.path)!r}, mode={self.mode!r}, version={self.version})"

    # -- what this handle sees ----------------------------------------------------------------------------------

    @property
    def schema(self) -> EventSchema:
        """Of the store as this handle sees it; it grows by ``add_column``."""
        return self._follower.schema

    @property
    def _view(self) -> View:
        view = self._follower.view
        if self.at_version is not None and view.version != self.at_version:
            return replace(view, version=self.at_version)
        return view

    @property
    def version(self) -> int:
        """The latest committed version that this handle sees; 0 for an empty store. Of a frozen view, its own."""
        return self._view.version

    @property
    def generation(self) -> int:
        """The number of the generation that this handle reads; 0 for none."""
        return self._view.generation.number

    @property
    def event_count(self) -> int:
        """Events in the store's files, as far as this handle sees, those included that are deleted but not compacted
        yet. Looks at no event."""
        return self._view.generation.rows + self.uncompacted

    @property
    def uncompacted(self) -> int:
        """Those of them that lie in the log: what a compaction would move."""
        return self._view.tail.rows

    @property
    def expired_before(self) -> int:
        """Retention has taken events of an earlier ``event_time`` (microseconds); 0 where it took nothing."""
        return self._view.generation.expired_before

    def refresh(self) -> int:
        """See what was committed since the last refresh (an appending handle always does; a frozen view stays at its
        version, and learns what was deleted); the version now."""
        self._check_open()
        self._follow()
        return self.version

    def _follow(self) -> None:
        """Take the newest files. A frozen view may come to lie in another generation, and shows the same."""
        if self._writer is None:
            with self._follower.moving:
                self._follower.refresh()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the handle on {self.path} is closed")

    def _writer_to(self, verb: str) -> Writer:
        self._check_open()
        if self._writer is None:
            raise StoreError(f'{self.path} is open with mode="r"; open it with mode="a" to {verb}')
        return self._writer

    # -- appending ----------------------------------------------------------------------------------------------

    def append(self, data: Any, token: str | None = None) -> int:
        """Append events (pa.Table, RecordBatch or anything with __arrow_c_stream__); the version they got.

        On disk when this returns, all rows or none after a crash. Appends of several threads share the disk's work
        (group commit), each with a version of its own. ``token``: a name for this append; a second append with a
        token that the store has seen does nothing and returns the first one's version. Raises ValueError for rows
        that do not fit the schema, OSError where the disk refuses (nothing is appended then), WriterFenced where
        another writer took over.
        """
        return self._writer_to("append").append(data, token)

    def delete(self, user_ids: Any = None, events: Any = None) -> int:
        """Take events away; the version of it. They are gone from all reads at once, through older pointers too (their
        ``status`` then says SCRUBBED), and from the files with the next ``compact``.

        ``user_ids`` [n]: all that these users have done so far; a user that comes back starts anew. Or ``events``, an
        Arrow table with the key, ``event_time`` and any other columns of the schema: of the events up to now, those
        that agree with one of its rows in all of its columns. Durable when this returns. Where nothing is there to
        delete, nothing is written and the present version returned. Raises ValueError for ids or columns that do not
        fit. See ``erase`` for removing every trace.
        """
        writer = self._writer_to("delete")
        if (user_ids is None) == (events is None):
            raise ValueError("delete takes either user_ids or events")
        if events is None:
            return writer.delete(np.unique(self._ids(user_ids)), None, None)
        arrays = check_named_events(events, self.schema)
        for name, column in self.schema.layout.items():
            if column.is_dictionary and name in arrays:
                arrays[name] = arrays[name].cast(pa.string())
        users, of = np.unique(self._ids(arrays.pop(self.schema.key).to_numpy(zero_copy_only=False)),
                              return_inverse=True)
        return writer.delete(users, of, pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays)))

    def position(self, source: str) -> Position:
        """How far ``source`` has got, as far as this handle sees: what the last append with a token of
        ``Position.then`` said. ``state`` None, version 0 for a source without one."""
        self._check_open()
        with self._follower.moving:
            tokens = self._writer.tokens if self._writer is not None else self._again(
                lambda view: Tokens({**view.generation.tokens(), **self._follower.tokens}))
            return tokens.position(source)

    # -- reading ------------------------------------------------------------------------------------------------

    def point(self, user_ids: Any, as_of: Any) -> Pointers:
        """Pointers at this handle's current version. ``user_ids`` [P]; ``as_of`` [P] or a scalar, microseconds."""
        return Pointers(self._ids(user_ids), as_of, np.array(self._view.version))

    def read(self, pointers: Pointers, projection: Projection, require_compacted: bool = False) -> JaggedTable:
        """The histories that ``pointers`` name: events with ``event_time < as_of`` and ``version <= version``, in the
        order (event_time, version, position in the append).

        Strings come as int32 codes with ``dictionaries`` (code -1 and validity False where null; other nulls are
        zero with validity False), timestamps as int64 in their unit. ``status`` [P]: see ``Status``. Raises
        VersionNotVisible for a pointer that is newer than the store, ValueError for a column that it lacks. With
        ``require_compacted`` only the generation is read: NotCompacted, with the missing versions, where it does not
        hold all that the pointers may see.
        """
        return self._answer(_fetching().read, pointers, projection, require_compacted)

    def lengths(self, pointers: Pointers, projection: Projection) -> tuple[np.ndarray, np.ndarray]:
        """([P] int64 lengths of the histories that ``read`` would return, [P] bool whether each is exact rather than
        an upper bound); no column but the group's is read."""
        return self._answer(_fetching().count, pointers, projection), np.ones(len(pointers), bool)

    def _answer(self, function: Callable[..., T], pointers: Pointers, projection: Projection,
                require_compacted: bool = False) -> T:
        self._check_open()
        if not isinstance(projection, Projection) or not isinstance(pointers, Pointers):
            raise ValueError(f"takes Pointers (HistoryStore.point makes them) and a Projection, got "
                             f"{type(pointers).__name__} and {type(projection).__name__}")
        checked = (projection.columns, projection.groups)
        if checked not in self._checked:
            if not set(projection.columns) <= {*self.schema.columns, *RESERVED}:
                self.refresh()  # a column may have been added
            _fetching().check_projection(projection, self.schema)
            if len(self._checked) == 1000:  # groups may be many
                self._checked.clear()
            self._checked.add(checked)
        if pointers.user_id.dtype != (object if self.schema.string_keys else np.int64):  # none at all, or a mistake
            pointers = Pointers(self._ids(pointers.user_id), pointers.as_of, pointers.version)
        newest = int(np.maximum.reduce(pointers.version, initial=0))
        if newest > self._view.version:
            self.refresh()
        if newest > self._view.version:
            why = "where this handle is frozen" if self.at_version is not None else "also after a refresh"
            raise VersionNotVisible(f"a pointer names version {newest}, the store at {self.path} is at version "
                                    f"{self._view.version} here, {why}")
        if require_compacted:
            if newest > self._view.compacted:
                self._follow()
            self._check_compacted(self._view, newest)
            return self._again(lambda view: function(replace(view, tail=Tail.empty(view.generation.schema)),
                                                     view.generation.schema, pointers, projection))
        return self._again(lambda view: function(view, view.generation.schema, pointers, projection))

    def _check_compacted(self, view: View, newest: int) -> None:
        first = [place.first for place in view.tail.ranges[:1]] + [d.version for d in view.deletions.deletions[:1]]
        if newest >= min(first, default=newest + 1):  # of the log; a version without events takes nothing away
            raise NotCompacted(f"versions {view.compacted + 1} to {newest} of {self.path} are not compacted yet "
                               f"(generation {view.generation.number} holds versions up to {view.compacted}); compact "
                               "the store first, or take pointers up to there")

    def _again(self, function: Callable[[View], T]) -> T:
        """``function`` of the view, once more where a generation's files are gone (this handle's lease keeps them on
        file systems that know locks): the next one answers the same."""
        for _ in range(RETRIES):
            view = self._view
            try:
                with view.lease or nullcontext():
                    return function(view)
            except GenerationGone as error:
                self._follow()
                if self._view.generation is view.generation:
                    if self._writer is not None:
                        self._writer.lock.confirm()  # else its owner now has removed it
                    raise CorruptFile(str(error)) from None
        raise StoreError(f"{self.path} was compacted {RETRIES} times during one read; try again")

    def _ids(self, ids: Any) -> np.ndarray:
        ids = ids_array(ids, self.schema.key)
        if not len(ids):
            return np.empty(0, object if self.schema.string_keys else np.int64)
        if (ids.dtype == object) != self.schema.string_keys:
            want, have = ("strings", "integers") if self.schema.string_keys else ("integers", "strings")
            raise ValueError(f"{self.schema.key}s are {want} in this store, got {have} ({ids.tolist()[0]!r}, ...)")
        return ids

    def keys(self) -> np.ndarray:
        """All user ids in the store, sorted: int64, or an object array of strings."""
        from semel.history.reading import histories

        self._check_open()
        return self._again(histories.keys)

    def changed_keys(self, after: int) -> np.ndarray:
        """The user ids with an event, or a deletion, of a version above ``after``, sorted: what a reader that keeps
        something by user has to look at again, also after compactions (through a frozen view on a later generation
        perhaps some more). What an erasure or retention took is not among them: where ``generation`` has changed, those
        that ``keys`` has no longer, and any if ``expired_before`` is above 0."""
        from semel.history.reading import histories

        self._check_open()
        return self._again(lambda view: histories.changed(view, after))

    def shards_of(self, user_ids: Any) -> np.ndarray:
        """[P] int64: the shard in which each user's events lie, or would."""
        from semel.history.kernels.sharding import shards_of

        ids = self._ids(user_ids)
        keys = [text.encode() for text in ids] if self.schema.string_keys else np.ascontiguousarray(ids)
        return shards_of(keys, len(self._view.generation.shards))

    # -- housekeeping -------------------------------------------------------------------------------------------

    def compact(self, engine: Engine = "local", workers: int = 2, memory_limit: int | str = "1GiB", *,
                codec: Codec = "packed", retention: timedelta | str | None = None,
                progress: Callable[[int, int], None] | None = None) -> int:
        """Move the log into a new generation; its number. Readers and appends go on meanwhile; a crash leaves the old
        generation in place. Older generations are removed, except those that a reader holds a lease on.

        ``engine``: ``local``, threads of this process; ``ray``, a Ray cluster whose nodes see the store's folder
        (needs ``semel[ray]``). ``workers``: how many shards are written at a time. ``memory_limit``: what it may
        allocate, bytes or "512MiB", "1GiB" (``ray``: for a shard); the rest goes through a temporary file in the
        store's folder. (An append is read whole, however large.) ``codec``: ``packed`` columns; ``plain`` ones,
        larger and a little faster to read; or ``cold`` ones, packed and those that shrink by it under zstd too: a read
        decompresses the blocks it touches, which then lie in the cache (``open``). The generation's bytes depend on
        none of the first three.

        ``retention``: how old events may be by their ``event_time`` and this machine's clock (a timedelta, or text like
        "90d", "12h"); older ones go, also from what older pointers read, whose status then says EXPIRED.
        ``progress(shards done, shards)``. Raises ValueError for what is none of these, StoreError where a shard does
        not fit into the limit.
        """
        expire_before = 0 if retention is None else now() - microseconds(retention, "retention")
        return self._compact(codec, engine, workers, memory_limit, progress, expire_before=expire_before)

    def _compact(self, codec: Codec, engine: Engine = "local", workers: int = 2, memory_limit: int | str = "1GiB",
                 progress: Callable[[int, int], None] | None = None, expire_before: int = 0,
                 forget: np.ndarray | None = None, added: AddedColumn | None = None) -> int:
        from semel.history.compaction.engines import check_engine, memory_bytes, write_generation
        from semel.history.compaction.scrubbing import Scrubbing
        from semel.history.compaction.shards import Change

        writer = self._writer_to("compact")
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r} is none of {', '.join(CODECS)}")
        check_engine(engine, workers)
        if engine == "ray" and not isinstance(self.path, Path):
            raise ValueError(f'engine "ray" is for stores in a folder that all its nodes see; {self.path} is compacted '
                             'by engine "local"')
        limit = memory_bytes(memory_limit)
        with self._compacting:
            with self._follower.moving:
                writer.check()
                view, tokens = self._view, dict(writer.tokens)
                new = view.tail.rows or view.deletions or any(version > view.compacted for version in tokens.values())
                if (not new and forget is None and added is None and expire_before <= view.generation.oldest
                        and view.generation.codec in (codec, None)):
                    return self.generation  # also where the log has a version without events, of an added column
                writer.seal()
                view = self._view
            number = view.generation.number + 1
            change = Change(Scrubbing(view.deletions, max(expire_before, 0), *(() if forget is None else (forget,))),
                            added)
            schema = self.schema if added is None else self.schema.with_column(added.column.name, added.column.type, 0)
            try:
                with self._storage.building(number) as building, self._storage.as_local(view.generation) as old:
                    seal = write_generation(building, replace(view, generation=old), tokens, codec, engine, workers,
                                            limit, change, progress)
                    folder, generation, lease = self._storage.publish(building, number, schema, len(old.shards), seal)
            except GenerationGone:
                writer.lock.confirm()  # else its owner now has removed it
                raise
            with self._follower.moving:
                if added is not None:
                    generation.schema = self.schema.with_column(added.column.name, added.column.type, self.version + 1)
                writer.adopt(generation, lease, folder, seal, view.version, added)
            self._clean(writer, keep=1)
            return number

    def erase(self, user_ids: Any, also: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
              *, workers: int = 2, memory_limit: int | str = "1GiB") -> dict[str, Any]:
        """Remove every trace of users from the disk: ``{"version", "generation", "rows": {file: rows removed}}``.

        Deletes their events, compacts, and removes all older generations (leased ones too: their readers go on with
        the new one) and log segments, and strings that only these users' events had. Marks are not kept either, so
        older pointers to these users read as UNKNOWN_USER. Before that it rewrites the Parquet files and logs that lie
        in the store's folder, or in ``also`` (folders or files: examples, exposures), without rows of these users
        and without outcomes of their requests. Appends wait meanwhile. ``workers`` and ``memory_limit`` as for
        ``compact``. Raises StoreLocked for a log that a
        server writes to, StoreError for a path of ``also`` that is not there or a file that cannot be read; the store
        has not changed then. What breaks off is finished by the same call again.
        """
        from semel.history.erasure import check_places, erase_rows, files_in

        writer = self._writer_to("erase")
        users = np.unique(self._ids(user_ids))
        own = [self.path] if isinstance(self.path, Path) else []
        rows = erase_rows(files_in([*own, *check_places(also)]), self.schema.key, users)
        with self._compacting, self._follower.moving:
            writer.delete(users, None, None)
            generation = self._compact(self._codec, workers=workers, memory_limit=memory_limit, forget=users)
            view = self._view
            for name in view.dictionaries.names:  # what was erased there, also here
                view.dictionaries.extend(name, 0, view.generation.dictionary(name), view.generation.folder)
            self._clean(writer, keep=1, leased=True)
            return {"version": self.version, "generation": generation, "rows": rows}

    @property
    def _codec(self) -> Codec:
        return self._view.generation.codec or "packed"

    def add_column(self, name: str, kind: pa.DataType, backfill: Backfill = None, *, workers: int = 2,
                   memory_limit: int | str = "1GiB") -> int:
        """Add a column; the version from which on pointers see it. Writes a new generation.

        ``backfill`` fills it for the events that are there: a function that gets a table of events (the key,
        ``event_time``, the other columns) and returns as many values; or a table that holds the new column beside one
        or more of those columns, by which an event finds its value (null where it has none). None: null. Older pointers
        read null all the same, unless their projection says ``allow_backfill``; events that arrive meanwhile have null.
        Appends need not have the column. ``workers`` and ``memory_limit`` as for ``compact``; where it is
        filled, a shard takes its columns in memory beside, which counts. Raises ValueError for a name, type or values
        that do not fit, StoreError where a shard does not fit into the limit; nothing has changed then.
        """
        from semel.history.compaction.backfill import AddedColumn

        writer = self._writer_to("add a column")
        with self._compacting:
            if name in self.schema.columns:
                raise ValueError(f"the store has a column {name!r} already: {', '.join(self.schema.columns)}")
            schema = self.schema.with_column(name, kind, self.version + 1)  # checks the name and the type
            added = AddedColumn(schema.layout[name], backfill, self.schema, writer.follower.view.dictionaries)
            self._compact(self._codec, workers=workers, memory_limit=memory_limit, added=added)
            return self.schema.layout[name].since_version

    def drop_generations(self, keep: int = 2) -> list[int]:
        """Remove all but the ``keep`` newest generations (the current one is never removed), except those that a live
        reader, in any process, holds a lease on; the numbers that were removed. No pointer needs an older
        generation: each newer one reproduces its views. Raises ValueError for ``keep`` < 1."""
        writer = self._writer_to("drop generations")
        if isinstance(keep, bool) or int(keep) != keep or keep < 1:
            raise ValueError(f"keep must be at least 1: the current generation is needed; got {keep!r}")
        with self._compacting:
            return self._clean(writer, int(keep))

    def _clean(self, writer: Writer, keep: int, leased: bool = False) -> list[int]:
        """Remove what nobody needs: compacted segments, older generations but ``keep`` and (unless ``leased``) those
        that are leased, leftovers of a crash. Arrays that readers have mapped stay valid until they let go of them."""
        with self._follower.moving:
            writer.lock.check()
            manifest = self._follower.manifest
            self._storage.clean_log(manifest)
        return self._storage.clean_generations(manifest, keep, leased)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: version, generation, shards, users, events (``generation``, ``log``, ``total``), bytes on
        disk (same keys). Events and bytes are those of the files, also through a frozen view. Users take as long as the
        log is (with deletions in it, or through a frozen view: as there are users); ``event_count`` and ``uncompacted``
        take no time."""
        self._check_open()
        view = self._view
        log = self._storage.log_bytes()
        kept, recent = view.generation.rows, view.tail.rows
        return {
            "version": view.version, "generation": view.generation.number, "shards": len(view.generation.shards),
            "users": self._again(_fetching().count_users),
            "events": {"generation": kept, "log": recent, "total": kept + recent},
            "bytes": {"generation": view.generation.nbytes, "log": log, "total": view.generation.nbytes + log},
            **self._storage.stats(),
        }

    def verify(self) -> dict[str, int]:
        """Read every byte of the store and check it; ``{"files", "bytes"}``. Raises CorruptFile naming the first
        damaged file."""
        self._check_open()
        return verify(self._storage)


@cache
def _fetching() -> ModuleType:
    from semel.history.reading import fetching  # late: it compiles

    return fetching

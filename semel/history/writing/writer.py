"""The one writer of a store: commits appends to the log, seals segments, and makes a new generation the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from semel.history.compaction.backfill import AddedColumn
from semel.history.errors import GenerationGone, Overtaken, PositionMoved, StoreError
from semel.history.generation.generation import Generation
from semel.history.log.positions import Tokens, step_of
from semel.history.log.records import AppendedRows, describe, versions_of
from semel.history.log.segments import SEGMENT_HEADER
from semel.history.schema import check_events
from semel.history.storage.interface import Owner
from semel.history.storage.leases import Lease
from semel.history.storage.manifest import Segment
from semel.history.view.deletions import Deletion, record_of, resolve
from semel.history.view.following import Follower
from semel.history.writing.group_commit import Append, GroupCommit

T = TypeVar("T")

SEGMENT_BYTES = 128 << 20  # a segment that has grown beyond this is sealed


class Writer:
    """Moves the files and the view of ``follower`` (which has read the log) together. ``tokens``: the version of each
    append that had one. Any number of threads may append."""

    def __init__(self, follower: Follower, lock: Owner) -> None:
        self.follower, self.lock, self.path = follower, lock, follower.path
        self._closed = False
        self._failed = ""  # why memory and disk may disagree, after which nothing more is written
        self._segment = follower.storage.log(follower.manifest.active)
        self._group = GroupCommit(self._commit)
        try:
            if lock.abandoned:
                follower.refresh()  # what the owner before has written since: that counts,
                self._segment.size = follower.position[1]
                self.seal()  # and what it may yet write comes after the end of a sealed segment
            self.tokens = Tokens({**follower.view.generation.tokens(), **follower.tokens})
            lock.mark(follower.manifest.active, self._segment.size)
        except BaseException:
            self._segment.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._segment.close()
        self.lock.release(in_order=not self._failed)

    # -- appending ----------------------------------------------------------------------------------------------

    def append(self, data: Any, token: str | None) -> int:
        """See ``HistoryStore.append``. Conversion and checks are done by the calling thread; writing, by one for all
        that wait."""
        if token is not None and not isinstance(token, str):
            raise ValueError(f"token must be a string, got {token!r}")
        if token is not None:
            token.encode()  # a lone surrogate is an error here, not in the middle of a write
        step = step_of(token)
        schema = self.follower.schema
        arrays = check_events(data, schema)
        for name in schema.dictionaries:
            array = arrays[name]
            arrays[name] = (array if pa.types.is_string(array.type) else array.cast(pa.string())).dictionary_encode()
        return self._group(Append(arrays, len(arrays["event_time"]), token, step))

    def _commit(self, group: Sequence[Append]) -> None:
        """Give every append of the group its version or its error."""
        with self.follower.moving:
            self._check_sound()
            self._in_order(lambda: self._commit_all(group))

    def _in_order(self, write: Callable[[], T]) -> T:
        """``write``, once more where a record of the owner before has come between."""
        try:
            return write()
        except Overtaken:
            self.follower.refresh()
            for token, version in self.follower.tokens.items():
                self.tokens.add(token, version)
            return write()
        except GenerationGone:
            self.lock.confirm()  # else its owner now has removed it
            raise

    def _commit_all(self, group: Sequence[Append]) -> None:
        fresh: list[Append] = []
        first: dict[str, Append] = {}  # of the appends with one token
        moved: set[str] = set()  # sources that an append of this group takes on
        for append in group:
            if append.done:  # before a record of the owner before came between
                if append.token is not None:
                    first.setdefault(append.token, append)
            elif append.token is not None and append.token in self.tokens:
                append.version, append.done = self.tokens[append.token], True
            elif append.token is None and not append.rows:
                append.version, append.done = self.follower.view.version, True
            elif append.token is None or first.setdefault(append.token, append) is append:
                if append.step is not None and not self._in_turn(append, moved):
                    continue
                fresh.append(append)
        self._write_each(fresh)
        for append in group:
            if not append.done and append.token is not None:
                same = first[append.token]
                append.version, append.error, append.done = same.version, same.error, True

    def _in_turn(self, append: Append, moved: set[str]) -> bool:
        """Whether the source of a position's append still stands where it goes on from; else the append has its error.
        ``moved``: sources that move in the same group, to which this one's is added."""
        assert append.step is not None
        source, stands = append.step.source, self.tokens.position(append.step.source)
        if source in moved or stands.version != append.step.after:
            where = "at this moment" if source in moved else f"to {stands.state!r} in version {stands.version}"
            append.error, append.done = PositionMoved(
                f"another process has taken {source} on ({where}); nothing was appended: stop one of the two, and "
                "start the other again"), True
            return False
        moved.add(source)
        return True

    def _write_each(self, group: Sequence[Append]) -> None:
        """One record for all; where that is refused, one for each, so that none fails for another's sake."""
        if not group:
            return
        try:
            self._write(group)
        except (OSError, ValueError, StoreError) as error:
            if len(group) > 1:
                for append in group:
                    self._write_each([append])
                return
            group[0].error = error
        for append in group:
            append.done = True

    def _write(self, group: Sequence[Append]) -> None:
        view = self.follower.view
        appends = [AppendedRows(view.version + 1 + i, append.rows, append.token) for i, append in enumerate(group)]
        batch, dictionaries = self._encode(group)
        with self.writing("an append"):
            start = self._log(batch, describe(appends, dictionaries))
            for name, added in dictionaries.items():
                view.dictionaries.extend(name, added["start"], added["values"], self._segment.path)
            versions = appends[0].version if len(appends) == 1 else versions_of(appends)
            for append, appended in zip(group, appends, strict=True):
                append.version = appended.version
                if append.token is not None:
                    self.tokens.add(append.token, appended.version)
            place_of = self.follower.storage.place_of(self._segment, start)
            place = place_of(batch.num_rows, appends[0].version, appends[-1].version)
            self.follower.view = replace(view, tail=view.tail.append(batch, versions, place), version=place.last)

    def delete(self, users: np.ndarray, of: np.ndarray | None, events: pa.RecordBatch | None) -> int:
        """See ``HistoryStore.delete``: all events of ``users`` (different ids, sorted), or of them those that
        ``events`` names. Durable on return; the version it got, the present one where there is nothing to delete."""
        with self.follower.moving:
            self.check()
            return self._in_order(lambda: self._delete(users, of, events))

    def _delete(self, users: np.ndarray, of: np.ndarray | None, events: pa.RecordBatch | None) -> int:
        view = self.follower.view
        nothing = np.empty(len(users), np.int64)
        deletion = resolve(Deletion(view.version + 1, users, nothing, nothing, of, events), view.deletions,
                           view.generation, view.tail, view.generation.expired)
        if not len(deletion.users):
            return view.version
        metadata, batch = record_of(deletion, self.follower.schema)
        with self.writing("a deletion"):
            self._log(batch, metadata)
            self.follower.view = replace(view, deletions=view.deletions.add(deletion), version=deletion.version)
        return deletion.version

    def _next_version(self) -> None:
        """A version without events."""
        view = self.follower.view
        with self.writing("a version"):
            self._log(self.follower.schema.stored.empty_table(), {"version": view.version + 1})
            self.follower.view = replace(view, version=view.version + 1)

    def _log(self, batch: pa.RecordBatch | pa.Table, metadata: dict[str, Any]) -> int:
        """One record, durable on return; the byte of the segment where it begins."""
        if self._segment.size > SEGMENT_BYTES:
            self._roll()
        start = self._segment.size
        self._segment.append(batch, metadata)
        self.lock.check()  # a writer that took over before this moment has not read the record, or may not have
        self.lock.mark(self.follower.manifest.active, self._segment.size)
        return start

    def _encode(self, group: Sequence[Append]) -> tuple[pa.RecordBatch, dict[str, Any]]:
        """The rows of all as they are stored, and the strings that dictionaries must grow by for them. Changes
        nothing; ValueError where a dictionary would be too large."""
        dictionaries, stored = self.follower.view.dictionaries, self.follower.schema.stored
        grown: dict[str, Any] = {}
        columns = []
        for name in stored.names:
            arrays = [append.arrays[name] if name in append.arrays else self._nulls(name, append.rows)
                      for append in group]
            if name in dictionaries.names:
                arrays, new = dictionaries.encode(name, arrays)
                if new:
                    grown[name] = {"start": dictionaries.size(name), "values": new}
            columns.append(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays))
        return pa.RecordBatch.from_arrays(columns, schema=stored), grown

    def _nulls(self, name: str, rows: int) -> pa.Array:
        """Of a column that was added after an append was checked."""
        if name in self.follower.view.dictionaries.names:
            return pa.nulls(rows, pa.string()).dictionary_encode()
        return pa.nulls(rows, self.follower.schema.layout[name].stored)

    # -- manifests ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """With ``follower.moving`` held (a write in progress counts as failed until it ends). Raises StoreError where
        an earlier write failed, WriterFenced where the lock was taken over."""
        if not self._closed:
            self.lock.check()
        self._check_sound()

    def _check_sound(self) -> None:
        if self._closed:
            raise StoreError(f"the handle on {self.path} is closed")
        if self._failed:
            raise StoreError(f"{self.path}: an earlier write failed ({self._failed}); reopen the store")

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Around what changes files and memory together, with ``follower.moving`` held. The disk's refusal (OSError)
        leaves both as they were; after anything else, a signal in the middle included, nothing more is written."""
        self.check()
        self._failed = f"{what} did not end"
        try:
            yield
        except Overtaken:
            self._failed = ""
            raise
        except StoreError as error:
            self._failed = str(error)
            raise
        except OSError as error:
            self._failed = "" if self._segment.usable else str(error)
            raise
        self._failed = ""

    def seal(self) -> None:
        """Seal the active segment, unless nothing is in it (a compaction that failed has done so), and go on in a new
        one."""
        with self.follower.moving, self.writing("sealing a segment"):
            if self._segment.size > SEGMENT_HEADER:
                self._roll()

    def _roll(self) -> None:
        if not self.follower.storage.segmented:
            return
        old, manifest, view = self._segment, self.follower.manifest, self.follower.view
        sealed = (*manifest.sealed, Segment(manifest.active, old.size, view.version))
        new = self.follower.storage.log(manifest.active + 1, fresh=True)
        try:
            self.follower.swap(manifest.replace(
                sealed=_after(view.compacted, sealed), active=manifest.active + 1,
                versions=(view.version,) * manifest.shards))
        except BaseException:
            new.close()
            raise
        self._segment = new
        old.close()

    def adopt(self, generation: Generation, lease: Lease | None, folder: str, seal: int, upto: int,
              added: AddedColumn | None = None) -> None:
        """Make ``generation``, which holds everything up to version ``upto``, the current one. ``added``: a column that
        it has and the one before has not; it is seen from a new version on. ``folder``: as the manifest has it."""
        with self.follower.moving:
            schema = generation.schema
            with self.writing("a compaction"):
                manifest, view = self.follower.manifest, self.follower.view
                self.follower.swap(manifest.replace(
                    schema=schema, generation=generation.number, generation_seal=seal, folder=folder,
                    compacted=(upto,) * manifest.shards, versions=(view.version,) * manifest.shards,
                    sealed=_after(upto, manifest.sealed)))
                tail = view.tail.after(upto)
                if added is not None:
                    view.dictionaries.include(schema.dictionaries)
                    if added.words:
                        view.dictionaries.extend(added.column.name, 0, list(added.words), generation.folder)
                    self.follower.schema, tail = schema, tail.with_schema(schema)
                self.follower.move_to(replace(view, generation=generation, lease=lease, compacted=upto, tail=tail,
                                              deletions=view.deletions.after(upto, schema)))
            if added is not None:
                self._in_order(self._next_version)


def _after(version: int, segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Those that hold something later than ``version``."""
    return tuple(segment for segment in segments if segment.last_version > version)

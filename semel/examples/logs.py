"""The exposure log and the outcome log: append-only, durable on return, readable while they are written.

A log is a folder: ``log.json`` (kind, format version, types of the ids) and segments ``00000001.log``, ``00000002.log``
... in the framing of ``semel.history.log.segments``. One process appends; any number read at any time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from semel.examples.exposures import check_exposures, conform, exposure_schema, id_type, outcome_schema
from semel.examples.recent_keys import DAY_US, REMEMBERED, RecentKeys, digest_of
from semel.history import SegmentWriter, read_segments

FORMAT_VERSION = 1
SEGMENT_BYTES = 64 << 20
_TYPES = {"int64": pa.int64(), "string": pa.string()}


class _Segments:
    """Tables of one schema in a folder of segments. Ids are integers or strings as in the first table appended."""

    def __init__(self, path: str | Path, kind: str, schema: Callable[..., pa.Schema], segment_bytes: int) -> None:
        self.path, self.kind = Path(path), kind
        self.lock = threading.Lock()
        self._schema, self._segment_bytes = schema, segment_bytes
        self._writer: SegmentWriter | None = None

    def stored_schema(self) -> pa.Schema | None:
        """The schema that the folder's ``log.json`` names, None where nothing was appended yet."""
        try:
            meta = json.loads((self.path / "log.json").read_text())
        except FileNotFoundError:
            return None
        if meta.get("kind") != self.kind or meta.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"{self.path} holds {meta.get('kind')!r} in format {meta.get('format_version')!r}; this "
                             f"version of semel reads {self.kind!r} in format {FORMAT_VERSION}")
        return self._schema(_TYPES[meta["user_id"]], _TYPES[meta["item_id"]])

    def schema_for(self, table: pa.Table) -> pa.Schema:
        """The log's schema; the first table decides on the types of the ids."""
        stored = self.stored_schema()
        if stored is not None:
            return stored
        types = {"user_id": pa.int64(), "item_id": pa.int64()}
        for role, column in (("user_id", "user_id"), ("item_id", "candidates"), ("item_id", "item_id")):
            if column in table.column_names:
                types[role] = id_type(table[column], f"{self.kind} column {column}")
        self.path.mkdir(parents=True, exist_ok=True)
        meta = {"kind": self.kind, "format_version": FORMAT_VERSION,
                **{role: str(kind) for role, kind in types.items()}}
        write_atomic(self.path / "log.json", json.dumps(meta, indent=1).encode())
        return self._schema(types["user_id"], types["item_id"])

    def append(self, table: pa.Table) -> None:
        if self._writer is None or self._writer.size >= self._segment_bytes:
            self.close()
            segments = self.segments()
            # After a restart a new segment, so that readers of the old ones may keep what they know of them.
            number = int(segments[-1].stem) + 1 if segments else 1
            self._writer = SegmentWriter(self.path / f"{number:08d}.log")
        try:
            self._writer.append(table)
        except BaseException:
            self.close()  # a disk that comes back is written to in a new segment
            raise

    def segments(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.log") if path.stem.isdigit())

    def tables(self) -> Iterator[pa.Table]:
        schema = self.stored_schema() or self._schema(None, None)
        for path in self.segments():
            for _, batch in read_segments(path):
                table = pa.Table.from_batches([batch])
                yield table if table.schema == schema else conform(table, schema, str(path))

    def read(self) -> pa.Table:
        schema = self.stored_schema() or self._schema(None, None)
        return pa.concat_tables([schema.empty_table(), *self.tables()])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


class ExposureLog:
    """The exposures of one server, in the order in which they were logged (``EXPOSURE_SCHEMA``)."""

    def __init__(self, path: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._log = _Segments(path, "exposures", exposure_schema, segment_bytes)
        self.path = self._log.path

    def append(self, table: pa.Table) -> None:
        """Adds exposures, durable on return. Nullable columns may be absent. Raises ValueError for a table that does
        not fit; nothing of it is then written."""
        if not len(table):
            return
        with self._log.lock:
            table = conform(table, self._log.schema_for(table), "exposures")
            check_exposures(table, "exposures")
            self._log.append(table)

    def read(self) -> pa.Table:
        """All exposures that are durable now; an empty table where there is no log."""
        return self._log.read()

    def tables(self) -> Iterator[pa.Table]:
        """The same a record at a time: what was appended together."""
        return self._log.tables()

    def close(self) -> None:
        with self._log.lock:
            self._log.close()


class OutcomeLog:
    """Outcomes in the order in which they were received (``OUTCOME_SCHEMA``).

    An outcome whose ``outcome_key`` was seen before is a retry and is dropped. The last ``remember`` keys are known,
    those of the last ``window_us`` of ``received_at``, over restarts too; ``join`` ignores what slips through, since an
    outcome repeated changes nothing there.
    """

    def __init__(self, path: str | Path, segment_bytes: int = SEGMENT_BYTES, remember: int = REMEMBERED,
                 window_us: int = DAY_US) -> None:
        self._log = _Segments(path, "outcomes", outcome_schema, segment_bytes)
        self._remember, self._window = remember, window_us
        self._keys: RecentKeys | None = None

    def append(self, table: pa.Table) -> int:
        """Adds outcomes, durable on return; returns how many were new. Raises ValueError for a table that does not fit
        or a value that is not finite; nothing of it is then written."""
        if not len(table):
            return 0
        with self._log.lock:
            table = conform(table, self._log.schema_for(table), "outcomes")
            value = table["value"].to_numpy()
            if not np.isfinite(value).all():
                raise ValueError(f"outcomes: value {value[~np.isfinite(value)][0]} is not a finite number")
            keys = table["outcome_key"].to_pylist()
            digests = _digests(keys)
            if self._keys is None:
                self._keys = self._stored_keys()
            fresh: set[bytes] = set()
            keep = []
            for row, (digest, known) in enumerate(zip(digests, self._keys.known(digests), strict=True)):
                if digest is None or not (known or digest in fresh):
                    keep.append(row)
                    if digest is not None:
                        fresh.add(digest)
            if keep:
                self._log.append(table if len(keep) == len(table) else table.take(keep))
            self._keys.add(fresh, int(table["received_at"].to_numpy().max()))  # a failed append may be tried again
            return len(keep)

    def _stored_keys(self) -> RecentKeys:
        """Those that the end of the log has, read from the last segment backwards until they are enough."""
        found: list[tuple[list[bytes | None], int]] = []
        count = 0
        for path in reversed(self._log.segments()):
            own = []
            for _, batch in read_segments(path):
                own.append((_digests(batch.column("outcome_key").to_pylist()),
                            int(np.max(batch.column("received_at").to_numpy(), initial=0))))
            found = own + found
            count += sum(len(digests) for digests, _ in own)
            if count >= self._remember or (own and found[-1][1] - own[0][1] > self._window):
                break
        known = RecentKeys(self._remember, self._window)
        for digests, at in found:
            known.add(digests, at)
        return known

    def read(self) -> pa.Table:
        """All outcomes that are durable now; an empty table where there is no log."""
        return self._log.read()

    def tables(self) -> Iterator[pa.Table]:
        """The same a record at a time."""
        return self._log.tables()

    def forget(self) -> None:
        """Close the segment, and know keys no longer but from the disk: somebody is about to rewrite it."""
        with self._log.lock:
            self._log.close()
            self._keys = None

    def close(self) -> None:
        with self._log.lock:
            self._log.close()


def _digests(keys: Sequence[str | None]) -> list[bytes | None]:
    return [None if key is None else digest_of(key) for key in keys]


def write_atomic(path: Path, content: bytes) -> None:
    """``content`` in ``path``: all of it after a crash, or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

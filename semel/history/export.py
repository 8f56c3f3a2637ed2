"""``export``: a store's events as Parquet or Lance, for everything that reads those."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.batch import JaggedTable, Pointers
from semel.history.durable import whole_folder
from semel.history.schema import EventSchema, Projection, from_numpy, numpy_dtype
from semel.history.store import HistoryStore

FORMATS = ("parquet", "lance")
SCHEMA_KEY = b"semel.schema"
"""Metadata key of the EventSchema as JSON: types that a format does not keep come back with it."""
ROWS = 1 << 17  # about as many events are in memory, or one user's where those are more
_EVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ExportReport:
    """``rows`` events of ``users``, known at ``version``, in ``files`` of ``bytes``."""

    rows: int
    users: int
    version: int
    files: int
    bytes: int


def export(store: HistoryStore, path: Path, format: str = "parquet",
           progress: Callable[[int, int], None] | None = None) -> ExportReport:
    """Writes all events that the handle sees, log included, to a new folder ``path``: columns user_id, event_time,
    version, then the schema's with their types, dictionaries and nulls; sorted by user, then in history order.

    ``parquet``: one file a shard, ``shard-0000.parquet``. ``lance``: one dataset, shard after shard (needs
    ``semel[lance]``). Streaming: a few users' events at a time. ``progress(shards done, shards)``. The folder appears
    when it is complete. Raises FileExistsError where ``path`` is there and not empty, ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    lance = _lance() if format == "lance" else None
    with whole_folder(Path(path), "folder") as building:
        rows = Rows(store)
        if lance is not None:
            batches = (batch for shard in range(rows.shards) for batch in _counted(rows.batches(shard), shard, rows,
                                                                                  progress))
            lance.write_dataset(pa.RecordBatchReader.from_batches(rows.schema, batches), str(building))
        else:
            building.mkdir()
            for shard in range(rows.shards):
                _write_shard(building / f"shard-{shard:04d}.parquet", rows, shard)
                if progress:
                    progress(shard + 1, rows.shards)
        files = [file for file in building.rglob("*") if file.is_file()]
        return ExportReport(rows.written, len(rows.keys), rows.version, len(files),
                            sum(file.stat().st_size for file in files))


def _counted(batches: Iterator[pa.RecordBatch], shard: int, rows: Rows,
             progress: Callable[[int, int], None] | None) -> Iterator[pa.RecordBatch]:
    yield from batches
    if progress:
        progress(shard + 1, rows.shards)


def _write_shard(path: Path, rows: Rows, shard: int) -> None:
    """A shard without users has no file."""
    writer = None
    try:
        for batch in rows.batches(shard):
            writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
            writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()


class Rows:
    """A store's events at the version it has now, as Arrow batches."""

    def __init__(self, store: HistoryStore) -> None:
        self._store, self.version = store, store.version
        self.shards = int(store.stats()["shards"])
        self.keys = store.keys()
        self._shard_of = store.shards_of(self.keys)
        layout = store.schema.layout
        self._projection = Projection(("event_time", "version", *layout))
        nothing = store.read(Pointers(self.keys[:0], np.empty(0, np.int64), np.empty(0, np.int64)), self._projection)
        # dictionaries only grow: what is here now holds every code of this version
        self._strings = {name: pa.array(values, pa.string()) for name, values in (nothing.dictionaries or {}).items()}
        fields = [(store.schema.key, store.schema.user_id), ("event_time", pa.int64()), ("version", pa.int64())]
        fields += [(name, _written(column.type, len(self._strings.get(name, ())))) for name, column in layout.items()]
        self.schema = pa.schema(fields, metadata={SCHEMA_KEY: json.dumps(store.schema.to_json())})
        self.written = 0

    def batches(self, shard: int) -> Iterator[pa.RecordBatch]:
        """The shard's events, about ``ROWS`` at a time: whole users, ascending."""
        keys = self.keys[self._shard_of == shard]
        pointers = Pointers(keys, np.full(len(keys), _EVER), np.full(len(keys), self.version))
        lengths, _ = self._store.lengths(pointers, self._projection)
        before = np.cumsum(lengths) - lengths
        edges = [0, *(np.flatnonzero(np.diff(before // ROWS)) + 1).tolist(), len(keys)]
        for low, high in pairwise(edges):
            if lengths[low:high].any():
                histories = self._store.read(pointers[low:high], self._projection)
                self.written += int(histories.offsets[-1])
                yield self._batch(pointers.user_id[low:high], histories)

    def _batch(self, keys: np.ndarray, histories: JaggedTable) -> pa.RecordBatch:
        users = pa.array(keys, self.schema.field(0).type).take(
            pa.array(np.repeat(np.arange(len(keys)), histories.lengths)))
        layout = self._store.schema.layout
        columns = [users, *(pa.array(histories.columns[name]) for name in ("event_time", "version"))]
        columns += [from_numpy(histories.columns[name], (histories.validity or {}).get(name), column,
                               self.schema.field(name).type, self._strings.get(name))
                    for name, column in layout.items()]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _written(kind: pa.DataType, strings: int) -> pa.DataType:
    """The type in the file: a dictionary that has outgrown its declared index gets a wider one."""
    if pa.types.is_dictionary(kind) and strings > np.iinfo(numpy_dtype(kind.index_type)).max:
        return pa.dictionary(pa.int32(), pa.string())
    return kind


def _lance() -> Any:
    try:
        import lance
    except ModuleNotFoundError as error:
        raise ValueError(f"to write Lance, install the extra: pip install 'semel[lance]' ({error})") from None
    return lance


def schema_in(metadata: dict[bytes, bytes] | None) -> EventSchema | None:
    """The schema that ``export`` wrote into a file's metadata; None where there is none or it is not understood."""
    text = (metadata or {}).get(SCHEMA_KEY)
    if text is None:
        return None
    try:
        return EventSchema.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return None

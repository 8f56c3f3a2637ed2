"""Compaction on a Ray cluster: Ray Data reads the log, shuffles it by shard and writes each shard where it has workers.
The store's folder must be the same path on all of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from semel.history.compaction.partition import Chunk, ShardRows, check_fits
from semel.history.compaction.shards import Change, compact_shard
from semel.history.durable import sync_files
from semel.history.errors import StoreError
from semel.history.generation.generation import Codec, Generation, Shard, WrittenShard, shard_file
from semel.history.kernels.sharding import shards_of
from semel.history.log.ranges import LogRange
from semel.history.log.segments import single_batch
from semel.history.log.tail import Arena
from semel.history.schema import EventSchema
from semel.history.view.following import View

TABLE_ROWS = 1 << 16  # of the tables that go into the shuffle


@dataclass(frozen=True)
class Work:
    """What every worker is told: the new generation's folder ``building`` and codec, the old generation, the most
    bytes a shard may take."""

    building: Path
    codec: Codec
    folder: Path | None
    number: int
    seal: int
    schema: EventSchema
    shards: int
    limit: int
    change: Change

    def read(self, ranges: pa.Table) -> Iterator[pa.Table]:
        """Ranges of the log -> their events, with the shard, the place in the log and the version of each."""
        for text in ranges["range"].to_pylist():
            place = json.loads(text)
            arrival = place.pop("arrival")
            waiting: list[pa.Table] = []
            for batch, versions in LogRange(**{**place, "path": Path(place["path"])}).read():
                end = arrival + batch.num_rows
                waiting.append(pa.table([
                    pa.array(self._shards_of(batch.column(0))), pa.array(np.arange(arrival, end)),
                    pa.array(np.broadcast_to(versions, batch.num_rows)), *batch.columns],
                    ["shard", "arrival", "version", *_places(batch.num_columns)]))
                arrival = end
                if sum(table.num_rows for table in waiting) >= TABLE_ROWS:
                    yield pa.concat_tables(waiting)
                    waiting = []
            if waiting:
                yield pa.concat_tables(waiting)

    def _shards_of(self, keys: pa.Array) -> np.ndarray:
        if self.schema.string_keys:
            return shards_of([key.encode() for key in keys.to_pylist()], self.shards)
        return shards_of(keys.to_numpy(), self.shards)

    def write(self, events: pa.Table) -> pa.Table:
        """All new events of one shard -> a row that says what was written."""
        events = events.take(np.argsort(events["arrival"].to_numpy(), kind="stable"))
        stored = self.schema.stored
        batch = single_batch(pa.table([events[place].cast(field.type) for place, field in
                                       zip(_places(len(stored)), stored, strict=True)], schema=stored))
        arena = Arena(self.schema, batch.num_rows)
        arena.append(batch, events["version"].to_numpy())
        shard = events["shard"][0].as_py()
        del events, batch
        return self._finish(shard, [Chunk.of(arena, self.shards)])

    def write_old(self, shards: pa.Table) -> Iterator[pa.Table]:
        """The same for shards without new events."""
        for shard in shards["shard"].to_pylist():
            yield self._finish(shard, [])

    def _finish(self, index: int, chunks: list[Chunk]) -> pa.Table:
        shutil.rmtree(self.building / shard_file(index, ""), ignore_errors=True)  # of an attempt that broke off
        old = Shard(Generation(self.folder, self.number, self.schema, self.shards, self.seal), index)
        names = sum(chunk.name_sizes.rows(index) for chunk in chunks if chunk.name_sizes is not None)
        new = ShardRows(self.schema, index, chunks, names)
        check_fits(old, new, self.limit, self.change.row_bytes(self.schema))
        written = compact_shard(self.building, self.schema, self.codec, old, new, self.change)
        sync_files(self.building / file for file in written.files)  # by the machine that wrote them
        return pa.table({"written": [json.dumps(asdict(written))]})


def _places(count: int) -> list[str]:
    """Names of the stored columns, which those of the shuffle cannot be."""
    return [str(place) for place in range(count)]


def write_shards(folder: Path, view: View, codec: Codec, workers: int, limit: int, change: Change,
                 ) -> Iterator[WrittenShard]:
    """See ``engines.write_shards_here``. Takes the cluster that this process is connected to (``ray.init``), or starts
    one here."""
    from ray.data import Dataset, from_items
    from ray.exceptions import RayError

    old = view.generation
    old_folder = None if old.folder is None else Path(old.folder).absolute()
    work = Work(folder.absolute(), codec, old_folder, old.number, old.seal, old.schema, len(old.shards), limit, change)
    ranges, arrival = [], 0
    for place in view.tail.ranges:
        assert isinstance(place, LogRange)  # of a store in a folder
        ranges.append({"range": json.dumps({**asdict(place), "path": str(place.path.absolute()), "arrival": arrival})})
        arrival += place.rows
    rest = set(range(work.shards))

    def results(dataset: Dataset) -> Iterator[WrittenShard]:
        try:
            for row in dataset.iter_rows():
                shard = WrittenShard(**json.loads(row["written"]))
                rest.discard(shard.index)
                yield shard
        except RayError as error:
            raise _cause(error) from error

    if arrival:
        events = from_items(ranges, override_num_blocks=len(ranges)).map_batches(
            work.read, batch_size=1, batch_format="pyarrow", concurrency=workers)
        yield from results(events.groupby("shard", num_partitions=min(work.shards, 4 * workers)).map_groups(
            work.write, batch_format="pyarrow", concurrency=workers))
    unchanged = [{"shard": shard} for shard in sorted(rest) if old.shards[shard].rows]
    if unchanged:
        yield from results(from_items(unchanged).map_batches(
            work.write_old, batch_size=1, batch_format="pyarrow", concurrency=workers))
    yield from [WrittenShard(shard) for shard in sorted(rest)]


def _cause(error: BaseException) -> BaseException:
    """What went wrong on a worker, where that is an error of ours or the disk's."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, StoreError | OSError):
            return at
        at = getattr(at, "cause", None) or at.__cause__
    return error

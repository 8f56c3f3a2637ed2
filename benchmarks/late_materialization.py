"""Training rows that hold pointers, against fat rows: the loader's speed, bytes kept, bytes read, batch latency.

    python -m benchmarks.late_materialization [--users 400] [--mean 500] [--requests-per-user 50] [--json]

Users are power-law, requests are drawn by event, so active users have more of both. Fat rows: one Parquet (zstd) row a
request with the last ``--longest`` events of all columns, made from the same pointers. Everything takes turns within
one run; the tables show medians and ratios. Loader: ``RequestLoader`` in windows with a worker, against any order
without one, and each step between the two; alone, and beside steps that a trainer takes meanwhile. Tenants: what a
short, a middle and a long model write, read and wait for, relative to fat rows = 1.00; a lookup's bytes are those of
the columns it reads, at the store's bytes on disk per byte in memory.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import run_and_show
from benchmarks.history import medians
from semel.batch import Jagged, JaggedTable, Pointers, RequestRows
from semel.examples import RequestLoader, history_tensors, rows_to_table, take_events
from semel.features import Feature, FeatureSpec
from semel.history import EventSchema, HistoryStore, Projection

SCHEMA = EventSchema({
    "item_id": pa.int64(), "watch_time": pa.float32(), "action": pa.dictionary(pa.int8(), pa.string()),
    "surface": pa.int8(), "author_id": pa.int32(), "price": pa.float32(),
}, group="action")
COLUMNS = ("event_time", *SCHEMA.columns)
ITEM, WATCH, ACTION = Feature("item_id"), Feature("watch_time", "numeric"), Feature("action")
LONG = (ITEM, WATCH, ACTION, Feature("surface"), Feature("author_id"), Feature("price", "numeric"))
CANDIDATES = 4
DAY = 86_400_000_000
STEP = 0.002  # seconds, of a trainer beside the loader


def generate(users: int, mean: int, seed: int = 0) -> pa.Table:
    """Events in order of time over 30 days. Lengths are Pareto (a = 1.3) with about this mean, 65,536 at most."""
    random = np.random.default_rng(seed)
    sizes = random.pareto(1.3, users) + 1
    sizes = np.clip(sizes * mean / sizes.mean(), 5, 65_536).astype(np.int64)
    user, count = np.repeat(np.arange(users), sizes), int(sizes.sum())
    when = np.sort(random.integers(0, 30 * DAY, count))
    codes = random.choice(4, count, p=[0.7, 0.2, 0.07, 0.03]).astype(np.int8)
    return pa.table({
        "user_id": random.permutation(user), "event_time": when,
        "item_id": np.minimum(random.zipf(1.2, count), 1_000_000), "watch_time": random.random(count, np.float32),
        "action": pa.DictionaryArray.from_arrays(pa.array(codes), ["view", "like", "share", "follow"]),
        "surface": random.integers(0, 5, count).astype(np.int8),
        "author_id": random.integers(0, 100_000, count).astype(np.int32), "price": random.random(count, np.float32),
    })


def make_store(events: pa.Table, folder: Path) -> HistoryStore:
    store = HistoryStore.create(folder, SCHEMA)
    for at in range(0, events.num_rows, 250_000):
        store.append(events.slice(at, 250_000))
    store.compact()
    return store


def make_rows(events: pa.Table, requests: int, version: int, seed: int = 1) -> RequestRows:
    """Requests at the times of drawn events, in order of time."""
    random = np.random.default_rng(seed)
    drawn = np.sort(random.choice(events.num_rows, requests, replace=requests > events.num_rows))
    count = requests * CANDIDATES
    return RequestRows(
        np.array([f"{n:x}" for n in range(requests)], object),
        Pointers(events["user_id"].to_numpy()[drawn], events["event_time"].to_numpy()[drawn], np.array(version)),
        np.zeros(requests, np.int64), {},
        Jagged(np.minimum(random.zipf(1.2, count), 1_000_000), np.arange(0, count + 1, CANDIDATES)),
        {"like": (random.random(count) < 0.2).astype(np.float32)}, {"like": np.ones(count, bool)})


def pointer_bytes(lengths: tuple[int, ...], folder: Path, requests: int = 4096) -> dict[str, Any]:
    """Bytes of the pointers in a training row, raw and in Parquet (zstd), where all histories are of one length."""
    out = {}
    for length in lengths:
        random = np.random.default_rng(length)
        when = np.sort(random.integers(0, 30 * DAY, (requests // 50 + 1, length)), axis=1)  # what every user has
        user = np.arange(requests) // 50
        as_of = when[user, random.integers(0, length, requests)]
        pointers = Pointers(user, as_of, np.array(1))
        path = folder / "pointers.parquet"
        pq.write_table(pa.table({name: getattr(pointers, name) for name in ("user_id", "as_of", "version")}), path,
                       compression="zstd")
        out[str(length)] = {"raw": pointers.nbytes / requests, "parquet_zstd": path.stat().st_size / requests}
    return out


def write_fat_rows(store: HistoryStore, rows: RequestRows, last: int, path: Path) -> None:
    """The same rows with a copy of the history in each, strings as dictionary values."""
    writer = None
    for at in range(0, len(rows), 256):
        part = rows.select(np.arange(at, min(at + 256, len(rows))))
        table = store.read(part.pointers, Projection(COLUMNS, last=last))
        fat = rows_to_table(part)
        for name in COLUMNS:
            values = pa.array(table.columns[name])
            if name in (table.dictionaries or {}):
                values = pa.DictionaryArray.from_arrays(values, pa.array(table.dictionaries[name], pa.string()))
            fat = fat.append_column(f"history.{name}", pa.LargeListArray.from_arrays(table.offsets, values))
        writer = writer or pq.ParquetWriter(path, fat.schema, compression="zstd")
        writer.write_table(fat)
    assert writer is not None
    writer.close()


def column_bytes(path: Path, names: list[str] | None = None) -> int:
    """Compressed bytes that a reader of these columns (None: all) of a Parquet file reads."""
    metadata = pq.ParquetFile(path).metadata
    chunks = (metadata.row_group(group).column(column)
              for group in range(metadata.num_row_groups) for column in range(metadata.num_columns))
    return sum(chunk.total_compressed_size for chunk in chunks
               if names is None or chunk.path_in_schema.split(".list")[0] in names)


def fat_batches(path: Path, features: FeatureSpec, batch: int) -> Iterator[JaggedTable]:
    """What a trainer on fat rows does for its histories: read the columns, keep the last events, make the tensors."""
    names = ["event_time", *(feature.name for feature in features.history)]
    file = pq.ParquetFile(path, read_dictionary=["history.action.list.element"])
    for part in file.iter_batches(batch, columns=[f"history.{name}" for name in names], use_threads=False):
        columns, dictionaries, offsets = {}, {}, np.zeros(1, np.int64)
        for name in names:
            column = part.column(f"history.{name}")
            offsets, values = np.asarray(column.offsets, dtype=np.int64), column.values
            if pa.types.is_dictionary(values.type):
                dictionaries[name] = np.asarray(values.dictionary.to_pylist(), object)
                values = values.indices
            columns[name] = values.to_numpy()
        lengths = np.minimum(np.diff(offsets), features.history_last)
        table = JaggedTable(columns, offsets - offsets[0], None, dictionaries or None)
        cut = take_events(table, table.offsets[1:] - lengths, lengths)
        yield history_tensors(cut, features)


def drain(batches: Any, step: Callable[[], Any] = lambda: None) -> None:
    for _ in batches:
        step()


def work_of(seconds: float) -> Callable[[], Any]:
    """Work of about so long on one core which, like a model's, leaves the interpreter's lock to others."""
    data = bytes(8 << 20)
    rate = len(data) / medians({"": lambda: zlib.crc32(data)}, 0.2)[""]
    return lambda: zlib.crc32(memoryview(data)[: min(len(data), int(rate * seconds))])


def loader_speed(store: HistoryStore, rows: RequestRows, features: FeatureSpec, batch: int, seconds: float,
                 ) -> dict[str, Any]:
    """Batches a second of one epoch, each way of loading in turn, alone and beside a step of ``STEP`` seconds; and what
    it read."""
    ways: dict[str, dict[str, Any]] = {
        "full, no worker": {"shuffle": "full", "workers": 0}, "full, 1 worker": {"shuffle": "full", "workers": 1},
        "window, no worker": {"shuffle": "window", "workers": 0},
        "window, 1 worker": {"shuffle": "window", "workers": 1},
        "window, 1 worker, users whole": {"shuffle": "window", "workers": 1, "together": len(rows)},
    }
    loaders = {name: RequestLoader(rows, store, features=features, batch_requests=batch, **way)
               for name, way in ways.items()}
    for loader in loaders.values():
        len(loader)

    def epoch(loader: RequestLoader, step: Callable[[], Any]) -> Callable[[], None]:
        return lambda: (loader.set_epoch(0), drain(loader, step))[1]

    times = medians({name: epoch(loader, lambda: None) for name, loader in loaders.items()}, seconds)
    work = work_of(STEP)
    beside = medians({name: epoch(loader, work) for name, loader in loaders.items()}, seconds)
    out = {}
    for name, loader in loaders.items():
        counters = loader.counters
        out[name] = {
            "batches_per_second": round(len(loader) / times[name], 1),
            "speed": round(times["full, no worker"] / times[name], 2),
            "batches_per_second_beside_step": round(len(loader) / beside[name], 1),
            "speed_beside_step": round(beside["full, no worker"] / beside[name], 2),
            "lookups_per_pointer": round(counters.lookups / counters.pointers, 3),
            "bytes_read_per_byte_delivered": round(counters.bytes_read / counters.bytes_delivered, 3)}
    return out


def tenants(store: HistoryStore, rows: RequestRows, fat: Path, pointers: Path, longest: int, batch: int,
            seconds: float) -> dict[str, Any]:
    """For each tenant, relative to fat rows = 1: bytes written (all tenants together), bytes of rows read, bytes looked
    up in streaming (order of time, a read for each pointer) and in batch (windows), time a batch."""
    stored = store.stats()
    events = stored["events"]["generation"]
    in_memory = 16 + sum(column.dtype.itemsize for column in SCHEMA.layout.values())  # event_time and version: 16
    on_disk = stored["bytes"]["generation"] / events / in_memory
    sizes = {"short": (min(100, longest), (ITEM, ACTION)), "middle": (min(512, longest), (ITEM, WATCH, ACTION)),
             "long": (longest, LONG)}
    rows_read = column_bytes(pointers)
    out: dict[str, Any] = {}
    for name, (last, history) in sizes.items():
        features = FeatureSpec(history=history, history_last=last)
        asked = [f"history.{column}" for column in ("event_time", *(feature.name for feature in history))]
        fat_read = column_bytes(fat, asked + pq.ParquetFile(pointers).schema_arrow.names)
        stream = RequestLoader(rows, store, features=features, batch_requests=batch, shuffle=None, workers=0)
        window = RequestLoader(rows, store, features=features, batch_requests=batch, shuffle="window", workers=0)
        for one, other in zip(fat_batches(fat, features, batch), stream, strict=True):
            for column in one.columns:
                got = other.request["history"][column].values
                assert got.equal(one.columns[column]), f"the contestants disagree on {column}"
        times = medians({
            "fat": lambda features=features: drain(fat_batches(fat, features, batch)),
            "streaming": lambda loader=stream: drain(loader), "batch": lambda loader=window: drain(loader),
        }, seconds)
        window.counters = type(window.counters)()
        drain(window)
        counters = window.counters
        out[name] = {
            "last": last, "columns": len(asked),
            "write": round((stored["bytes"]["generation"] + column_bytes(pointers)) / column_bytes(fat), 4),
            "read_rows": round(rows_read / fat_read, 4),
            "lookup_streaming": round(counters.bytes_delivered * on_disk / fat_read, 4),
            "lookup_batch": round(counters.bytes_read * on_disk / fat_read, 4),
            "latency_streaming": round(times["streaming"] / times["fat"], 3),
            "latency_batch": round(times["batch"] / times["fat"], 3)}
    return out


def run(users: int, mean: int, requests_per_user: int, last: int, longest: int, batch: int, seconds: float,
        folder: Path) -> dict[str, Any]:
    events = generate(users, mean)
    with make_store(events, folder / "store") as store:
        rows = make_rows(events, users * requests_per_user, store.version)
        pointers, fat = folder / "rows.parquet", folder / "fat.parquet"
        pq.write_table(rows_to_table(rows), pointers, compression="zstd")
        write_fat_rows(store, rows, longest, fat)
        lengths, _ = store.lengths(rows.pointers, Projection((), last=longest))
        kept = store.stats()["bytes"]["generation"] + pointers.stat().st_size
        features = FeatureSpec(history=(ITEM, WATCH, ACTION), history_last=last)
        return {
            "events": events.num_rows, "users": users, "requests": len(rows), "batch": batch, "cpus": os.cpu_count(),
            "last": last, "longest": longest, "mean_length": round(float(lengths.mean()), 1),
            "loader": loader_speed(store, rows, features, batch, seconds),
            "pointer_bytes": pointer_bytes((100, 1000, 10_000), folder),
            "total_bytes": {"store and rows": kept, "fat rows": fat.stat().st_size,
                            "fat_over_late": round(fat.stat().st_size / kept, 1)},
            "tenants": tenants(store, rows, fat, pointers, longest, batch, seconds / 3),
        }


def show(result: dict[str, Any]) -> None:
    print(f"{result['events']:,} events of {result['users']:,} users, {result['requests']:,} requests, mean history "
          f"{result['mean_length']}, batches of {result['batch']}")
    print(f"\nloader, last {result['last']}, 3 columns".ljust(39)
          + f"batches/s   speed   beside a step of {STEP * 1e3:.0f} ms   lookups/pointer   bytes read/delivered")
    for name, row in result["loader"].items():
        print(f"  {name:<36}{row['batches_per_second']:>10}{row['speed']:>8}"
              f"{row['batches_per_second_beside_step']:>16}{row['speed_beside_step']:>8}{row['lookups_per_pointer']:>16}"
              f"{row['bytes_read_per_byte_delivered']:>23}")
    print("\npointer bytes of a training row, by history length")
    for length, row in result["pointer_bytes"].items():
        print(f"  {length:>6} events   raw {row['raw']:.0f}, Parquet zstd {row['parquet_zstd']:.2f}")
    total = result["total_bytes"]
    print(f"\ntotal bytes, all columns, last {result['longest']}: store and rows {total['store and rows']:,}, fat rows "
          f"{total['fat rows']:,}: {total['fat_over_late']}x")
    print("\nrelative to fat rows = 1     write  read rows  lookup streaming / batch  latency streaming / batch")
    for name, row in result["tenants"].items():
        print(f"  {name:<7} last {row['last']:<6} x{row['columns']:<3}{row['write']:>9}{row['read_rows']:>11}"
              f"{row['lookup_streaming']:>16} / {row['lookup_batch']:<8}{row['latency_streaming']:>16} / "
              f"{row['latency_batch']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=400)
    parser.add_argument("--mean", type=int, default=500, help="events a user")
    parser.add_argument("--requests-per-user", type=int, default=50)
    parser.add_argument("--last", type=int, default=1024, help="events that the loader's model reads")
    parser.add_argument("--longest", type=int, default=4096, help="events in a fat row, read by the long tenant")
    parser.add_argument("--batch", type=int, default=256, help="requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the contestants of a table take turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run_and_show(lambda folder: run(options.users, options.mean, options.requests_per_user, options.last,
                                        options.longest, options.batch, options.seconds, folder),
                 show, options.json)


if __name__ == "__main__":
    main()

"""Reading histories: ``store.read``, packed and plain, against the raw numba gather (the limit) and fat rows.

    python -m benchmarks.history [--users 20000] [--mean 500] [--folder FOLDER] [--json]

Log-normal lengths, 6 columns, requests drawn by event; the last 1,024 events of 2 columns. First warm, on equal terms:
first one thread each, on one core, then one a core each; all read batch after batch and keep none. The contestants take
turns, the table shows medians. Fat rows: one Parquet (zstd) row a request, with the same two columns of the same
events, read in the order of the file, columns projected. Bytes: against Parquet (zstd) of the same events sorted by
user. Where DuckDB, Lance and RocksDB are installed they answer the first batch too, with the threads they choose.

Then from the disk: the page cache is dropped, each opens its files anew and answers one batch, all cores; a generation
of compressed columns too. The raw gather has its columns mapped; the offsets of its users are in memory. Where the
system says how much it has read from the disk, that is shown: nothing, if FOLDER is a tmpfs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import other_stores
from benchmarks.command import run_and_show
from benchmarks.page_cache import cold_medians
from semel.batch import offsets_of
from semel.history import EventSchema, HistoryStore, Pointers, Projection
from semel.history.reading import parallel

LAST = 1024
LONGEST = 65_536
BATCH = 1024
SCHEMA = EventSchema({
    "item_id": pa.int64(), "watch_time": pa.float32(), "action": pa.dictionary(pa.int8(), pa.string()),
    "surface": pa.int8(), "author_id": pa.int32(), "price": pa.float32(),
}, group="action")
PROJECTION = Projection(("item_id", "watch_time"), last=LAST)


def generate(users: int, mean: int, seed: int = 0) -> pa.Table:
    """Events in order of time; sizes are log-normal with the given mean, LONGEST at most."""
    random = np.random.default_rng(seed)
    sizes = np.clip(random.lognormal(np.log(mean) - 0.72, 1.2, users), 1, LONGEST).astype(np.int64)
    user = np.repeat(np.arange(users), sizes)
    count = len(user)
    when = random.integers(0, 30 * 86_400_000_000, count)
    order = np.argsort(when)
    codes = random.choice(4, count, p=[0.7, 0.2, 0.07, 0.03]).astype(np.int8)
    actions = pa.DictionaryArray.from_arrays(pa.array(codes), ["view", "like", "share", "follow"])
    return pa.table({
        "user_id": user[order], "event_time": when[order],
        "item_id": np.minimum(random.zipf(1.2, count), 1_000_000), "watch_time": random.random(count, np.float32),
        "action": actions, "surface": random.integers(0, 5, count).astype(np.int8),
        "author_id": random.integers(0, 100_000, count).astype(np.int32), "price": random.random(count, np.float32),
    })


@numba.njit(nogil=True)
def gather_limit(offsets: Any, times: Any, items: Any, watch: Any, users: Any, as_of: Any, last: int) -> Any:
    """What no store can beat with these arrays: one sorted copy of all, users are row numbers, one version."""
    begin = np.empty(len(users), np.int64)
    out_offsets = np.zeros(len(users) + 1, np.int64)
    for p in range(len(users)):
        low, high = offsets[users[p]], offsets[users[p] + 1]
        start = low
        while low < high:
            middle = (low + high) >> 1
            if times[middle] < as_of[p]:
                low = middle + 1
            else:
                high = middle
        begin[p] = max(start, low - last)
        out_offsets[p + 1] = out_offsets[p] + low - begin[p]
    out_items = np.empty(out_offsets[-1], items.dtype)
    out_watch = np.empty(out_offsets[-1], watch.dtype)
    for p in range(len(users)):
        count = out_offsets[p + 1] - out_offsets[p]
        out_items[out_offsets[p] : out_offsets[p + 1]] = items[begin[p] : begin[p] + count]
        out_watch[out_offsets[p] : out_offsets[p + 1]] = watch[begin[p] : begin[p] + count]
    return out_offsets, out_items, out_watch


def gather_shared(pool: ThreadPoolExecutor, threads: int, arrays: Any, batch: Pointers) -> list[Any]:
    """``gather_limit``, a share of the batch a thread; nobody puts the shares together."""
    edges = np.linspace(0, len(batch), threads + 1).astype(int)
    shares = [pool.submit(gather_limit, *arrays, batch.user_id[a:b], batch.as_of[a:b], LAST)
              for a, b in pairwise(edges[1:])]
    own = gather_limit(*arrays, batch.user_id[: edges[1]], batch.as_of[: edges[1]], LAST)
    return [own, *(share.result() for share in shares)]


def write_fat_rows(store: HistoryStore, pointers: Pointers, path: Path) -> None:
    writer = None
    for at in range(0, len(pointers), BATCH):
        table = store.read(pointers[at : at + BATCH], PROJECTION)
        rows = pa.table({"user_id": pointers.user_id[at : at + BATCH], "as_of": pointers.as_of[at : at + BATCH], **{
            name: pa.LargeListArray.from_arrays(table.offsets, column) for name, column in table.columns.items()}})
        writer = writer or pq.ParquetWriter(path, rows.schema, compression="zstd")
        writer.write_table(rows)
    assert writer is not None
    writer.close()


def scan(path: Path, threads: bool) -> int:
    count = 0
    for batch in pq.ParquetFile(path).iter_batches(BATCH, columns=list(PROJECTION.columns), use_threads=threads):
        for name in PROJECTION.columns:
            column = batch.column(name)
            count += len(column.offsets.to_numpy()) + len(column.values.to_numpy())
    return count


def medians(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds a run of each, taking turns until the time is over (three rounds at least)."""
    if not contestants:
        return {}
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def each(read: Callable[[Pointers], Any], batches: list[Pointers]) -> None:
    """Batch after batch, none kept: as a trainer reads, and as the scan does."""
    for batch in batches:
        read(batch)


def race(store: HistoryStore, plain: HistoryStore, arrays: Any, fat: Path, batches: list[Pointers], threads: int,
         seconds: float) -> dict[str, float]:
    """Seconds of each contestant for all requests, with as many threads as cores are free to use."""
    with ThreadPoolExecutor(threads) as pool:
        return medians({
            "raw numba gather (limit)": partial(each, partial(gather_shared, pool, threads, arrays), batches),
            "store.read, packed": partial(each, lambda b: store.read(b, PROJECTION), batches),
            "store.read, plain": partial(each, lambda b: plain.read(b, PROJECTION), batches),
            "fat-row Parquet scan": partial(scan, fat, threads > 1),
        }, seconds)


def from_the_disk(folder: Path, others: dict[str, other_stores.Stored], arrays: Any, batch: Pointers, rounds: int,
                  ) -> dict[str, dict[str, float]]:
    """``cold_medians`` of one batch, answered by files in ``folder`` that are opened anew each time."""
    limit, threads = folder / "limit", parallel.cores()
    limit.mkdir()
    for name, array in zip(("times", "items", "watch"), arrays[1:], strict=True):
        np.save(limit / name, array)

    def gather() -> Any:
        mapped = [np.load(limit / f"{name}.npy", mmap_mode="r") for name in ("times", "items", "watch")]
        with ThreadPoolExecutor(threads) as pool:
            return gather_shared(pool, threads, (arrays[0], *mapped), batch)

    def ours(path: Path) -> Any:
        with HistoryStore.open(path, cache_folder=folder / "blocks") as store:
            return store.read(batch, PROJECTION)

    def fat_rows() -> int:
        part = next(pq.ParquetFile(folder / "fat.parquet").iter_batches(BATCH, columns=list(PROJECTION.columns)))
        return sum(len(part.column(name).values.to_numpy()) for name in PROJECTION.columns)

    def other(stored: other_stores.Stored) -> Any:
        with stored.open() as read:
            return read(batch)

    contestants = {
        "raw numba gather (limit)": (limit, gather),
        **{f"store.read, {codec}": (folder / codec, partial(ours, folder / codec))
           for codec in ("packed", "plain", "cold")},
        "fat-row Parquet, its first rows": (folder / "fat.parquet", fat_rows),
        **{name: (stored.path, partial(other, stored)) for name, stored in others.items()},
    }
    return cold_medians(contestants, rounds)


def one_by_one(store: HistoryStore, users: np.ndarray, as_of: int, count: int = 3000) -> dict[str, float]:
    times = []
    for user in users[:count]:
        start = time.perf_counter()
        store.read(store.point(np.array([user]), as_of), PROJECTION)
        times.append(time.perf_counter() - start)
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def run(users: int, mean: int, requests: int, seconds: float, folder: Path) -> dict[str, Any]:
    events = generate(users, mean)
    random = np.random.default_rng(1)
    with HistoryStore.create(folder / "plain", SCHEMA) as log:
        start = time.perf_counter()
        for at in range(0, events.num_rows, 250_000):
            log.append(events.slice(at, 250_000))
        append_seconds = time.perf_counter() - start
    shutil.copytree(folder / "plain", folder / "packed")
    shutil.copytree(folder / "plain", folder / "cold")
    plain, store = (HistoryStore.open(folder / name, mode="a") for name in ("plain", "packed"))
    plain.compact(codec="plain")
    with HistoryStore.open(folder / "cold", mode="a") as cold:
        cold.compact(codec="cold")
        cold_bytes = cold.stats()["bytes"]["generation"]
    start = time.perf_counter()
    store.compact()
    compact_seconds = time.perf_counter() - start

    drawn = random.choice(events.num_rows, requests, replace=False)  # by event: active users dominate
    pointers = store.point(events["user_id"].to_numpy()[drawn], events["event_time"].to_numpy()[drawn])
    user, when = events["user_id"].to_numpy(), events["event_time"].to_numpy()
    order = np.lexsort((when, user))
    arrays = (offsets_of(np.bincount(user, minlength=users)), when[order], events["item_id"].to_numpy()[order],
              events["watch_time"].to_numpy()[order])
    batches = [pointers[at : at + BATCH] for at in range(0, requests, BATCH)]
    fat = folder / "fat.parquet"
    write_fat_rows(store, pointers, fat)

    lengths, _ = store.lengths(pointers, PROJECTION)
    first = store.read(batches[0], PROJECTION)
    limit = gather_limit(*arrays, batches[0].user_id, batches[0].as_of, LAST)
    for got, want in zip((first.offsets, first.columns["watch_time"]), (limit[0], limit[2]), strict=True):
        assert (got == want).all(), "the contestants disagree"
    by_user = events.take(pa.array(order))
    pq.write_table(by_user, folder / "events.parquet", compression="zstd")
    others = other_stores.available(by_user, arrays[0], folder, LAST)
    with ExitStack() as opened:
        readers = {name: opened.enter_context(stored.open()) for name, stored in others.items()}
        for name, reader in readers.items():
            other_stores.agree(name, reader(batches[0]), limit)
        other_times = medians({name: partial(reader, batches[0]) for name, reader in readers.items()}, seconds)

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    most = parallel.cores()
    races = {}
    for used in sorted({1, most} if cores else {most}):
        if cores:  # also what tells the store how many threads it may use
            os.sched_setaffinity(0, cores[-used:])
        races[used] = race(store, plain, arrays, fat, batches, used, seconds)
        races[used]["store.lengths"] = medians({"": partial(store.lengths, pointers, PROJECTION)}, 0.5)[""]
    stats, plain_stats = store.stats(), plain.stats()
    plain.close()
    visited = random.choice(user, 3000)
    now = int(when.max()) + 1
    alone = {"generation": one_by_one(store, visited, now)}
    tail = events.slice(0, min(100_000, events.num_rows))
    store.append(tail)
    alone["generation + log of 100k events"] = one_by_one(store, visited, now)
    one = tail.slice(0, 1)
    start = time.perf_counter()
    for _ in range(50):
        store.append(one)
        store.read(store.point(one["user_id"].to_numpy(), now), PROJECTION)
    append_one = (time.perf_counter() - start) / 50
    thousand = tail.slice(0, 1000)
    start = time.perf_counter()
    for _ in range(20):
        store.append(thousand)
    append_thousand = (time.perf_counter() - start) / 20
    store.compact()
    store.close()
    del store, plain  # what they have mapped stays in memory
    fat_bytes = fat.stat().st_size
    disk = from_the_disk(folder, others, arrays, batches[0], rounds=5)
    return {
        "events": events.num_rows, "users": users, "requests": requests, "last": LAST, "columns": 2,
        "mean_length_read": round(float(lengths.mean()), 1), "cpus": os.cpu_count(),
        "threads": {used: {
            "sequences_per_second": {name: round(requests / value) for name, value in times.items()
                                     if name != "store.lengths"},
            "packed_over_limit": round(times["raw numba gather (limit)"] / times["store.read, packed"], 3),
            "plain_over_limit": round(times["raw numba gather (limit)"] / times["store.read, plain"], 3),
            "packed_over_fat_rows": round(times["fat-row Parquet scan"] / times["store.read, packed"], 2),
            "lengths_per_second": round(requests / times["store.lengths"]),
        } for used, times in races.items()},
        "other_stores": {name: round(len(batches[0]) / value) for name, value in other_times.items()},
        "store_over_best_other": round(
            min(other_times.values()) / len(batches[0]) / races[most]["store.read, packed"] * requests, 1)
        if other_times else None,
        "from_the_disk": {name: {"sequences_per_second": round(len(batches[0]) / figures["seconds"]),
                                 "disk_mb": round(figures["disk_bytes"] / 1e6, 1)} for name, figures in disk.items()},
        "one_pointer": alone,
        "append_events_per_second": round(events.num_rows / append_seconds),
        "append_1000_events_per_second": round(1000 / append_thousand),
        "append_one_and_read_ms": round(append_one * 1e3, 2),
        "compact_events_per_second": round(events.num_rows / compact_seconds),
        "bytes_per_event": {
            "packed": round(stats["bytes"]["generation"] / events.num_rows, 2),
            "plain": round(plain_stats["bytes"]["generation"] / events.num_rows, 2),
            "cold": round(cold_bytes / events.num_rows, 2),
            "Parquet (zstd) sorted by user": round((folder / "events.parquet").stat().st_size / events.num_rows, 2),
        },
        "bytes_per_request": {"pointer": 24, "fat row": round(fat_bytes / requests, 1)},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['events']:,} events of {result['users']:,} users, {result['requests']:,} requests, last "
          f"{result['last']}, {result['columns']} of 6 columns, mean length read {result['mean_length_read']}")
    rows: list[tuple[str, Any]] = []
    for used, figures in result["threads"].items():
        terms = "one thread" if used == 1 else f"{used} threads"
        rows += [(f"{name}, {terms}", f"{value:,} sequences/s")
                 for name, value in figures["sequences_per_second"].items()]
        rows += [(f"packed / limit, {terms}", figures["packed_over_limit"]),
                 (f"plain / limit, {terms}", figures["plain_over_limit"]),
                 (f"packed / fat rows, {terms}", figures["packed_over_fat_rows"]),
                 (f"store.lengths, {terms}", f"{figures['lengths_per_second']:,} pointers/s")]
    rows += [(name, f"{value:,} sequences/s") for name, value in result["other_stores"].items()]
    rows += [("packed / best of the other stores", result["store_over_best_other"] or "none is installed")]
    rows += [(f"{name}, from the disk", f"{value['sequences_per_second']:,} sequences/s, {value['disk_mb']:,} MB read")
             for name, value in result["from_the_disk"].items()]
    rows += [(f"one pointer, {name}", f"p50 {value['p50_us']} us, p99 {value['p99_us']} us")
             for name, value in result["one_pointer"].items()]
    rows += [("append, batches of 250,000", f"{result['append_events_per_second']:,} events/s"),
             ("append, batches of 1,000", f"{result['append_1000_events_per_second']:,} events/s"),
             ("append one event, read it", f"{result['append_one_and_read_ms']} ms"),
             ("compaction", f"{result['compact_events_per_second']:,} events/s"),
             *((f"bytes an event, all columns, {name}", f"{value}")
               for name, value in result["bytes_per_event"].items()),
             ("bytes a request, 2 columns", f"pointer {result['bytes_per_request']['pointer']}, fat row (zstd) "
                                            f"{result['bytes_per_request']['fat row']}")]
    for name, value in rows:
        print(f"  {name:<48} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8_000)
    parser.add_argument("--mean", type=int, default=500, help="events a user")
    parser.add_argument("--requests", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the contestants take turns")
    parser.add_argument("--folder", type=Path, help="where the files go for the time (on a disk, not a tmpfs)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run_and_show(lambda folder: run(options.users, options.mean, options.requests, options.seconds, folder),
                 show, options.json, options.folder)


if __name__ == "__main__":
    main()

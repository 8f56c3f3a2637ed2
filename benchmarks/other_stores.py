"""What a user would otherwise read histories from: DuckDB over Parquet, Lance, RocksDB. Each is there if it is
installed (``pip install duckdb pylance rocksdict``); none is needed by Semel.

Each holds the same sorted events and answers the same question: the last ``last`` events before ``as_of`` of two
columns, as (offsets [P + 1], item_id, watch_time) in the order of the pointers. ``Stored.open`` opens it anew, a
context that gives its reader, so that a first read from the disk can be timed too.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.batch import Pointers, expand_rows, offsets_of

Answer: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
Reader: TypeAlias = Callable[[Pointers], Answer]
STRIPE = 256


@dataclass(frozen=True)
class Stored:
    """Events in ``path``, a file or a folder."""

    path: Path
    open: Callable[[], AbstractContextManager[Reader]]


def available(events: pa.Table, offsets: np.ndarray, folder: Path, last: int) -> dict[str, Stored]:
    """By name. ``events`` sorted by (user, event_time), users 0 .. U - 1 at ``offsets`` [U + 1]."""
    makers = {"duckdb": ("DuckDB over Parquet", duckdb), "lance": ("Lance take", lance),
              "rocksdict": ("RocksDB stripes", rocksdb)}
    return {name: make(events, offsets, folder, last) for module, (name, make) in makers.items()
            if importlib.util.find_spec(module) is not None}


def duckdb(events: pa.Table, offsets: np.ndarray, folder: Path, last: int) -> Stored:
    import duckdb as database

    path = folder / "duckdb.parquet"
    pq.write_table(events.select(["user_id", "event_time", "item_id", "watch_time"]), path, compression="zstd")
    @contextmanager
    def opened() -> Iterator[Reader]:
        with database.connect() as connection:
            def read(pointers: Pointers) -> Answer:
                asked = pa.table({"request": np.arange(len(pointers)), "user_id": pointers.user_id,
                                  "as_of": pointers.as_of})
                connection.register("asked", asked)
                found = connection.execute(f"""
                    select request, item_id, watch_time from (
                        select request, event_time, item_id, watch_time,
                               row_number() over (partition by request order by event_time desc) as place
                        from asked join '{path}' as events using (user_id) where event_time < as_of)
                    where place <= {last} order by request, event_time""").to_arrow_table()
                count = np.bincount(found["request"].to_numpy(), minlength=len(pointers))
                return offsets_of(count), found["item_id"].to_numpy(), found["watch_time"].to_numpy()

            yield read

    return Stored(path, opened)


def lance(events: pa.Table, offsets: np.ndarray, folder: Path, last: int) -> Stored:
    """The search for rows is done on times in memory, as Lance has none."""
    import lance as format

    path = folder / "events.lance"
    format.write_dataset(events, str(path))
    times = events["event_time"].to_numpy()

    @contextmanager
    def opened() -> Iterator[Reader]:
        dataset = format.dataset(str(path))

        def read(pointers: Pointers) -> Answer:
            begin, end = ranges(pointers, offsets, times, last)
            rows, out = expand_rows(np.stack([begin, end], 1).ravel(), np.arange(0, 2 * len(begin), 2))
            unique, inverse = np.unique(rows, return_inverse=True)  # take answers sorted, distinct rows fastest
            found = dataset.take(unique, columns=["item_id", "watch_time"])
            return out, found["item_id"].to_numpy()[inverse], found["watch_time"].to_numpy()[inverse]

        yield read

    return Stored(path, opened)


def rocksdb(events: pa.Table, offsets: np.ndarray, folder: Path, last: int) -> Stored:
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    path = folder / "rocksdb"
    store = rocksdict.Rdict(str(path), options)
    stripe = np.dtype([("event_time", "<i8"), ("item_id", "<i8"), ("watch_time", "<f4")])
    packed = np.empty(events.num_rows, stripe)
    for name in stripe.names or ():
        packed[name] = events[name].to_numpy()
    for user in range(len(offsets) - 1):
        for number, at in enumerate(range(offsets[user], offsets[user + 1], STRIPE)):
            store[struct.pack(">qi", user, number)] = packed[at : min(at + STRIPE, offsets[user + 1])].tobytes()
    store.flush()
    store.close()

    def read(store: rocksdict.Rdict, pointers: Pointers) -> Answer:
        parts, count = [], []
        for user, as_of in zip(pointers.user_id.tolist(), pointers.as_of.tolist(), strict=True):
            size = offsets[user + 1] - offsets[user]
            keys = [struct.pack(">qi", user, number) for number in range(-(-size // STRIPE))]
            # Newest stripes first until there are enough: what a stripe holds is known only once it is read.
            have, total = [], 0
            for key in reversed(keys):
                rows = np.frombuffer(store[key], stripe)
                rows = rows[: np.searchsorted(rows["event_time"], as_of)]
                have.append(rows)
                total += len(rows)
                if total >= last:
                    break
            found = np.concatenate(have[::-1])[-last:] if have else packed[:0]
            parts.append(found)
            count.append(len(found))
        found = np.concatenate(parts)
        return offsets_of(count), found["item_id"].copy(), found["watch_time"].copy()

    @contextmanager
    def opened() -> Iterator[Reader]:
        store = rocksdict.Rdict(str(path), options)
        try:
            yield partial(read, store)
        finally:
            store.close()

    return Stored(path, opened)


def ranges(pointers: Pointers, offsets: np.ndarray, times: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """[P] rows from, to of each pointer's events."""
    begin, end = np.empty((2, len(pointers)), np.int64)
    for p, (user, as_of) in enumerate(zip(pointers.user_id.tolist(), pointers.as_of.tolist(), strict=True)):
        low, high = offsets[user], offsets[user + 1]
        end[p] = low + np.searchsorted(times[low:high], as_of)
        begin[p] = max(low, end[p] - last)
    return begin, end


def agree(name: str, answer: Answer, expected: Any) -> None:
    """Raises AssertionError unless ``answer`` is ``expected`` [offsets, item_id, watch_time]."""
    for got, want in zip(answer, expected, strict=True):
        assert np.array_equal(got, want), f"{name} disagrees"

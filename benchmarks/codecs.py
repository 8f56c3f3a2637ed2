"""Ways to store a column, measured on one shard: what led to ``semel.history.kernels.packing``.

    python -m benchmarks.codecs [--users 4000] [--store ./store] [--json]

Bytes a value of each column of a simulated site (Zipf items, log-normal lengths, times within a month) sorted by user,
or of the events of a store: blocks of 64, 128 and 256 values by frame of reference with a common divisor, blocks of
differences, a dictionary of the column, blocks under zstd, and Parquet (zstd). Then packing itself: nanoseconds a value
to pack and to unpack, beside a plain copy. Sizes other than packing's are computed, not written.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.history import generate
from semel.batch import Pointers
from semel.history import HistoryStore, Projection
from semel.history.kernels.packing import copy_all, pack, view_packed

ZSTD_SAMPLE = 400


def integers(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(f"i{values.dtype.itemsize}").astype(np.int64)


def blocks_of(values: np.ndarray, size: int) -> np.ndarray:
    """[blocks, size], the last one filled up with the last value."""
    count = -(-len(values) // size)
    return np.concatenate([values, np.full(count * size - len(values), values[-1])]).reshape(count, size)


def bits_of(values: np.ndarray) -> np.ndarray:
    """Bits that each unsigned number needs."""
    bits = np.zeros(len(values), np.int64)
    for bit in range(64):
        bits += (values >> np.uint64(bit)) > 0
    return bits


def frames(values: np.ndarray, size: int) -> float:
    """Bytes by frame of reference: header, base, divisor, and as many bits a value as the block's range needs."""
    block = blocks_of(values, size)
    base = block.min(1)
    return _packed_bytes((block - base[:, None]).view(np.uint64), base, size)


def differences(values: np.ndarray, size: int) -> float:
    """Bytes where a block keeps its first value and the differences, those by frame of reference."""
    block = blocks_of(values, size)
    step = np.diff(block, axis=1)
    least = step.min(1)
    first = np.ceil((bits_of(np.abs(block[:, 0]).view(np.uint64)) + 1) / 8).sum()
    return float(first) + _packed_bytes((step - least[:, None]).view(np.uint64), least, size - 1)


def _packed_bytes(above: np.ndarray, base: np.ndarray, size: int) -> float:
    divisor = np.maximum(np.gcd.reduce(above, axis=1), np.uint64(1))
    width = bits_of(above.max(1) // divisor)
    header = 6 + np.ceil((bits_of(np.abs(base).view(np.uint64)) + 1) / 8) + np.where(
        divisor > 1, np.ceil(bits_of(divisor) / 8), 0)
    return float((header + width * size / 8).sum())


def dictionary(values: np.ndarray) -> float:
    distinct = len(np.unique(values))
    return len(values) * max(1, int(np.ceil(np.log2(max(distinct, 2))))) / 8 + distinct * values.dtype.itemsize


def zstd(values: np.ndarray, size: int) -> float:
    """Bytes of blocks under zstd, from the first ZSTD_SAMPLE of them."""
    data, step = values.tobytes(), size * values.dtype.itemsize
    sample = range(0, min(len(data), ZSTD_SAMPLE * step), step)
    packed = sum(len(pa.compress(data[at : at + step], codec="zstd", asbytes=True)) + 6 for at in sample)
    return packed * max(1.0, len(data) / (ZSTD_SAMPLE * step))


def parquet(name: str, column: pa.ChunkedArray) -> int:
    sink = io.BytesIO()
    pq.write_table(pa.table({name: column}), sink, compression="zstd")
    return sink.tell()


def best(run: Callable[[], Any], rounds: int = 7) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def column_figures(name: str, column: pa.ChunkedArray) -> dict[str, float]:
    array = column.combine_chunks()
    raw = array.indices.to_numpy() if pa.types.is_dictionary(array.type) else array.to_numpy()
    values, count = integers(raw), len(raw)
    payload = pack(raw)
    packed = view_packed(payload, count)
    unsigned = raw.view(f"u{raw.dtype.itemsize}")
    out = np.empty_like(unsigned)
    return {
        "plain": raw.dtype.itemsize, "packed": len(payload) / count,
        **{f"frames {size}": frames(values, size) / count for size in (64, 128, 256)},
        "differences 128": differences(values, 128) / count, "dictionary": dictionary(raw) / count,
        "zstd 128": zstd(raw, 128) / count, "zstd 1024": zstd(raw, 1024) / count,
        "Parquet": parquet(name, column) / count,
        "pack ns": best(lambda: pack(raw)) / count * 1e9,
        "unpack ns": best(lambda: copy_all(packed, count, out)) / count * 1e9,
        "copy ns": best(lambda: copy_all(unsigned, count, out)) / count * 1e9,
    }


def events_of(path: Path) -> pa.Table:
    """A store's events sorted by user, numbers only."""
    with HistoryStore.open(path) as store:
        users = store.keys()
        columns = ("event_time", *store.schema.columns)
        histories = store.read(Pointers(users, np.int64(2**62), np.int64(store.version)), Projection(columns))
        user = np.repeat(np.arange(len(users)), histories.lengths)
        flat = {name: values for name, values in histories.columns.items() if values.ndim == 1}
        return pa.table({"user_id": user, **flat})


def run(users: int, store: Path | None) -> dict[str, dict[str, float]]:
    if store is None:
        events = generate(users, 500)
        events = events.take(pa.array(np.lexsort((events["event_time"].to_numpy(), events["user_id"].to_numpy()))))
    else:
        events = events_of(store)
    figures = {name: column_figures(name, events[name]) for name in events.column_names if name != "user_id"}
    figures["all columns"] = {key: sum(column[key] for column in figures.values()) for key in figures["event_time"]}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=4_000)
    parser.add_argument("--store", type=Path, help="measure this store's events")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options.users, options.store)
    if options.json:
        print(json.dumps(figures))
        return
    keys = list(figures["event_time"])
    print(f"{'bytes a value':<14}" + "".join(f"{key:>17}" for key in keys))
    for name, column in figures.items():
        print(f"{name:<14}" + "".join(f"{column[key]:>17.2f}" for key in keys))


if __name__ == "__main__":
    main()

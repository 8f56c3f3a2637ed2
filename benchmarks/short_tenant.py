"""What a short tenant reads of a store that keeps long histories, against a store that keeps only what it reads.

    python -m benchmarks.short_tenant [--users 64] [--length 65500] [--last 100] [--json]

Two stores of the same users: one with their whole histories, one with the last ``--last`` events of each. A pointer at
the head reads those from either. One in the middle (as of a random event) reads as many from the first store, and must
find them by time. Bytes are those of the packed blocks that a read touches, each pointer alone, all that it takes to
find the place included (the time index, the block of times that is searched); what is told by the user's record in
memory costs nothing. The length is no multiple of a block's 128, where histories would end as blocks do. Sequences/s:
the contestants take turns, medians.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.command import run_and_show
from benchmarks.history import SCHEMA, medians
from semel.history import HistoryStore, Pointers, Projection
from semel.history.generation.lookup import TIME_STEP
from semel.history.kernels.packing import BLOCK
from semel.history.reading import histories

COLUMNS = ("item_id", "watch_time")


def generate(users: int, length: int, seed: int = 0) -> pa.Table:
    """``length`` events of each user by time, log-normal gaps, Zipf items."""
    random = np.random.default_rng(seed)
    count = users * length
    gaps = random.lognormal(16, 1.5, (users, length)).astype(np.int64) + 1
    when = np.cumsum(gaps, axis=1).reshape(-1)
    order = np.argsort(when, kind="stable")
    action = pa.DictionaryArray.from_arrays(random.integers(0, 4, count).astype(np.int8),
                                            pa.array(["view", "click", "like", "share"]))
    return pa.table({
        "user_id": np.repeat(np.arange(users), length), "event_time": when,
        "item_id": random.zipf(1.2, count) % 1_000_000, "watch_time": random.exponential(20, count).astype(np.float32),
        "action": action, "surface": random.integers(0, 5, count).astype(np.int8),
        "author_id": random.integers(0, 50_000, count).astype(np.int32),
        "price": random.integers(1, 5000, count).astype(np.float32) / 100}).take(pa.array(order))


def make_store(events: pa.Table, path: Path) -> HistoryStore:
    store = HistoryStore.create(path, SCHEMA, shards=4)
    for at in range(0, events.num_rows, 1 << 20):
        store.append(events.slice(at, 1 << 20))
    store.compact()
    return store


def touched(store: HistoryStore, pointers: Pointers, projection: Projection) -> float:
    """Mean bytes of the blocks that a read of each pointer alone touches."""
    view = store._view
    chosen = histories.select(view, store.schema, pointers, projection)
    total = 0
    for p in range(len(pointers)):
        shard = view.generation.shards[int(chosen.shard_of[p])]
        first, end = int(chosen.begin[p]), int(chosen.begin[p] + chosen.count[p])
        total += sum(_blocks(shard, name, first, end) for name in projection.columns)
        user = int(np.searchsorted(shard.users, pointers.user_id[p]))
        if shard.last_time[user] >= pointers.as_of[p]:  # else the record tells that all events come before it
            steps = (shard.offsets[user + 1] - 1) // TIME_STEP - shard.offsets[user] // TIME_STEP + 1
            total += 8 * math.ceil(math.log2(steps + 1)) + _blocks(shard, "event_time", end - 1, end + 1)
    return total / len(pointers)


def _blocks(shard: Any, name: str, first: int, end: int) -> int:
    """Bytes of the packed blocks that hold rows ``first`` to ``end`` of a column."""
    _, starts = shard.column(name)
    return int(starts[-(-end // BLOCK)]) - int(starts[first // BLOCK])


def run(users: int, length: int, last: int, pointers: int, seconds: float, folder: Path) -> dict[str, Any]:
    events = generate(users, length)
    when, user = events["event_time"].to_numpy(), events["user_id"].to_numpy()
    order = np.lexsort((when, user)).reshape(users, length)
    projection = Projection(COLUMNS, last=last)
    random = np.random.default_rng(1)
    with make_store(events, folder / "long") as long, \
            make_store(events.take(pa.array(np.sort(order[:, -last:].reshape(-1)))), folder / "short") as short:
        some = random.integers(0, users, pointers)
        head = Pointers(some, np.array(int(when.max()) + 1), np.array(long.version))
        middle = Pointers(some, when[order[some, random.integers(last, length, pointers)]], np.array(long.version))
        of_short = Pointers(some, head.as_of, np.array(short.version))
        same = long.read(head, projection), short.read(of_short, projection)
        assert all((same[0].columns[name] == same[1].columns[name]).all() for name in COLUMNS)
        assert long.lengths(middle, projection)[0].min() == last
        cases = {"head, store of the last only": (short, of_short), "head, store of all": (long, head),
                 "middle, store of all": (long, middle)}
        times = medians({name: partial(store.read, where, projection) for name, (store, where) in cases.items()},
                        seconds)
        read = {name: touched(store, where, projection) for name, (store, where) in cases.items()}
        base = next(iter(cases))
        return {"users": users, "length": length, "last": last, "pointers": pointers,
                "middle_limit": round(1 + BLOCK / last, 3), "cases": {
                    name: {"bytes": round(read[name], 1), "bytes_relative": round(read[name] / read[base], 3),
                           "sequences_per_second": round(pointers / times[name]),
                           "speed_relative": round(times[base] / times[name], 3)} for name in cases}}


def show(result: dict[str, Any]) -> None:
    print(f"last {result['last']} events of {result['users']} users with {result['length']:,} each, 2 of 6 columns; "
          f"asked: at the head at most 1.1, in the middle at most {result['middle_limit']} of the bytes")
    print("                                   bytes a read   relative   sequences/s   relative")
    for name, row in result["cases"].items():
        print(f"  {name:<30}{row['bytes']:>15,.1f}{row['bytes_relative']:>11}{row['sequences_per_second']:>14,}"
              f"{row['speed_relative']:>11}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--length", type=int, default=65_500, help="events of each user")
    parser.add_argument("--last", type=int, default=100, help="events that the tenant reads")
    parser.add_argument("--pointers", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the contestants take turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run_and_show(lambda folder: run(options.users, options.length, options.last, options.pointers, options.seconds,
                                    folder), show, options.json)


if __name__ == "__main__":
    main()

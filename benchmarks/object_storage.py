"""A store on object storage: what reads and appends ask of the bucket, against ranges of plain column objects.

    python -m benchmarks.object_storage [--users 5000] [--last 128] [--pointers 1000] [--json]

The bucket is a mock S3 server (moto) in a process of its own on the loopback interface: requests and bytes are what a
bucket would be asked, times are not what one would take. The other contestant keeps each column as one plain object,
has every user's rows in memory, and asks with ``obstore.get_ranges`` for exactly the bytes of each pointer (requests:
its ranges that do not touch). It has no log, no late events and no as-of, so pointers are at the head here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import run_and_show
from benchmarks.history import SCHEMA, generate
from semel.history import HistoryStore, Pointers, Projection
from semel.history.storage.objects import Objects

COLUMNS = ("item_id", "watch_time")
ROUNDS = 15
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


class Asked:
    """Counts what a store's handles ask of the bucket: requests, and bytes that they fetch."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        ask, ranges = Objects._ask, Objects.ranges

        def counted(objects: Objects, name: str, request: Callable[[], Any]) -> Any:
            self.requests += 1
            return ask(objects, name, request)

        def counted_ranges(objects: Objects, name: str, starts: Any, ends: Any) -> Any:
            self.requests += len(starts) - 1
            self.bytes += int(np.sum(ends) - np.sum(starts))
            return ranges(objects, name, starts, ends)

        Objects._ask, Objects.ranges = counted, counted_ranges  # type: ignore[method-assign]

    def of(self, work: Callable[[], Any]) -> dict[str, Any]:
        before, start = (self.requests, self.bytes), time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return {"requests": self.requests - before[0], "bytes": self.bytes - before[1], "ms": round(seconds * 1e3, 2)}


class PlainColumns:
    """Each column one object of plain values, sorted by user and time."""

    def __init__(self, url: str, options: dict[str, Any], events: Any) -> None:
        import obstore
        from obstore.store import from_url

        self._get, self._store = obstore.get_ranges, from_url(url, **options)
        order = np.lexsort((events["event_time"].to_numpy(), events["user_id"].to_numpy()))
        self.users, starts = np.unique(events["user_id"].to_numpy()[order], return_index=True)
        self.offsets = np.append(starts, len(order))
        self.width = {}
        for name in COLUMNS:
            values = events[name].to_numpy()[order]
            self.width[name] = values.itemsize
            obstore.put(self._store, name, values.tobytes())

    def read(self, users: np.ndarray, last: int) -> tuple[int, int]:
        """(requests, bytes)."""
        place = np.searchsorted(self.users, users)
        end = self.offsets[place + 1]
        begin = np.maximum(self.offsets[place], end - last)
        rows = np.unique(np.stack([begin, end], axis=1), axis=0)
        for name, width in self.width.items():
            self._get(self._store, name, starts=(begin * width).tolist(), ends=(end * width).tolist(), coalesce=0)
        return len(COLUMNS) * len(rows), int((rows[:, 1] - rows[:, 0]).sum()) * sum(self.width.values())


def run(users: int, last: int, pointers: int, folder: Path) -> dict[str, Any]:
    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        host, port = server.stdout.readline().split()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=10).close()
        options = {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret",
                   "client_options": {"allow_http": True}}
        return measure(users, last, pointers, folder, options)
    finally:
        server.kill()
        server.wait(10)


def measure(users: int, last: int, count: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    events = generate(users, 500)
    asked = Asked()
    place: dict[str, Any] = {"storage_options": options, "cache_folder": folder / "cache"}
    local = HistoryStore.create(folder / "store", SCHEMA)
    remote = HistoryStore.create("s3://bucket/store", SCHEMA, **place)
    for start in range(0, events.num_rows, 500_000):
        for store in (local, remote):
            store.append(events.slice(start, 500_000))
    local.compact()
    rows = {f"append of {1000:,} events": asked.of(lambda: remote.append(events.slice(0, 1000)))}
    rows["compact"] = asked.of(remote.compact)
    plain = PlainColumns("s3://bucket/plain", options, events)

    projection = Projection(COLUMNS, last=last)
    random = np.random.default_rng(0)
    everywhere = random.choice(events["user_id"].to_numpy(), count)
    ever = 2**62
    reader = None
    for name, ids in {"one pointer": everywhere[:1], f"{count:,} pointers": everywhere}.items():
        if reader is not None:
            reader.close()
        opened: list[HistoryStore] = []
        rows["open"] = asked.of(lambda opened=opened: opened.append(HistoryStore.open("s3://bucket/store", **place)))
        (reader,) = opened
        pointer = Pointers(ids, np.full(len(ids), ever), np.full(len(ids), local.version))
        rows[f"{name}, cold"] = asked.of(lambda reader=reader, pointer=pointer: reader.read(pointer, projection))
        rows[f"{name}, warm"] = asked.of(lambda reader=reader, pointer=pointer: reader.read(pointer, projection))
        start = time.perf_counter()
        requests, size = plain.read(ids, last)
        rows[f"{name}, plain column objects"] = {"requests": requests, "bytes": size,
                                                 "ms": round((time.perf_counter() - start) * 1e3, 2)}
        times: dict[str, list[float]] = {"local": [], "remote": []}
        for _ in range(ROUNDS):
            for kind, store in {"local": local, "remote": reader}.items():
                start = time.perf_counter()
                store.read(pointer, projection)
                times[kind].append(time.perf_counter() - start)
        rows[f"{name}, warm"]["ms"] = round(float(np.median(times["remote"])) * 1e3, 2)
        rows[f"{name}, a folder"] = {"requests": 0, "bytes": 0, "ms": round(float(np.median(times["local"])) * 1e3, 2)}
    rows["refresh"] = asked.of(reader.refresh)
    total = remote.stats()["bytes"]["generation"]
    for store in (local, remote, reader):
        store.close()
    return {"users": users, "events": events.num_rows, "last": last, "generation_bytes": total, "measures": rows}


def show(result: dict[str, Any]) -> None:
    print(f"{result['events']:,} events of {result['users']:,} users, {result['generation_bytes'] / 1e6:.1f} MB; last "
          f"{result['last']} of {len(COLUMNS)} columns")
    print(f"  {'':<36} {'requests':>9} {'bytes fetched':>15} {'ms, mock server':>16}")
    for name, row in result["measures"].items():
        print(f"  {name:<36} {row['requests']:>9,} {row['bytes']:>15,} {row['ms']:>16,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--last", type=int, default=128)
    parser.add_argument("--pointers", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run_and_show(lambda folder: run(options.users, options.last, options.pointers, folder), show, options.json)


if __name__ == "__main__":
    main()

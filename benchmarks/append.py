"""Durable appends: one thread, several threads (group commit), client processes of a writer server, against SQLite.

    python -m benchmarks.append [--appends 100] [--rows 1000] [--folder DIR] [--json]

Batches of 1,000 events of 6 columns, each on disk when its append returns. SQLite: the same batches, one transaction
each, WAL with synchronous=FULL, no index, which favours it (a table that can be read by user needs one). Contestants
take turns on one disk, the table shows medians. ``fsync alone`` writes and syncs the same number of bytes: what no
single appender can beat on this disk. On a file system in memory an fsync costs nothing and the figures say little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.command import run_and_show
from benchmarks.history import SCHEMA, generate
from semel.history import HistoryStore, WriterClient, WriterServer

CLIENTS = 2
THREADS = 4


def batches_of(appends: int, rows: int, seed: int = 0) -> list[pa.Table]:
    events = generate(max(appends * rows // 50, 10), 100, seed)
    starts = np.arange(appends) * rows % max(events.num_rows - rows, 1)
    return [events.slice(int(start), rows).combine_chunks() for start in starts]


def in_threads(store: HistoryStore, batches: list[pa.Table], count: int) -> None:
    def work(number: int) -> None:
        for batch in batches[number::count]:
            store.append(batch)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def client_process(socket_path: str, appends: int, rows: int, number: int, pipe: Connection) -> None:
    """Appends its share of the batches each time it is told to."""
    batches = batches_of(appends, rows)[number::CLIENTS]
    with WriterClient(socket_path) as client:
        pipe.send("ready")
        while pipe.recv():
            for batch in batches:
                client.append(batch)
            pipe.send("done")


class SQLite:
    """A table of events: the same columns, strings as they are."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("pragma journal_mode = wal")
        self.connection.execute("pragma synchronous = full")
        self.connection.execute(f"create table events ({', '.join(SCHEMA.arrow.names)})")
        self.insert = f"insert into events values ({', '.join('?' * len(SCHEMA.arrow.names))})"

    def append(self, batch: pa.Table) -> None:
        # From columns to rows is part of what it costs to hand a batch over.
        rows = zip(*(column.to_pylist() for column in batch.select(SCHEMA.arrow.names).columns), strict=True)
        self.connection.execute("begin")
        self.connection.executemany(self.insert, rows)
        self.connection.execute("commit")


def fsync_alone(path: Path, size: int, times: int) -> None:
    data = os.urandom(size)
    with open(path, "ab", buffering=0) as file:
        for _ in range(times):
            file.write(data)
            os.fsync(file.fileno())


def run(appends: int, rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    batches = batches_of(appends, rows)
    names = ("one thread", f"{THREADS} threads", f"{CLIENTS} client processes")
    stores = {name: HistoryStore.create(folder / name.replace(" ", "-"), SCHEMA) for name in names}
    sqlite = SQLite(folder / "events.sqlite")
    socket_folder = tempfile.mkdtemp(prefix="semel-")  # a socket's path must be short
    socket_path = str(Path(socket_folder) / "writer.sock")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        with WriterServer(stores[names[2]], socket_path):
            for number in range(CLIENTS):
                ours, theirs = context.Pipe()
                process = context.Process(target=client_process, daemon=True,
                                          args=(socket_path, appends, rows, number, theirs))
                process.start()
                pipes.append(ours)
                processes.append(process)
            for pipe in pipes:
                pipe.recv()

            def through_server() -> None:
                for pipe in pipes:
                    pipe.send(True)
                for pipe in pipes:
                    pipe.recv()

            stores[names[0]].append(batches[0])
            size = stores[names[0]].stats()["bytes"]["log"]
            contestants: dict[str, Callable[[], Any]] = {
                names[0]: lambda: in_threads(stores[names[0]], batches, 1),
                names[1]: lambda: in_threads(stores[names[1]], batches, THREADS),
                names[2]: through_server,
                "SQLite WAL, synchronous=FULL": lambda: [sqlite.append(batch) for batch in batches],
                "fsync alone": lambda: fsync_alone(folder / "bytes", size, appends),
            }
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            for turn in range(rounds + 1):
                for name, contestant in contestants.items():
                    start = time.perf_counter()
                    contestant()
                    if turn:  # the first is for warming up
                        seconds[name].append(time.perf_counter() - start)
            for pipe in pipes:
                pipe.send(False)
            for process in processes:
                process.join(20)
        expected = (rounds + 1) * appends
        counts = {name: stores[name].stats()["events"]["total"] for name in names}
        assert counts == {names[0]: (expected + 1) * rows, names[1]: expected * rows, names[2]: expected * rows}, counts
        assert sqlite.connection.execute("select count(*) from events").fetchone() == (expected * rows,)
    finally:
        for process in processes:
            process.kill()
        for store in stores.values():
            store.close()
        sqlite.connection.close()
        shutil.rmtree(socket_folder)
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    base = median["SQLite WAL, synchronous=FULL"]
    return {
        "appends": appends, "rows": rows, "rounds": rounds, "cpus": os.cpu_count(),
        "bytes_per_event": round(size / rows, 1),
        "fsync_ms": round(median["fsync alone"] / appends * 1e3, 3),
        "events_per_second": {name: round(appends * rows / median[name]) for name in median},
        "append_ms": {name: round(median[name] / appends * 1e3, 3) for name in median},
        "over_sqlite": {name: round(base / median[name], 2) for name in names},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['appends']} appends of {result['rows']:,} events of 6 columns, {result['bytes_per_event']} bytes "
          f"an event, each durable; an fsync of as many bytes takes {result['fsync_ms']} ms here")
    print(f"  {'':<32} {'events/s':>12} {'ms an append':>14} {'x SQLite':>10}")
    for name, value in result["events_per_second"].items():
        over = result["over_sqlite"].get(name, "")
        print(f"  {name:<32} {value:>12,} {result['append_ms'][name]:>14} {over:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--appends", type=int, default=100, help="a round")
    parser.add_argument("--rows", type=int, default=1000, help="events an append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the folder for temporary files)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    run_and_show(lambda folder: run(options.appends, options.rows, options.rounds, folder),
                 show, options.json, options.folder)


if __name__ == "__main__":
    main()

"""Readers in threads and processes while one handle appends and compacts: no torn, shortened or changed history."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, Pointers, Projection

SCHEMA = EventSchema({"item_id": pa.int64(), "text": pa.string()})
PROJECTION = Projection(("item_id", "version", "text"))
USERS = 7


def append(store: HistoryStore, version: int) -> None:
    """Every append gives every user one event; its item is the version that it gets."""
    users = np.arange(USERS)
    store.append(pa.table({"user_id": users, "event_time": np.full(USERS, 1000 - version % 50),
                           "item_id": np.full(USERS, version), "text": [f"t{version % 5}"] * USERS}))


def check(store: HistoryStore, version: int) -> None:
    """A pointer at ``version`` sees exactly the events of versions 1 ... version."""
    table = store.read(Pointers(np.arange(USERS), 10**6, np.full(USERS, version)), PROJECTION)
    for user in range(USERS):
        row = table.row(user)
        assert sorted(row["item_id"].tolist()) == list(range(1, version + 1))
        assert (row["item_id"] == row["version"]).all()
        strings = table.strings("text")[table.offsets[user] : table.offsets[user + 1]]
        assert strings.tolist() == [f"t{v % 5}" for v in row["item_id"]]


def follow(path: Path, stop: Any, failures: Any, counts: Any) -> None:
    try:
        store = HistoryStore.open(path)
        random = np.random.default_rng()
        while not stop.is_set():
            version = store.refresh()
            check(store, int(random.integers(0, version + 1)))
            if random.random() < 0.2:
                store = HistoryStore.open(path)
                assert store.version >= version
            counts.put(1)
    except BaseException as error:
        failures.put(repr(error))
        raise


@pytest.mark.timeout(90)
def test_processes_read_while_one_appends_and_compacts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    stop, failures, counts = context.Event(), context.Queue(), context.Queue()
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=3) as store:
        append(store, 1)
        check(store, 1)  # compiles what the readers then load
        readers = [context.Process(target=follow, args=(tmp_path / "s", stop, failures, counts), daemon=True)
                   for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for _ in readers:
                counts.get(timeout=60)
            for version in range(2, 80):
                append(store, version)
                if version % 6 == 0:
                    store.compact()
        finally:
            stop.set()
            for reader in readers:
                reader.join(20)
                if reader.is_alive():
                    reader.kill()
        assert failures.empty(), failures.get()
        assert [reader.exitcode for reader in readers] == [0, 0]
        check(store, 79)


@pytest.mark.timeout(90)
def test_threads_read_through_the_appending_handle(tmp_path: Path) -> None:
    stop, failures, reads = threading.Event(), [], []
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=3) as store:
        append(store, 1)

        def read() -> None:
            random = np.random.default_rng()
            try:
                while not stop.is_set():
                    check(store, int(random.integers(0, store.version + 1)))
                    reads.append(1)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        compacting = threading.Thread(target=lambda: [store.compact() for _ in range(12) if not time.sleep(0.02)])
        for thread in (*threads, compacting):
            thread.start()
        for version in range(2, 120):
            append(store, version)
        compacting.join()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        assert reads
        check(store, 119)
        store.verify()


def generations(path: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (path / "generations").iterdir())


def test_a_reader_keeps_the_generation_that_it_reads(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        append(store, 1)
        store.compact()
        reader = HistoryStore.open(tmp_path / "s")  # has opened none of its columns yet
        for version in range(2, 6):
            append(store, version)
            store.compact()
        assert generations(tmp_path / "s") == [1, 5]
        assert store.drop_generations(keep=1) == []
        assert reader.generation == 1
        check(reader, 1)
        assert reader.generation == 1
        append(store, 6)
        check(reader, 6)  # moves on to the present generation, and lets go of the first
        assert reader.generation == 5
        assert store.drop_generations(keep=1) == [1]
        assert generations(tmp_path / "s") == [5]
        assert [f.name for f in (tmp_path / "s" / "log").iterdir()] == ["00000006.log"]
        store.compact()
        assert generations(tmp_path / "s") == [5, 6]
        reader.close()
        assert store.drop_generations() == []
        assert store.drop_generations(keep=1) == [5]
        with pytest.raises(ValueError, match="at least 1"):
            store.drop_generations(keep=0)


HOLDER = """
import sys
from semel.history import HistoryStore, Projection
store = HistoryStore.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
table = store.read(store.point(store.keys(), 10**6), Projection(("item_id", "version", "text")))
print(store.generation, table.columns["item_id"].tolist(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.timeout(90)
def test_a_killed_reader_holds_no_lease(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        append(store, 1)
        store.compact()
        reader = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "s")], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        assert reader.stdin is not None and reader.stdout is not None
        try:
            assert reader.stdout.readline() == "open\n"
            append(store, 2)
            store.compact()
            assert generations(tmp_path / "s") == [1, 2]
            print(file=reader.stdin, flush=True)
            assert reader.stdout.readline() == f"1 {[1] * USERS}\n"  # files that it opened after the compaction
        finally:
            reader.kill()
            reader.wait()
            reader.stdin.close()
            reader.stdout.close()
        assert store.drop_generations(keep=1) == [1]


def test_no_lease_waits_for_the_garbage_collector(tmp_path: Path) -> None:
    """A traceback that somebody keeps (a compiler's, of a kernel's first call) holds the frames of a compaction or a
    read, and what these refer to; the generation before is removed all the same."""
    kept: list[Any] = []
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        append(store, 1)
        store.compact()
        for number in (2, 3):
            append(store, number)
            assert store.compact(progress=lambda *_: kept.append(sys._getframe())) == number
            assert generations(tmp_path / "s") == [number]
    assert len(kept) == 4


def test_arrays_outlive_their_generation_and_their_handle(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        append(store, 1)
        store.compact()
        with HistoryStore.open(tmp_path / "s") as reader:
            table = reader.read(reader.point(np.arange(USERS), 10**6), PROJECTION)
        append(store, 2)
        store.compact()
        assert generations(tmp_path / "s") == [2]
        assert table.columns["item_id"].tolist() == [1] * USERS

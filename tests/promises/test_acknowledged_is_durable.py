"""Promise 2: kill the writer at any instruction; every acknowledged append is there, no torn one is visible, a retry
with the same token is one append. And damaged bytes are an error that names the file, never wrong data."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from semel.history import CorruptFile, EventSchema, HistoryStore, Pointers, Projection, StoreError
from semel.history.generation.array_files import Codec

SCHEMA = EventSchema({"item_id": pa.int64(), "text": pa.string()})
PROJECTION = Projection(("item_id", "version", "text"))
USERS = 5

# Appends batches number 0, 1, ... (batch n: one event for each user, token "n"), prints each number when it is
# acknowledged, compacts now and then. Starts at the number that it is given, so that the first may be a retry.
WRITER = """
import sys, pyarrow as pa
from semel.history import HistoryStore, SegmentWriter
from semel.history.writing import writer as module
module.SEGMENT_BYTES = 4000
from semel.history.generation import array_files
array_files.SHRINKS = 9  # so that all columns of cold generations are compressed
store = HistoryStore.open(sys.argv[1], mode="a")
print("open", flush=True)
for n in range(int(sys.argv[2]), 10**9):
    table = pa.table({"user_id": range(5), "event_time": [1000 - n % 7] * 5, "item_id": [n] * 5,
                      "text": [f"t{n % 11}"] * 5})
    version = store.append(table, token=str(n))
    print(n, version, flush=True)
    if n % 4 == 3:
        store.compact(codec=["packed", "cold"][n // 4 % 2])
        print("compacted", flush=True)
"""


def run_and_kill(path: Path, start: int, after: float, chance: random.Random) -> dict[int, int]:
    """{batch number: version} of what was acknowledged before the writer was killed."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(start)], stdout=subprocess.PIPE, text=True)
    acknowledged: dict[int, int] = {}
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        lines = chance.randint(0, 20)
        for line in writer.stdout:
            if line[0].isdigit():
                number, version = map(int, line.split())
                acknowledged[number] = version
            lines -= 1
            if lines <= 0:
                break
        time.sleep(after)
        os.kill(writer.pid, signal.SIGKILL)
        for line in writer.stdout:
            if line.endswith("\n") and line[0].isdigit():
                number, version = map(int, line.split())
                acknowledged[number] = version
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()  # type: ignore[union-attr]
    return acknowledged


def check(store: HistoryStore, acknowledged: dict[int, int]) -> list[int]:
    """Whole batches, each once, every acknowledged one at its version; the batch numbers that are there."""
    table = store.read(store.point(np.arange(USERS), 10**9), PROJECTION)
    first = table.row(0)
    for user in range(USERS):
        row = table.row(user)
        assert (row["item_id"] == first["item_id"]).all() and (row["version"] == first["version"]).all()
        strings = table.strings("text")[table.offsets[user] : table.offsets[user + 1]]
        assert strings.tolist() == [f"t{n % 11}" for n in row["item_id"]]
    there = dict(zip(first["item_id"].tolist(), first["version"].tolist(), strict=True))
    assert len(there) == len(first["item_id"])
    assert acknowledged.items() <= there.items()
    assert sorted(there) == list(range(len(there)))
    return sorted(there)


def kill_many(path: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    HistoryStore.create(path, SCHEMA, shards=2).close()
    acknowledged: dict[int, int] = {}
    start = 0
    for _ in range(times):
        acknowledged |= run_and_kill(path, start, chance.random() ** 3 * 0.05, chance)
        with HistoryStore.open(path) as reader:
            there = check(reader, acknowledged)
            reader.verify()
        start = max(len(there) - 1, 0)  # a retry of the last one, which may or may not have been acknowledged
    with HistoryStore.open(path, mode="a") as store:
        before = store.version
        for n in range(len(there)):
            table = pa.table({"user_id": range(USERS), "event_time": [1] * USERS, "item_id": [n] * USERS,
                              "text": ["again"] * USERS})
            version = store.append(table, token=str(n))
            assert version == acknowledged.get(n, version)
        assert store.version == before
        store.compact()
        check(store, acknowledged)
        assert len(list((path / "generations").iterdir())) == 1
        assert len(list((path / "log").iterdir())) == 1


@pytest.mark.timeout(110)
def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    kill_many(tmp_path / "store", 4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_killed_writers(tmp_path: Path, seed: int) -> None:
    kill_many(tmp_path / "store", 75, seed=seed + 100)


def make_store(path: Path, codec: Codec = "packed") -> tuple[bytes, ...]:
    """A store with a generation and a log, and with deletions, expired events and an added column in both; what a full
    read of it gives."""
    with HistoryStore.create(path, SCHEMA, shards=2) as store:
        for n in range(6):
            store.append(pa.table({"user_id": range(USERS), "event_time": [1000 - n] * USERS, "item_id": [n] * USERS,
                                   "text": [f"t{n}", None, "x", "y", "z"]}), token=str(n))
            others = range(USERS, USERS + 3)
            if n < 2:
                store.append(pa.table({"user_id": others, "event_time": [n] * 3, "item_id": [n] * 3,
                                       "text": ["o"] * 3}))
            if n == 2:
                store.delete(user_ids=[USERS])
            if n == 3:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("semel.history.store.now", lambda: 10**6)
                    patch.setattr("semel.history.generation.array_files.SHRINKS", 9)
                    store.compact(codec=codec, retention=timedelta(microseconds=10**6 - 1))
                    store.add_column("score", pa.float32(), lambda table: table["item_id"].cast(pa.float32()))
            if n == 4:
                store.delete(user_ids=[USERS + 1])
                store.delete(events=pa.table({"user_id": [0], "event_time": [999]}))
    assert [folder.name for folder in (path / "generations").iterdir()] == ["00000002"]  # all files are the store's
    return contents(path)


def contents(path: Path) -> tuple[bytes, ...]:
    with HistoryStore.open(path) as store:
        seen = ("item_id", "version", "event_time", "text", "score")
        pointers = [Pointers(np.arange(USERS + 4), 10**9, store.version - back) for back in (0, 5)]
        table, older = (store.read(each, Projection(seen)) for each in pointers)
        parts = [table.offsets, *table.columns.values(), *(table.validity or {}).values(), table.status, older.offsets,
                 older.status]
        return (*(part.tobytes() for part in parts), repr(table.strings("text").tolist()).encode(),
                str(store.version).encode())


def flip_and_read(source: Path, work: Path, expected: tuple[bytes, ...], chance: random.Random, times: int) -> None:
    files = sorted(f for f in source.rglob("*") if f.is_file() and f.name != "writer.lock")
    shutil.copytree(source, work)
    for _ in range(times):
        file = chance.choice(files).relative_to(source)
        original = (source / file).read_bytes()
        if not original:
            continue
        damaged = bytearray(original)
        at = chance.randrange(len(damaged))
        damaged[at] ^= chance.randrange(1, 256)
        (work / file).write_bytes(damaged)
        try:
            assert contents(work) == expected, f"{file}: byte {at} changed what was read"
        except StoreError as error:
            assert str(file.name) in str(error) or file.suffix == ".json", f"{error} does not name {file}"
        with pytest.raises(StoreError), HistoryStore.open(work) as store:
            store.verify()
        (work / file).write_bytes(original)
    assert contents(work) == expected


@pytest.mark.parametrize("codec", ["packed", "cold"])
def test_a_flipped_byte_is_an_error_or_is_not_read(tmp_path: Path, codec: Codec) -> None:
    expected = make_store(tmp_path / "store", codec)
    flip_and_read(tmp_path / "store", tmp_path / "work", expected, random.Random(5), 120)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec", ["packed", "cold"])
def test_many_flipped_bytes(tmp_path: Path, codec: Codec) -> None:
    expected = make_store(tmp_path / "store", codec)
    flip_and_read(tmp_path / "store", tmp_path / "work", expected, random.Random(6), 5000)


@pytest.mark.parametrize("codec", ["packed", "cold"])
@pytest.mark.parametrize("kind", ["column", "segment", "generation", "shortened", "exchanged"])
def test_lost_files_are_an_error_that_names_them(tmp_path: Path, kind: str, codec: Codec) -> None:
    path = tmp_path / "store"
    make_store(path, codec)
    shard = next(path.glob("generations/*/shard-0000"))
    victim = {"column": shard / "column-000", "segment": next(path.glob("log/*.log")),
              "generation": shard.parent / "generation.json", "shortened": shard / "event_time",
              "exchanged": shard / "version"}[kind]
    if kind == "shortened":
        victim.write_bytes(victim.read_bytes()[:-8])
    elif kind == "exchanged":
        shutil.copy(shard / "event_time", victim)  # a sound file of the wrong place
    else:
        victim.unlink()
    with pytest.raises(CorruptFile, match=victim.name):
        contents(path)


def test_a_full_disk_appends_nothing(tmp_path: Path) -> None:
    """The size limit of the process stands in for the disk's."""
    code = """
import resource, signal, sys, pyarrow as pa
from semel.history import EventSchema, HistoryStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = HistoryStore.create(sys.argv[1], EventSchema({"item_id": pa.int64(), "text": pa.string()}), shards=2)
def table(n, rows):
    return pa.table({"user_id": [u % 5 for u in range(rows)], "event_time": [n] * rows, "item_id": [n] * rows,
                     "text": [f"t{n % 11}"] * rows})
store.append(table(0, 5))
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    store.append(table(1, 5000))
except OSError as error:
    print("refused", store.version)
print(store.append(table(1, 5)))
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=60)
    assert out.stdout == "refused 1\n2\n", out.stderr
    with HistoryStore.open(tmp_path / "s") as store:
        assert check(store, {0: 1, 1: 2}) == [0, 1]


def test_a_full_disk_compacts_nothing(tmp_path: Path) -> None:
    """The error names the file, and tries that fail leave nothing behind, however many there are."""
    code = """
import resource, signal, sys, pyarrow as pa
from pathlib import Path
from semel.history import EventSchema, HistoryStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
store = HistoryStore.create(path, EventSchema({"item_id": pa.int64(), "text": pa.string()}), shards=2)
store.append(pa.table({"user_id": [u % 5 for u in range(5000)], "event_time": range(5000),
                       "item_id": [i * i * i * 7919 for i in range(5000)], "text": ["t"] * 5000}))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for change in (store.compact, lambda: store.compact(memory_limit="256KiB"),
               lambda: store.add_column("more", pa.int64(), lambda table: table["item_id"])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))
    try:
        change()
    except OSError as error:
        print(".building" in str(error), store.generation, list(store.schema.columns),
              sorted(file.name for file in path.glob("*/*")))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(store.compact(), store.verify()["files"])
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=90)
    failed = "True 0 ['item_id', 'text'] ['00000001.log', '00000002.log']\n"
    lines = out.stdout.splitlines(keepends=True)
    assert lines[:-1] == [failed] * 3 and lines[-1].startswith("1 "), out.stdout + out.stderr


def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    expected = make_store(tmp_path / "store")
    folders = [tmp_path / "store", *(f for f in (tmp_path / "store").rglob("*") if f.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert contents(tmp_path / "store") == expected
        if os.geteuid() != 0:
            with pytest.raises(PermissionError):
                HistoryStore.create(tmp_path / "store" / "more", SCHEMA)
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_missing_log_is_not_made_anew(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "store"
    make_store(path)
    segment = next(path.glob("log/*.log"))
    segment.unlink()
    with pytest.raises(CorruptFile, match=segment.name):
        HistoryStore.open(path, mode)
    assert not segment.exists()


def test_a_handle_that_was_interrupted_in_a_write_writes_no_more(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a signal ends an append or the switch to a new generation nobody knows how far it came."""
    def row(n: int) -> pa.Table:
        return pa.table({"user_id": [1], "event_time": [n], "item_id": [n], "text": ["t"]})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "s"
    HistoryStore.create(path, SCHEMA, shards=1).close()
    for place, use in (("semel.history.log.tail.Tail.append", lambda store: store.append(row(2), token="two")),
                       ("semel.history.log.tail.Tail.after", lambda store: store.compact()),
                       ("semel.history.log.segments.SegmentWriter.close", lambda store: store.compact())):
        with HistoryStore.open(path, mode="a") as store:
            store.append(row(1), token=place)
            with monkeypatch.context() as patch:
                patch.setattr(place, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    use(store)
            for again in (lambda: store.append(row(3)), store.compact):
                with pytest.raises(StoreError, match=r"did not end.*reopen"):
                    again()
        with HistoryStore.open(path, mode="a") as store:
            store.append(row(2), token="two")
            store.verify()
            items = store.read(store.point([1], 99), PROJECTION).columns["item_id"].tolist()
            assert sorted(items) == [1] * (store.version - 1) + [2]

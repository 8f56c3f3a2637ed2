"""Compaction: within a memory limit, by several workers, the same bytes; and what is left where it breaks off."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from semel.history import EventSchema, HistoryStore, Projection, StoreError
from semel.history.compaction.distinct import Distinct
from semel.history.compaction.engines import memory_bytes
from semel.history.compaction.partition import Spill
from semel.history.compaction.shards import merge_bucket
from semel.history.kernels.sharding import packed, shards_of
from semel.history.reference import ReferenceStore

COLUMNS = {"item_id": pa.int64(), "text": pa.string(), "flag": pa.bool_(), "vector": pa.list_(pa.float32(), 3)}
ALL = Projection(("event_time", "version", *COLUMNS))


def rows_of(random: np.random.Generator, count: int, users: list[Any]) -> list[dict[str, Any]]:
    """Ties, late events, nulls."""
    def some(value: Any) -> Any:
        return None if random.random() < 0.2 else value

    return [{"user_id": users[random.integers(len(users))], "event_time": int(random.integers(0, 40)),
             "item_id": some(int(random.integers(-(2**60), 2**60))), "text": some(f"t{random.integers(0, 9)}"),
             "flag": some(bool(random.integers(2))), "vector": some(random.integers(0, 99, 3).astype(float).tolist())}
            for _ in range(count)]


def files_of(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in folder.rglob("*") if file.is_file()}


def generation_of(store: HistoryStore) -> dict[str, str]:
    return files_of(Path(store.path) / "generations" / f"{store.generation:08d}")


def histories(store: HistoryStore, users: list[Any]) -> list[list[tuple[Any, ...]]]:
    table = store.read(store.point(users, 2**60), ALL)
    columns = []
    for name in ALL.columns:
        values = list(table.strings(name)) if name in (table.dictionaries or {}) else table.columns[name].tolist()
        valid = (table.validity or {}).get(name)
        columns.append(values if valid is None else [v if ok else None for v, ok in zip(values, valid, strict=True)])
    events = list(zip(*columns, strict=True))
    return [events[a:b] for a, b in zip(table.offsets, table.offsets[1:], strict=False)]


any_store = given(seed=st.integers(0, 2**32), strings=st.booleans(),
                  sizes=st.lists(st.integers(0, 150), min_size=1, max_size=4), limit=st.integers(100_000, 300_000),
                  workers=st.integers(1, 3), codec=st.sampled_from(["packed", "plain", "cold"]))


@any_store
@settings(max_examples=15, deadline=None)
def test_any_limit_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, **drawn: Any) -> None:
    same_bytes(tmp_path_factory, **drawn)


@pytest.mark.slow
@any_store
@settings(max_examples=150, deadline=None)
@pytest.mark.timeout(900)
def test_any_limit_gives_the_same_bytes_many_times(tmp_path_factory: pytest.TempPathFactory, **drawn: Any) -> None:
    same_bytes(tmp_path_factory, **drawn)


def same_bytes(tmp_path_factory: pytest.TempPathFactory, seed: int, strings: bool, sizes: list[int], limit: int,
               workers: int, codec: Any) -> None:
    folder, random = tmp_path_factory.mktemp("stores"), np.random.default_rng(seed)
    users = [f"u\u00fc{i}" if strings else i - 3 for i in range(7)]
    schema = EventSchema(COLUMNS, pa.string() if strings else pa.int64())
    oracle = ReferenceStore()
    with (pytest.MonkeyPatch.context() as patch, HistoryStore.create(folder / "a", schema, 3) as plenty,
          HistoryStore.create(folder / "b", schema, 3) as little):
        # so that few events make several chunks, and spill
        patch.setattr("semel.history.compaction.partition.LEAST_ROWS", 2)
        patch.setattr("semel.history.compaction.partition.IN_MEMORY", 50)
        patch.setattr("semel.history.compaction.engines.SERIAL_ROWS", 0)
        patch.setattr("semel.history.generation.generation.PIECE_VALUES", 128)
        for size in sizes:
            rows = rows_of(random, size, users)
            oracle.append(rows)
            for store in (plenty, little):
                store.append(pa.Table.from_pylist(rows, schema.arrow))
            plenty.compact(workers=1, codec=codec)
            little.compact(workers=workers, memory_limit=limit, codec=codec)
            if plenty.generation:
                assert generation_of(plenty) == generation_of(little)
        little.verify()
        expected = oracle.read([(user, 2**60, oracle.version) for user in users], ALL)
        assert histories(little, users) == [[tuple(v if not isinstance(v, tuple) else list(v) for v in event)
                                             for event in row] for row in expected]
        assert [path.name for path in (folder / "b" / "generations").iterdir()] in ([], [f"{little.generation:08d}"])


TIMES = hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(0, 9))


@given(old=TIMES, new=TIMES, data=st.data())
def test_merging_is_a_stable_sort(old: np.ndarray, new: np.ndarray, data: st.DataObject) -> None:
    users = np.array([-(2**63), -1, 0, 7, 2**63 - 1])
    old_user = np.sort(data.draw(hnp.arrays(np.int64, len(old), elements=st.sampled_from(users.tolist()))))
    new_user = data.draw(hnp.arrays(np.int64, len(new), elements=st.sampled_from(users.tolist())))
    old = old[np.lexsort((old, old_user))]
    old_users, counts = np.unique(old_user, return_counts=True)
    new_users = data.draw(st.permutations(np.unique(new_user).tolist()))
    codes = np.array([new_users.index(user) for user in new_user.tolist()], np.int32)
    arrays = [old_users, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), old,
              np.array(new_users, np.int64), codes, new]
    for array in (arrays[1], old, new):
        array.flags.writeable = False
    bucket = merge_bucket(*arrays)
    user, times = np.concatenate([old_user, new_user]), np.concatenate([old, new])
    order = np.lexsort((times, user))
    assert np.where(bucket.refs >= 0, bucket.refs, len(old) + ~bucket.refs).tolist() == order.tolist()
    assert np.repeat(bucket.users, np.diff(bucket.offsets)).tolist() == user[order].tolist()


def test_many_users_of_one_shard(tmp_path: Path) -> None:
    """More than the table of users begins with; the extremes among them."""
    users = np.concatenate([np.arange(-30_000, 30_000), [2**63 - 1, -(2**63)]])
    random = np.random.default_rng(0)
    with HistoryStore.create(tmp_path / "s", EventSchema({"item_id": pa.int64()}), shards=1) as store:
        for _ in range(2):
            store.append(pa.table({"user_id": random.permutation(users), "event_time": np.full(len(users), 5),
                                   "item_id": np.arange(len(users))}))
        store.compact()
        assert store.keys().tolist() == np.sort(users).tolist()
        assert (store.read(store.point(users, 6), Projection(("item_id",))).lengths == 2).all()


# -- what lies in the log is in memory only once it is read ---------------------------------------------------------

def table(*items: int, user: int = 1) -> pa.Table:
    return pa.table({"user_id": [user] * len(items), "event_time": list(items), "item_id": list(items)})


ITEMS = Projection(("item_id",))
PLAIN = EventSchema({"item_id": pa.int64()})


def items(store: HistoryStore, as_of: int = 10**6) -> list[int]:
    return store.read(store.point([1], as_of), ITEMS).columns["item_id"].tolist()


def test_no_events_in_memory_before_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN, shards=2) as store, monkeypatch.context() as patch:
        patch.setattr("semel.history.log.tail.Arena.append", lambda *_: pytest.fail("an event was loaded"))
        store.append(table(1))
        store.append(table(2, user=2))
        reader = HistoryStore.open(tmp_path / "s")
        frozen = HistoryStore.open(tmp_path / "s", at_version=1)
        for handle in (store, reader):
            assert handle.keys().tolist() == [1, 2] and handle.stats()["events"]["log"] == 2
        assert frozen.keys().tolist() == [1]
        patch.undo()
        assert items(reader) == items(store) == items(frozen) == [1]
        store.append(table(3))
        reader.refresh()
        assert items(reader) == items(store) == [1, 3] and store.keys().tolist() == [1, 2]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_reader_whose_log_was_compacted_reads_on(tmp_path: Path, loaded: bool) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN, shards=2) as store:
        store.append(table(1, 5))
        reader, frozen = HistoryStore.open(tmp_path / "s"), HistoryStore.open(tmp_path / "s", at_version=1)
        pointers = reader.point([1], 100)
        if loaded:
            assert items(reader) == items(frozen) == [1, 5]
        store.append(table(3))
        store.compact()  # removes the segments that they have not read yet
        store.append(table(2))
        assert reader.read(pointers, ITEMS).columns["item_id"].tolist() == [1, 5]
        assert items(frozen) == [1, 5] and frozen.keys().tolist() == [1]
        assert reader.refresh() == 3 and items(reader) == [1, 2, 3, 5]


def test_a_log_that_was_damaged_after_opening(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN) as store:
        store.append(table(*range(100)))
        segment = next((tmp_path / "s" / "log").iterdir())
        sound = segment.read_bytes()
        segment.write_bytes(sound[:500] + bytes([sound[500] ^ 1]) + sound[501:])
        for use in (lambda: items(store), store.compact):
            with pytest.raises(StoreError, match=f"{segment.name}.*checksum"):
                use()
        segment.write_bytes(sound)
        assert items(store) == list(range(100))
        assert store.compact() == 1 and items(store) == list(range(100))


def test_threads_that_read_and_append_while_the_log_is_loaded(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN, shards=2) as store:
        failures: list[BaseException] = []

        def read() -> None:
            try:
                for _ in range(40):
                    pointers = store.point([1], 10**6)
                    found = store.read(pointers, ITEMS).columns["item_id"].tolist()
                    assert found == list(range(pointers.version[0]))
            except BaseException as error:
                failures.append(error)

        for n in range(20):
            store.append(table(n))
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for n in range(20, 60):
            store.append(table(n))
            if n % 7 == 0:
                store.compact()
        for thread in threads:
            thread.join()
        assert not failures and items(store) == list(range(60))


# -- where it breaks off --------------------------------------------------------------------------------------------

CRASH = """
import os, sys
from semel.history import HistoryStore
from semel.history.compaction import partition
partition.LEAST_ROWS = 2
write = partition.Spill.write
def once(self, array):
    write(self, array)
    os.kill(os.getpid(), 9)
partition.Spill.write = once
HistoryStore.open(sys.argv[1], mode="a").compact(memory_limit=int(sys.argv[2]), workers=int(sys.argv[3]))
"""
LIMIT = 100_000


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_while_it_spills(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "s"
    with HistoryStore.create(path, PLAIN, shards=4) as store:
        store.append(table(*range(500)))
        store.compact()
        store.append(table(*range(500, 3000)))
    killed = subprocess.run([sys.executable, "-c", CRASH, str(path), str(LIMIT), str(workers)], timeout=60)
    assert killed.returncode == -9
    left = {entry.name for entry in (path / "generations").iterdir()}
    assert left == {"00000001", ".00000002.building"}
    assert list((path / "generations" / ".00000002.building").iterdir()) == []  # the file has no name
    with HistoryStore.open(path) as reader:
        assert items(reader) == list(range(3000)) and reader.generation == 1
    with HistoryStore.open(path, mode="a") as store:
        assert [entry.name for entry in (path / "generations").iterdir()] == ["00000001"]
        assert store.compact() == 2 and items(store) == list(range(3000))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_while_it_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with HistoryStore.create(tmp_path / "s", PLAIN, shards=4) as store:
        store.append(pa.table({"user_id": np.arange(3000) % 7, "event_time": np.arange(3000),
                               "item_id": np.arange(3000)}))
        with monkeypatch.context() as patch:
            patch.setattr(Spill, "write", full)
            with pytest.raises(OSError, match="No space left"):
                store.compact(memory_limit=LIMIT, workers=workers)
        assert list((tmp_path / "s" / "generations").iterdir()) == [] and store.generation == 0
        assert store.compact(memory_limit=4 * LIMIT, workers=workers) == 1
        assert items(store) == list(range(1, 3000, 7))


def test_a_shard_that_does_not_fit(tmp_path: Path) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN, shards=1) as store:
        store.append(table(*range(3000)))
        with pytest.raises(StoreError, match=r"shard 0 takes about \d+,\d+ bytes.*leaves \d+,\d+: raise memory_limit"):
            store.compact(memory_limit="50kB")
        assert list((tmp_path / "s" / "generations").iterdir()) == [] and items(store) == list(range(3000))
        store.append(table(3000))
        assert store.compact(memory_limit="400 kB") == 1 and items(store) == list(range(3001))


def test_what_a_compaction_does_beside_counts(tmp_path: Path) -> None:
    """Filling a column and leaving events out take memory too."""
    with HistoryStore.create(tmp_path / "s", PLAIN, shards=1) as store:
        store.append(table(*range(3000)))
        store.compact(memory_limit="400 kB")
        with pytest.raises(StoreError, match="shard 0 takes about"):
            store.add_column("n", pa.list_(pa.float32(), 30), lambda rows: [[0.0] * 30] * rows.num_rows,
                             memory_limit="400 kB")
        assert "n" not in store.schema.columns and store.version == 1
        store.delete(events=table(5).select(["user_id", "event_time"]))
        with pytest.raises(StoreError, match="shard 0 takes about"):
            store.compact(memory_limit="400 kB")
        store.compact(memory_limit="700 kB")
        assert items(store) == [n for n in range(3000) if n != 5]


@pytest.mark.parametrize(("options", "words"), [
    ({"engine": "spark"}, "'spark' is none of local, ray"), ({"workers": 0}, "workers must be at least 1, got 0"),
    ({"workers": 1.5}, r"got 1\.5"), ({"workers": True}, "got True"),
    ({"memory_limit": "much"}, "'much' is not a size"),
    ({"memory_limit": 0}, "0 is not a size"), ({"memory_limit": "-1GiB"}, "not a size"),
    ({"memory_limit": 1.5}, r"1\.5 is not a size"), ({"codec": "zip"}, "codec 'zip'"),
])
def test_what_is_no_limit(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with HistoryStore.create(tmp_path / "s", PLAIN) as store:
        store.append(table(1))
        with pytest.raises(ValueError, match=words):
            store.compact(**options)
        assert store.generation == 0 and store.append(table(2)) == 2


@pytest.mark.parametrize(("text", "size"), [
    ("1GiB", 2**30), ("512MiB", 2**29), ("1.5 kB", 1500), ("64k", 64_000), (" 7 ", 7), ("2TB", 2 * 10**12), (9, 9)])
def test_sizes(text: str | int, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("users", [0, 1, 300, 20_000, 300_000])
def test_how_many_strings_a_shard_has(users: int) -> None:
    counter = Distinct(3)
    for part in np.array_split(np.arange(users), 4):
        names = [f"user-{n}".encode() for n in part.tolist()]
        counter.add(*packed(names))
        counter.add(*packed(names[::2]))  # counted once
    exact = np.bincount(shards_of([f"user-{n}".encode() for n in range(users)], 3), minlength=3)
    assert (np.abs(counter.counts() - exact) <= 0.07 * exact).all()


def test_workers_wait_for_memory() -> None:
    from semel.history.compaction.engines import _in_threads

    lock, held, most = threading.Lock(), [0], [0]

    def job(need: int) -> Any:
        def work() -> int:
            with lock:
                held[0] += need
                most[0] = max(most[0], held[0])
            time.sleep(0.01)
            with lock:
                held[0] -= need
            return need
        return work

    needs = [3, 3, 5, 1, 1, 1, 4, 2]
    assert sorted(_in_threads([(need, job(need)) for need in needs], 3, 6)) == sorted(needs)
    assert 3 < most[0] <= 6


# -- slow -----------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    """Three million events, 150 MB in memory, of which a third was compacted before, within 64 MiB: appending and
    compacting."""
    import argparse

    from benchmarks.compaction import run

    result = run(argparse.Namespace(events=3_000_000, old=0.33, memory_limit="64MiB", workers=2, engine="local"),
                 tmp_path)
    assert result["peak_bytes"] - result["before_bytes"] < 64 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", [pa.int64(), pa.string()])
def test_ray_writes_the_same_bytes(tmp_path: Path, key: pa.DataType) -> None:
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'semel[ray]'")
    random = np.random.default_rng(0)
    users = [f"u{i}" if key == pa.string() else i for i in range(30)]
    schema = EventSchema(COLUMNS, key)
    with HistoryStore.create(tmp_path / "a", schema, 5) as here, HistoryStore.create(tmp_path / "b", schema, 5) as ray:
        for size, some in ((700, users), (0, users), (20, users[:1])):  # the last leaves most shards as they are
            rows = rows_of(random, size, some)
            for store in (here, ray):
                store.append(pa.Table.from_pylist(rows, schema.arrow))
            here.compact()
            ray.compact("ray", memory_limit="64MiB")
            assert generation_of(here) == generation_of(ray)
        ray.append(pa.Table.from_pylist(rows_of(random, 3000, users), schema.arrow))
        with pytest.raises(StoreError, match=r"shard \d takes about"):
            ray.compact("ray", memory_limit=1000)
        assert ray.compact("ray") == 3 and ray.verify()

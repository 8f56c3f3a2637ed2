"""A store on object storage: the same store, kept by conditional puts and read by ranges."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import (
    CorruptFile,
    EventSchema,
    HistoryStore,
    Pointers,
    Projection,
    StoreError,
    StoreExists,
    StoreNotFound,
    WriterFenced,
)

pytest.importorskip("obstore")
from semel.history.storage.objects import Objects, Unanswered

SCHEMA = EventSchema({"item_id": pa.int64(), "action": pa.dictionary(pa.int8(), pa.string())}, group="action")
ITEMS = Projection(("item_id",))
EVER = 2**62


def events(*rows: tuple[int, int, int], action: str | None = "click") -> pa.Table:
    """(user, event_time, item) rows."""
    return pa.table({
        "user_id": pa.array([row[0] for row in rows], pa.int64()),
        "event_time": pa.array([row[1] for row in rows], pa.int64()),
        "item_id": pa.array([row[2] for row in rows], pa.int64()),
        "action": pa.array([action] * len(rows), pa.string()),
    })


def many(rows: int, users: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table({
        "user_id": random.integers(0, users, rows), "event_time": random.integers(0, 10**9, rows),
        "item_id": random.integers(0, 10**5, rows),
        "action": pa.array(random.choice(["click", "like"], rows), mask=random.random(rows) < 0.1),
    })


def items(store: HistoryStore, user: int, as_of: int = EVER, projection: Projection = ITEMS) -> list[int]:
    return store.read(store.point([user], as_of), projection).columns["item_id"].tolist()


@pytest.fixture
def store(s3: Any) -> Iterator[HistoryStore]:
    with HistoryStore.create(s3.url, SCHEMA, shards=2, **s3.options) as store:
        yield store


def names(s3: Any) -> list[str]:
    return sorted(name for name, _ in s3.objects().entries(""))


# -- the store's surface -----------------------------------------------------------------------------------------------


def test_a_late_event_is_seen_by_later_pointers_only(store: HistoryStore, s3: Any) -> None:
    store.append(events((1, 10, 100), (1, 20, 200)))
    served = store.point([1], 21)
    store.append(events((1, 15, 150)))
    with HistoryStore.open(s3.url, **s3.options) as reader:
        for _ in range(2):
            for handle in (store, reader):
                assert handle.read(served, ITEMS).columns["item_id"].tolist() == [100, 200]
                assert items(handle, 1, 21) == [100, 150, 200]
            assert store.compact() == 1
            reader.refresh()
            assert reader.generation == 1
    with HistoryStore.open(s3.url, at_version=1, **s3.options) as frozen:
        assert items(frozen, 1) == [100, 200]
    assert store.stats()["bytes"]["log"] == 0
    assert store.verify()["files"] == len(names(s3)) - 1  # generation.json goes without saying


def test_a_reader_sees_what_was_committed_before_it_asks(store: HistoryStore, s3: Any) -> None:
    with HistoryStore.open(s3.url, **s3.options) as reader:
        for version in range(1, 8):
            store.append(events((1, version, version)))
            if version % 3 == 0:
                store.compact()
            if version % 2:
                assert reader.refresh() == version
            assert reader.read(store.point([1], EVER), ITEMS).columns["item_id"].tolist() == [*range(1, version + 1)]


def test_opening_and_creating(store: HistoryStore, s3: Any) -> None:
    with pytest.raises(StoreExists, match=s3.url):
        HistoryStore.create(s3.url, SCHEMA, **s3.options)
    store.append(events((1, 1, 1)))
    with pytest.raises(StoreExists, match="history store at"):
        HistoryStore.create(s3.url, SCHEMA, **s3.options)
    s3.objects().put(f"other/log/{1:020d}.log", b"")
    with pytest.raises(StoreExists, match=r"other/log/0"):
        HistoryStore.create(f"{s3.url}/other", SCHEMA, **s3.options)
    for mode in ("r", "a"):
        with pytest.raises(StoreNotFound, match=f"{s3.url}/none"):
            HistoryStore.open(f"{s3.url}/none", mode, **s3.options)
    with pytest.raises(StoreNotFound):
        HistoryStore.open("s3://no-such-bucket/store", **s3.options)
    with pytest.raises(ValueError, match="cache_bytes"):
        HistoryStore.open(s3.url, **{**s3.options, "cache_bytes": 0})
    with pytest.raises(ValueError, match="colour"):
        HistoryStore.open(s3.url, storage_options={"colour": "green"})
    nobody = {**s3.options["storage_options"], "endpoint": "http://127.0.0.1:1", "retry_config": {"max_retries": 0}}
    with pytest.raises(OSError, match=s3.url):
        HistoryStore.open(s3.url, storage_options=nobody)


def test_a_token_is_one_append(store: HistoryStore, s3: Any) -> None:
    assert store.append(events((1, 1, 1)), "a") == store.append(events((1, 2, 2)), "a") == 1
    store.compact()
    with HistoryStore.open(s3.url, mode="a", **s3.options) as later:
        assert later.append(events((1, 3, 3)), "a") == 1
        assert items(later, 1) == [1]


def test_appends_of_several_threads_share_objects(
    store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, begun, go = Objects.put, threading.Event(), threading.Event()

    def slow(self: Objects, name: str, *rest: Any) -> str:
        begun.set()
        assert go.wait(20)
        return put(self, name, *rest)

    monkeypatch.setattr(Objects, "put", slow)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(store.append, events((0, 0, 0)))
        assert begun.wait(20)
        others = [pool.submit(store.append, events((user, 1, user)), str(user)) for user in range(1, 9)]
        while store._writer._group.waiting < 8:  # type: ignore[union-attr]
            pass
        go.set()
        assert first.result(20) == 1
        assert sorted(other.result(20) for other in others) == [*range(2, 10)]
    assert [name for name in names(s3) if name.startswith("log/")] == [f"log/{1:020d}.log", f"log/{2:020d}.log"]
    with HistoryStore.open(s3.url, **s3.options) as reader:
        assert reader.version == 9
        assert [items(reader, user) for user in range(9)] == [[user] for user in range(9)]


# -- writers -----------------------------------------------------------------------------------------------------------


def test_who_opens_for_appending_takes_over(store: HistoryStore, s3: Any) -> None:
    store.append(events((1, 1, 1)))
    with HistoryStore.open(s3.url, mode="a", **s3.options) as later:
        with pytest.raises(WriterFenced, match="opened for appending elsewhere"):
            store.append(events((1, 2, 2)), "mine")
        with pytest.raises(StoreError):
            store.append(events((1, 3, 3)))
        # What the older one was about to append came after the newer one had read the log. It was not acknowledged; it
        # is there, once.
        assert later.append(events((1, 4, 4)), "its own") == 3
        assert later.append(events((1, 2, 2)), "mine") == 2
        assert items(later, 1) == [1, 2, 4]


def test_a_late_append_that_is_tried_again_is_one_append(store: HistoryStore, s3: Any) -> None:
    with HistoryStore.open(s3.url, mode="a", **s3.options) as later:
        with pytest.raises(WriterFenced):
            store.append(events((1, 2, 2)), "mine")
        assert later.append(events((1, 2, 2)), "mine") == 1
        assert later.append(events((1, 3, 3))) == 2
        assert items(later, 1) == [2, 3]


def test_a_fenced_writer_commits_nothing_after_a_compaction(store: HistoryStore, s3: Any) -> None:
    """The names of compacted log objects are free again, which must not let an old writer in."""
    with HistoryStore.open(s3.url, mode="a", **s3.options) as later:
        later.append(events((1, 1, 1)))
        later.append(events((1, 2, 2)))
        later.compact()
        with pytest.raises(WriterFenced):
            store.append(events((1, 3, 3)))
        assert later.append(events((1, 4, 4))) == 3
        assert items(later, 1) == [1, 2, 4]
        with HistoryStore.open(s3.url, **s3.options) as reader:
            assert items(reader, 1) == [1, 2, 4]
        later.compact()
        assert not [name for name in names(s3) if name.startswith("log/")]


def test_a_fenced_writer_neither_compacts_nor_removes(store: HistoryStore, s3: Any) -> None:
    store.append(events((1, 1, 1)))
    with HistoryStore.open(s3.url, mode="a", **s3.options) as later:
        later.append(events((1, 2, 2)))
        later.compact()
        before = names(s3)
        with pytest.raises(WriterFenced):
            store.compact()
        with pytest.raises(StoreError):
            store.drop_generations(1)
        assert set(before) <= set(names(s3))
        assert later.verify() and items(later, 1) == [1, 2]
        assert later.drop_generations(1) == []
        assert names(s3) == before


def test_a_takeover_during_a_compaction(store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(events((1, 1, 1)))
    upload, later = Objects.upload, []

    def overtaken(self: Objects, files: Any) -> None:
        upload(self, files)
        if not later:
            later.append(HistoryStore.open(s3.url, mode="a", **s3.options))

    monkeypatch.setattr(Objects, "upload", overtaken)
    with pytest.raises(WriterFenced):
        store.compact()
    with later[0] as new:
        assert new.generation == 0 and new.append(events((1, 2, 2))) == 2
        assert new.compact() == 1 and items(new, 1) == [1, 2]
        assert len({name.split("/")[1] for name in names(s3) if name.startswith("generations/")}) == 1


@pytest.mark.parametrize("done", [True, False])
def test_an_answer_that_is_lost(store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """Of a put that was done: no difference. Of one that was not, or may yet be: the writer stops."""
    put = Objects.put
    lost: list[str] = []

    def losing(self: Objects, name: str, *rest: Any) -> str:
        if name in lost:
            return put(self, name, *rest)
        lost.append(name)
        if done:
            put(self, name, *rest)
        raise Unanswered(f"{name}: no answer")

    store.append(events((1, 1, 1)))
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put", losing)
        if done:
            assert store.append(events((1, 2, 2)), "a") == 2
            assert store.compact() == 1
            assert set(lost) == {f"log/{2:020d}.log", "manifest.json"}
        else:
            with pytest.raises(StoreError, match="unknown"):
                store.append(events((1, 2, 2)), "a")
            with pytest.raises(StoreError, match="reopen"):
                store.append(events((1, 9, 9)))
    with HistoryStore.open(s3.url, mode="a", **s3.options) as again:
        assert again.append(events((1, 2, 2)), "a") == 2
        assert items(again, 1) == [1, 2]


def test_a_manifest_of_unknown_fate(store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(events((1, 1, 1)))
    put = Objects.put
    with monkeypatch.context() as patch:
        late: list[tuple[Any, ...]] = []

        def losing(self: Objects, name: str, *rest: Any) -> str:
            if name != "manifest.json":
                return put(self, name, *rest)
            late.append((self, name, *rest))
            raise Unanswered("no answer")

        patch.setattr(Objects, "put", losing)
        with pytest.raises(StoreError, match="unknown"):
            store.compact()
    put(*late[0])  # it was under way
    with HistoryStore.open(s3.url, mode="a", **s3.options) as again:
        assert again.generation == 1 and items(again, 1) == [1]
        assert again.verify()


@pytest.mark.parametrize("refused", ["log", "generations"])
def test_what_is_refused_changes_nothing(
    store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch, refused: str,
) -> None:
    store.append(events((1, 1, 1)))
    before = names(s3)
    with monkeypatch.context() as patch:
        def deny(*_: Any) -> None:
            raise PermissionError("denied")

        patch.setattr(Objects, "put" if refused == "log" else "upload", deny)
        with pytest.raises(PermissionError):
            _ = store.append(events((1, 2, 2))) if refused == "log" else store.compact()
    assert names(s3) == before
    assert store.append(events((1, 2, 2))) == 2 and store.compact() == 1
    assert items(store, 1) == [1, 2]


def test_leftovers_are_removed_by_the_next_writer(
    store: HistoryStore, s3: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.append(events((1, 1, 1)))
    upload = Objects.upload

    def killed(self: Objects, files: Any) -> None:
        upload(self, dict([*files.items()][:3]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "upload", killed)
        with pytest.raises(KeyboardInterrupt):
            store.compact()
    assert [name for name in names(s3) if name.startswith("generations/")]
    with HistoryStore.open(s3.url, mode="a", **s3.options) as again:
        assert not [name for name in names(s3) if name.startswith("generations/")]
        assert items(again, 1) == [1]


# -- readers -----------------------------------------------------------------------------------------------------------


def test_readers_during_compactions(store: HistoryStore, s3: Any) -> None:
    store.append(many(3_000, 20))
    expected = [store.read(store.point(np.arange(20), 10**8 * k), Projection(("item_id", "action"), last=30))
                for k in range(1, 11)]
    pointers = [store.point(np.arange(20), 10**8 * k) for k in range(1, 11)]
    stop, failed = threading.Event(), []

    def read() -> None:
        try:
            with HistoryStore.open(s3.url, **{**s3.options, "cache_bytes": 10_000}) as reader:
                while not stop.is_set():
                    for pointer, want in zip(pointers, expected, strict=True):
                        got = reader.read(pointer, Projection(("item_id", "action"), last=30))
                        assert (got.columns["item_id"] == want.columns["item_id"]).all()
                        assert (got.columns["action"] == want.columns["action"]).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(4):
        store.append(many(50, 20, seed=step + 1))
        store.compact()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failed and store.drop_generations(1) == []


@pytest.mark.parametrize("codec", ["packed", "plain", "cold"])
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("cache_bytes", [20_000, 1 << 30])
def test_parts_of_files_answer_like_whole_ones(
    tmp_path: Path, in_memory: None, monkeypatch: pytest.MonkeyPatch, codec: Any, strings: bool, cache_bytes: int,
) -> None:
    """Blocks so small that most of every file stays where it is: what is not fetched reads as zeros, so a row that was
    forgotten would show."""
    # first: it imports the other when it is imported
    monkeypatch.setattr("semel.history.storage.block_cache.BLOCK_BYTES", 32)
    monkeypatch.setattr("semel.history.generation.array_files.BLOCK_BYTES", 32)
    monkeypatch.setattr("semel.history.storage.block_cache.AT_ONCE", 100)
    monkeypatch.setattr("semel.history.generation.array_files.SHRINKS", 9)
    random = np.random.default_rng(1)
    rows = 30_000

    def users(numbers: np.ndarray) -> Any:
        return np.array([f"user {n}" for n in numbers], object) if strings else numbers

    schema = EventSchema({**SCHEMA.columns, "vector": pa.list_(pa.float32(), 3)},
                         pa.string() if strings else pa.int64(), group="action")
    local = HistoryStore.create(tmp_path / "local", schema, shards=2)
    remote = HistoryStore.create("memory:///store", schema, shards=2, cache_folder=tmp_path / "cache")
    for part in range(3):
        number = random.integers(0, 8, rows)
        table = pa.table({
            "user_id": users(number), "event_time": random.integers(10**15, 10**15 + 10**9, rows),
            "item_id": random.integers(1, 10**12, rows),
            "action": pa.array(random.choice(["click", "like", "buy"], rows), mask=random.random(rows) < 0.1),
            "vector": pa.FixedSizeListArray.from_arrays(random.random(3 * rows, np.float32), 3),
        })
        for store in (local, remote):
            store.append(table if part else table.slice(0, 3_000))
            if part < 2:
                store.compact(codec=codec)
    with HistoryStore.open("memory:///store", cache_folder=tmp_path / "cache", cache_bytes=cache_bytes) as reader:
        for step in range(60):
            size = int(random.choice([1, 5, 40]))
            compacted = step % 3 < 2
            pointers = Pointers(users(random.integers(0, 9, size)), random.choice(
                [10**15, 10**15 + 10**8, 10**15 + 5 * 10**8, 10**15 + 999_000_000, EVER], size),
                random.integers(0, 3 if compacted else 4, size))
            projection = Projection(
                tuple(random.permutation(["item_id", "action", "vector", "event_time", "version"])[: 1 + step % 4]),
                last=[None, 1, 30, 500][int(random.integers(0, 4))],
                groups=[None, None, ("like",), ("like", "never")][int(random.integers(0, 4))],
                since=[None, None, 10**15 + 2 * 10**8, 10**15 + 6 * 10**8][int(random.integers(0, 4))])
            ours = reader.read(pointers, projection, require_compacted=compacted)
            theirs = local.read(pointers, projection, require_compacted=compacted)
            assert ours.offsets.tolist() == theirs.offsets.tolist()
            assert ours.status.tolist() == theirs.status.tolist()
            for name, column in theirs.columns.items():
                np.testing.assert_array_equal(ours.columns[name], column)
                assert ((ours.validity or {}).get(name) is None) == ((theirs.validity or {}).get(name) is None)
                if name in (theirs.validity or {}):
                    np.testing.assert_array_equal(ours.validity[name], theirs.validity[name])
            assert reader.lengths(pointers, projection)[0].tolist() == local.lengths(pointers, projection)[0].tolist()
        if cache_bytes > 20_000:
            assert reader.stats()["cache"]["fetched"] < 2 * reader.stats()["bytes"]["generation"]
    local.close()
    remote.close()


def one_long_history(s3: Any, codec: Any = "packed") -> HistoryStore:
    """40 users of 60,000 events."""
    store = HistoryStore.create(s3.url, SCHEMA, shards=1, **s3.options)
    for part in range(4):
        time = np.arange(15_000 * part, 15_000 * (part + 1)) * 1_000_003
        random = np.random.default_rng(part)
        store.append(pa.table({
            "user_id": np.repeat(np.arange(40), 15_000), "event_time": np.tile(time, 40),
            "item_id": random.integers(0, 10**6, 600_000),
            "action": pa.array(random.choice(["click", "like"], 600_000), mask=random.random(600_000) < 0.1),
        }))
    store.compact(codec=codec)
    return store


@pytest.mark.timeout(240)
@pytest.mark.parametrize("codec", ["packed", "plain", "cold"])
def test_a_short_read_of_a_long_history_fetches_little(s3: Any, codec: Any) -> None:
    with one_long_history(s3, codec) as store:
        total = store.stats()["bytes"]["generation"]
        with HistoryStore.open(s3.url, **s3.options) as reader:
            opened = reader.stats()["cache"]["fetched"]
            last = reader.read(reader.point([7], EVER), Projection(("item_id", "action"), last=100))
            first = reader.stats()["cache"]["fetched"] - opened
            # two files and the times, each: header, the directory of its blocks, and one or two of 64 KiB
            assert first < 900_000 and first < total / 7
            assert last.columns["item_id"].tolist() == items(store, 7)[-100:]
            again = reader.read(reader.point([7], EVER), Projection(("item_id", "action"), last=100))
            assert reader.stats()["cache"]["fetched"] == opened + first
            assert (again.columns["item_id"] == last.columns["item_id"]).all()
            middle = 30_000 * 1_000_003
            some = reader.read(reader.point([11], middle), Projection(("item_id",), last=100, groups=("like",)))
            want = store.read(store.point([11], middle), Projection(("item_id",), last=100, groups=("like",)))
            assert some.columns["item_id"].tolist() == want.columns["item_id"].tolist()
            lengths, _ = reader.lengths(reader.point([11, 12, 77], middle), ITEMS)
            assert lengths.tolist() == [30_000, 30_000, 0]
            assert reader.stats()["cache"]["fetched"] < total / 3


def test_a_cache_that_is_smaller_than_what_is_read(s3: Any) -> None:
    with HistoryStore.create(s3.url, SCHEMA, shards=4, **s3.options) as store:
        store.append(many(40_000, 100))
        store.compact()
        store.append(many(2_000, 100, seed=1))
        random = np.random.default_rng(0)
        pointers = Pointers(random.integers(0, 110, 300), random.integers(0, 10**9, 300), random.integers(0, 3, 300))
        with HistoryStore.open(s3.url, **{**s3.options, "cache_bytes": 1}) as reader:
            for projection in (ITEMS, Projection(("action", "item_id", "version"), last=7, groups=("like",))):
                ours, theirs = reader.read(pointers, projection), store.read(pointers, projection)
                assert ours.offsets.tolist() == theirs.offsets.tolist()
                for name, column in ours.columns.items():
                    assert (column == theirs.columns[name]).all()
            assert len(list((s3.options["cache_folder"]).glob("handle-*/[0-9]*"))) >= 1
            assert reader._storage.cache.bytes < 200_000  # type: ignore[attr-defined]
            with ThreadPoolExecutor(4) as pool:
                for got in pool.map(lambda _: reader.read(pointers, ITEMS), range(8)):
                    assert (got.columns["item_id"] == store.read(pointers, ITEMS).columns["item_id"]).all()


def test_the_cache_goes_with_its_handle(store: HistoryStore, s3: Any) -> None:
    folder: Path = s3.options["cache_folder"]
    store.append(many(100, 5))
    store.compact()
    items(store, 1)
    killed, alive = folder / "handle-killed", folder / "handle-alive"
    for left in (killed, alive):
        left.mkdir()
        (left / "lock").touch()
        (left / "0").touch()
    handle = os.open(alive / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with HistoryStore.open(s3.url, **s3.options) as reader:
        items(reader, 1)
        assert not killed.exists() and (alive / "0").exists()
        assert len(list(folder.glob("handle-*"))) == 3
    store.close()
    os.close(handle)
    assert list(folder.glob("handle-*")) == [alive]


def test_a_forked_process_says_that_it_cannot(store: HistoryStore, s3: Any) -> None:
    child = os.fork()
    if not child:
        try:
            HistoryStore.open(s3.url, **s3.options)
        except StoreError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# -- damage ------------------------------------------------------------------------------------------------------------


def damage(s3: Any, name: str, at: int | None, keep: int | None = None) -> None:
    """Flip a bit of an object, or cut it."""
    objects = s3.objects()
    content = bytearray(objects.get(name)[0])
    if at is not None:
        content[at] ^= 1
    objects.delete([name])
    objects.put(name, bytes(content[:keep]))


@pytest.mark.parametrize("kind", ["manifest", "log", "json", "users", "times", "column", "short", "gone"])
def test_damage_is_named_and_never_read(store: HistoryStore, s3: Any, kind: str) -> None:
    store.append(many(20_000, 5))
    store.compact()
    store.append(many(10, 5))
    folder = next(name for name in names(s3) if name.endswith("generation.json")).rsplit("/", 1)[0]
    name = {
        "manifest": "manifest.json", "log": f"log/{2:020d}.log", "json": f"{folder}/generation.json",
        "users": f"{folder}/shard-0000/users", "times": f"{folder}/shard-0000/event_time",
    }.get(kind, f"{folder}/shard-0000/column-000")
    store.close()
    size = len(s3.objects().get(name)[0])
    if kind == "gone":
        s3.objects().delete([name])
    else:
        damage(s3, name, None if kind == "short" else size // 2, size - 9 if kind == "short" else None)

    def read() -> None:
        with HistoryStore.open(s3.url, **s3.options) as reader:
            reader.read(reader.point(np.arange(5), EVER), Projection(("item_id", "action")))

    def verify() -> None:
        with HistoryStore.open(s3.url, **s3.options) as reader:
            reader.verify()

    for look in (read, verify):
        with pytest.raises(CorruptFile, match=f"{s3.url}/{name}"):
            look()


@pytest.mark.parametrize("codec", ["packed", "plain", "cold"])
def test_times_are_right_when_the_cache_lets_go_of_them(in_memory: None, tmp_path: Path, codec: Any) -> None:
    """A read maps a file anew that the cache has let go of since the read looked into it first."""
    schema = EventSchema({"item_id": pa.int64()})
    random = np.random.default_rng(0)
    count = 200_000
    with HistoryStore.create("memory:///small", schema, shards=4, cache_folder=tmp_path / "a") as store:
        store.append(pa.table({"user_id": random.integers(0, 200, count),
                               "event_time": random.integers(1, 10**12, count),
                               "item_id": random.integers(0, 10**6, count)}))
        store.compact(codec=codec)
        with HistoryStore.open("memory:///small", cache_folder=tmp_path / "b", cache_bytes=100_000) as small:
            for seed in range(6):
                random = np.random.default_rng(seed)
                as_of = np.where(random.random(30) < 0.5, 10**13, random.integers(0, 10**12, 30))
                pointers = store.point(random.integers(0, 200, 30), as_of)
                want, got = (handle.read(pointers, Projection(("item_id", "event_time"), last=500))
                             for handle in (store, small))
                assert all(np.array_equal(got.columns[name], want.columns[name]) for name in want.columns)


def late_put(store: HistoryStore, name: str, user: int) -> None:
    """What a fenced writer had under way arrives after all."""
    from semel.history.log.segments import encode_object

    batch = pa.record_batch({"user_id": [user], "event_time": [1], "i": [user]})
    store._storage.objects.put(name, encode_object(batch, {"version": int(name[4:24]), "writer": "old"}))


def one(user: int) -> pa.Table:
    return pa.table({"user_id": [user], "event_time": [1], "i": [user]})


@pytest.mark.parametrize("compacts", [False, True])
def test_an_owner_gets_past_a_late_put(in_memory: None, tmp_path: Path, compacts: bool) -> None:
    from semel.history.storage.object_storage import log_name

    url = f"memory:///late{compacts}"
    HistoryStore.create(url, EventSchema({"i": pa.int64()}), shards=2, cache_folder=tmp_path).close()
    with HistoryStore.open(url, "a", cache_folder=tmp_path) as store:
        store.append(one(1))
        if compacts:
            store.compact()
        late_put(store, log_name(store.version + 1), 9)
        assert store.append(one(2)) == 3 and store.append(one(3)) == 4
        assert store.keys().tolist() == [1, 2, 3, 9]


def test_no_append_of_a_group_is_written_twice(in_memory: None, tmp_path: Path, monkeypatch: Any) -> None:
    """A group is refused, then put one by one; before the second of them a late put takes its name."""
    from semel.history.storage import object_storage

    HistoryStore.create("memory:///twice", EventSchema({"i": pa.int64()}), shards=2, cache_folder=tmp_path).close()
    real, calls, go = object_storage._put, [], threading.Event()

    def put(objects: Objects, name: str, content: bytes, replacing: Any = None) -> Any:
        calls.append(name)
        if len(calls) == 1:
            assert go.wait(20)  # meanwhile the others gather
        if len(calls) == 2:
            raise OSError(5, "refused")
        if len(calls) == 4:
            late_put(store, name, 9)
        return real(objects, name, content, replacing)

    with HistoryStore.open("memory:///twice", "a", cache_folder=tmp_path) as store:
        monkeypatch.setattr(object_storage, "_put", put)
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(store.append, one(1))
            while not calls:
                threading.Event().wait(0.01)
            others = [pool.submit(store.append, one(user)) for user in (2, 3)]
            while len(store._writer._group._waiting) < 2:  # type: ignore[union-attr]
                threading.Event().wait(0.01)
            go.set()
            versions = {first.result(20), *(each.result(20) for each in others)}
        assert len(versions) == 3
        assert store.read(store.point([1, 2, 3, 9], 10), Projection(("i",))).lengths.tolist() == [1, 1, 1, 1]

"""The store's surface: what it accepts, what it refuses, and in which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import (
    EventSchema,
    HistoryStore,
    Pointers,
    Projection,
    Status,
    StoreError,
    StoreExists,
    StoreLocked,
    StoreNotFound,
    VersionNotVisible,
)
from semel.history.reading import histories

SCHEMA = EventSchema({"item_id": pa.int64(), "action": pa.dictionary(pa.int8(), pa.string())}, group="action")
ITEMS = Projection(("item_id",))


def events(*rows: tuple[Any, int, int], action: str | None = "click", key: str = "user_id") -> pa.Table:
    """(user, event_time, item) rows."""
    users = [row[0] for row in rows]
    return pa.table({
        key: pa.array(users, pa.string() if users and isinstance(users[0], str) else pa.int64()),
        "event_time": pa.array([row[1] for row in rows], pa.int64()),
        "item_id": pa.array([row[2] for row in rows], pa.int64()),
        "action": pa.array([action] * len(rows), pa.string()),
    })


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "store", SCHEMA, shards=4) as store:
        yield store


def items(store: HistoryStore, user: Any, as_of: int = 10**9, projection: Projection = ITEMS) -> list[int]:
    return store.read(store.point([user], as_of), projection).columns["item_id"].tolist()


def test_a_late_event_is_seen_by_later_pointers_only(store: HistoryStore) -> None:
    store.append(events((1, 10, 100), (1, 20, 200)))
    served = store.point([1], 21)
    store.append(events((1, 15, 150)))
    assert store.read(served, ITEMS).columns["item_id"].tolist() == [100, 200]
    assert items(store, 1, 21) == [100, 150, 200]
    store.compact()
    assert store.read(served, ITEMS).columns["item_id"].tolist() == [100, 200]
    assert items(store, 1, 21) == [100, 150, 200]
    assert items(store, 1, 20) == [100, 150]  # as_of itself is not seen


def test_ties_keep_version_then_position(store: HistoryStore) -> None:
    store.append(events((1, 5, 1), (1, 5, 2)))
    store.append(events((1, 5, 3), (1, 4, 0), (1, 5, 4)))
    assert items(store, 1) == [0, 1, 2, 3, 4]
    store.compact()
    store.append(events((1, 5, 5)))
    assert items(store, 1) == [0, 1, 2, 3, 4, 5]
    assert items(store, 1, projection=Projection(("item_id",), last=2)) == [4, 5]


def test_last_counts_after_groups_and_since(store: HistoryStore) -> None:
    store.append(events((1, 1, 1), (1, 2, 2), action="like"))
    store.append(events((1, 3, 3), (1, 4, 4), action="click"))
    store.append(events((1, 5, 5), action=None))
    for _ in range(2):
        assert items(store, 1, projection=Projection(("item_id",), last=1, groups=("like",))) == [2]
        assert items(store, 1, projection=Projection(("item_id",), groups=("click", "like"), since=2)) == [2, 3, 4]
        assert items(store, 1, projection=Projection(("item_id",), groups=("unheard",))) == []
        assert items(store, 1, projection=Projection(("item_id",), groups=())) == []
        store.compact()


def test_unknown_users_are_empty_and_say_so(store: HistoryStore) -> None:
    store.append(events((1, 10, 1)))
    before = store.point([2, 1], 100)
    store.append(events((2, 10, 2)))
    for _ in range(2):
        table = store.read(before, ITEMS)
        assert table.lengths.tolist() == [0, 1]
        assert table.status.tolist() == [Status.UNKNOWN_USER, Status.OK]  # as it was then
        assert store.read(store.point([2, 3], 5), ITEMS).status.tolist() == [Status.OK, Status.UNKNOWN_USER]
        store.compact()


def test_an_empty_store_and_no_pointers(store: HistoryStore) -> None:
    assert store.version == 0 and store.compact() == 0 and store.keys().tolist() == []
    assert items(store, 1) == []
    store.append(events((1, 1, 1)))
    for pointers in (store.point([], 5), store.point(np.empty(0, np.int64), np.empty(0, np.int64))):
        table = store.read(pointers, Projection(("item_id", "action", "event_time", "version")))
        assert len(table) == 0 and table.columns["item_id"].dtype == np.int64
    assert store.append(events()) == 1  # no rows, no version


def test_a_token_is_one_append(store: HistoryStore, tmp_path: Path) -> None:
    first = store.append(events((1, 1, 1)), token="a")
    assert store.append(events((1, 1, 1)), token="a") == first == store.version
    store.append(events((1, 2, 2)))
    store.compact()
    assert store.append(events((1, 1, 1)), token="a") == first
    store.close()
    with HistoryStore.open(tmp_path / "store", mode="a") as again:
        assert again.append(events((1, 1, 1)), token="a") == first
        assert items(again, 1) == [1, 2]


def test_readers_follow_and_never_shorten(store: HistoryStore, tmp_path: Path) -> None:
    reader = HistoryStore.open(tmp_path / "store")
    store.append(events((1, 1, 1)))
    pointers = store.point([1], 100)
    assert reader.version == 0
    assert reader.read(pointers, ITEMS).columns["item_id"].tolist() == [1]  # refreshed by itself
    for i in range(2, 6):
        store.append(events((1, i, i)))
        store.compact()
    assert reader.read(pointers, ITEMS).columns["item_id"].tolist() == [1]
    assert reader.refresh() == 5 and items(reader, 1) == [1, 2, 3, 4, 5]
    with pytest.raises(VersionNotVisible, match=r"version 6.*version 5"):
        reader.read(Pointers(np.array([1]), 100, np.array([6])), ITEMS)
    with pytest.raises(VersionNotVisible, match=r"version 6.*version 5"):
        store.read(Pointers(np.array([1]), 100, np.array([6])), ITEMS)


def test_a_read_refreshes_once_and_only_for_a_newer_pointer(
        store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.history.view.following import Follower

    reader, refreshes = HistoryStore.open(tmp_path / "store"), []
    refresh = Follower.refresh
    monkeypatch.setattr(Follower, "refresh", lambda self: (refreshes.append(1), refresh(self)))
    store.append(events((1, 1, 1)))
    for expected in (1, 1):
        assert reader.read(Pointers(np.array([1]), 9, np.array([1])), ITEMS).columns["item_id"].tolist() == [1]
        assert len(refreshes) == expected
    for expected in (2, 3):
        with pytest.raises(VersionNotVisible):
            reader.read(Pointers(np.array([1]), 9, np.array([2])), ITEMS)
        assert len(refreshes) == expected


def test_a_reader_whose_generation_is_gone_reads_the_next(store: HistoryStore, tmp_path: Path) -> None:
    store.append(events((1, 1, 1), (2, 1, 2)))
    store.compact()
    reader = HistoryStore.open(tmp_path / "store")  # has mapped nothing yet
    store.append(events((1, 2, 3)))
    store.compact()
    assert reader.generation == 1
    assert items(reader, 1) == [1] or reader.generation == 2
    assert reader.read(Pointers(np.array([1]), 9, np.array([1])), ITEMS).columns["item_id"].tolist() == [1]
    assert reader.keys().tolist() == [1, 2]


def test_one_appending_process(store: HistoryStore, tmp_path: Path) -> None:
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        HistoryStore.open(tmp_path / "store", mode="a")
    code = ("import sys; from semel.history import HistoryStore, StoreLocked\n"
            "try: HistoryStore.open(sys.argv[1], mode='a')\n"
            "except StoreLocked as error: print(error)")
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True,
                         timeout=60, check=True)
    assert f"process {os.getpid()}" in out.stdout
    store.close()
    HistoryStore.open(tmp_path / "store", mode="a").close()


def test_reading_handles_do_not_write(store: HistoryStore, tmp_path: Path) -> None:
    reader = HistoryStore.open(tmp_path / "store")
    with pytest.raises(StoreError, match='mode="a" to append'):
        reader.append(events((1, 1, 1)))
    with pytest.raises(StoreError, match='mode="a" to compact'):
        reader.compact()


def test_a_closed_handle_says_so(store: HistoryStore) -> None:
    store.append(events((1, 1, 1)))
    pointers = store.point([1], 5)
    store.close()
    store.close()
    for use in (lambda: store.read(pointers, ITEMS), lambda: store.append(events((1, 1, 1))), store.refresh,
                store.compact, store.verify, store.stats, store.keys):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_opening_what_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="does not exist"):
        HistoryStore.open(tmp_path / "none")
    (tmp_path / "other").mkdir()
    for mode in ("r", "a"):
        with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
            HistoryStore.open(tmp_path / "other", mode)
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreNotFound):
        HistoryStore.open(tmp_path / "file")
    with pytest.raises(ValueError, match="nowhere://"):
        HistoryStore.open("nowhere://bucket/store")
    with pytest.raises(ValueError, match="storage_options"):
        HistoryStore.open(tmp_path / "other", storage_options={"region": "eu-north-1"})
    with pytest.raises(ValueError, match="mode"):
        HistoryStore.open(tmp_path, "w")


def test_creating_where_a_store_is(store: HistoryStore, tmp_path: Path) -> None:
    with pytest.raises(StoreExists, match="already"):
        HistoryStore.create(tmp_path / "store", SCHEMA)
    with pytest.raises(ValueError, match="shards"):
        HistoryStore.create(tmp_path / "new", SCHEMA, shards=0)
    with pytest.raises(ValueError, match="EventSchema"):
        HistoryStore.create(tmp_path / "new", {"item_id": pa.int64()})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_stores_and_other_folders_live_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "store" / "exposures").mkdir(parents=True)
    with HistoryStore.create((tmp_path / "store").as_uri(), SCHEMA, shards=1) as store:
        with HistoryStore.create(tmp_path / "store" / "catalogue", EventSchema({}, key="item_id"), 1) as catalogue:
            catalogue.append(pa.table({"item_id": [7], "event_time": [1]}))
        store.append(events((1, 1, 1)))
        store.compact()
        store.verify()
    assert (tmp_path / "store" / "exposures").exists()


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.drop_columns(["item_id"]), r"missing \['item_id'\]"),
    (lambda t: t.append_column("more", pa.array([1, 2])), r"unknown \['more'\]"),
    (lambda t: t.set_column(2, "item_id", pa.array([1, 2], pa.int32())), "'item_id' has type int32.*int64.*cast"),
    (lambda t: t.set_column(0, "user_id", pa.array(["a", "b"])), "'user_id' has type string"),
    (lambda t: t.set_column(0, "user_id", pa.array([1, None])), "'user_id' has 1 nulls"),
    (lambda t: t.set_column(1, "event_time", pa.array([1, None])), "'event_time' has 1 nulls"),
    (lambda t: t.set_column(1, "event_time", pa.array([1, -5])), "event_time -5 in row 1 is negative"),
    (lambda t: t.set_column(1, "event_time", pa.array([1.0, 2.0])), "'event_time' has type double"),
    (lambda t: t.append_column("item_id", pa.array([1, 2])), "each once"),
    (lambda t: t.to_pylist(), "append takes an Arrow table"),
])
def test_rows_that_do_not_fit_change_nothing(store: HistoryStore, tmp_path: Path, change: Any, words: str) -> None:
    store.append(events((1, 1, 1)))
    size = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*") if file.is_file())
    with pytest.raises(ValueError, match=words):
        store.append(change(events((1, 1, 1), (2, 2, 2))))
    assert store.version == 1
    assert size == sum(file.stat().st_size for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert store.append(events((1, 2, 2))) == 2


@pytest.mark.parametrize(("use", "match"), [
    (lambda store: store.point([2**64], 9), "user_id: 18446744073709551616 does not fit int64"),
    (lambda store: store.point([-2**63 - 1], 9), "does not fit int64"),
    (lambda store: store.point([1], 2**63), "as_of: 9223372036854775808 does not fit int64"),  # not a negative one
    (lambda store: store.point(["a"], 9), r"integers in this store, got strings \('a'"),
    (lambda store: Projection(None), "columns must be a sequence"),  # type: ignore[arg-type]
    (lambda store: Projection(("item_id",), since="1d"), "since must be microseconds"),  # type: ignore[arg-type]
    (lambda store: Projection(("item_id",), since=2**63), "since must be microseconds"),
    (lambda store: Projection(("item_id",), last="3"), "last must be at least 1"),  # type: ignore[arg-type]
    (lambda store: Projection(("item_id",), last=float("nan")), "last must be at least 1"),  # type: ignore[arg-type]
    (lambda store: store.read(store.point([1], 9), ("item_id",)), "takes Pointers .* got Pointers and tuple"),
    (lambda store: store.lengths(([1], [9], [1]), ITEMS), "takes Pointers .* got tuple and Projection"),
])
def test_what_is_no_pointer_or_projection(store: HistoryStore, use: Any, match: str) -> None:
    store.append(events((1, 1, 5)))
    with pytest.raises(ValueError, match=match):
        use(store)


def test_numbers_at_the_ends_of_their_range(store: HistoryStore) -> None:
    users = [2**63 - 1, -2**63, 0]
    store.append(events(*((user, time, time) for user in users for time in (0, 2**63 - 2))))
    for _ in range(2):
        for user in users:
            for last in (2**61, 2**63 - 1, 2**70):
                assert items(store, user, 2**63 - 1, Projection(("item_id",), last=last)) == [0, 2**63 - 2]
            assert items(store, user, 2**63 - 1, Projection(("item_id",), since=2**63 - 1)) == []
            assert items(store, user, 0) == items(store, user, -2**63) == []
            assert items(store, user, 1, Projection(("item_id",), since=-2**63 + 1)) == [0]
        store.compact()


def test_what_is_not_the_stores_stays(tmp_path: Path) -> None:
    path = tmp_path / "store"
    HistoryStore.create(path, SCHEMA, shards=2).close()
    foreign = [path / "notes.txt", path / "log" / "mine.log", path / "generations" / "mine" / "file",
               path / "generations" / "7" / "file", path / "generations" / ".mine"]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    with HistoryStore.open(path, mode="a") as store:
        for item in range(3):
            store.append(events((1, item, item)))
            store.compact()
        store.drop_generations(keep=1)
        store.verify()
    assert all(file.read_text() == "x" for file in foreign)
    with pytest.raises(StoreExists, match="is a file"):
        HistoryStore.create(path / "notes.txt", SCHEMA)


def test_projections_that_name_what_is_not_there(store: HistoryStore) -> None:
    with pytest.raises(ValueError, match="'price'; the store has item_id, action, event_time, version"):
        store.read(store.point([1], 1), Projection(("price",)))
    with pytest.raises(ValueError, match="at least 1"):
        Projection(("item_id",), last=0)
    with pytest.raises(ValueError, match="string"):
        Projection("item_id")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are strings"):
        store.read(store.point([1], 1), Projection(("item_id",), groups=(1,)))
    with pytest.raises(ValueError, match="user_ids are integers"):
        store.point(["a"], 1)


@pytest.mark.parametrize("bad", [
    {"x": pa.list_(pa.int64())}, {"x": pa.struct([("y", pa.int64())])}, {"event_time": pa.int64()},
    {"version": pa.int64()}, {"user_id": pa.int64()}, {"": pa.int64()}, {"x": pa.list_(pa.string(), 2)},
])
def test_schemas_that_cannot_be_kept(bad: dict[str, pa.DataType]) -> None:
    with pytest.raises(ValueError):
        EventSchema(bad)


def test_keys_and_groups_that_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="int64 or string"):
        EventSchema({}, user_id=pa.int32())
    with pytest.raises(ValueError, match="group column"):
        EventSchema({"x": pa.int64()}, group="y")
    with pytest.raises(ValueError, match="strings or integers"):
        EventSchema({"x": pa.float32()}, group="x")


def test_integer_groups_and_nulls(tmp_path: Path) -> None:
    schema = EventSchema({"kind": pa.int8()}, group="kind")
    with HistoryStore.create(tmp_path / "s", schema, shards=1) as store:
        store.append(pa.table({"user_id": [1] * 4, "event_time": [1, 2, 3, 4],
                               "kind": pa.array([0, 1, None, 0], pa.int8())}))
        for _ in range(2):
            table = store.read(store.point([1], 9), Projection(("event_time", "kind"), groups=(0,)))
            assert table.columns["event_time"].tolist() == [1, 4] and table.validity is None
            both = store.read(store.point([1], 9), Projection(("kind",)))
            assert both.validity is not None and both.validity["kind"].tolist() == [True, True, False, True]
            store.compact()


def test_what_append_takes(tmp_path: Path) -> None:
    class Stream:  # what polars, duckdb and others offer
        def __init__(self, table: pa.Table) -> None:
            self.table = table

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return self.table.__arrow_c_stream__(requested_schema)

    table = events(("u\u00e9", 1, 1), ("\u4f60", 2, 2))
    schema = EventSchema(SCHEMA.columns, pa.string())
    with HistoryStore.create(tmp_path / "s", schema, shards=2) as store:
        store.append(table)
        store.append(table.to_batches()[0])
        store.append(Stream(table))
        store.append(pa.table({name: table.column(name) for name in reversed(table.column_names)}))
        wide = table.set_column(0, "user_id", table.column(0).cast(pa.large_string()))
        store.append(wide.set_column(1, "event_time", table.column(1).cast(pa.timestamp("us"))))
        store.append(table.set_column(3, "action", table.column(3).dictionary_encode()))
        for _ in range(2):
            assert items(store, "\u4f60") == [2] * 6
            assert store.keys().tolist() == ["u\u00e9", "\u4f60"]
            got = store.read(store.point(["u\u00e9", ""], 9), Projection(("action",)))
            assert got.strings("action").tolist() == ["click"] * 6 and got.lengths.tolist() == [6, 0]
            store.compact()


def test_codes_never_change_their_meaning(store: HistoryStore, tmp_path: Path) -> None:
    projection = Projection(("action",))
    for i, action in enumerate(["b", "a", "c", "a"]):
        store.append(events((1, i, i), action=action))
        if i == 1:
            store.compact()
    for handle in (store, HistoryStore.open(tmp_path / "store")):
        table = handle.read(handle.point([1], 99), projection)
        assert table.columns["action"].tolist() == [0, 1, 2, 1]
        assert table.dictionaries is not None and table.dictionaries["action"].tolist() == ["b", "a", "c"]


def test_lists_that_hold_nulls_are_refused(tmp_path: Path) -> None:
    schema = EventSchema({"v": pa.list_(pa.float32(), 2)})
    with HistoryStore.create(tmp_path / "s", schema, shards=1) as store:
        kind = pa.list_(pa.float32(), 2)
        table = pa.table({"user_id": [1, 1], "event_time": [1, 2], "v": pa.array([[1, 2], [3, None]], kind)})
        with pytest.raises(ValueError, match="a list holds a null"):
            store.append(table)
        assert store.version == 0
        store.append(table.set_column(2, "v", pa.array([None, [3, 4]], kind)))
        got = store.read(store.point([1], 9), Projection(("v",)))
        assert got.columns["v"].tolist() == [[0, 0], [3, 4]] and got.validity is not None


def test_stats_and_verify(store: HistoryStore) -> None:
    store.append(events((1, 1, 1), (2, 1, 1)))
    store.compact()
    store.append(events((1, 2, 1), (3, 1, 1)))
    stats = store.stats()
    assert stats["events"] == {"generation": 2, "log": 2, "total": 4} and stats["users"] == 3
    assert stats["version"] == 2 and stats["generation"] == 1 and stats["shards"] == 4
    assert store.event_count == 4 and store.uncompacted == 2
    assert stats["bytes"]["total"] == stats["bytes"]["generation"] + stats["bytes"]["log"] > 0
    assert store.verify()["files"] > 10


@pytest.mark.parametrize("strings", [False, True])
def test_users_are_counted_like_they_are_listed(
    tmp_path: Path, strings: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without listing them, unless something was deleted since or the view is frozen."""
    def some(*numbers: int) -> pa.Table:
        users = [f"u{n}" for n in numbers] if strings else numbers
        return pa.table({"user_id": users, "event_time": numbers, "item_id": numbers})

    listed: list[int] = []
    keys = histories.keys
    monkeypatch.setattr(histories, "keys", lambda view: listed.append(1) or keys(view))
    schema = EventSchema({"item_id": pa.int64()}, pa.string() if strings else pa.int64())
    with HistoryStore.create(tmp_path / "s", schema, shards=3) as store:
        assert store.stats()["users"] == store.uncompacted == 0
        for step, numbers in enumerate([(1, 2, 3, 2), (2, 4), (5, 6, 4), (7,)]):
            store.append(some(*numbers))
            assert store.stats()["users"] == max(numbers) and not listed
            if step == 1:
                store.read(store.point(["u1"] if strings else [1], 9), ITEMS)  # loads the log
            if step == 2:
                store.compact()
                assert store.stats()["users"] == 6 and store.uncompacted == 0 and not listed
        assert store.event_count == 10 and store.uncompacted == 1
        frozen = HistoryStore.open(tmp_path / "s", at_version=2)
        assert frozen.stats()["users"] == 4
        store.delete(user_ids=["u1"] if strings else [1])
        assert store.stats()["users"] == 6 == len(store.keys())
        frozen.close()


def test_lengths_are_those_of_read(store: HistoryStore) -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        rows = random.integers(0, 20, (200, 3))
        store.append(events(*map(tuple, rows.tolist())))
        store.compact()
    store.append(events((1, 3, 4), (2, 7, 8)))
    users = np.arange(25)
    for projection in (ITEMS, Projection(("item_id",), last=5, since=3), Projection((), groups=("click",))):
        pointers = Pointers(users, random.integers(0, 25, 25), random.integers(0, 5, 25))
        lengths, exact = store.lengths(pointers, projection)
        assert (lengths == store.read(pointers, projection).lengths).all() and exact.all()


def test_a_long_history_among_short_ones(store: HistoryStore) -> None:
    times = np.arange(65_536)[::-1].copy()
    store.append(pa.table({"user_id": np.ones(65_536, np.int64), "event_time": times, "item_id": times,
                           "action": pa.array(["click"] * 65_536)}))
    for _ in range(2):
        assert items(store, 1, 10**9) == list(range(65_536))
        assert items(store, 1, 1000, Projection(("item_id",), last=3)) == [997, 998, 999]
        store.compact()
        store.append(events((2, 1, 1)))


def test_many_small_appends_stay_in_order(store: HistoryStore) -> None:
    """More of them than the first runs of the tail's index hold."""
    random = np.random.default_rng(1)
    expected: dict[int, list[tuple[int, int]]] = {u: [] for u in range(5)}
    for i in range(60):
        rows = [(int(u), int(t), i * 100 + j)
                for j, (u, t) in enumerate(random.integers(0, [5, 50], (random.integers(1, 30), 2)))]
        store.append(events(*rows))
        for user, time, item in rows:
            expected[user].append((time, item))
        if i % 7 == 0:
            user = int(random.integers(0, 5))
            assert items(store, user) == [item for _, item in sorted(expected[user], key=lambda row: row[0])]
    for user, rows in expected.items():
        assert items(store, user) == [item for _, item in sorted(rows, key=lambda row: row[0])]


def test_the_import_needs_neither_torch_nor_numba() -> None:
    code = "import semel.history, sys; print([m for m in ('torch', 'numba', 'pandas') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_real_ratings(shared_data: Path, tmp_path: Path) -> None:
    import pyarrow.csv as csv

    ratings = csv.read_csv(shared_data / "ml-latest-small" / "ratings.csv")
    table = pa.table({"user_id": ratings["userId"], "item_id": ratings["movieId"],
                      "rating": ratings["rating"].cast(pa.float32()),
                      "event_time": pa.array(ratings["timestamp"].to_numpy() * 1_000_000)})
    schema = EventSchema({"item_id": pa.int64(), "rating": pa.float32()})
    with HistoryStore.create(tmp_path / "s", schema) as store:
        store.append(table)
        pointers = store.point(store.keys(), 2**62)
        before = store.read(pointers, Projection(("item_id", "rating", "event_time")))
        store.compact()
        after = store.read(pointers, Projection(("item_id", "rating", "event_time")))
        for name in before.columns:
            assert (before.columns[name] == after.columns[name]).all()
        order = np.lexsort((table["event_time"].to_numpy(), table["user_id"].to_numpy()))
        assert (after.columns["item_id"] == table["item_id"].to_numpy()[order]).all()
        assert len(after) == len(np.unique(table["user_id"].to_numpy()))


def test_formats_of_another_time_are_refused(store: HistoryStore, tmp_path: Path) -> None:
    import json

    from semel.history.durable import dump_json

    store.append(events((1, 1, 1)))
    store.close()
    manifest = tmp_path / "store" / "manifest.json"
    original = manifest.read_bytes()
    body = json.loads(original)
    del body["checksum"]
    for change, words in (({"format": 2}, "format 2.*reads format 1"), ({"hash": "murmur3"}, "murmur3"),
                          ({"magic": "other"}, "does not belong to a history store")):
        manifest.write_bytes(dump_json({**body, **change}))
        for mode in ("r", "a"):
            with pytest.raises(StoreError, match=words):
                HistoryStore.open(tmp_path / "store", mode)
    manifest.write_bytes(original)
    segment = tmp_path / "store" / "log" / "00000001.log"
    content = segment.read_bytes()
    segment.write_bytes(content[:8] + b"\x02" + content[9:])
    with pytest.raises(StoreError, match="log format 2, this Semel reads 1"):
        HistoryStore.open(tmp_path / "store")


def test_array_files_of_another_codec_are_refused(tmp_path: Path) -> None:
    import zlib

    from semel.history.generation.array_files import map_column, write_array

    entry = write_array(tmp_path / "a", np.arange(10))
    assert map_column(tmp_path / "a", entry, np.int64).tolist() == list(range(10))
    content = bytearray((tmp_path / "a").read_bytes())
    content[12] = 3
    seal = zlib.crc32(content[:60])
    content[60:64] = seal.to_bytes(4, "little")
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(StoreError, match="codec 3; this Semel reads format 1, codecs 0 to 2"):
        map_column(tmp_path / "a", {**entry, "seal": seal}, np.int64)


def test_array_files_of_several_blocks(tmp_path: Path) -> None:
    from semel.history import CorruptFile
    from semel.history.generation.array_files import BLOCK_BYTES, map_column, write_array

    array = np.random.default_rng(0).integers(0, 9, (700_000, 3), np.int8)
    entry = write_array(tmp_path / "a", array)
    assert (map_column(tmp_path / "a", entry, np.int8, (3,)) == array).all()
    content = bytearray((tmp_path / "a").read_bytes())
    content[64 + BLOCK_BYTES + 5] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CorruptFile, match="a: block 1 "):
        map_column(tmp_path / "a", entry, np.int8, (3,))


def test_the_documented_bytes() -> None:
    """``docs/formats/history.md`` in plain Python agrees with the compiled hash."""
    from semel.history.kernels.sharding import shards_of

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def fnv(text: str) -> int:
        h = 0xCBF29CE484222325
        for byte in text.encode():
            h = (h ^ byte) * 0x100000001B3 % 2**64
        return h

    ids = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    assert shards_of(np.array(ids), 13).tolist() == [mix(i % 2**64) % 13 for i in ids]
    texts = ["", "a", "\u00e4", "\U0001f3ac", "user-1"]
    assert shards_of([text.encode() for text in texts], 13).tolist() == [mix(fnv(text)) % 13 for text in texts]

"""Promise 1: a pointer's history depends on its user's events, its version and its as_of, and on nothing else; only
deletion and retention change it, with a status that says so."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from semel.batch import JaggedTable
from semel.history import EventSchema, HistoryStore, NotCompacted, Pointers, Projection, Status
from semel.history.generation.array_files import CODECS, Codec
from semel.history.reference import ReferenceStore
from semel.history.storage.block_cache import BlockCache

INTEGER_USERS = [0, 1, -7, 2**62, 5]
STRING_USERS = ["", "a", "aa", "\u00e4", "\U0001f3ac", "user-1"]
COLUMNS: dict[str, pa.DataType] = {
    "item_id": pa.int64(), "watch": pa.float32(), "like": pa.bool_(), "small": pa.uint8(), "half": pa.float16(),
    "action": pa.dictionary(pa.int8(), pa.string()), "surface": pa.string(), "when": pa.timestamp("ms", "UTC"),
    "vector": pa.list_(pa.float32(), 2),
}
TIMES = st.one_of(st.integers(0, 12), st.integers(0, 2**62))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "item_id": st.integers(-(2**63), 2**63 - 1), "watch": st.floats(width=32, allow_nan=False),
    "like": st.booleans(), "small": st.integers(0, 255), "half": st.floats(width=16, allow_nan=False),
    "action": st.sampled_from(["click", "like", "\u0444"]), "surface": st.text("ab\u00df", max_size=2),
    "when": st.integers(0, 2**40), "vector": st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
}


def rows_of(users: list[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    event = st.fixed_dictionaries({
        "user_id": st.sampled_from(users), "event_time": TIMES,
        **{name: st.one_of(st.none(), value) for name, value in VALUES.items()},
    })
    # Duplicate rows are events like others.
    return st.lists(event, min_size=0, max_size=8).flatmap(
        lambda rows: st.lists(st.sampled_from(rows), max_size=2).map(lambda more: rows + more) if rows
        else st.just(rows))


PROJECTIONS = st.builds(
    Projection,
    columns=st.lists(st.sampled_from([*COLUMNS, "event_time", "version"]), min_size=1, max_size=4, unique=True),
    last=st.one_of(st.none(), st.integers(1, 5)),
    groups=st.one_of(st.none(), st.lists(st.sampled_from(["click", "like", "\u0444", "never"]), max_size=2)),
    since=st.one_of(st.none(), st.integers(0, 12)),
)


ADDED: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "author": (pa.int32(), st.integers(-5, 5)), "source": (pa.string(), st.sampled_from(["app", "web"])),
}


def to_table(rows: list[dict[str, Any]], schema: EventSchema) -> pa.Table:
    columns = {}
    for field in schema.arrow:
        if field.name in schema.since and not any(field.name in row for row in rows):
            continue
        values = [row.get(field.name) for row in rows]
        if field.name == "half":
            values = [None if value is None else np.float16(value) for value in values]
        columns[field.name] = pa.array(values, field.type)
    return pa.table(columns, schema=pa.schema([schema.arrow.field(name) for name in columns]))


def to_rows(table: JaggedTable, schema: EventSchema) -> list[list[tuple[Any, ...]]]:
    """What was read as Python values, so that the oracle need not know arrays."""
    columns = []
    for name, column in table.columns.items():
        if name in (table.dictionaries or {}):
            values = list(table.strings(name))
        else:
            values = [tuple(v) if isinstance(v, list) else v for v in column.tolist()]
            valid = (table.validity or {}).get(name)
            if valid is not None:
                values = [value if ok else None for value, ok in zip(values, valid, strict=True)]
        columns.append(values)
    events = list(zip(*columns, strict=True))
    return [events[a:b] for a, b in zip(table.offsets, table.offsets[1:], strict=False)]


class AsServed(RuleBasedStateMachine):
    users: list[Any] = INTEGER_USERS
    key_type = pa.int64()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="semel-"))
        # Small enough that the few events of a run go through several runs of the tail's index and several segments.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("semel.history.log.tail.LEVELS", (3, 9, 27, 1 << 62))
        self.patch.setattr("semel.history.writing.writer.SEGMENT_BYTES", 9_000)
        # Columns of several blocks, all of them compressed where they are cold, and a cache that keeps few.
        self.patch.setattr("semel.history.generation.array_files.BLOCK_BYTES", 64)
        self.patch.setattr("semel.history.storage.block_cache.BLOCK_BYTES", 64)
        self.patch.setattr("semel.history.storage.block_cache.AT_ONCE", 80)
        self.patch.setattr("semel.history.generation.array_files.SHRINKS", 9)
        self.patch.setattr("semel.history.storage.local.BlockCache", lambda folder, _: BlockCache(folder, 3_000))
        self.store = HistoryStore.create(self.folder / "store", EventSchema(COLUMNS, self.key_type, group="action"),
                                         shards=3)
        self.reader = HistoryStore.open(self.folder / "store")
        self.oracle = ReferenceStore("action")
        self.view = HistoryStore.open(self.folder / "store", at_version=0)
        self.compacted = 0
        self.frozen: list[tuple[list[Any], Projection, list[Any]]] = []

    @property
    def schema(self) -> EventSchema:
        return self.store.schema

    def see_what_was_taken(self) -> None:
        """A handle learns of deletions like of appends: when it refreshes."""
        if self.oracle.marks:
            self.reader.refresh()
            self.view = HistoryStore.open(self.folder / "store", at_version=self.view.version)

    def teardown(self) -> None:
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @initialize(rows=rows_of(INTEGER_USERS))
    def begin(self, rows: list[dict[str, Any]]) -> None:
        rows = [{**row, "user_id": self.users[INTEGER_USERS.index(row["user_id"])]} for row in rows]
        self.store.append(to_table(rows, self.schema))
        self.oracle.append(rows)

    @rule(data=st.data(), token=st.sampled_from([None, None, "a", "b", "\u00fc"]))
    def append(self, data: st.DataObject, token: str | None) -> None:
        rows = data.draw(rows_of(self.users))
        for name in data.draw(st.sets(st.sampled_from(sorted(self.oracle.since) or ["none"]))) & set(self.oracle.since):
            for row in rows:
                row[name] = data.draw(st.none() | ADDED[name][1])
        assert self.store.append(to_table(rows, self.schema), token) == self.oracle.append(rows, token)

    @rule(data=st.data(), names=st.lists(st.sampled_from(["a", "c", "d", 1, 2]), min_size=2, max_size=4, unique=True))
    def append_together(self, data: st.DataObject, names: list[str | int]) -> None:
        """From several threads at once: some share a write, all have versions as if they had come in turn."""
        batches = [(data.draw(rows_of(self.users)), name if isinstance(name, str) else None) for name in names]
        with ThreadPoolExecutor(len(names)) as pool:
            versions = list(pool.map(lambda batch: self.store.append(to_table(batch[0], self.schema), batch[1]),
                                     batches))
        for version, (rows, token) in sorted(zip(versions, batches, strict=True), key=lambda one: one[0]):
            if rows or token is not None:
                assert self.oracle.append(rows, token) == version

    @rule(keep=st.integers(1, 3))
    def drop_generations(self, keep: int) -> None:
        self.store.drop_generations(keep)

    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.view.close()
        version = data.draw(st.integers(0, self.oracle.version))
        self.view = HistoryStore.open(self.folder / "store", at_version=version)

    @rule(projection=PROJECTIONS, by_writer=st.booleans())
    def read_frozen_and_compacted(self, projection: Projection, by_writer: bool) -> None:
        """A frozen view shows its version; what the generation holds can be read from it alone, the rest is named."""
        self.see_what_was_taken()
        pointers = self.view.point(self.users, 2**62)
        drawn = [(user, 2**62, self.view.version) for user in self.users]
        expected = self.expected(drawn, projection)
        assert to_rows(self.view.read(pointers, projection), self.schema) == expected
        assert self.view.keys().tolist() == sorted(
            {event.user_id for event in self.oracle.alive if event.version <= self.view.version})
        handle = self.store if by_writer else self.view
        if not self.logged():
            assert to_rows(handle.read(pointers, projection, require_compacted=True), self.schema) == expected
        else:
            with pytest.raises(NotCompacted, match=f"versions {self.compacted + 1} to {self.view.version} "):
                handle.read(pointers, projection, require_compacted=True)

    def logged(self) -> bool:
        """Whether the log has events or deletions that the frozen view knows: more than the version of an added
        column."""
        versions = [*(event.version for event in self.oracle.events), *(mark.until or 0 for mark in self.oracle.marks)]
        return any(self.compacted < version <= self.view.version for version in versions)

    @rule()
    def refresh_reader(self) -> None:
        assert self.reader.refresh() == self.oracle.version
        assert self.reader.point(self.users[:2], 5).version.tolist() == [self.oracle.version] * 2

    @rule(codec=st.sampled_from(CODECS))
    def compact(self, codec: Codec) -> None:
        self.store.compact(codec=codec)
        self.compacted = self.oracle.version
        assert self.store.stats()["events"]["total"] == len(self.oracle.alive)

    @precondition(lambda self: self.oracle.version > 3)
    @rule(data=st.data())
    def delete_users(self, data: st.DataObject) -> None:
        users = data.draw(st.lists(st.sampled_from([*self.users[:3], self.users[4]]), max_size=2))
        assert self.store.delete(user_ids=users) == self.oracle.delete(sorted(set(users)))

    @precondition(lambda self: self.oracle.events)
    @rule(data=st.data())
    def delete_events(self, data: st.DataObject) -> None:
        """Some that are there, named by some of their columns, and perhaps one that is not."""
        also = data.draw(st.sets(st.sampled_from(sorted(COLUMNS)), max_size=3))
        events = data.draw(st.lists(st.sampled_from(self.oracle.events), min_size=1, max_size=3))
        named = [{"user_id": e.user_id, **{name: e.values[name] for name in ("event_time", *also)}} for e in events]
        if data.draw(st.booleans()):
            named.append({**named[0], "event_time": 7})
        fields = [self.schema.arrow.field(name) for name in named[0]]
        schema = EventSchema({f.name: f.type for f in fields[2:]}, self.key_type)
        assert self.store.delete(events=to_table(named, schema)) == self.oracle.delete_events(named)

    @precondition(lambda self: self.oracle.version > 4)
    @rule(before=st.sampled_from([2, 5, 9]))
    def retention(self, before: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("semel.history.store.now", lambda: 1000)
            self.store.compact(retention=timedelta(microseconds=1000 - before))
        self.oracle.expire(before)
        self.compacted = self.oracle.version

    @precondition(lambda self: len(self.oracle.since) < len(ADDED))
    @rule(filled=st.booleans())
    def add_column(self, filled: bool) -> None:
        name = sorted(ADDED)[len(self.oracle.since)]
        values: dict[Any, Any] = {"click": 3, "like": None} if name == "author" else {"click": "app", "\u0444": "tv"}
        if not filled:
            values = {}
        backfill: Any = None
        if filled and name == "author":
            def backfill(events: pa.Table) -> list[Any]:
                return [values.get(action) for action in events["action"].to_pylist()]
        elif filled:
            backfill = pa.table({"action": list(values), name: list(values.values())})
        self.compacted = self.oracle.version
        assert self.store.add_column(name, ADDED[name][0], backfill) == self.oracle.add_column(
            name, lambda event: values.get(event.values["action"]))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = HistoryStore.open(self.folder / "store", mode="a")

    @rule()
    def reopen_reader(self) -> None:
        self.reader = HistoryStore.open(self.folder / "store")

    @rule(data=st.data(), projection=PROJECTIONS, by_reader=st.booleans())
    def read(self, data: st.DataObject, projection: Projection, by_reader: bool) -> None:
        self.see_what_was_taken()
        if self.oracle.since:
            added = data.draw(st.lists(st.sampled_from(sorted(self.oracle.since)), unique=True))
            projection = replace(projection, columns=(*projection.columns, *added),
                                 allow_backfill=data.draw(st.booleans()))
        drawn = data.draw(st.lists(
            st.tuples(st.sampled_from(self.users), TIMES, st.integers(0, self.oracle.version)), max_size=6))
        pointers = self.pointers(drawn)
        handle = self.reader if by_reader else self.store
        table = handle.read(pointers, projection)
        expected = self.expected(drawn, projection)
        assert to_rows(table, self.schema) == expected
        assert table.status.tolist() == self.oracle.status(drawn, projection)
        lengths, exact = handle.lengths(pointers, projection)
        assert lengths.tolist() == [len(row) for row in expected] and exact.all()
        self.frozen = [*self.frozen, (drawn, projection, expected)][-5:]

    def pointers(self, drawn: list[Any]) -> Pointers:
        users = np.array([p[0] for p in drawn], object if self.key_type == pa.string() else np.int64)
        return Pointers(users, *(np.array([p[i] for p in drawn], np.int64) for i in (1, 2)))

    def expected(self, drawn: list[Any], projection: Projection) -> list[Any]:
        def plain(name: str, value: Any) -> Any:
            if name == "vector" and value is not None:
                return tuple(np.array(value, np.float32).tolist())
            return value

        return [[tuple(plain(n, v) for n, v in zip(projection.columns, event, strict=True)) for event in row]
                for row in self.oracle.read(drawn, projection)]

    @precondition(lambda self: self.frozen)
    @rule()
    def read_again(self) -> None:
        """A pointer's history does not change, whatever has happened since; where something was taken the status says
        so."""
        self.see_what_was_taken()
        for drawn, projection, before in self.frozen:
            for handle in (self.store, self.reader):
                table = handle.read(self.pointers(drawn), projection)
                rows = to_rows(table, self.schema)
                assert rows == self.expected(drawn, projection)
                assert table.status.tolist() == self.oracle.status(drawn, projection)
                for row, was, status in zip(rows, before, table.status, strict=True):
                    assert row == was or status in (Status.SCRUBBED, Status.EXPIRED)

    @invariant()
    def versions(self) -> None:
        assert self.store.version == self.oracle.version

    @rule()
    def keys_and_files(self) -> None:
        assert self.store.keys().tolist() == self.oracle.keys()
        assert self.store.stats()["events"]["total"] >= len(self.oracle.alive)
        self.store.verify()


class SmallStore:
    """A store and its oracle, changed at random; nearly all events tie and many come late."""

    def __init__(self, folder: Path, seed: int, text: bool) -> None:
        self.random, self.folder, self.text = np.random.default_rng(seed), folder, text
        self.key_type = pa.string() if text else pa.int64()
        schema = EventSchema({"item_id": pa.int64(), "action": pa.string()}, self.key_type, group="action")
        self.store, self.oracle = HistoryStore.create(folder / "s", schema, shards=2), ReferenceStore("action")
        self.items = 0

    def user(self, number: int) -> Any:
        return f"\u00fc{number}" if self.text else number

    def append(self) -> None:
        rows = []
        for _ in range(self.random.integers(1, 5)):
            self.items += 1
            rows.append({"user_id": self.user(self.random.integers(0, 3)),
                         "event_time": int(self.random.integers(0, 4)), "item_id": self.items,
                         "action": [None, "like", "click"][self.random.integers(0, 3)]})
            if "source" in self.oracle.since:
                rows[-1]["source"] = [None, "app"][self.random.integers(0, 2)]
        assert self.store.append(to_table(rows, self.store.schema)) == self.oracle.append(rows)

    def compact(self) -> None:
        self.store.compact(codec=CODECS[self.random.integers(0, len(CODECS))])
        assert self.store.stats()["events"]["total"] == len(self.oracle.alive)

    def reopen(self) -> None:
        self.store.close()
        self.store = HistoryStore.open(self.folder / "s", "a")

    def delete_users(self) -> None:
        users = [self.user(number) for number in np.unique(self.random.integers(0, 4, self.random.integers(1, 3)))]
        assert self.store.delete(user_ids=users) == self.oracle.delete(users)

    def delete_events(self) -> None:
        """By time alone (ties go together), or by time and one more column."""
        events = self.oracle.events
        also = [[], ["item_id"], ["action"]][self.random.integers(0, 3)]
        some = [events[i] for i in self.random.integers(0, len(events), 2)] if events else []
        named = [{"user_id": e.user_id, "event_time": e.event_time, **{n: e.values[n] for n in also}} for e in some]
        schema = EventSchema({name: self.store.schema.columns[name] for name in also}, self.key_type)
        assert self.store.delete(events=to_table(named, schema)) == self.oracle.delete_events(named)

    def retention(self) -> None:
        before = int(self.random.integers(1, 3))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("semel.history.store.now", lambda: 1000)
            self.store.compact(retention=timedelta(microseconds=1000 - before))
        self.oracle.expire(before)

    def add_column(self) -> None:
        if not self.oracle.since:
            table = pa.table({"action": ["like", None], "source": ["web", "app"]})
            since = self.oracle.add_column("source", lambda e: "web" if e.values["action"] == "like" else None)
            assert self.store.add_column("source", pa.string(), table) == since

    def change(self) -> None:
        kinds = [self.append, self.compact, self.reopen, self.delete_users, self.delete_events, self.retention,
                 self.add_column]
        kinds[self.random.choice(len(kinds), p=[0.48, 0.14, 0.06, 0.12, 0.12, 0.04, 0.04])]()


@pytest.mark.parametrize("seed", range(24))
def test_every_pointer_of_a_small_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All users x times x versions after every step: the corner cases that a drawn pointer seldom meets. Through the
    handle that appends, another one, and one by one."""
    monkeypatch.setattr("semel.history.log.tail.LEVELS", (2, 4, 8, 1 << 62))
    small = SmallStore(tmp_path, seed, text=seed % 3 == 2)
    reader = HistoryStore.open(tmp_path / "s")
    before: dict[Any, list[Any]] = {}
    for _ in range(16):
        small.change()
        store, oracle = small.store, small.oracle
        reader.refresh()
        grid = [(small.user(user), as_of, version) for user in range(4) for as_of in range(6)
                for version in range(oracle.version + 1)]
        ids = np.array([user for user, _, _ in grid], object if small.text else np.int64)
        pointers = Pointers(ids, *(np.array([pointer[i] for pointer in grid]) for i in (1, 2)))
        projections = [Projection(("item_id", "version", "action")), Projection(("item_id",), last=2),
                       Projection(("item_id", "event_time"), last=2, groups=("like",), since=1)]
        if oracle.since:
            projections += [Projection(("source", "item_id"), last=3, allow_backfill=backfill)
                            for backfill in (False, True)]
        for projection in projections:
            expected, status = oracle.read(grid, projection), oracle.status(grid, projection)
            for handle in (store, reader):
                table = handle.read(pointers, projection)
                assert to_rows(table, store.schema) == expected
                assert table.status.tolist() == status
                assert handle.lengths(pointers, projection)[0].tolist() == [len(row) for row in expected]
            for pointer, row, what in zip(grid, expected, status, strict=True):
                was = before.setdefault((pointer, projection), row)
                assert row == was or what in (Status.SCRUBBED, Status.EXPIRED)
        some = small.random.integers(0, len(grid), 20)
        alone = [store.read(pointers[i : i + 1], projections[0]) for i in some]
        assert [to_rows(one, store.schema)[0] for one in alone] == [oracle.read([grid[i]], projections[0])[0]
                                                                    for i in some]
        assert store.keys().tolist() == reader.keys().tolist() == oracle.keys()
    store.verify()
    store.close()
    reader.close()


class AsServedWithStringUsers(AsServed):
    users = STRING_USERS
    key_type = pa.string()


_QUICK = settings(max_examples=12, stateful_step_count=20, deadline=None,
                  suppress_health_check=list(HealthCheck))
_SLOW = settings(_QUICK, max_examples=400, stateful_step_count=40)

TestIntegerUsers = AsServed.TestCase
TestIntegerUsers.settings = _QUICK
TestStringUsers = AsServedWithStringUsers.TestCase
TestStringUsers.settings = _QUICK


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [AsServed, AsServedWithStringUsers])
def test_many_histories(machine: type[AsServed]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=_SLOW)

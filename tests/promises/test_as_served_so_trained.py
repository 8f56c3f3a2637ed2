"""Promise 1: a pointer's history depends on its user's events, its version and its as_of, and on nothing else."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semel.batch import JaggedTable
from semel.history import EventSchema, HistoryStore, NotCompacted, Pointers, Projection
from semel.history.reference import ReferenceStore

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


def to_table(rows: list[dict[str, Any]], schema: EventSchema) -> pa.Table:
    columns = {}
    for field in schema.arrow:
        values = [row[field.name] for row in rows]
        if field.name == "half":
            values = [None if value is None else np.float16(value) for value in values]
        columns[field.name] = pa.array(values, field.type)
    return pa.table(columns, schema=schema.arrow)


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
        self.patch.setattr("semel.history.tail.LEVELS", (3, 9, 27, 1 << 62))
        self.patch.setattr("semel.history.writing.SEGMENT_BYTES", 9_000)
        self.schema = EventSchema(COLUMNS, self.key_type, group="action")
        self.store = HistoryStore.create(self.folder / "store", self.schema, shards=3)
        self.reader = HistoryStore.open(self.folder / "store")
        self.oracle = ReferenceStore("action")
        self.view = HistoryStore.open(self.folder / "store", at_version=0)
        self.compacted = 0
        self.frozen: list[tuple[Pointers, Projection, list[Any]]] = []

    def teardown(self) -> None:
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @rule(data=st.data(), token=st.sampled_from([None, None, "a", "b", "\u00fc"]))
    def append(self, data: st.DataObject, token: str | None) -> None:
        rows = data.draw(rows_of(self.users))
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
        pointers = self.view.point(self.users, 2**62)
        drawn = [(user, 2**62, self.view.version) for user in self.users]
        expected = self.expected(drawn, projection)
        assert to_rows(self.view.read(pointers, projection), self.schema) == expected
        assert self.view.keys().tolist() == sorted(
            {event.user_id for event in self.oracle.events if event.version <= self.view.version})
        handle = self.store if by_writer else self.view
        if self.view.version <= self.compacted:
            assert to_rows(handle.read(pointers, projection, require_compacted=True), self.schema) == expected
        else:
            with pytest.raises(NotCompacted, match=f"versions {self.compacted + 1} to {self.view.version} "):
                handle.read(pointers, projection, require_compacted=True)

    @rule()
    def refresh_reader(self) -> None:
        assert self.reader.refresh() == self.oracle.version
        assert self.reader.point(self.users[:2], 5).version.tolist() == [self.oracle.version] * 2

    @rule()
    def compact(self) -> None:
        self.store.compact()
        self.compacted = self.oracle.version

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = HistoryStore.open(self.folder / "store", mode="a")

    @rule()
    def reopen_reader(self) -> None:
        self.reader = HistoryStore.open(self.folder / "store")

    @rule(data=st.data(), projection=PROJECTIONS, by_reader=st.booleans())
    def read(self, data: st.DataObject, projection: Projection, by_reader: bool) -> None:
        drawn = data.draw(st.lists(
            st.tuples(st.sampled_from(self.users), TIMES, st.integers(0, self.oracle.version)), max_size=6))
        users = np.array([p[0] for p in drawn], object if self.key_type == pa.string() else np.int64)
        pointers = Pointers(users, np.array([p[1] for p in drawn], np.int64), np.array([p[2] for p in drawn], np.int64))
        handle = self.reader if by_reader else self.store
        table = handle.read(pointers, projection)
        expected = self.expected(drawn, projection)
        assert to_rows(table, self.schema) == expected
        assert table.status.tolist() == self.oracle.status(drawn)
        lengths, exact = handle.lengths(pointers, projection)
        assert lengths.tolist() == [len(row) for row in expected] and exact.all()
        self.frozen = [*self.frozen, (pointers, projection, expected)][-5:]

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
        """A pointer's history does not change, whatever has happened since."""
        for pointers, projection, expected in self.frozen:
            assert to_rows(self.store.read(pointers, projection), self.schema) == expected
            assert to_rows(self.reader.read(pointers, projection), self.schema) == expected

    @invariant()
    def versions(self) -> None:
        assert self.store.version == self.oracle.version

    @rule()
    def keys_and_files(self) -> None:
        assert self.store.keys().tolist() == self.oracle.keys()
        assert self.store.stats()["events"]["total"] == len(self.oracle.events)
        self.store.verify()


@pytest.mark.parametrize("seed", range(16))
def test_every_pointer_of_a_small_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All users x times x versions after every step, where nearly all events tie and many come late: the corner cases
    that a drawn pointer seldom meets."""
    monkeypatch.setattr("semel.history.tail.LEVELS", (2, 4, 8, 1 << 62))
    random = np.random.default_rng(seed)
    schema = EventSchema({"item_id": pa.int64(), "action": pa.string()}, group="action")
    oracle = ReferenceStore("action")
    with HistoryStore.create(tmp_path / "s", schema, shards=2) as store:
        for step in range(12):
            if random.random() < 0.25:
                store.compact()
            else:
                rows = [{"user_id": int(random.integers(0, 3)), "event_time": int(random.integers(0, 4)),
                         "item_id": 100 * step + i, "action": [None, "like", "click"][random.integers(0, 3)]}
                        for i in range(random.integers(1, 5))]
                assert store.append(to_table(rows, schema)) == oracle.append(rows)
            grid = [(user, as_of, version) for user in range(4) for as_of in range(6)
                    for version in range(oracle.version + 1)]
            users, as_of, version = (np.array(column) for column in zip(*grid, strict=True))
            pointers = Pointers(users, as_of, version)
            for projection in (Projection(("item_id", "version", "action")), Projection(("item_id",), last=2),
                               Projection(("item_id", "event_time"), last=2, groups=("like",), since=1)):
                table = store.read(pointers, projection)
                assert to_rows(table, schema) == oracle.read(grid, projection)
            assert table.status.tolist() == oracle.status(grid)


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

"""Reads that the pointers of one user share give what reads of their own give."""

import tempfile
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, JaggedTable, Pointers, RequestRows, offsets_of
from semel.examples import materialize, read_histories
from semel.examples.shared_reads import ReadCounters
from semel.features import Feature, FeatureSpec
from semel.history import EventSchema, HistoryStore, Projection, Status, VersionNotVisible

COLUMNS = {"item_id": pa.int64(), "action": pa.string(), "vector": pa.list_(pa.float32(), 2)}
TIMES = st.one_of(st.integers(0, 6), st.integers(0, 60))


def events(rows, text=False):
    """rows: (user, time, item or None, action or None)."""
    key_type = pa.string() if text else pa.int64()
    user = (lambda n: f"ü{n}") if text else (lambda n: n)
    return pa.table({
        "user_id": pa.array([user(row[0]) for row in rows], key_type),
        "event_time": pa.array([row[1] for row in rows], pa.int64()),
        "item_id": pa.array([row[2] for row in rows], pa.int64()),
        "action": pa.array([row[3] for row in rows], pa.string()),
        "vector": pa.array([[row[1], at] for at, row in enumerate(rows)], pa.list_(pa.float32(), 2))})


def assert_same(got: JaggedTable, want: JaggedTable) -> None:
    assert got.offsets.tolist() == want.offsets.tolist() and got.status.tolist() == want.status.tolist()
    assert list(got.columns) == list(want.columns)
    for name, column in want.columns.items():
        assert got.columns[name].dtype == column.dtype and got.columns[name].shape == column.shape
        assert got.columns[name].tobytes() == column.tobytes(), name
    assert {n: v.tolist() for n, v in (got.validity or {}).items()} == \
        {n: v.tolist() for n, v in (want.validity or {}).items()}
    assert {n: v.tolist() for n, v in (got.dictionaries or {}).items()} == \
        {n: v.tolist() for n, v in (want.dictionaries or {}).items()}


PROJECTIONS = st.builds(
    Projection, columns=st.lists(st.sampled_from([*COLUMNS, "event_time", "version"]), min_size=1, max_size=4,
                                 unique=True),
    last=st.sampled_from([None, 1, 3, 10, 30, 100]),
    groups=st.one_of(st.none(), st.none(), st.lists(st.sampled_from(["click", "like", "never"]), max_size=2)),
    since=st.one_of(st.none(), st.none(), st.integers(0, 30)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 150), min_size=1, max_size=5),
       compact=st.integers(0, 5), latest=st.sampled_from([5, 60, 600]), users=st.integers(1, 3), late=st.booleans(),
       text=st.booleans(), deleted=st.integers(0, 5), retained=st.booleans(),
       projections=st.lists(PROJECTIONS, min_size=1, max_size=4))
def test_shared_reads_equal_separate_reads(seed, sizes, compact, latest, users, late, text, deleted, retained,
                                           projections):
    """Late events, ties, nulls, several versions, unknown, deleted and expired users; compacted, recent and both."""
    rng = np.random.default_rng(seed)
    key_type = pa.string() if text else pa.int64()
    with tempfile.TemporaryDirectory() as folder, HistoryStore.create(
            Path(folder) / "s", EventSchema(COLUMNS, key_type, group="action"), shards=2) as store:
        for at, size in enumerate(sizes):
            first = 0 if late else at * latest // len(sizes)
            store.append(events([
                (int(rng.integers(0, users)), int(rng.integers(first, latest + 1)),
                 int(rng.integers(0, 99)) if rng.random() < 0.9 else None,
                 [None, "click", "like", "buy"][rng.integers(0, 4)]) for _ in range(size)], text))
            if at == compact:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("semel.history.store.now", lambda: 10**6)
                    store.compact(retention=timedelta(microseconds=10**6 - latest // 2) if retained else None)
            if at == deleted:
                store.delete(user_ids=[f"ü{at % 3}" if text else at % 3])
        for projection in projections:
            count = int(rng.integers(0, 16))
            of = rng.integers(0, users + 1, count)
            as_of = rng.integers(0, latest + 2, count) if rng.random() < 0.5 else \
                np.clip(latest - rng.geometric(0.2, count), 0, None)
            version = rng.integers(0, store.version + 1, count) if rng.random() < 0.5 else \
                np.full(count, store.version) - (rng.random(count) < 0.1)
            pointers = Pointers(np.array([f"ü{n}" for n in of], object) if text else of, as_of, version)
            histories = read_histories(store, pointers, projection)
            want = store.read(pointers, projection)
            assert_same(histories.table(), want)
            counters = histories.counters
            assert counters.pointers == count and counters.events_delivered == want.offsets[-1]
            assert counters.bytes_delivered == sum(column.nbytes for column in want.columns.values())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """User 1 has an event a second up to 2,000; user 2 ten."""
    path = tmp_path_factory.mktemp("shared") / "s"
    with HistoryStore.create(path, EventSchema(COLUMNS, group="action"), shards=4) as store:
        store.append(events([(1, t, t, "click") for t in range(2000)] + [(2, t, t, None) for t in range(10)]))
        store.compact()
        yield store


def read(store, pointers, last, columns=("item_id", "event_time"), version=None):
    users, as_of = np.array(pointers).T
    pointers = Pointers(users, as_of, np.array(version or store.version))
    histories = read_histories(store, pointers, Projection(columns, last=last))
    assert_same(histories.table(), store.read(pointers, Projection(columns, last=last)))
    return histories.counters


def test_neighbours_take_one_lookup_and_little_more_than_one_history(store):
    counters = read(store, [(1, t) for t in range(1500, 1580, 10)], last=100)
    assert counters.lookups == 1 and counters.lookups_saved == 7
    assert counters.events_delivered == 800 and counters.events_read <= 200
    assert counters.bytes_read == 16 * counters.events_read
    assert counters.bytes_saved == 16 * (800 - counters.events_read) > 0


def test_a_history_that_fits_is_read_once_however_far_apart_its_pointers_are(store):
    counters = read(store, [(2, t) for t in range(11)], last=100)
    assert (counters.lookups, counters.events_read, counters.events_delivered) == (1, 10, 55)
    counters = read(store, [(2, t) for t in range(11)], last=None)
    assert (counters.lookups, counters.events_read) == (1, 10)


def test_pointers_that_have_nothing_in_common_are_read_apart(store):
    counters = read(store, [(1, 200), (1, 900), (1, 1900)], last=100)
    assert (counters.lookups, counters.events_read, counters.bytes_saved) == (3, 300, 0)
    assert read(store, [(1, 500), (2, 5), (7, 5)], last=100).lookups == 3
    two = read(store, [(1, t) for t in (500, 501, 502, 1500, 1501, 1502)], last=100)
    assert two.lookups == 2


def test_a_late_event_separates_only_whom_it_concerns(tmp_path):
    with HistoryStore.create(tmp_path / "s", EventSchema(COLUMNS), shards=1) as store:
        store.append(events([(1, t, t, None) for t in range(0, 400, 2)]))
        store.append(events([(1, 301, -1, None)]))
        pointers = Pointers(np.ones(6, np.int64), np.array([200, 210, 220, 302, 320, 330]),
                            np.array([1, 1, 1, 1, 2, 2]))
        projection = Projection(("item_id",), last=50)
        histories = read_histories(store, pointers, projection)
        assert_same(histories.table(), store.read(pointers, projection))
        assert -1 not in histories.table().row(3)["item_id"] and -1 in histories.table().row(4)["item_id"]
        assert histories.counters.lookups < 6


def test_a_status_that_is_not_the_usual_one_separates_its_users_pointers(store):
    class Scrubbed:
        """A store that says of user 1 that something was deleted."""

        def __getattr__(self, name):
            return getattr(store, name)

        def read(self, pointers, projection):
            table = store.read(pointers, projection)
            table.status[pointers.user_id == 1] = Status.SCRUBBED
            return table

    pointers = Pointers(np.array([1, 1, 1, 2, 2, 2]), np.array([50, 60, 70, 5, 6, 7]), np.array(1))
    histories = read_histories(Scrubbed(), pointers, Projection(("item_id",)))
    assert_same(histories.table(), Scrubbed().read(pointers, Projection(("item_id",))))
    assert histories.counters.lookups == 2 + 3


def test_pointers_that_the_store_does_not_reach_yet_are_refused(store):
    with pytest.raises(VersionNotVisible, match="version 9"):
        read_histories(store, Pointers(np.ones(5, np.int64), np.arange(5), np.array(9)), Projection(("item_id",)))


def test_a_materialized_batch_is_the_same_alone_or_shared(store):
    spec = FeatureSpec(history=(Feature("item_id"), Feature("action")), history_last=30)
    as_of = np.array([100, 400, 105, 110, 3, 120])
    rows = RequestRows(np.array([f"r{i}" for i in range(6)], object),
                       Pointers(np.array([1, 1, 1, 1, 2, 1]), as_of, np.array(store.version)),
                       np.zeros(6, np.int64), {}, Jagged(np.arange(6), offsets_of(np.ones(6))), {}, {})
    whole = materialize(rows, store, None, spec, checksum=True)
    for row in range(6):
        one = materialize(rows.select(np.array([row])), store, None, spec, checksum=True)
        assert one.request["history_checksum"][0] == whole.request["history_checksum"][row]
        for name in ("item_id", "action", "event_time"):
            assert one.request["history"][name].values.tolist() == whole.request["history"][name][row].tolist()


def test_counters_add_up():
    one = ReadCounters(5, 2, 10, 30, 80, 240, 1)
    total = ReadCounters()
    for _ in range(2):
        total += one
    assert [getattr(total, f.name) for f in fields(total)] == [10, 4, 20, 60, 160, 480, 2]
    assert total.lookups_saved == 6 and total.bytes_saved == 320

"""Fat rows against a store: equal where they are, and otherwise for which reason."""

import numpy as np
import pyarrow as pa
import pytest
from fat import rows_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import FatRowColumns, compare_fat_rows, open_fat_rows
from semel.examples.shadow import Side, differences
from semel.history import EventSchema, HistoryStore, JaggedTable, Status, VersionNotVisible

SCHEMA = EventSchema({"item_id": pa.int64(), "rating": pa.float64()})
STORED = [(10, 1, 1.0), (20, 2, None), (20, 3, 2.0), (30, 4, 3.0)]


@pytest.fixture
def store(tmp_path):
    with HistoryStore.create(tmp_path / "store", SCHEMA) as store:
        append(store, STORED)
        yield store


def append(store, events, user=1):
    times, items, ratings = zip(*events, strict=True)
    return store.append(pa.table({"user_id": [user] * len(events), "event_time": times, "item_id": items,
                                  "rating": pa.array(ratings, pa.float64())}))


def compare(tmp_path, store, *rows, last=None, version=None, **types):
    path = write(tmp_path / "fat.parquet", list(rows), **(types or {"rating": pa.float64()}))
    return compare_fat_rows(open_fat_rows([path], FatRowColumns(version=version)), store, last)


def causes(report):
    return {cause: count["rows"] for cause, count in report.causes.items() if count["rows"]}


@pytest.mark.parametrize("at", [31, 30, 21, 11])
def test_equal(tmp_path, store, at):
    report = compare(tmp_path, store, {"user": 1, "at": at, "events": [event for event in STORED if event[0] < at]})
    assert (report.rows, report.equal, causes(report), report.passed) == (1, 1, {}, True)
    assert report.columns == ["item_id", "rating"] and report.version == 1


@pytest.mark.parametrize(("at", "events", "cause", "count", "words"), [
    (31, [STORED[0], *STORED[2:]], "late", 1, "item 2 at 20, which the row does not list"),
    (31, STORED[:3], "late", 1, "item 4 at 30"),
    (31, [STORED[0], STORED[2], STORED[1], STORED[3]], "tie", 2, "the events at 20 are in another order"),
    (30, STORED, "tie", 1, "the instant of the request"),
    (31, [*STORED[:3], (30, 4, None)], "schema", 1, "rating of item 4 at 30 is None in the row, 3.0 in the store"),
    (31, [*STORED[:3], (30, 4, 9.0)], "other", 1, "rating of item 4 at 30 is 9.0 in the row, 3.0 in the store"),
    (31, [*STORED[:3], (29, 7, 1.0), STORED[3]], "other", 1, "item 7 at 29, which the store does not have"),
    (25, STORED, "other", 1, "which is after the request at 25"),
    (31, [STORED[3], *STORED[:3]], "other", 4, "not in the order of time"),
])
def test_causes(tmp_path, store, at, events, cause, count, words):
    report = compare(tmp_path, store, {"user": 1, "at": at, "events": events})
    assert causes(report) == {cause: 1} and report.causes[cause]["events"] == count, report
    assert report.passed == (cause != "other")
    (example,) = report.examples
    assert words in example["what"] and (example["row"], example["user_id"], example["request_time"]) == (1, 1, at)


def test_truncation(tmp_path, store):
    rows = [{"user": 1, "at": 31, "events": STORED[-length:]} for length in (1, 2, 3, 4)]
    report = compare(tmp_path, store, *rows)
    assert (report.last, report.equal, causes(report)) == (4, 1, {"truncation": 3})
    report = compare(tmp_path, store, rows[1], rows[2], last=2)
    assert (report.equal, causes(report)) == (2, {}), "longer rows are cut, and a row of just so many is whole"
    report = compare(tmp_path, store, {"user": 1, "at": 31, "events": [STORED[1], STORED[3]]}, last=2)
    assert causes(report) == {"tie": 1}, "cut inside an instant whose order differs"


def test_several_causes_count_for_the_gravest(tmp_path, store):
    append(store, [(15, 9, 1.0)])
    report = compare(tmp_path, store, {"user": 1, "at": 30, "events": [(15, 9, None), *STORED[2:]]}, last=9)
    assert causes(report) == {"schema": 1}
    assert report.causes["truncation"]["events"] == 1 and report.causes["tie"]["events"] == 1
    assert report.causes["late"]["events"] == 1


def test_twice_in_the_store_is_not_explained(tmp_path, store):
    append(store, STORED[3:])
    assert causes(compare(tmp_path, store, {"user": 1, "at": 31, "events": STORED})) == {"other": 1}


def test_versions(tmp_path, store):
    first = store.version
    append(store, [(15, 9, 1.0)])
    row = {"user": 1, "at": 31, "events": STORED}
    assert causes(compare(tmp_path, store, {**row, "version": first})) == {"late": 1}, "without its version"
    assert compare(tmp_path, store, {**row, "version": first}, version="store_version").equal == 1
    report = compare(tmp_path, store, {**row, "version": first + 1}, version="store_version")
    assert causes(report) == {"other": 1}, "the event was known at that version"
    whole = [STORED[0], (15, 9, 1.0), *STORED[1:]]
    report = compare(tmp_path, store, {**row, "version": first, "events": whole}, version="store_version")
    assert causes(report) == {"late": 1} and "after the row's version" in report.examples[0]["what"]
    with pytest.raises(VersionNotVisible):
        compare(tmp_path, store, {**row, "version": 99}, version="store_version")


def test_what_was_deleted_or_expired():
    names = ["item_id"]

    def events(*pairs):
        times, items = np.array(pairs, np.int64).reshape(-1, 2).T
        return Side(JaggedTable({"event_time": times, "item_id": items}, np.array([0, len(times)])))[0]

    fat, seen = events((1, 1), (2, 2), (3, 3)), events((1, 1), (3, 3))
    for status in (Status.SCRUBBED, Status.EXPIRED):
        (one,) = differences(fat, seen, lambda: seen, 9, status, 3, names)
        assert (one.cause, one.events) == ("deleted", 1) and status.name in one.what
    (one,) = differences(fat, seen, lambda: seen, 9, Status.OK, 3, names)
    assert one.cause == "other"
    (one,) = differences(fat, events(), events, 9, Status.SCRUBBED, 3, names)
    assert (one.cause, one.events) == ("deleted", 3)


def test_columns_that_the_store_does_not_have(tmp_path, store):
    events = [(*event, 7) for event in STORED]
    report = compare(tmp_path, store, {"user": 1, "at": 31, "events": events}, rating=pa.float64(), price=pa.int8())
    assert report.equal == 1 and report.unmatched == {"price": "the store has no such column"} and not report.passed
    events = [(*event[:2], "x") for event in STORED]
    report = compare(tmp_path, store, {"user": 1, "at": 31, "events": events}, rating=pa.string())
    assert report.unmatched == {"rating": "string in the fat rows, double in the store"} and not report.passed
    report = compare(tmp_path, store, {"user": 1, "at": 31, "events": STORED}, rating=pa.float32())
    assert report.equal == 1, "a narrower type holds the same values here"


def test_users_that_the_store_does_not_know(tmp_path, store):
    report = compare(tmp_path, store, {"user": 5, "at": 31, "events": STORED}, {"user": 6, "at": 3, "events": []})
    assert causes(report) == {"other": 1} and report.equal == 1
    with pytest.raises(ValueError, match="user_ids are integers in this store, got strings"):
        compare(tmp_path, store, {"user": "a", "at": 31, "events": STORED})
    with pytest.raises(ValueError, match="cause 'lat' is none of other, schema, deleted, late, tie, truncation"):
        compare_fat_rows(open_fat_rows([tmp_path / "fat.parquet"]), store, explained=["lat"])


def test_string_users_and_items(tmp_path):
    schema = EventSchema({"item_id": pa.string(), "action": pa.dictionary(pa.int8(), pa.string())}, user_id=pa.string())
    with HistoryStore.create(tmp_path / "s", schema) as store:
        store.append(pa.table({"user_id": ["zoë"] * 2, "event_time": [1, 2], "item_id": ["映画", "b"],
                               "action": ["like", None]}))
        store.compact()
        report = compare(tmp_path, store, {"user": "zoë", "at": 9, "events": [(1, "映画", "like"), (2, "b", None)]},
                         {"user": "zoë", "at": 9, "events": [(1, "映画", "like"), (2, "ü", None)]},
                         item_id=pa.string(), action=pa.string())
    assert report.equal == 1 and causes(report) == {"other": 1} and "'ü'" in report.examples[0]["what"]


_append = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.none() | st.sampled_from([1.0, 2.0])), min_size=1,
                   max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), _append), min_size=1, max_size=7), st.data())
def test_what_a_server_writes_is_equal_at_its_version_and_late_at_most_without(tmp_path_factory, appends, data):
    folder = tmp_path_factory.mktemp("shadow")
    rows = []
    with HistoryStore.create(folder / "store", SCHEMA) as store:
        for user, events in appends:
            append(store, events, user)
            pointers = store.point([data.draw(st.integers(0, 2))], data.draw(st.integers(0, 8)))
            rows += rows_of(store, pointers, None, "item_id", "rating")
            if data.draw(st.booleans()):
                store.compact()
        if not any(row["events"] for row in rows):
            return
        assert compare(folder, store, *rows, version="store_version").equal == len(rows)
        report = compare(folder, store, *rows, last=99)
        late = sum(bool(rows_of(store, store.point([row["user"]], row["at"]), None, "item_id", "rating")[0]["events"]
                        != row["events"]) for row in rows)
        assert report.equal == len(rows) - late
        allowed = {"late", "truncation", "other", "schema", "tie"}  # an equal event that came again is "other"
        assert set(causes(report)) <= allowed

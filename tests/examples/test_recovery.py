"""Events out of fat rows: each once, ties in the order in which rows list them, cuts undone, conflicts said."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fat import events_in, rows_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import FatRowColumns, compare_fat_rows, ingest_fat_rows, open_fat_rows
from semel.history import EventSchema, HistoryStore


def recover(tmp_path, rows, **types):
    path = write(tmp_path / "fat.parquet", rows, **types)
    report, recovery = ingest_fat_rows([path], tmp_path / "store")
    return events_in(tmp_path / "store", "item_id", *(name for name in types if name != "item_id")), recovery, report


def test_events_that_many_rows_list_are_one(tmp_path):
    found, recovery, report = recover(tmp_path, [
        {"user": 1, "at": 30, "events": [(10, 5), (20, 6)]},
        {"user": 2, "at": 30, "events": [(10, 5)]},
        {"user": 1, "at": 40, "events": [(10, 5), (20, 6), (30, 7)]},
        {"user": 3, "at": 9, "events": []},
    ])
    assert found == {1: [(10, 5), (20, 6), (30, 7)], 2: [(10, 5)]}
    assert (recovery.rows, recovery.listed, recovery.events) == (4, 6, 4)
    assert (recovery.future, recovery.unsorted, recovery.order, recovery.values) == (0, 0, 0, 0)
    assert (report.events, report.users, report.items) == (4, 2, 3)


def test_histories_cut_at_different_lengths_are_united(tmp_path):
    found, _, _ = recover(tmp_path, [
        {"user": "ä", "at": 50, "events": [(40, 4)]},
        {"user": "ä", "at": 30, "events": [(10, 1), (20, 2)]},
        {"user": "ä", "at": 40, "events": [(20, 2), (30, 3)]},
    ])
    assert found == {"ä": [(10, 1), (20, 2), (30, 3), (40, 4)]}


def test_ties_keep_the_order_of_the_rows(tmp_path):
    found, recovery, _ = recover(tmp_path, [
        {"user": 1, "at": 11, "events": [(10, 9), (10, 3)]},
        {"user": 1, "at": 12, "events": [(10, 3)]},  # cut inside the instant
        {"user": 1, "at": 13, "events": [(10, 9), (10, 7), (10, 3), (10, 1)]},  # with one that came late
        {"user": 1, "at": 14, "events": [(10, 7), (10, 3), (10, 1), (10, 2)]},
    ])
    assert found == {1: [(10, 9), (10, 7), (10, 3), (10, 1), (10, 2)]}
    assert recovery.order == recovery.values == 0


def test_the_same_event_twice_in_one_row_is_two(tmp_path):
    found, _, _ = recover(tmp_path, [
        {"user": 1, "at": 11, "events": [(10, 5), (10, 5)]},
        {"user": 1, "at": 12, "events": [(10, 5), (11, 5)]},
        {"user": 1, "at": 13, "events": [(10, 5), (10, 5), (11, 5)]},
    ])
    assert found == {1: [(10, 5), (10, 5), (11, 5)]}


def test_conflicts_are_settled_by_the_latest_request_and_reported(tmp_path):
    found, recovery, report = recover(tmp_path, [
        {"user": 1, "at": 15, "events": [(10, 2, 1.0), (10, 1, 2.0)]},
        {"user": 1, "at": 30, "events": [(10, 1, 2.0), (10, 2, 1.0), (20, 3, 4.5)]},
        {"user": 1, "at": 25, "events": [(10, 1, 2.0), (10, 2, 1.0), (20, 3, 3.5)]},
    ], rating=pa.float64())
    assert found == {1: [(10, 1, 2.0), (10, 2, 1.0), (20, 3, 4.5)]}
    assert (recovery.order, recovery.values) == (1, 1)
    assert any("orders that contradict" in note for note in report.notes)
    assert any("user 1" in note for note in report.notes)


def test_two_values_of_an_item_that_one_row_lists_are_two_events(tmp_path):
    found, recovery, _ = recover(tmp_path, [
        {"user": 1, "at": 12, "events": [(10, 5, "view"), (10, 5, "click")]},
        {"user": 1, "at": 13, "events": [(10, 5, "click")]},
    ], action=pa.string())
    assert found == {1: [(10, 5, "view"), (10, 5, "click")]} and recovery.values == 0


def test_newest_first_future_and_unsorted(tmp_path):
    path = write(tmp_path / "fat.parquet", [{"user": 1, "at": 30, "events": [(20, 6), (10, 7), (10, 5)]}])
    report, _ = ingest_fat_rows([path], tmp_path / "a")
    assert events_in(tmp_path / "a", "item_id") == {1: [(10, 5), (10, 7), (20, 6)]}
    assert any("newest first" in note for note in report.notes)
    path = write(tmp_path / "b.parquet", [{"user": 1, "at": 20, "events": [(10, 5), (30, 7), (20, 6)]},
                                          {"user": 1, "at": 20, "events": [(30, 7), (20, 6)]}])
    _, recovery = ingest_fat_rows([path], tmp_path / "b")
    assert events_in(tmp_path / "b", "item_id") == {1: [(10, 5), (20, 6), (30, 7)]}
    assert (recovery.future, recovery.unsorted) == (4, 2)


def test_lists_of_structs_vectors_nulls_and_lists_of_something_else(tmp_path):
    history = [[{"item_id": "映画", "event_time": 1, "vector": [1.0, 2.0], "seen": True}], None,
               [{"item_id": "映画", "event_time": 1, "vector": [1.0, 2.0], "seen": True},
                {"item_id": "b", "event_time": 2, "vector": None, "seen": None}]]
    kind = pa.list_(pa.struct([("item_id", pa.string()), ("event_time", pa.int64()),
                               ("vector", pa.list_(pa.float32(), 2)), ("seen", pa.bool_())]))
    pq.write_table(pa.table({"user_id": ["a", "a", "a"], "request_time": [5, 6, 7], "history": pa.array(history, kind),
                             "candidates": [[1, 2, 3]] * 3}), tmp_path / "fat.parquet")
    report, _ = ingest_fat_rows([tmp_path / "fat.parquet"], tmp_path / "store")
    assert events_in(tmp_path / "store", "item_id", "vector", "seen") == {
        "a": [(1, "映画", [1.0, 2.0], True), (2, "b", None, None)]}
    pq.write_table(pa.table({"user_id": [1], "request_time": [5], "item_id": [[1, 2]], "event_time": [[1, 2]],
                             "rating": [[4, 5]], "candidates": [[1, 2, 3]]}), tmp_path / "plain.parquet")
    report, _ = ingest_fat_rows([tmp_path / "plain.parquet"], tmp_path / "s2")
    assert events_in(tmp_path / "s2", "item_id", "rating") == {1: [(1, 1, 4), (2, 2, 5)]}
    assert any("'candidates' is left out: row 1 has 3 values for 2 items" in note for note in report.notes)


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda inner: pa.list_(inner, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_other_kinds_of_lists_ids_and_times(tmp_path, kind, stream):
    users = pa.array(["ä", "ä"]).dictionary_encode()
    items = pa.array([["x", "y"]] * 2, kind(pa.string()))
    times = pa.array([[1, 2]] * 2, kind(pa.timestamp("ms", "UTC")))
    table = pa.table({"user_id": users, "request_time": ["1970-01-01T00:00:01Z", "1970-01-01T00:00:02Z"],
                      "item_ids": items, "event_times": times}).slice(1)
    path = tmp_path / "fat.arrow"
    with pa.ipc.new_stream(str(path), table.schema) if stream else pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    ingest_fat_rows([path], tmp_path / "store")
    assert events_in(tmp_path / "store", "item_id") == {"ä": [(1_000, "x"), (2_000, "y")]}


def test_a_list_that_was_asked_for_must_be_one_of_the_history(tmp_path):
    path = write(tmp_path / "fat.parquet", [{"user": 1, "at": 5, "events": [(1, 1)]}])
    table = pq.read_table(path).append_column("labels", pa.array([[1, 2]]))
    pq.write_table(table, path)
    with pytest.raises(ValueError, match="row 1: 'labels' has 2 values for 1 items in 'history_item_id'"):
        open_fat_rows([path], FatRowColumns(others={"label": "labels"}))
    with pytest.raises(ValueError, match="no list 'label'; the lists are"):
        open_fat_rows([path], FatRowColumns(others={"label": "label"}))


def test_a_column_that_came_later(tmp_path):
    old = write(tmp_path / "in" / "1.parquet", [{"user": 1, "at": 15, "events": [(10, 5)]}])
    new = write(tmp_path / "in" / "2.parquet", [{"user": 1, "at": 25, "events": [(10, 5, 7), (20, 6, 8)]}],
                author=pa.int32())
    _, recovery = ingest_fat_rows([old, new], tmp_path / "store")
    assert events_in(tmp_path / "store", "item_id", "author") == {1: [(10, 5, 7), (20, 6, 8)]}
    assert recovery.values == 1, "null in the older row, a value in the newer"


def test_again_and_with_more_files(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.examples.recovery.PIECE_ROWS", 2)
    monkeypatch.setattr("semel.examples.recovery.BUCKET_EVENTS", 5)
    rows = [{"user": user, "at": 100, "events": [(at, at) for at in range(5)]} for user in range(9)]
    write(tmp_path / "in" / "a.parquet", rows)

    def fail(what, done, total):
        if what == "append events" and done > 10:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ingest_fat_rows([tmp_path / "in"], tmp_path / "store", progress=fail)
    assert not (tmp_path / "store").exists()
    report, _ = ingest_fat_rows([tmp_path / "in"], tmp_path / "store")
    assert report.events == 45 and 0 < report.appended < 45
    assert events_in(tmp_path / "store", "item_id") == {user: [(at, at) for at in range(5)] for user in range(9)}
    assert ingest_fat_rows([tmp_path / "in"], tmp_path / "store")[0].appended == 0
    write(tmp_path / "in" / "b.parquet", rows[:1])
    with pytest.raises(FileExistsError, match="recover all fat rows together"):
        ingest_fat_rows([tmp_path / "in"], tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store"]


BASE = {"user_id": [1], "request_time": [5], "item_id": [[1]], "event_time": [[1]]}


@pytest.mark.parametrize(("columns", "message"), [
    ({"request_time": None}, r"no column 'request_time'.*\(--request-time names it\)"),
    ({"user_id": None, "user": [1]}, r"no column 'user_id'.*did you mean 'user'\? \(--user names it\)"),
    ({"item_id": [1]}, r"no list column 'item_id' or 'history_item_id'; name the list \(--item COLUMN\); the lists"),
    ({"event_time": [[1, 2]]}, r"row 1: 'event_time' has 2 values for 1 items"),
    ({"event_time": pa.array([[None]], pa.list_(pa.int64()))}, "row 1: an event without a time"),
    ({"event_time": [[-1]]}, "row 1: an event time before 1970"),
    ({"event_time": [["soon"]]}, "neither a number nor an ISO 8601 time"),
    ({"item_id": [[None]]}, "row 1: an item without an id|ids must be"),
    ({"item_id": [[1.5]]}, "'item_id' holds double; ids must be integers or strings"),
    ({"user_id": pa.array([None], pa.int64())}, "line 1: no user_id"),
    ({"request_time": pa.array([None], pa.int64())}, "no event time"),
    ({"item_id": pa.array([[]], pa.list_(pa.int64())), "event_time": pa.array([[]], pa.list_(pa.int64()))},
     "all histories in it are empty"),
])
def test_bad_fat_rows(tmp_path, columns, message):
    columns = {name: value for name, value in {**BASE, **columns}.items() if value is not None}
    pq.write_table(pa.table(columns), tmp_path / "fat.parquet")
    with pytest.raises(ValueError, match=rf"(?s)fat\.parquet.*({message})"):
        ingest_fat_rows([tmp_path / "fat.parquet"], tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["fat.parquet"]


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_fat_rows([tmp_path / "gone.parquet"])
    (tmp_path / "a.csv").write_text("user_id\n")
    with pytest.raises(ValueError, match=r"ends in \.parquet"):
        open_fat_rows([tmp_path / "a.csv"])
    (tmp_path / "a.parquet").write_bytes(b"PAR1xxxxPAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: "):
        open_fat_rows([tmp_path / "a.parquet"])
    write(tmp_path / "in" / "1.parquet", [{"user": 1, "at": 5, "events": [(1, 1)]}])
    write(tmp_path / "in" / "2.parquet", [{"user": "a", "at": 5, "events": [(1, 1)]}])
    with pytest.raises(ValueError, match=r"'user_id' is int64 in .*1\.parquet and string in .*2\.parquet"):
        open_fat_rows([tmp_path / "in"])
    with pytest.raises(ValueError, match="holds int64, no list; the lists are 'history_event_time'"):
        open_fat_rows([tmp_path / "in"], FatRowColumns(item_id="user_id"))


_event = st.tuples(st.integers(0, 6), st.integers(0, 3), st.sampled_from(["like", "click", None]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(_event, min_size=1, max_size=4)), min_size=1, max_size=6),
       st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=8),
       st.randoms())
def test_rows_of_a_store_give_a_store_that_gives_the_rows(tmp_path_factory, appends, requests, random):
    """Fat rows written from one version, cut anywhere, in any order: a store of what they list rebuilds each row."""
    folder = tmp_path_factory.mktemp("fat")
    schema = EventSchema({"item_id": pa.int64(), "action": pa.dictionary(pa.int8(), pa.string())})
    rows = []
    with HistoryStore.create(folder / "truth", schema) as truth:
        for user, events in appends:
            times, items, actions = zip(*events, strict=True)
            truth.append(pa.table({"user_id": [user] * len(events), "event_time": times, "item_id": items,
                                   "action": pa.array(actions, pa.string())}))
        for user, as_of, last in requests:
            rows += rows_of(truth, truth.point([user], as_of), last, "item_id", "action")
    random.shuffle(rows)
    if not any(row["events"] for row in rows):
        return
    path = write(folder / "fat.parquet", rows, action=pa.string())
    _, recovery = ingest_fat_rows([path], folder / "store")
    assert recovery.order == recovery.values == 0
    with HistoryStore.open(folder / "store") as store:
        report = compare_fat_rows(open_fat_rows([path]), store)
        assert report.passed and report.equal + report.causes["truncation"]["rows"] == len(rows), report

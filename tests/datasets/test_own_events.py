"""Tables of one's own into a store: any number of files, checked first, each appended once however often it is run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.datasets import Dataset, EventColumns, ingest, ingest_files
from semel.history import EventSchema, HistoryStore, Projection, StoreLocked

FOREVER = 2**62


def parquet(path, rows=None, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns) if rows is None else rows, path)
    return path


def events(users, items, times, **more):
    return pa.table({"user_id": users, "item_id": items, "event_time": times, **more})


def histories(store, *columns):
    """user -> events as tuples of ``columns``, nulls None."""
    with HistoryStore.open(store) as handle:
        keys = handle.keys()
        table = handle.read(handle.point(keys, as_of=FOREVER), Projection(columns))
        values = []
        for name in columns:
            if name in (table.dictionaries or {}):
                values.append(table.strings(name).tolist())
            else:
                valid = (table.validity or {}).get(name)
                plain = table.columns[name].tolist()
                values.append([v if ok else None for v, ok in zip(
                    plain, [True] * len(plain) if valid is None else valid, strict=True)])
        rows = list(zip(*values, strict=True))
        return {key: rows[a:b] for key, a, b in zip(keys, table.offsets[:-1], table.offsets[1:], strict=True)}


def test_a_folder_in_the_order_of_its_paths(tmp_path):
    folder = tmp_path / "in"
    parquet(folder / "b" / "part-1.parquet", events([1, 2], [30, 31], [5, 5]))
    parquet(folder / "a" / "part-2.parquet", events([1, 2], [10, 11], [5, 5]))
    parquet(folder / "part-0.parquet", events([1], [40], [5]))
    parquet(folder / "_tmp.parquet", events([9], [9], [9]))
    (folder / ".hidden.csv").write_text("x\n")
    (folder / "_SUCCESS").write_text("")
    report = ingest_files([folder], tmp_path / "store")
    assert (report.events, report.appended, report.users, report.items) == (5, 5, 2, 5)
    assert histories(tmp_path / "store", "item_id") == {1: [(10,), (30,), (40,)], 2: [(11,), (31,)]}
    with HistoryStore.open(tmp_path / "store" / "catalogue") as catalogue:
        assert catalogue.keys().tolist() == [10, 11, 30, 31, 40]
    note = json.loads((tmp_path / "store" / "dataset.json").read_text())
    assert (note["events"], note["first_event_time"], note["last_event_time"]) == (5, 5, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store"], "nothing is left beside"


def test_every_format_gives_the_same_store(tmp_path):
    table = events(["zoë", "7"], ["映画", "007"], [1, 2], price=[1.5, None])
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_file(str(folder / "b.arrow"), table.schema) as writer:
        writer.write_table(table.slice(0, 1))
        writer.write_table(table.slice(1))
    with pa.ipc.new_stream(str(folder / "c.arrow"), table.schema) as writer:
        writer.write_table(table)
    text = "user_id,item_id,event_time,price\nzoë,映画,1,1.5\n7,007,2,\n"
    (folder / "d.csv").write_text(text, encoding="utf8")
    (folder / "e.tsv").write_text(text.replace(",", "\t"), encoding="utf8")
    for path in sorted(folder.iterdir()):
        store = tmp_path / path.stem
        ingest_files([path], store)
        assert histories(store, "item_id", "event_time", "price") == {
            "zoë": [("映画", 1, 1.5)], "7": [("007", 2, None)]}, path
    assert ingest_files([folder], tmp_path / "all").events == 10


def test_types_are_kept(tmp_path):
    table = events([1, 1], [2, 3], [1, 2], action=pa.array(["like", None]).dictionary_encode(),
                   seen=pa.array([1, None], pa.timestamp("ms", "UTC")), tiny=pa.array([1, None], pa.int8()),
                   half=pa.array([1.5, None], pa.float16()), ok=[True, None],
                   huge=pa.array([2**64 - 1, 0], pa.uint64()),
                   vector=pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), nested=[{"x": 1}, None],
                   day=pa.array([19000, None], pa.date32()), cost=pa.array([None, None], pa.null()))
    report = ingest_files([parquet(tmp_path / "e.parquet", table)], tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        kept = store.schema
    assert kept.columns == {
        "item_id": pa.int64(), "action": pa.dictionary(pa.int32(), pa.string()), "seen": pa.timestamp("ms", "UTC"),
        "tiny": pa.int8(), "half": pa.float16(), "ok": pa.bool_(), "huge": pa.uint64(),
        "vector": pa.list_(pa.float32(), 2), "day": pa.timestamp("us")}
    assert kept.group == "action"
    assert any("nested" in note for note in report.notes) and any("cost" in note for note in report.notes)
    assert histories(tmp_path / "store", "action", "tiny", "ok", "huge", "vector", "day") == {
        1: [("like", 1, True, 2**64 - 1, [1.0, 2.0], 19000 * 86_400_000_000), (None, None, None, 0, None, None)]}


def test_mapping(tmp_path):
    (tmp_path / "e.csv").write_text("who,what,when,stars,note\n1,7,1600000000,4,x\n")
    columns = EventColumns("who", "what", "when", "s", others={"rating": "stars"})
    ingest_files([tmp_path / "e.csv"], tmp_path / "store", columns)
    with HistoryStore.open(tmp_path / "store") as store:
        assert list(store.schema.columns) == ["item_id", "rating"]
    assert histories(tmp_path / "store", "item_id", "event_time", "rating") == {1: [(7, 1_600_000_000_000_000, 4)]}
    with pytest.raises(ValueError, match=r"e\.csv: no column 'starz'; it has .* did you mean 'stars'"):
        ingest_files([tmp_path / "e.csv"], tmp_path / "s2", EventColumns("who", "what", "when", "s", {"r": "starz"}))


def test_text_gets_its_types_from_all_files(tmp_path):
    (tmp_path / "a.csv").write_text("user_id,item_id,event_time,n,flag,at,code\n1,7,1,5,true,2024-01-01,1\n")
    (tmp_path / "b.csv").write_text("user_id,item_id,event_time,n,flag,at,code\n2,8,2.0,4.5,false,2024-01-02,x\n")
    ingest_files([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "store")
    with HistoryStore.open(tmp_path / "store") as store:
        assert store.schema.columns == {"item_id": pa.int64(), "n": pa.float64(), "flag": pa.bool_(),
                                        "at": pa.timestamp("us"), "code": pa.string()}
    assert histories(tmp_path / "store", "n", "flag", "code") == {1: [(5.0, True, "1")], 2: [(4.5, False, "x")]}
    (tmp_path / "c.csv").write_text("user_id,item_id,event_time\n1,007,1\n")
    ingest_files([tmp_path / "a.csv", tmp_path / "c.csv"], tmp_path / "s2", EventColumns(others={}))
    assert histories(tmp_path / "s2", "item_id") == {1: [("7",), ("007",)]}, "ids are text in all files or in none"


# Again, and more


def test_again_appends_nothing_and_a_new_file_only_itself(tmp_path):
    folder, store = tmp_path / "in", tmp_path / "store"
    parquet(folder / "1.parquet", events([1], [1], [1]))
    assert ingest_files([folder], store).appended == 1
    assert ingest_files([folder], store).appended == 0
    parquet(folder / "2.parquet", events([1, 2], [2, 9], [2, 2]))
    report = ingest_files([folder], store)
    assert (report.events, report.appended, report.items) == (3, 2, 3)
    assert any("was there; events before: 1, joined them: 2" in note for note in report.notes)
    assert ingest_files([folder / "1.parquet"], store).appended == 0
    shutil.copytree(folder, tmp_path / "moved")
    assert ingest_files([tmp_path / "moved"], store).appended == 0, "the same bytes are the same events"
    assert histories(store, "item_id") == {1: [(1,), (2,)], 2: [(9,)]}
    note = json.loads((store / "dataset.json").read_text())
    assert (note["events"], note["users"], note["items"], note["last_event_time"]) == (3, 2, 3, 2)
    with HistoryStore.open(store / "catalogue") as catalogue:
        assert catalogue.keys().tolist() == [1, 2, 9] and catalogue.stats()["events"]["total"] == 3


def test_a_file_that_has_changed_is_refused(tmp_path):
    store, path = tmp_path / "store", tmp_path / "e.csv"
    path.write_text("user_id,item_id,event_time\n1,1,1\n")
    ingest_files([path], store)
    with open(path, "a") as file:
        file.write("1,2,2\n")
    with pytest.raises(ValueError, match=r"e\.csv was ingested into .* before and has changed since"):
        ingest_files([path], store)
    path.write_text("user_id,item_id,event_time\n1,1,1\n")
    with pytest.raises(ValueError, match=r"was ingested into .* before, read as user_id=user_id"):
        ingest_files([path], store, EventColumns("item_id", "user_id"))
    assert histories(store, "item_id") == {1: [(1,)]}


def test_an_ingest_that_failed_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.datasets.own_events.PIECE_ROWS", 3)
    for number in range(4):
        parquet(tmp_path / "in" / f"{number}.parquet", events([1] * 7, [number] * 7, list(range(7))))
    store, calls = tmp_path / "store", []

    def fail(what, done, total):
        calls.append(what)
        if calls.count("append events") == 5:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ingest_files([tmp_path / "in"], store, progress=fail)
    assert not store.exists(), "a store is there when it is complete"
    report = ingest_files([tmp_path / "in"], store)
    assert (report.events, report.appended) == (28, 28 - (3 + 3 + 1 + 3 + 3))
    assert histories(store, "item_id", "event_time") == {1: [(n, t) for t in range(7) for n in range(4)]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "store"]


def test_what_an_ingest_of_other_files_left_is_not_taken_over(tmp_path):
    def fail(what, done, total):
        if what == "append events":
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ingest_files([parquet(tmp_path / "wrong.parquet", events([1], [1], [1]))], tmp_path / "store", progress=fail)
    ingest_files([parquet(tmp_path / "right.parquet", events(["a"], [2], [2]))], tmp_path / "store")
    assert histories(tmp_path / "store", "item_id") == {"a": [(2,)]}


def test_two_at_a_time_into_one_new_store(tmp_path):
    first = parquet(tmp_path / "a.parquet", events([1], [1], [1]))
    other = parquet(tmp_path / "b.parquet", events([2], [2], [2]))
    refused = []

    def meanwhile(what, done, total):
        if what == "append events":
            for path in (first, other):
                with pytest.raises(StoreLocked):
                    ingest_files([path], tmp_path / "store")
                refused.append(path)
    ingest_files([first], tmp_path / "store", progress=meanwhile)
    assert refused == [first, other] and histories(tmp_path / "store", "item_id") == {1: [(1,)]}


@pytest.mark.timeout(120)
def test_killed_anywhere_nothing_is_lost_or_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.datasets.own_events.PIECE_ROWS", 20)
    for number in range(3):
        parquet(tmp_path / "in" / f"{number}.parquet", events([1, 2] * 200, [number] * 400, list(range(400))))
    script = ("import sys, semel.datasets.own_events as own\nown.PIECE_ROWS = 20\nfrom pathlib import Path\n"
              "print('go', flush=True)\nown.ingest_files([Path(sys.argv[1])], Path(sys.argv[2]))\nprint('done')\n")
    store = tmp_path / "store"
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", script, tmp_path / "in", store], stdout=subprocess.PIPE,
                                   text=True)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        time.sleep(0.04 * 2**attempt)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate(timeout=60)[0]
        if "done" in rest:
            break
    report = ingest_files([tmp_path / "in"], store)
    assert report.events == 1200
    with HistoryStore.open(store) as handle:
        assert handle.stats()["events"]["total"] == 1200


def test_more_than_a_log_should_hold_is_compacted_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.datasets.own_events.PIECE_ROWS", 10)
    monkeypatch.setattr("semel.datasets.filling.COMPACT_EVENTS", 25)
    path = parquet(tmp_path / "e.parquet", events([1, 2] * 50, list(range(100)), [5] * 100))
    ingest_files([path], tmp_path / "store")
    assert histories(tmp_path / "store", "item_id") == {1: [(n,) for n in range(0, 100, 2)],
                                                        2: [(n,) for n in range(1, 100, 2)]}
    with HistoryStore.open(tmp_path / "store") as store:
        assert store.generation == 4
    assert ingest_files([path], tmp_path / "store").appended == 0


# Into a store that is there


def test_values_are_cast_to_a_store_that_is_there_or_refused(tmp_path):
    store = tmp_path / "store"
    schema = EventSchema({"item_id": pa.int32(), "rating": pa.float32(),
                          "action": pa.dictionary(pa.int8(), pa.string())}, user_id=pa.string(), group="action")
    HistoryStore.create(store, schema).close()
    (tmp_path / "a.csv").write_text("user_id,item_id,event_time,rating,action\n7,5,1,4.1,like\n")
    ingest_files([tmp_path / "a.csv"], store)
    ((item, rating, action),) = histories(store, "item_id", "rating", "action")["7"]
    assert (item, action) == (5, "like") and rating == pytest.approx(4.1, abs=1e-6)
    before = histories(store, "item_id")
    for message, table in {
        "the store has no column 'other'": events(["7"], [5], [1], other=[1]),
        r"'user_id' holds int64, the store keeps string": events([7], [5], [1]),
        r"'item_id' has values from .* too large for int32": events(["7"], [2**40], [1]),
        r"'rating' has values from .* which float, .* does not hold exactly": events(
            ["7"], [1], [1], rating=[2**30 + 1]),
        r"'rating' holds double, the store keeps float": events(["7"], [1], [1], rating=[1.5]),
        r"'rating' holds string, the store keeps float": events(["7"], [1], [1], rating=["good"]),
    }.items():
        with pytest.raises(ValueError, match=message):
            ingest_files([parquet(tmp_path / "bad.parquet", table)], store)
    assert histories(store, "item_id") == before
    ingest_files([parquet(tmp_path / "less.parquet", events(["8"], [6], [1]))], store)
    assert histories(store, "rating", "action")["8"] == [(None, None)]
    with HistoryStore.open(store, mode="a"), pytest.raises(StoreLocked):
        ingest_files([parquet(tmp_path / "more.parquet", events(["8"], [7], [1]))], store)


def test_not_into_what_is_no_store_of_events(tmp_path):
    path = parquet(tmp_path / "e.parquet", events([1], [1], [1]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    with pytest.raises(FileExistsError, match="is no history store"):
        ingest_files([path], tmp_path / "mine")
    ingest_files([path], tmp_path / "store")
    ingest(Dataset("d", events([1], [1], [1]), None, None, "", ""), tmp_path / "d")
    with pytest.raises(FileExistsError, match="holds a data set; choose another --store"):
        ingest_files([path], tmp_path / "d")
    with pytest.raises(ValueError, match="keyed by item_id"):
        ingest_files([path], tmp_path / "store" / "catalogue")


def test_item_features_join_the_catalogue_once(tmp_path):
    folder = tmp_path / "in"
    parquet(folder / "events.parquet", events([1], [5], [1]))
    parquet(folder / "items.parquet", item_id=[5, 6], title=["five", "six"])
    parquet(folder / "users.parquet", user_id=[1], age=[33])
    for _ in range(2):
        report = ingest_files([folder], tmp_path / "store")
        assert report.items == 2
    parquet(folder / "events.parquet", events([1], [7], [2]))
    with pytest.raises(ValueError, match="has changed since"):
        ingest_files([folder], tmp_path / "store")
    ingest_files([parquet(tmp_path / "new.parquet", events([1], [7], [2]))], tmp_path / "store")
    with HistoryStore.open(tmp_path / "store" / "catalogue") as catalogue:
        assert catalogue.stats()["events"]["total"] == 3
        features = catalogue.read(catalogue.point([5, 6, 7], as_of=1), Projection(("title",), last=1))
        assert features.strings("title").tolist() == ["five", "six", None]
    assert pq.read_table(tmp_path / "store" / "users.parquet").num_rows == 1


# Bad input: before anything is stored


@pytest.mark.parametrize(("name", "content", "message"), [
    ("b.csv", "user_id,item_id,event_time\n1,,5\n", r"b\.csv, line 2: no item_id"),
    ("b.csv", "user_id,item_id,event_time\n1,2,5\n1,2\n", r"b\.csv: .*Expected 3 columns, got 2"),
    ("b.csv", "user_id,item_id,event_time\n1,2,soon\n", r"b\.csv, line 2: column 'event_time' holds 'soon'"),
    ("b.csv", "user_id,item_id,event_time\n1,2,\n", r"b\.csv, line 2: no event time"),
    ("b.csv", "user_id,item_id,event_time\n1,2,-5\n", r"b\.csv, line 2: event time -5 us is before 1970"),
    ("b.csv", "user_id,item,event_time\n1,2,5\n", r"b\.csv: no column 'item_id'.*did you mean 'item'"),
    ("b.csv", "user_id,user_id,item_id,event_time\n1,1,2,5\n", r"b\.csv: more than one column is called 'user_id'"),
    ("b.csv", "", r"b\.csv: the file is empty"),
    ("b.csv", b"user_id,item_id,event_time\n\xff,2,5\n", r"b\.csv: .*UTF8"),
    ("b.parquet", b"", r"b\.parquet: the file is empty"),
    ("b.parquet", b"PAR1 but no Parquet PAR1", r"b\.parquet: "),
    ("b.arrow", b"ARROW1\0\0 and no more", r"b\.arrow: "),
    ("b.arrow", b"no arrow", r"b\.arrow: "),
])
def test_a_bad_file_among_good_ones(tmp_path, name, content, message):
    parquet(tmp_path / "in" / "a.parquet", events([1], [1], [1]))
    (tmp_path / "in" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        ingest_files([tmp_path / "in"], tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("first", "second", "message"), [
    ({"user_id": [1]}, {"user_id": ["a"]}, r"'user_id' is int64 in .*a\.parquet and string in .*b\.parquet"),
    ({"x": [1]}, {"x": ["a"]}, r"'x' is int64 in .*a\.parquet and string in .*b\.parquet"),
    ({"x": [2**60 + 1]}, {"x": [1.5]}, r"a\.parquet: column 'x' has values .* which double"),
    ({"x": pa.array([[1, 2]], pa.list_(pa.int8(), 2))}, {"x": pa.array([[1, 2, 3]], pa.list_(pa.int8(), 3))},
     r"'x' is fixed_size_list"),
    ({"x": pa.array([[1, None]], pa.list_(pa.int8(), 2))}, {}, r"a\.parquet, .*: column 'x': a list holds a null"),
    ({"user_id": [1.5]}, {}, r"'user_id' holds double; ids must be integers or strings"),
])
def test_schemas_that_do_not_go_together(tmp_path, first, second, message):
    base = {"user_id": [1], "item_id": [1], "event_time": [1]}
    parquet(tmp_path / "a.parquet", **{**base, **first})
    parquet(tmp_path / "b.parquet", **{**base, **second})
    with pytest.raises(ValueError, match=message):
        ingest_files([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_schemas_that_go_together(tmp_path):
    parquet(tmp_path / "a.parquet", events([1], [1], [1], x=pa.array([1], pa.int8()), s=["a"], y=[None]))
    parquet(tmp_path / "b.parquet", events(pa.array([1], pa.int32()), [2], [2], x=[2.5], y=[3],
                                           s=pa.array(["b"]).dictionary_encode()))
    parquet(tmp_path / "c.parquet", pa.table({"event_time": [3], "item_id": [3], "user_id": [1]}))
    report = ingest_files([tmp_path / f"{name}.parquet" for name in "abc"], tmp_path / "store")
    assert histories(tmp_path / "store", "x", "s", "y") == {1: [(1.0, "a", None), (2.5, "b", 3), (None, None, None)]}
    assert any("'x' is not in 1 of 3 files" in note and "c.parquet" in note for note in report.notes)


def test_corrupt_parquet_in_the_middle(tmp_path):
    path = parquet(tmp_path / "e.parquet", events(list(range(50_000)), list(range(50_000)), list(range(50_000))))
    content = bytearray(path.read_bytes())
    content[200:4000] = os.urandom(3800)
    path.write_bytes(content)
    try:
        ingest_files([path], tmp_path / "store")  # plain pages have no checksum: other values may come out
    except ValueError as error:
        assert "e.parquet" in str(error)
        assert not (tmp_path / "store").exists()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"e\.parquet: "):
        ingest_files([path], tmp_path / "s2")


def test_nothing_in_it(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no file in it whose name ends in"):
        ingest_files([tmp_path / "none"], tmp_path / "store")
    with pytest.raises(FileNotFoundError, match=r"gone\.csv: no such file"):
        ingest_files([tmp_path / "gone.csv"], tmp_path / "store")
    (tmp_path / "h.csv").write_text("user_id,item_id,event_time\n")
    nothing = pa.array([], pa.int64())
    parquet(tmp_path / "h.parquet", events(nothing, nothing, nothing))
    for path in (tmp_path / "h.csv", tmp_path / "h.parquet"):
        with pytest.raises(ValueError, match="no events in it"):
            ingest_files([path], tmp_path / "store")
    (tmp_path / "one.csv").write_text("user_id,item_id,event_time\n1,2,3\n")
    assert ingest_files([tmp_path / "h.csv", tmp_path / "one.csv"], tmp_path / "store").events == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=9), min_size=1, max_size=4),
       st.integers(1, 5))
def test_any_split_into_files_and_pieces_is_the_same_history(tmp_path_factory, files, chunk):
    folder = tmp_path_factory.mktemp("split")
    rows = [(user, time) for file in files for user, time in file]
    for number, file in enumerate(files):
        first = sum(map(len, files[:number]))
        parquet(folder / "in" / f"{number}.parquet", events(
            pa.array([user for user, _ in file], pa.int64()), pa.array(range(first, first + len(file)), pa.int64()),
            pa.array([when for _, when in file], pa.int64())))
    if not rows:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semel.datasets.own_events.PIECE_ROWS", chunk)
        ingest_files([folder / "in"], folder / "store")
    want = {user: [(at,) for _, at in sorted((time, at) for at, (u, time) in enumerate(rows) if u == user)]
            for user in {user for user, _ in rows}}
    assert histories(folder / "store", "item_id") == want

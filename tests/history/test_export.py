"""``export``: every event once, sorted, typed; and back again."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.datasets import ingest_files
from semel.history import EventSchema, HistoryStore, Projection
from semel.history.export import export

FOREVER = 2**62
COLUMNS = {
    "item_id": pa.int32(), "action": pa.dictionary(pa.int8(), pa.string()), "title": pa.string(), "ok": pa.bool_(),
    "half": pa.float16(), "price": pa.float64(), "huge": pa.uint64(), "at": pa.timestamp("s", "UTC"),
    "fine": pa.timestamp("ns"), "vector": pa.list_(pa.float32(), 2),
}
_value = {
    "item_id": st.integers(0, 50), "action": st.sampled_from(["like", "click", "ünlike"]), "title": st.text(max_size=3),
    "ok": st.booleans(), "half": st.floats(width=16, allow_nan=False), "price": st.floats(allow_nan=False),
    "huge": st.integers(0, 2**64 - 1), "at": st.integers(-2**40, 2**40), "fine": st.integers(-2**62, 2**62),
    "vector": st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
}
_event = st.fixed_dictionaries({name: values if name == "item_id" else st.none() | values
                                for name, values in _value.items()} | {"event_time": st.integers(0, 5)})


def table_of(rows, schema):
    return pa.table([pa.array([np.float16(row[field.name]) if field.name == "half" and row["half"] is not None
                               else row[field.name] for row in rows], field.type) for field in schema.arrow],
                    schema=schema.arrow)


def contents(store):
    """user -> all columns but the version, bit for bit."""
    keys = store.keys()
    found = store.read(store.point(keys, as_of=FOREVER), Projection(("event_time", *store.schema.columns)))
    out = {}
    for row, key in enumerate(keys):
        low, high = found.offsets[row], found.offsets[row + 1]
        out[key] = {}
        for name in found.columns:
            values = found.strings(name)[low:high].tolist() if name in (found.dictionaries or {}) else (
                found.columns[name][low:high].tobytes())
            valid = (found.validity or {}).get(name)
            missing = [] if valid is None else np.flatnonzero(~valid[low:high]).tolist()
            out[key][name] = (values, missing)
    return out


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([pa.int64(), pa.string()]), st.integers(1, 4), st.booleans(), st.integers(1, 9))
def test_export_and_ingest_give_equal_histories(tmp_path_factory, data, key, shards, compacted, chunk):
    folder = tmp_path_factory.mktemp("round")
    users = st.integers(-3, 3) if pa.types.is_int64(key) else st.sampled_from(["ä", "b", "映画", "7"])
    appends = data.draw(st.lists(st.lists(st.tuples(users, _event), min_size=1, max_size=6), min_size=1, max_size=4))
    schema = EventSchema(COLUMNS, user_id=key, group="action")
    with HistoryStore.create(folder / "store", schema, shards=shards) as store:
        for append in appends:
            store.append(table_of([{"user_id": user, **event} for user, event in append], schema))
        if compacted:
            store.compact()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("semel.history.export.ROWS", chunk)
            report = export(store, folder / "out")
        assert report.rows == sum(map(len, appends)) and report.users == len(store.keys())
        assert report.version == store.version and 1 <= report.files <= shards
        for file in (folder / "out").iterdir():
            rows = pq.read_table(file)
            assert rows.column_names == ["user_id", "event_time", "version", *COLUMNS]
            assert rows.schema.field("action").type == COLUMNS["action"]
            order = list(zip(rows["user_id"].to_pylist(), rows["event_time"].to_pylist(), rows["version"].to_pylist(),
                             strict=True))
            assert order == sorted(order)
        ingest_files([folder / "out"], folder / "again")
        with HistoryStore.open(folder / "again") as again:
            assert again.schema == schema, "seconds and index types too"
            assert contents(again) == contents(store)


def small(path, values=("like", None), rows=2):
    schema = EventSchema({"item_id": pa.int64(), "action": pa.dictionary(pa.int8(), pa.string())})
    store = HistoryStore.create(path, schema)
    store.append(pa.table({"user_id": [1] * rows, "event_time": list(range(rows)), "item_id": list(range(rows)),
                           "action": pa.array(list(values))}))
    return store


def test_events_of_the_log_and_not_those_that_come_meanwhile(tmp_path):
    with small(tmp_path / "store") as store:
        reader = HistoryStore.open(tmp_path / "store")
        store.append(pa.table({"user_id": [2], "event_time": [9], "item_id": [9], "action": ["new"]}))
        assert export(reader, tmp_path / "old").rows == 2
        assert export(store, tmp_path / "new").rows == 3


def test_a_dictionary_that_has_outgrown_its_index(tmp_path):
    with small(tmp_path / "store", [f"a{n}" for n in range(300)], rows=300) as store:
        export(store, tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    assert pq.read_table(file)["action"].to_pylist() == [f"a{n}" for n in range(300)]
    assert pq.read_schema(file).field("action").type == pa.dictionary(pa.int32(), pa.string())


def test_an_empty_store(tmp_path):
    with HistoryStore.create(tmp_path / "store", EventSchema({"item_id": pa.int64()})) as store:
        report = export(store, tmp_path / "out")
    assert (report.rows, report.users, report.files) == (0, 0, 0) and (tmp_path / "out").is_dir()


def test_where_it_may_not_write(tmp_path):
    with small(tmp_path / "store") as store:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("x")
        with pytest.raises(FileExistsError, match="out exists already"):
            export(store, tmp_path / "out")
        with pytest.raises(ValueError, match="format 'csv' is none of parquet, lance"):
            export(store, tmp_path / "new", "csv")

        def fail(done, total):
            raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            export(store, tmp_path / "new", progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_lance_says_which_extra_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    with small(tmp_path / "store") as store, pytest.raises(ValueError, match=r"pip install 'semel\[lance\]'"):
        export(store, tmp_path / "out", "lance")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_lance(tmp_path):
    lance = pytest.importorskip("lance")
    schema = EventSchema(COLUMNS, user_id=pa.string())
    rows = [{**dict.fromkeys(COLUMNS), "user_id": f"u{n % 7}", "event_time": n, "item_id": n} for n in range(50)]
    rows[3] |= {"action": "like", "title": "ü", "ok": True, "half": 1.5, "price": 2.5, "huge": 2**64 - 1, "at": 7,
                "fine": 8, "vector": [1.0, 2.0]}
    with HistoryStore.create(tmp_path / "store", schema) as store:
        store.append(table_of(rows, schema))
        assert export(store, tmp_path / "out.lance", "lance").rows == 50
        export(store, tmp_path / "parquet")
    found = lance.dataset(str(tmp_path / "out.lance")).to_table()
    want = pa.concat_tables(pq.read_table(file) for file in sorted((tmp_path / "parquet").iterdir()))
    assert found.column_names == want.column_names
    for name in want.column_names:
        if name != "fine":  # nanoseconds have no Python object
            assert found[name].to_pylist() == want[name].to_pylist(), name


def test_shards_of_says_where_users_lie(tmp_path):
    with small(tmp_path / "store") as store:
        where = store.shards_of([1, 2, 3])
        assert where.dtype == np.int64 and ((where >= 0) & (where < 16)).all()
        assert where.tolist() == store.shards_of(np.array([1, 2, 3])).tolist()

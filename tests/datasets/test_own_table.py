"""Your own table: columns by name, times by unit, ids as they are."""

from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.datasets import EventColumns, read
from semel.datasets.ids import compact_ids

WANT = 1_700_000_000_000_000


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(("times", "name", "unit"), [
    ([1_700_000_000], "t", "s"), ([1_700_000_000_000], "t", "ms"), ([WANT], "t", "us"),
    ([WANT * 1000 + 999], "t", "ns"),
    ([1_700_000_000.0], "t", "s"), ([1_700_000_000_000], "time_ms", None), ([1_700_000_000], "seen_s", None),
    ([WANT], "event_time", None), (["2023-11-14T22:13:20Z"], "t", None), (["2023-11-14 22:13:20"], "t", None),
    (["2023-11-15T00:13:20+02:00"], "t", None), ([datetime(2023, 11, 14, 22, 13, 20)], "t", None),
    ([datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)], "t", "us"),
])
def test_times(tmp_path, times, name, unit):
    path = parquet(tmp_path / "e.parquet", u=[1], i=[2], **{name: times})
    data = read(path, columns=EventColumns("u", "i", name, unit))
    assert data.events["event_time"].to_pylist() == [WANT]
    assert data.events["event_time"].type == pa.int64()


@pytest.mark.parametrize("value", ["2023-11-14", date(2023, 11, 14)])
def test_a_day_is_its_first_microsecond(tmp_path, value):
    path = parquet(tmp_path / "e.parquet", u=[1], i=[2], t=[value])
    data = read(path, columns=EventColumns("u", "i", "t"))
    assert data.events["event_time"].to_pylist() == [1_699_920_000_000_000]


def test_numbers_without_a_unit_are_not_guessed(tmp_path):
    path = parquet(tmp_path / "e.parquet", user_id=[1], item_id=[2], t=[1_700_000_000])
    with pytest.raises(ValueError, match="column 't' holds numbers; say their unit"):
        read(path, columns=EventColumns(event_time="t"))
    with pytest.raises(ValueError, match="time unit 'hours' is none of s, ms, us, ns"):
        EventColumns(unit="hours")


def test_csv_with_other_columns(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("who,what,when,action,price,ok\nzoë,007,2023-11-14T22:13:20Z,buy,1.5,true\n"
                    "bob,8,2023-11-14T22:13:19Z,view,,false\n")
    data = read(path, columns=EventColumns("who", "what", "when"))
    assert data.events.to_pylist()[0] == {"user_id": "zoë", "item_id": "007", "event_time": WANT, "action": "buy",
                                          "price": 1.5, "ok": 1}
    assert data.events["event_time"].to_pylist() == [WANT, WANT - 1_000_000], "order of time is not asked for"
    assert data.action is None, "the events say it themselves"


def test_plain_numbers_in_csv_become_integers(tmp_path):
    path = tmp_path / "events.tsv"
    path.write_text("user_id\titem_id\tevent_time\n9000000000000000001\t-5\t1\n1\t0\t2\n")
    data = read(path)
    assert data.events["user_id"].to_pylist() == ["9000000000000000001", "1"], "19 digits may not fit: kept as text"
    assert data.events["item_id"].to_pylist() == [-5, 0]


def test_further_columns_by_name(tmp_path):
    path = parquet(tmp_path / "e.parquet", user_id=[1], item_id=[2], event_time=[WANT], stars=[4], note=["x"])
    data = read(path, columns=EventColumns(others={"rating": "stars"}))
    assert data.events.to_pylist() == [{"user_id": 1, "item_id": 2, "event_time": WANT, "rating": 4}]
    with pytest.raises(ValueError, match=r"no column 'star'.*did you mean 'stars'"):
        read(path, columns=EventColumns(others={"rating": "star"}))
    with pytest.raises(ValueError, match="user, item and time must be three columns"):
        EventColumns("a", "a", "b")


@given(st.lists(st.text("0123456789-_a", min_size=1), min_size=1))
def test_text_ids_lose_nothing(texts):
    ids = compact_ids(pa.array(texts)).to_pylist()
    assert [str(value) for value in ids] == texts
    assert len({type(value) for value in ids}) == 1


def test_a_folder_with_items_and_users(tmp_path):
    parquet(tmp_path / "events.parquet", user_id=["a"], item_id=[2], event_time=[WANT], version=[1],
            nested=[{"x": 1}])
    parquet(tmp_path / "items.parquet", item_id=[2, 2], title=["old", "new"])
    (tmp_path / "users.csv").write_text("user_id,age\na,33\n")
    data = read(tmp_path)
    assert data.events.column_names == ["user_id", "item_id", "event_time"]
    assert len(data.notes) == 2 and "version" in data.notes[0]
    assert data.items.to_pylist() == [{"item_id": 2, "title": "new"}]
    assert data.users.to_pylist() == [{"user_id": "a", "age": 33}]


@pytest.mark.parametrize(("columns", "message"), [
    ({"user": [1], "item_id": [2], "event_time": [3]}, "no column 'user_id'.*did you mean 'user'"),
    ({"user_id": [1.5], "item_id": [2], "event_time": [3]}, "'user_id' holds double; ids must be integers or strings"),
    ({"user_id": [None, 1], "item_id": [2, 2], "event_time": [3, 3]}, "line 1: no user_id"),
    ({"user_id": [1, 1], "item_id": ["x", ""], "event_time": [3, 3]}, "line 2: no item_id"),
    ({"user_id": [1], "item_id": [2], "event_time": [-1]}, "event time -1 us is before 1970"),
    ({"user_id": [1], "item_id": [2], "event_time": [None]}, "which is no time|no event time"),
    ({"user_id": [1], "item_id": [2], "event_time": ["soon"]}, "'event_time' holds 'soon'"),
    ({"user_id": [1], "item_id": [2], "event_time": [float("nan")]}, "nan us is no time"),
    ({"user_id": [], "item_id": [], "event_time": []}, "no events|ids must be"),
])
def test_bad_tables(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        read(parquet(tmp_path / "e.parquet", **columns))


def test_bad_files(tmp_path):
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        read(tmp_path / "e.csv", columns=EventColumns())
    (tmp_path / "e.csv").write_text("user_id,item_id,event_time\n1,2\n")
    with pytest.raises(ValueError, match="Expected 3 columns, got 2"):
        read(tmp_path / "e.csv", columns=EventColumns())
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(tmp_path / "gone.parquet", columns=EventColumns())
    (tmp_path / "e.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"e\.parquet"):
        read(tmp_path / "e.parquet")
    (tmp_path / "e.xlsx").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ends in \.parquet, \.csv"):
        read(tmp_path / "e.xlsx", columns=EventColumns())



@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-2**63, 2**63 - 1), st.text(min_size=1).filter(lambda t: "\0" not in t),
                          st.integers(0, 7_000_000_000_000_000)), min_size=1))
def test_parquet_keeps_every_event_in_order(tmp_path_factory, events):
    users, items, times = zip(*events, strict=True)
    path = tmp_path_factory.mktemp("table") / "e.parquet"
    try:
        table = pa.table({"user_id": pa.array(users, pa.int64()), "item_id": pa.array(items, pa.string()),
                          "event_time": pa.array(times, pa.int64())})
    except UnicodeEncodeError:
        return
    pq.write_table(table, path)
    assert read(path).events.equals(table)


def test_a_header_without_rows_is_said_to_hold_no_events(tmp_path):
    file = tmp_path / "events.csv"
    file.write_text("user_id,item_id,event_time\n")
    with pytest.raises(ValueError, match="no events in it"):
        read(file, columns=EventColumns(unit="s"))

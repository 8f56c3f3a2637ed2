"""``semel erase`` and ``semel compact --retention``."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.history import HistoryStore


@pytest.fixture
def store(tmp_path, semel):
    (tmp_path / "events.csv").write_text("user_id,item_id,event_time\n1,5,10\n2,6,11\n3,6,2000000000\n")
    assert semel("ingest", tmp_path / "events.csv", "--store", tmp_path / "s").exit_code == 0
    return tmp_path / "s"


def test_erase(semel, store, tmp_path):
    pq.write_table(pa.table({"user_id": [1, 2]}), tmp_path / "examples.parquet")
    (tmp_path / "users.txt").write_text("1\n\n9\n")
    result = semel("erase", store, "--users", tmp_path / "users.txt", "--also", tmp_path / "examples.parquet", "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["users"] == 1 and list(facts["rows"].values()) == [1]
    result = semel("erase", store, "2")
    assert result.exit_code == 0 and "erased 1 of 1 user;" in result.stdout
    with HistoryStore.open(store) as handle:
        assert handle.keys().tolist() == [3]


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "name the users to erase"), (["x"], "user 'x': the store's users are 64-bit integers"),
    ([str(1 << 64)], "users are 64-bit integers"),
    (["1", "--also", "nowhere"], "nowhere is not there"), (["--users", "nowhere"], "nowhere"),
])
def test_bad_input_erases_nothing(semel, store, arguments, message):
    result = semel("erase", store, *arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    with HistoryStore.open(store) as handle:
        assert handle.keys().tolist() == [1, 2, 3]


def test_retention(semel, store):
    result = semel("compact", store, "--retention", "36500d", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["events"]["events"]["total"] == 3
    assert json.loads(semel("compact", store, "--retention", "365d", "--json").stdout)["events"]["events"]["total"] == 0
    result = semel("compact", store, "--retention", "1y")
    assert result.exit_code == 2 and "retention must be a length of time" in result.stderr


def test_what_a_search_still_finds_is_named(semel, store, tmp_path):
    elsewhere = tmp_path / "predictions.csv"
    elsewhere.write_text("user_id,score\n123456789,0.5\n")
    result = semel("erase", store, "123456789", "--also", elsewhere, "--json")
    assert result.exit_code == 2 and "predictions.csv" in result.stderr and result.stderr.count("\n") == 1
    assert json.loads(result.stdout)["traces"] == [str(elsewhere)]
    elsewhere.unlink()
    assert json.loads(semel("erase", store, "1", "--json").stdout)["traces"] == []

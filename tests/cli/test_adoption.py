"""``semel ingest`` of one's own files and of fat rows, ``semel shadow``, ``semel export``: the way from copies to
pointers, and what each says of bad input."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.history import HistoryStore, Projection

ROWS = {"user_id": ["ü", "ü", "b"], "request_time": [15, 30, 30], "history_item_id": [["映画"], ["映画", "7"], ["7"]],
        "history_event_time": [[10], [10, 20], [5]], "history_action": [["like"], ["like", None], ["like"]]}


@pytest.fixture
def fat_rows(tmp_path):
    pq.write_table(pa.table(ROWS), tmp_path / "fat.parquet")
    return tmp_path / "fat.parquet"


def done(result, code=0):
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_recover_shadow_export_and_ingest_again(semel, tmp_path, fat_rows):
    facts = json.loads(done(semel("ingest", "--from-fat-rows", fat_rows, "--store", tmp_path / "s", "--json")).stdout)
    assert (facts["events"], facts["users"], facts["items"], facts["fat_rows"]["listed"]) == (3, 2, 2, 4)
    facts = json.loads(done(semel("shadow", fat_rows, tmp_path / "s", "--json")).stdout)
    assert facts["passed"] is True and (facts["rows"], facts["equal"], facts["last"]) == (3, 3, 2)
    table = done(semel("shadow", fat_rows, tmp_path / "s")).stdout
    assert "passed: 3 of 3 rows equal" in table and "truncation" in table
    facts = json.loads(done(semel("export", tmp_path / "s", tmp_path / "out", "--json")).stdout)
    assert facts["rows"] == 3 and facts["files"] == len(list((tmp_path / "out").iterdir()))
    assert "3 events of 2 users" in done(semel("export", tmp_path / "s", tmp_path / "out2")).stdout
    done(semel("ingest", tmp_path / "out", "--store", tmp_path / "again"))
    assert json.loads(done(semel("shadow", fat_rows, tmp_path / "again", "--json")).stdout)["equal"] == 3
    with HistoryStore.open(tmp_path / "again") as store:
        found = store.read(store.point(["ü"], as_of=99), Projection(("item_id", "action")))
        assert found.strings("item_id").tolist() == ["映画", "7"] and found.strings("action").tolist() == ["like", None]


def test_shadow_exit_codes(semel, tmp_path, fat_rows):
    done(semel("ingest", "--from-fat-rows", fat_rows, "--store", tmp_path / "s"))
    late = tmp_path / "late.csv"
    late.write_text("user_id,item_id,event_time,action\nb,late,7,like\n")
    done(semel("ingest", late, "--store", tmp_path / "s"))
    facts = json.loads(done(semel("shadow", fat_rows, tmp_path / "s", "--json")).stdout)
    assert facts["causes"]["late"] == {"rows": 1, "events": 1} and facts["equal"] == 2
    result = done(semel("shadow", fat_rows, tmp_path / "s", "--explained", "tie,truncation", "--json"), 1)
    facts = json.loads(result.stdout)
    assert facts["passed"] is False and facts["explained"] == ["tie", "truncation"]
    assert "late: " in done(semel("shadow", fat_rows, tmp_path / "s", "--explained", ""), 1).stdout
    done(semel("shadow", fat_rows, tmp_path / "s", "--explained", "late", "--last", 5))


def test_own_names(semel, tmp_path):
    pq.write_table(pa.table({"who": [1, 1], "when": [2, 4], "items": [[5], [5, 6]], "times_s": [[1], [1, 2]],
                             "stars": [[4.0], [4.0, 5.0]]}), tmp_path / "fat.parquet")
    names = ["--user", "who", "--request-time", "when", "--item", "items", "--time", "times_s", "--time-unit", "s",
             "--column", "rating=stars"]
    done(semel("ingest", tmp_path / "fat.parquet", "--from-fat-rows", "--store", tmp_path / "s", *names))
    facts = json.loads(done(semel("shadow", tmp_path / "fat.parquet", tmp_path / "s", *names, "--json")).stdout)
    assert facts["equal"] == 2 and facts["columns"] == ["item_id", "rating"]


def test_files_of_one_ingest(semel, tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.csv").write_text(f"user_id,item_id,event_time,x\n1,{name},1,2\n")
    result = done(semel("ingest", tmp_path / "b.csv", tmp_path / "a.csv", "--store", tmp_path / "s", "--column", "y=x"))
    assert "2 events of 1 user and 2 items" in result.stdout
    with HistoryStore.open(tmp_path / "s") as store:
        found = store.read(store.point([1], as_of=9), Projection(("item_id", "y")))
        assert found.strings("item_id").tolist() == ["b", "a"], "in the order given"
    again = done(semel("ingest", tmp_path / "b.csv", tmp_path / "a.csv", "--store", tmp_path / "s", "--column", "y=x"))
    assert "2 events (0 of them new)" in again.stdout


def test_bad_input(refused, tmp_path, fat_rows, semel):
    store = tmp_path / "s"
    done(semel("ingest", "--from-fat-rows", fat_rows, "--store", store))
    assert "gone.parquet" in refused("ingest", "--from-fat-rows", tmp_path / "gone.parquet", "--store", tmp_path / "n")
    assert "--from-fat-rows" in refused("ingest", fat_rows, "--request-time", "t", "--store", tmp_path / "n")
    assert "no column 'user_idd'" in refused("ingest", "--from-fat-rows", fat_rows, "--user", "user_idd", "--store",
                                             tmp_path / "n")
    assert "NAME=COLUMN" in refused("ingest", fat_rows, "--column", "=x", "--store", tmp_path / "n")
    assert "--data" in refused("ingest", "ml-1m", "ml-100k", "--data", tmp_path, "--store", tmp_path / "n")
    assert "gone" in refused("shadow", tmp_path / "gone", store)
    assert "gone" in refused("shadow", fat_rows, tmp_path / "gone")
    assert "no column 'v'" in refused("shadow", fat_rows, store, "--version", "v")
    assert "none of other" in refused("shadow", fat_rows, store, "--explained", "luck")
    assert "gone" in refused("export", tmp_path / "gone", tmp_path / "n")
    assert "none of parquet, lance" in refused("export", store, tmp_path / "n", "--format", "csv")
    assert "exists already" in refused("export", store, store)
    assert "no history store" in refused("ingest", fat_rows, "--from-fat-rows", "--store", tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    for verb in (["ingest"], ["ingest", "--from-fat-rows"]):
        assert "bad.parquet" in refused(*verb, tmp_path / "bad.parquet", "--store", tmp_path / "n")
    assert not (tmp_path / "n").exists()

"""The search for what is left of a user: it finds every way in which a file may hold an id, and nothing else."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.history import EventSchema, HistoryStore, SegmentWriter
from semel.history.erasure import traces


def text(*ids):
    return np.array(ids, object)


def test_bytes_columns_and_packed_columns_are_searched(tmp_path):
    table = pa.table({"user_id": ["someone-else"], "context": ['{"by": "anna-4711"}']})
    pq.write_table(table, tmp_path / "packed.parquet", compression="zstd", use_dictionary=False)
    with SegmentWriter(tmp_path / "00000001.log") as log:
        log.append(pa.table({"user_id": ["anna-4711"]}))
    (tmp_path / "notes.txt").write_bytes(b"... anna-4711 ...")
    (tmp_path / "other.txt").write_bytes(b"... anna-4712 ...")
    (tmp_path / "empty").write_bytes(b"")
    found = traces([tmp_path], "user_id", text("anna-4711"))
    assert [path.rsplit("/", 1)[1] for path in found] == ["00000001.log", "notes.txt", "packed.parquet"]
    assert traces([tmp_path], "user_id", text("berta-4711")) == []


@pytest.mark.parametrize("user", [3, 16_777_216, -(2**63), 2**63 - 1, 1_234_567_890_123])
def test_integers_are_found_in_columns_and_the_large_ones_in_bytes(tmp_path, user):
    pq.write_table(pa.table({"user_id": [user, 5]}), tmp_path / "a.parquet", compression="zstd")
    pq.write_table(pa.table({"user_id": [user - 1 if user > 0 else user + 1, 5]}), tmp_path / "b.parquet")
    (tmp_path / "raw.npy").write_bytes(b"\x07" * 13 + user.to_bytes(8, "little", signed=True))
    found = traces([tmp_path], "user_id", np.array([user]))
    assert [path.rsplit("/", 1)[1] for path in found] == (["a.parquet"] if user == 3 else ["a.parquet", "raw.npy"])


@pytest.mark.parametrize("codec", ["packed", "plain", "cold"])
def test_a_store_has_traces_before_and_none_after(tmp_path, codec):
    users = [f"user-number-{number}" for number in range(30)]
    schema = EventSchema({"note": pa.string()}, user_id=pa.string())
    with HistoryStore.create(tmp_path / "s", schema, shards=2) as store:
        for _ in range(2):
            store.append(pa.table({"user_id": users, "event_time": [1] * 30,
                                   "note": [f"only of {user}" for user in users]}))
            store.compact(codec=codec)
        store.append(pa.table({"user_id": users, "event_time": [2] * 30, "note": users}))
        gone = text("user-number-7", "user-number-29")
        assert traces([tmp_path], "user_id", gone)
        store.erase(gone)
        assert traces([tmp_path], "user_id", gone) == []
        assert len(store.keys()) == 28 and traces([tmp_path], "user_id", text("user-number-11"))


def test_a_copy_made_beside_the_writer_is_a_store(tmp_path):
    import shutil

    with HistoryStore.create(tmp_path / "s", EventSchema({"item_id": pa.int64()}), shards=2) as store:
        store.append(pa.table({"user_id": [1, 2], "event_time": [1, 2], "item_id": [3, 4]}))
        store.compact()
        store.append(pa.table({"user_id": [1], "event_time": [3], "item_id": [5]}))
        shutil.copytree(store.path, tmp_path / "backup")  # docs/operations.md: Back up
    with HistoryStore.open(tmp_path / "backup", mode="a") as backup:
        assert backup.verify()["files"] > 0 and backup.stats()["events"]["total"] == 3

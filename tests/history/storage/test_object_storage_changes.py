"""Deletion, retention, added columns and erasure of a store on object storage: what a folder's store answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, Pointers, Projection

pytest.importorskip("obstore")
from semel.history.storage.objects import Objects

SCHEMA = EventSchema({"item_id": pa.int64(), "action": pa.string()}, group="action")
DAY = 86_400_000_000


def table(seed: int, rows: int = 6_000) -> pa.Table:
    random = np.random.default_rng(seed)
    return pa.table({
        "user_id": random.integers(0, 6, rows), "event_time": random.integers(0, 100, rows) * DAY,
        "item_id": random.integers(0, 50, rows), "action": random.choice(["click", "like"], rows),
    })


def same(remote: HistoryStore, local: HistoryStore) -> None:
    assert remote.version == local.version
    assert remote.keys().tolist() == local.keys().tolist()
    random = np.random.default_rng(7)
    for projection in (Projection(("item_id", "version")), Projection(("action", "item_id"), last=9, groups=("like",)),
                       Projection(tuple(local.schema.columns), last=50, since=20 * DAY)):
        pointers = Pointers(random.integers(0, 8, 40), random.integers(0, 110, 40) * DAY,
                            random.integers(0, local.version + 1, 40))
        ours, theirs = remote.read(pointers, projection), local.read(pointers, projection)
        assert ours.status.tolist() == theirs.status.tolist()
        assert ours.offsets.tolist() == theirs.offsets.tolist()
        for name, column in theirs.columns.items():
            np.testing.assert_array_equal(ours.columns[name], column)
        assert remote.lengths(pointers, projection)[0].tolist() == local.lengths(pointers, projection)[0].tolist()


def test_all_that_changes_a_store(tmp_path: Path, in_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("storage.block_cache", "generation.array_files"):  # what it imports is patched after it
        monkeypatch.setattr(f"semel.history.{module}.BLOCK_BYTES", 32)
    monkeypatch.setattr("semel.history.storage.block_cache.AT_ONCE", 100)
    local = HistoryStore.create(tmp_path / "local", SCHEMA, shards=2)
    remote = HistoryStore.create("memory:///store", SCHEMA, shards=2, cache_folder=tmp_path / "cache")
    reader = HistoryStore.open("memory:///store", cache_folder=tmp_path / "cache")
    some = table(1).slice(0, 20).select(["user_id", "event_time", "item_id"])
    steps = [
        lambda store: store.append(table(1)),
        lambda store: store.compact(),
        lambda store: store.append(table(2, 500)),
        lambda store: store.delete(user_ids=[1]),
        lambda store: store.delete(events=some),
        lambda store: store.append(table(3, 500)),
        lambda store: store.compact(),
        lambda store: store.add_column("author_id", pa.int32(), lambda events: events["item_id"].cast(pa.int32())),
        lambda store: store.append(table(4, 500).append_column("author_id", pa.array([5] * 500, pa.int32()))),
        lambda store: store.erase([4]),
        lambda store: store.append(table(5, 500)),
        lambda store: store.compact(memory_limit="64MiB", codec="plain"),
    ]
    for step in steps:
        for store in (remote, local):
            step(store)
        same(remote, local)
        reader.refresh()
        same(reader, local)
    assert remote.verify()
    folders = {name.split("/")[1] for name, _ in Objects("memory:///store").entries("generations")}
    assert len(folders) == 1
    for store in (remote, local, reader):
        store.close()


def test_nothing_of_an_erased_user_is_left(tmp_path: Path, in_memory: None) -> None:
    schema = EventSchema({"note": pa.string()}, user_id=pa.string())
    with HistoryStore.create("memory:///erased", schema, shards=2, cache_folder=tmp_path) as store:
        for number in range(3):
            store.append(pa.table({"user_id": ["kept", "forgotten"], "event_time": [number, number],
                                   "note": ["ordinary", f"secret {number}"]}))
            if number:
                store.compact(codec="plain")
        store.erase(["forgotten"])
        objects = Objects("memory:///erased")
        for name, _ in objects.entries(""):
            found = objects.get(name)
            assert found is not None and b"forgotten" not in found[0] and b"secret" not in found[0], name
        assert store.keys().tolist() == ["kept"]

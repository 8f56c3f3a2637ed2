"""``open(at_version=)`` and ``read(require_compacted=True)``: what batch training reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, NotCompacted, Pointers, Projection, Status, VersionNotVisible

SCHEMA = EventSchema({"item_id": pa.int64(), "text": pa.string()})
ITEMS = Projection(("item_id", "text"))


def rows(item: int, user: int = 1) -> pa.Table:
    return pa.table({"user_id": [user], "event_time": [5], "item_id": [item], "text": [f"t{item}"]})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with HistoryStore.create(tmp_path / "s", SCHEMA, shards=2) as store:
        for item in (1, 2, 3):
            store.append(rows(item))
        yield store


def items(store: HistoryStore, **options: Any) -> list[int]:
    return store.read(store.point([1], 10), ITEMS, **options).columns["item_id"].tolist()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_frozen_view_does_not_move(store: HistoryStore, tmp_path: Path, compacted: bool) -> None:
    if compacted:
        store.compact()
    frozen = HistoryStore.open(tmp_path / "s", at_version=2)
    assert frozen.version == frozen.refresh() == 2 and items(frozen) == [1, 2]
    for item in range(4, 8):
        store.append(rows(item, user=item))
        store.append(rows(item))
        store.compact()
        assert frozen.point([1], 10).version.tolist() == [2]
        assert items(frozen) == [1, 2] and frozen.keys().tolist() == [1]
        table = frozen.read(frozen.point([1, item], 10), ITEMS)
        assert table.strings("text").tolist() == ["t1", "t2"]
        assert table.status.tolist() == [Status.OK, Status.UNKNOWN_USER]
    again = HistoryStore.open(tmp_path / "s", at_version=2)  # from a later generation: the same
    assert items(again) == [1, 2] and again.keys().tolist() == [1]
    with pytest.raises(VersionNotVisible, match=r"version 3.*at version 2.*frozen"):
        frozen.read(Pointers(np.array([1]), 10, np.array([3])), ITEMS)
    assert items(HistoryStore.open(tmp_path / "s", at_version=0)) == []


def test_a_frozen_view_whose_files_are_gone_shows_the_same(store: HistoryStore, tmp_path: Path) -> None:
    """Where leases do not reach (another host, a file system without locks)."""
    store.compact()
    frozen = HistoryStore.open(tmp_path / "s", at_version=2)
    store.append(rows(4))
    store.compact()
    shutil.rmtree(tmp_path / "s" / "generations" / "00000001")
    assert items(frozen) == [1, 2] and frozen.generation == 2 and frozen.version == 2


def test_what_cannot_be_frozen(store: HistoryStore, tmp_path: Path) -> None:
    with pytest.raises(VersionNotVisible, match=r"at version 4.*at version 3"):
        HistoryStore.open(tmp_path / "s", at_version=4)
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="at_version"):
            HistoryStore.open(tmp_path / "s", at_version=bad)  # type: ignore[arg-type]
    store.close()
    with pytest.raises(ValueError, match="for reading"):
        HistoryStore.open(tmp_path / "s", mode="a", at_version=1)


def test_batch_reads_ask_for_compacted_events_only(store: HistoryStore, tmp_path: Path) -> None:
    reader = HistoryStore.open(tmp_path / "s")
    with pytest.raises(NotCompacted, match=r"versions 1 to 3 .*are not compacted"):
        items(reader, require_compacted=True)
    store.compact()
    assert items(reader, require_compacted=True) == [1, 2, 3]  # refreshed by itself
    store.append(rows(4))
    store.append(rows(5))
    reader.refresh()
    for handle in (reader, store):
        with pytest.raises(NotCompacted, match=r"versions 4 to 5 .*generation 1 holds versions up to 3"):
            items(handle, require_compacted=True)
        old = Pointers(np.array([1]), 10, np.array([3]))
        assert handle.read(old, ITEMS, require_compacted=True).columns["item_id"].tolist() == [1, 2, 3]
        assert items(handle) == [1, 2, 3, 4, 5]
    frozen = HistoryStore.open(tmp_path / "s", at_version=4)
    with pytest.raises(NotCompacted, match=r"versions 4 to 4"):
        items(frozen, require_compacted=True)
    store.compact()
    assert items(frozen, require_compacted=True) == [1, 2, 3, 4] and frozen.version == 4

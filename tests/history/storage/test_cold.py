"""Cold generations: which columns are compressed, and reading them block by block in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import CorruptFile, EventSchema, HistoryStore, Pointers, Projection
from semel.history.generation.array_files import (
    BLOCK_BYTES,
    CODEC_COLD,
    CODEC_PACKED,
    checked,
    map_column,
    write_pieces,
)
from semel.history.generation.generation import piece_rows

SCHEMA = EventSchema({"item_id": pa.int64(), "noise": pa.float32(), "action": pa.dictionary(pa.int8(), pa.string())},
                     group="action")
ALL = Projection(("item_id", "noise", "action", "event_time", "version"))
USERS = 40
EVER = 2**62


def events(count: int, seed: int = 0) -> pa.Table:
    """Zipf ids, which zstd makes smaller, and noise, which it does not."""
    random = np.random.default_rng(seed)
    return pa.table({
        "user_id": random.integers(0, USERS, count), "event_time": random.integers(0, 10**12, count),
        "item_id": np.minimum(random.zipf(1.2, count), 10**6), "noise": random.random(count, np.float32),
        "action": pa.array(random.choice(["click", "like"], count, p=[0.9, 0.1]), mask=random.random(count) < 0.01),
    })


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same events packed and cold, some of them in the log."""
    folder = tmp_path_factory.mktemp("cold")
    for codec in ("packed", "cold"):
        with HistoryStore.create(folder / codec, SCHEMA, shards=2) as store:
            store.append(events(400_000))
            store.compact(codec=codec)
            store.append(events(300, seed=1))
    return {codec: folder / codec for codec in ("packed", "cold")}


def same(one: Any, other: Any) -> bool:
    return (np.array_equal(one.offsets, other.offsets)
            and all(np.array_equal(column, other.columns[name]) for name, column in one.columns.items())
            and (one.validity or {}).keys() == (other.validity or {}).keys()
            and all(np.array_equal(valid, other.validity[name]) for name, valid in (one.validity or {}).items()))


def column_file(store: HistoryStore, name: str) -> tuple[Path, dict[str, int]]:
    generation = store._view.generation
    file = f"shard-0000/{name}"
    return Path(generation.folder or "") / file, generation.info["files"][file]


def test_columns_are_compressed_where_that_makes_them_smaller(stores: dict[str, Path]) -> None:
    with HistoryStore.open(stores["cold"]) as cold, HistoryStore.open(stores["packed"]) as packed:
        codecs = {name: checked(*column_file(cold, name))[1].codec
                  for name in ("column-000", "column-001", "column-002", "event_time")}
        assert codecs == {"column-000": CODEC_COLD, "column-001": CODEC_PACKED, "column-002": CODEC_COLD,
                          "event_time": CODEC_PACKED}
        path, entry = column_file(cold, "column-000")
        assert path.stat().st_size < 0.7 * column_file(packed, "column-000")[0].stat().st_size
        assert entry["decompressed"] > path.stat().st_size
        for name in ("column-001", "event_time"):
            assert column_file(cold, name)[0].read_bytes() == column_file(packed, name)[0].read_bytes()
        assert cold.stats()["bytes"]["generation"] < packed.stats()["bytes"]["generation"]
        assert cold.verify()["bytes"] < packed.verify()["bytes"]


def test_a_short_read_decompresses_few_blocks(stores: dict[str, Path], tmp_path: Path) -> None:
    with HistoryStore.open(stores["packed"]) as packed, HistoryStore.open(
            stores["cold"], cache_folder=tmp_path / "cache") as cold:
        pointers = cold.point([3, 999], EVER)
        last = Projection(("item_id", "noise"), last=50)
        assert same(cold.read(pointers, last), packed.read(pointers, last))
        cache = cold._storage.cache  # type: ignore[attr-defined]
        whole = column_file(cold, "column-000")[1]["decompressed"]
        assert 0 < cache.bytes <= 3 * BLOCK_BYTES < whole  # the block of the events, and those of the directory
        random = np.random.default_rng(0)
        for most in (7, 1000, None):
            pointers = Pointers(random.integers(0, USERS + 2, 60), random.integers(0, 10**12, 60),
                                random.integers(0, 3, 60))
            for groups in (None, ("like",)):
                projection = Projection(ALL.columns, last=most, groups=groups)
                assert same(cold.read(pointers, projection), packed.read(pointers, projection))
                assert (cold.lengths(pointers, projection)[0] == packed.lengths(pointers, projection)[0]).all()
        assert list((tmp_path / "cache").iterdir())
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_smaller_than_a_read(stores: dict[str, Path], tmp_path: Path) -> None:
    with HistoryStore.open(stores["packed"]) as packed, HistoryStore.open(
            stores["cold"], cache_folder=tmp_path, cache_bytes=1) as cold:
        pointers = cold.point(np.arange(USERS), EVER)
        for _ in range(2):
            assert same(cold.read(pointers, ALL), packed.read(pointers, ALL))
        assert len([file for file in tmp_path.rglob("*") if file.name.isdigit()]) <= 1
    for bad in (0, True, "1GiB"):
        with pytest.raises(ValueError, match="cache_bytes must be a number of bytes"):
            HistoryStore.open(stores["cold"], cache_bytes=bad)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_a_forked_process_reads_on(stores: dict[str, Path], tmp_path: Path) -> None:
    """With a cache of its own: the parent may let go of its files, or close."""
    with HistoryStore.open(stores["cold"], cache_folder=tmp_path) as cold:
        few, many = cold.point([1], EVER), cold.point(np.arange(USERS), EVER)
        cold.read(few, ALL)
        child = os.fork()
        if not child:
            code = 1
            try:
                with HistoryStore.open(stores["packed"]) as packed:
                    code = 0 if same(cold.read(many, ALL), packed.read(many, ALL)) else 2
                cold.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with HistoryStore.open(stores["packed"]) as packed:
            assert same(cold.read(many, ALL), packed.read(many, ALL))


def test_a_compaction_moves_compressed_columns(tmp_path: Path) -> None:
    """Into every codec and back; erasing and adding a column keep the codec; the log's rows come along."""
    def filled(name: str) -> HistoryStore:
        store = HistoryStore.create(tmp_path / name, SCHEMA, shards=2, cache_folder=tmp_path / f"{name} cache")
        store.append(events(100_000))
        return store

    with filled("a") as store, filled("b") as plain:
        store.compact(codec="cold")
        plain.compact(codec="plain")
        for step, codec in enumerate(("cold", "packed", "cold", "plain")):
            for each, to in ((store, codec), (plain, "plain")):
                each.append(events(1000, seed=step))
                each.compact(codec=to, workers=1 + step % 2)  # type: ignore[arg-type]
            pointers = store.point(np.arange(USERS), EVER)
            assert same(store.read(pointers, ALL), plain.read(pointers, ALL))
        store.compact(codec="cold")
        store.add_column("author", pa.int32(), lambda table: table["item_id"].cast(pa.int32()))
        plain.add_column("author", pa.int32(), lambda table: table["item_id"].cast(pa.int32()))
        store.read(store.point([4, 5], EVER), ALL)
        reader = HistoryStore.open(store.path, cache_folder=tmp_path / "reader's cache")
        reader.read(store.point([4, 5], EVER), ALL)
        assert [each.erase([4])["generation"] > 0 for each in (store, plain)] == [True, True]
        reader.refresh()
        for handle in (store, reader):  # decompressed, what was erased would still be there
            assert handle._storage.cache.bytes == 0  # type: ignore[attr-defined]
        reader.close()
        assert store._view.generation.codec == "cold"
        pointers, projection = store.point(np.arange(USERS), EVER), Projection((*ALL.columns, "author"))
        got = store.read(pointers, projection)
        assert same(got, plain.read(pointers, projection)) and not len(got["author"][4])
        store.verify()


def test_a_damaged_block_is_named(stores: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(stores["cold"], tmp_path / "s")
    with HistoryStore.open(tmp_path / "s") as store:
        path, _ = column_file(store, "column-000")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with HistoryStore.open(tmp_path / "s") as store:
        with pytest.raises(CorruptFile, match=r"column-000: block 0 \(bytes 64 on, decompressed\) does not match"):
            store.read(store.point(np.arange(USERS), EVER), ALL)
        with pytest.raises(CorruptFile, match="column-000: block 0"):
            store.verify()
        pointers = store.point(np.arange(USERS), EVER)
        assert len(store.read(pointers, Projection(("noise",))))  # what does not touch it reads on
    path.unlink()
    with HistoryStore.open(tmp_path / "s") as store, pytest.raises(CorruptFile, match="column-000 is missing"):
        store.read(store.point(np.arange(USERS), EVER), ALL)


@pytest.mark.parametrize("size", [0, 1, 127, 129, 70_000, 500_000])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_files_of_all_sizes_come_back(tmp_path: Path, size: int, shape: tuple[int, ...]) -> None:
    values = np.minimum(np.random.default_rng(size).zipf(1.3, (size, *shape)), 30_000)
    step = piece_rows(shape)
    pieces = [values[at : at + step] for at in range(0, size, step)]
    entry = write_pieces(tmp_path / "a", pieces, size, values.dtype, shape, "cold")
    column = map_column(tmp_path / "a", entry, values.dtype, shape)
    from semel.history.kernels.packing import unpack

    assert isinstance(column, tuple)
    assert (unpack(column, values.size, np.int64).reshape(values.shape) == values).all()
    if size > 10_000:
        assert checked(tmp_path / "a", entry)[1].codec == CODEC_COLD

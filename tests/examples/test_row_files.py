"""Request rows read by row group, as batches ask for them: bit for bit what they are in memory, and little is held."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, Pointers, RequestRows, offsets_of
from semel.examples import RequestLoader, concat_rows, read_rows, row_files, rows_to_table
from semel.examples.row_files import RowFiles
from semel.features import Feature, FeatureSpec
from semel.history import EventSchema, HistoryStore

SPEC = FeatureSpec(request=(Feature("age", "numeric"), Feature("city")), history_last=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    schema = EventSchema({"item_id": pa.int64()})
    store = HistoryStore.create(tmp_path_factory.mktemp("files") / "store", schema, shards=3)
    users = np.repeat(np.arange(12), np.arange(12))
    store.append(pa.table({"user_id": users, "event_time": np.arange(len(users)), "item_id": users * 10}))
    yield store
    store.close()


def make_rows(count, first=0, seed=0, weighted=False, tasks=("like",), nulls=True):
    """Requests with an age that is null now and then, a city, labels that are missing now and then."""
    rng = np.random.default_rng([seed, first])
    lengths = rng.integers(0, 4, count)
    total = int(lengths.sum())
    ages = np.array([None if nulls and rng.random() < 0.1 else int(age) for age in rng.integers(0, 99, count)], object)
    return RequestRows(
        np.array([f"r{first + i}" for i in range(count)], object),
        Pointers(rng.integers(0, 13, count), rng.integers(1, 1000, count), np.ones(count, np.int64)),
        np.zeros(count, np.int64),
        {"age": ages, "city": np.array([f"c{c}" for c in rng.integers(0, 5, count)], object)},
        Jagged(rng.integers(0, 99, total), offsets_of(lengths)),
        {task: rng.random(total).astype(np.float32) for task in tasks},
        {task: rng.random(total) < 0.7 for task in tasks},
        rng.random(total).astype(np.float32) if weighted else None)


def write(folder, *files, group=7):
    paths = []
    for number, rows in enumerate(files):
        paths.append(folder / f"{number}.parquet")
        pq.write_table(rows_to_table(rows), paths[-1], row_group_size=group)
    return paths


def same_rows(one, other):
    assert one.request_id.tolist() == other.request_id.tolist()
    for a, b in ((one.pointers.user_id, other.pointers.user_id), (one.pointers.as_of, other.pointers.as_of),
                 (one.pointers.version, other.pointers.version), (one.catalogue_version, other.catalogue_version),
                 (one.candidates.values, other.candidates.values), (one.candidates.offsets, other.candidates.offsets)):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()
    for of_one, of_other in ((one.context, other.context), (one.label, other.label),
                             (one.label_mask, other.label_mask)):
        assert list(of_one) == list(of_other)
        for name, values in of_one.items():
            assert values.dtype == of_other[name].dtype, name
            assert np.array_equal(values.astype(str), of_other[name].astype(str)), name
    assert (one.weight is None) == (other.weight is None)
    assert one.weight is None or one.weight.tolist() == other.weight.tolist()


def same_batches(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert one.request_id.tolist() == other.request_id.tolist()
        for name in ("age", "city"):
            assert torch.equal(one.request[name].nan_to_num(7), other.request[name].nan_to_num(7))
        assert torch.equal(one.request["history"]["item_id"].values, other.request["history"]["item_id"].values)
        assert torch.equal(one.candidate_offsets, other.candidate_offsets)
        for task in one.label:
            assert torch.equal(one.label[task], other.label[task])
            assert torch.equal(one.label_mask[task], other.label_mask[task])


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=4), group=st.integers(1, 40), seed=st.integers(0, 9),
       data=st.data())
def test_selected_rows_are_those_of_the_files_put_together(tmp_path_factory, counts, group, seed, data):
    files, first = [], 0
    for number, count in enumerate(counts):
        weighted, tasks = data.draw(st.booleans()), data.draw(st.sampled_from([("like",), ("like", "buy"), ()]))
        files.append(make_rows(count, first, seed, weighted, tasks, nulls=number == 0))
        first += count
    paths = write(tmp_path_factory.mktemp("rows"), *files, group=group)
    whole = concat_rows([read_rows(path) for path in paths])
    rows = RowFiles(paths, near=10)
    assert len(rows) == len(whole)
    index = np.array(data.draw(st.lists(st.integers(0, first - 1), max_size=40)) if first else [], np.int64)
    same_rows(rows.select(index), whole.select(index))
    assert rows.pointers.user_id.tolist() == whole.pointers.user_id.tolist()
    assert rows.pointers.as_of.tolist() == whole.pointers.as_of.tolist()
    assert rows.candidate_counts.tolist() == whole.candidates.lengths.tolist()


@settings(max_examples=15, deadline=None)
@given(shuffle=st.sampled_from(["window", "full", None]), window=st.integers(1, 60), size=st.integers(1, 20),
       group=st.integers(1, 60), tokens=st.sampled_from([None, 9, 40]), world=st.integers(1, 3),
       workers=st.integers(0, 2), held=st.sampled_from([0, 1 << 30]), stop=st.integers(0, 5))
def test_batches_are_those_of_rows_in_memory_also_after_a_resume(
        store, tmp_path_factory, monkeypatch_module, shuffle, window, size, group, tokens, world, workers, held, stop):
    monkeypatch_module.setattr(row_files, "HELD_BYTES", held)
    paths = write(tmp_path_factory.mktemp("loader"), make_rows(40), make_rows(31, 40), group=group)
    rows = concat_rows([read_rows(path) for path in paths])

    def loader(examples, rank=0, ranks=1, threads=0):
        return RequestLoader(examples, store, features=SPEC, shuffle=shuffle, window=window, batch_requests=size,
                             batch_tokens=tokens, seed=4, rank=rank, world_size=ranks, workers=threads)

    memory, streamed = loader(rows), loader(paths)
    assert memory.state_dict() == streamed.state_dict()
    whole = list(memory)
    same_batches(whole, streamed)
    for rank in range(world):
        same_batches(loader(rows, rank, world), loader(paths, rank, world, workers))
    begun = loader(rows)
    stop %= len(whole)
    for _ in zip(range(stop), begun, strict=False):
        pass
    resumed = loader(paths, threads=workers)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    same_batches(whole[stop:], resumed)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def groups_read(monkeypatch):
    """The row groups that were read, in order."""
    read, real = [], RowFiles._read

    def noted(self, group, columns):
        read.append(group)
        return real(self, group, columns)

    monkeypatch.setattr(RowFiles, "_read", noted)
    return read


@pytest.mark.parametrize(("shuffle", "window", "most"), [("window", 64, 2 * 64 + 3 * 16), (None, 64, 8 + 3 * 16),
                                                         ("full", 64, 1000)])
def test_only_what_windows_need_is_held_and_each_group_is_read_once(store, tmp_path, groups_read, monkeypatch, shuffle,
                                                                     window, most):
    monkeypatch.setattr(row_files, "HELD_BYTES", 0)
    paths = write(tmp_path, make_rows(1000), group=16)
    loader = RequestLoader(paths, store, features=SPEC, shuffle=shuffle, window=window, batch_requests=8)
    len(loader)  # the pointers are read
    groups_read.clear()
    assert max([loader.rows.held_rows for _ in loader]) <= most
    assert sorted(groups_read) == list(range(63))


def test_threads_read_a_row_group_once(tmp_path, groups_read):
    rows = RowFiles(write(tmp_path, make_rows(200), group=50), near=200)
    threads = [threading.Thread(target=rows.select, args=(np.arange(200),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(groups_read) == [0, 1, 2, 3]


def test_what_cannot_be_read_is_named(store, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        RequestLoader(tmp_path / "gone.parquet", store, features=SPEC)
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"text.parquet"):
        RequestLoader(tmp_path / "text.parquet", store, features=SPEC)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other.parquet: not a table of request rows"):
        RequestLoader([tmp_path / "other.parquet"], store, features=SPEC)
    with pytest.raises(ValueError, match="no files"):
        RequestLoader([], store, features=SPEC)
    (path,) = write(tmp_path, make_rows(20))
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["context.age"]), tmp_path / "without.parquet")
    with pytest.raises(ValueError, match=r"without.parquet: .*age"):
        RequestLoader([path, tmp_path / "without.parquet"], store, features=SPEC)
    loader = RequestLoader(path, store, features=SPEC, shuffle=None)
    write(tmp_path, make_rows(20, seed=1))
    with pytest.raises(ValueError, match="has changed since"):
        list(loader)

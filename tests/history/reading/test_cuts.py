"""Where histories are cut: long ones with ties, at every kind of bound, plain, packed and cold, together and alone."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Pointers
from semel.history import CorruptFile, EventSchema, HistoryStore, Projection
from semel.history.generation.generation import FileWriter

SCHEMA = {"n": pa.int32(), "pair": pa.list_(pa.int8(), 2)}
SIZES = (1, 3, 127, 128, 129, 255, 256, 257, 640, 1500)
DELETED = 4


def fill(store, keys, span, seed=0):
    """Events of ``keys``, ``SIZES`` of them, in one append; (user, time, n) [events] in the order of histories."""
    random = np.random.default_rng(seed)
    user = random.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    time = random.integers(0, span, len(user)) * 1000
    n = np.arange(len(user), dtype=np.int32)
    pair = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(n % 100, 2).astype(np.int8)), 2)
    store.append(pa.table({"user_id": keys.take(pa.array(user)), "event_time": time, "n": n, "pair": pair}))
    order = np.lexsort((n, time, user))
    return user[order], time[order], n[order]


@pytest.fixture(scope="module", params=["packed-int", "plain-int", "cold-int", "packed-string"])
def filled(request, tmp_path_factory):
    codec, key = request.param.split("-")
    ids = [int(i) for i in np.random.default_rng(1).integers(-(2**62), 2**62, len(SIZES))]
    keys = pa.array(ids) if key == "int" else pa.array([f"user {i}" for i in ids])
    schema = EventSchema(SCHEMA, user_id=keys.type)
    with HistoryStore.create(tmp_path_factory.mktemp("cuts") / "store", schema, shards=3) as store:
        events = fill(store, keys, span=700)
        store.compact(codec=codec)
        yield store, keys, events


@settings(max_examples=150, deadline=None)
@given(data=st.data(), last=st.none() | st.integers(1, 300),
       since=st.none() | st.integers(-5, 705_000) | st.sampled_from([0, 350_000, 2**62]))
def test_cuts_equal_a_scan(filled, data, last, since):
    store, keys, (user, time, n) = filled
    bound = (st.integers(-5, 705_000) | st.integers(0, 700).map(lambda t: t * 1000)
             | st.sampled_from([-(2**63), 2**63 - 1]))
    asked = data.draw(st.lists(st.tuples(st.integers(0, len(SIZES) - 1), bound), min_size=1, max_size=40))
    which, as_of = np.array([u for u, _ in asked]), np.array([t for _, t in asked], np.int64)
    pointers = Pointers(keys.take(pa.array(which)).to_numpy(zero_copy_only=False), as_of, np.int64(store.version))
    projection = Projection(("n", "pair"), last=last, since=since)
    whole = store.read(pointers, projection)
    lengths, _ = store.lengths(pointers, projection)
    for row, (u, before) in enumerate(asked):
        seen = (user == u) & (time < before) & (time >= (0 if since is None else since))
        want = n[seen][-(last or 10**9):]
        assert np.array_equal(whole["n"][row], want)
        assert np.array_equal(whole["pair"][row], np.repeat(want % 100, 2).reshape(-1, 2))
        assert lengths[row] == len(want)
    alone = store.read(pointers[0], projection)
    assert np.array_equal(alone["n"][0], whole["n"][0]) and alone.status[0] == whole.status[0] == 0


@pytest.mark.parametrize("last", [1, 100, 300, 700])
def test_lengths_are_those_of_reads_over_several_versions_a_log_and_deletions(versions, last):
    random, size = np.random.default_rng(last), 3000
    user = random.integers(0, len(SIZES), size)
    pointers = Pointers(user, random.integers(0, 710_000, size), random.integers(0, versions.version + 1, size))
    projection = Projection(("n",), last=last)
    for asked in (pointers, pointers[np.flatnonzero(user != DELETED)]):
        lengths, exact = versions.lengths(asked, projection)
        assert exact.all() and np.array_equal(lengths, versions.read(asked, projection).lengths)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Two versions compacted, one in the log, and a user's deletion there."""
    keys = pa.array(range(len(SIZES)))
    with HistoryStore.create(tmp_path_factory.mktemp("cuts") / "store", EventSchema(SCHEMA), shards=2) as store:
        fill(store, keys, span=700)
        fill(store, keys, span=500, seed=1)
        store.compact()
        fill(store, keys, span=700, seed=2)
        store.delete(user_ids=[DELETED])
        yield store


def test_many_pointers_are_shared_among_threads(filled):
    store, keys, (user, time, n) = filled
    which = np.random.default_rng(2).integers(0, len(SIZES), 20_000)
    as_of = np.random.default_rng(3).integers(0, 800_000, len(which))
    pointers = Pointers(keys.take(pa.array(which)).to_numpy(zero_copy_only=False), as_of, np.int64(store.version))
    lengths, exact = store.lengths(pointers, Projection(("n",)))
    by_user = [np.sort(time[user == u]) for u in range(len(SIZES))]
    assert exact.all()
    assert np.array_equal(lengths, [np.searchsorted(by_user[u], t) for u, t in zip(which, as_of, strict=True)])
    read = store.read(pointers[:4000], Projection(("n",)))  # enough rows for several threads
    assert np.array_equal(read.lengths, lengths[:4000])
    ends = np.array([n[user == u][length - 1] for u, length in zip(which, read.lengths, strict=False) if length])
    assert np.array_equal(read.columns["n"][read.offsets[1:][read.lengths > 0] - 1], ends)


def test_a_time_index_that_disagrees_is_found(tmp_path, monkeypatch):
    array = FileWriter.array
    monkeypatch.setattr(FileWriter, "array", lambda self, file, values: array(
        self, file, values + 1 if file.endswith("time_index") else values))
    with HistoryStore.create(tmp_path / "store", EventSchema(SCHEMA), shards=1) as store:
        fill(store, pa.array(np.arange(len(SIZES))), span=700)
        store.compact()
        with pytest.raises(CorruptFile, match="shard 0 has times that its index does not"):
            store.verify()

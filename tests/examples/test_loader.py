import json
import subprocess
import sys
import threading
import time
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, Pointers, RequestRows, offsets_of
from semel.examples import RequestLoader, WithheldHistory, rows_to_table
from semel.examples.order import token_cuts
from semel.features import Feature, FeatureSpec, Task
from semel.history import EventSchema, HistoryStore, Projection

SPEC = FeatureSpec(history_last=4)
REQUESTS = 23


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    schema = EventSchema({"item_id": pa.int64()})
    store = HistoryStore.create(tmp_path_factory.mktemp("loader") / "store", schema, shards=2)
    users = np.repeat(np.arange(8), np.arange(8))
    store.append(pa.table({"user_id": users, "event_time": np.arange(len(users)), "item_id": users * 10}))
    yield store
    store.close()


def make_rows(version=1):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, REQUESTS)
    count = int(lengths.sum())
    return RequestRows(
        np.array([f"r{i}" for i in range(REQUESTS)], dtype=object),
        Pointers(rng.integers(0, 9, REQUESTS), np.full(REQUESTS, 1000), np.full(REQUESTS, version)),
        np.zeros(REQUESTS, dtype=np.int64), {}, Jagged(rng.integers(0, 99, count), offsets_of(lengths)),
        {"like": rng.random(count).astype(np.float32)}, {"like": np.ones(count, dtype=bool)})


def ids(loader):
    return [batch.request_id.tolist() for batch in loader]


def test_one_pass_yields_every_request_once_and_epochs_differ(store):
    loader = RequestLoader(make_rows(), store, features=SPEC, batch_requests=5)
    first, second = ids(loader), ids(loader)
    for epoch in (first, second):
        assert sorted(chain(*epoch)) == sorted(make_rows().request_id)
        assert [len(batch) for batch in epoch] == [5, 5, 5, 5, 3]
    assert first != second and len(loader) == 5
    loader.set_epoch(0)
    assert ids(loader) == first
    in_order = RequestLoader(make_rows(), store, features=SPEC, batch_requests=5, shuffle=False)
    assert list(chain(*ids(in_order))) == make_rows().request_id.tolist()
    other = RequestLoader(make_rows(), store, features=SPEC, batch_requests=5, seed=1)
    assert ids(other) != first


def test_true_means_full_and_false_means_none(store):
    def make(shuffle):
        return RequestLoader(make_rows(), store, features=SPEC, batch_requests=5, shuffle=shuffle)

    assert ids(make(True)) == ids(make("full")) != ids(make("window"))
    assert ids(make(False)) == ids(make(None))
    assert ids(RequestLoader(make_rows(), store, features=SPEC, batch_requests=5)) == ids(make("window"))
    with pytest.raises(ValueError, match='"window", "full" or None, got \'ful\''):
        make("ful")


@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(1, 5), size=st.integers(1, 30), tokens=st.sampled_from([None, 1, 9, 40]),
       workers=st.integers(0, 3), epoch=st.integers(0, 2))
def test_the_order_does_not_depend_on_world_size_or_workers(store, world_size, size, tokens, workers, epoch):
    def make(rank, world, threads):
        loader = RequestLoader(make_rows(), store, features=SPEC, batch_requests=size, batch_tokens=tokens, seed=3,
                               rank=rank, world_size=world, workers=threads)
        loader.set_epoch(epoch)
        return ids(loader)

    alone = make(0, 1, 0)
    ranks = [make(rank, world_size, workers) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for step, batch in enumerate(alone):
        assert list(chain(*(rank[step] for rank in ranks))) == batch


@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 6), workers=st.integers(0, 2), world_size=st.integers(1, 2))
def test_a_state_resumes_in_the_middle_of_an_epoch(store, stop, workers, world_size):
    def make(world=1):
        return RequestLoader(make_rows(), store, features=SPEC, batch_requests=4, workers=workers, seed=7,
                             world_size=world)

    whole = make()
    expected = [ids(whole), ids(whole)]
    loader = make()
    loader.set_epoch(1)
    seen = []
    for batch in loader:
        if len(seen) == stop:
            break
        seen.append(batch.request_id.tolist())
        state = json.loads(json.dumps(loader.state_dict()))
    if not seen:
        state = make().state_dict() | {"epoch": 1}
    resumed = make()
    resumed.load_state_dict(state)
    resumed.set_epoch(state["epoch"])  # a trainer's loop says this; it must not lose the place
    assert seen + ids(resumed) == expected[1]
    assert resumed.epoch == 2
    shared = make(world_size)
    shared.load_state_dict(state)
    assert [batch[0] for batch in seen + ids(shared)] == [batch[0] for batch in expected[1]]


def test_breaking_off_starts_the_epoch_anew_and_leaves_no_thread(store):
    loader = RequestLoader(make_rows(), store, features=SPEC, batch_requests=2, workers=2)
    before = threading.active_count()
    firsts = []
    for _ in range(2):
        for batch in loader:
            firsts.append(batch.request_id.tolist())
            break
        assert not [t for t in threading.enumerate() if t.name.startswith("semel-loader")]
    assert firsts[0] == firsts[1] and threading.active_count() == before


def test_a_state_of_other_examples_or_settings_is_refused(store):
    state = RequestLoader(make_rows(), store, features=SPEC, batch_requests=4).state_dict()
    with pytest.raises(ValueError, match=r"batch_requests=5.*saved with 4"):
        RequestLoader(make_rows(), store, features=SPEC, batch_requests=5).load_state_dict(state)
    fewer = make_rows().select(np.arange(20))
    with pytest.raises(ValueError, match="requests=20"):
        RequestLoader(fewer, store, features=SPEC, batch_requests=4).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_out_at_its_batch_and_ends_the_threads(store, workers):
    rows = make_rows()
    rows.pointers.version[10] = 99  # not visible
    loader = RequestLoader(rows, store, features=SPEC, batch_requests=4, shuffle=False, workers=workers)
    seen = []
    with pytest.raises(Exception, match="version 99"):
        seen.extend(loader)
    assert len(seen) == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("semel-loader")]


def test_tokens_count_history_and_candidates(store):
    rows = make_rows()
    loader = RequestLoader(rows, store, features=SPEC, batch_tokens=12, shuffle=False)
    sizes = []
    for batch in loader:
        tokens = int(batch.request["history"].lengths.sum()) + batch.candidates
        assert tokens <= 12 or batch.requests == 1
        sizes.append(batch.requests)
    assert sum(sizes) == REQUESTS and max(sizes) > 1
    short = RequestLoader(rows, store, Projection(columns=("item_id",), last=1), features=SPEC, batch_tokens=12)
    assert len(short) < len(loader)
    assert all(int(batch.request["history"].lengths.max()) <= 1 for batch in short)


@given(tokens=st.lists(st.integers(0, 9), max_size=30), limit=st.integers(1, 20))
def test_token_cuts_are_as_few_as_a_greedy_loop_makes(tokens, limit):
    cuts = token_cuts(np.array(tokens, dtype=np.int64), limit).tolist()
    expected, total = [0], 0
    for place, size in enumerate(tokens):
        if place > expected[-1] and total + size > limit:
            expected.append(place)
            total = 0
        total += size
    if tokens:
        expected.append(len(tokens))
    assert cuts == expected


def test_waiting_is_counted_and_prefetch_hides_it(store):
    class Slow:
        """A store whose reads take a while."""

        def __getattr__(self, name):
            return getattr(store, name)

        def read(self, *args):
            time.sleep(0.3)
            return store.read(*args)

    def wait(workers):
        loader = RequestLoader(make_rows(), Slow(), features=SPEC, batch_requests=5, workers=workers)
        for _ in loader:
            time.sleep(0.35)
        return loader.wait_seconds

    alone = wait(0)
    assert alone > 5 * 0.3
    assert wait(2) < 0.6 * alone  # but for the first batch nothing is waited for


def test_examples_may_be_rows_a_table_a_file_or_files(store, tmp_path):
    rows = make_rows()
    pq.write_table(rows_to_table(rows), tmp_path / "all.parquet")
    pq.write_table(rows_to_table(rows.select(np.arange(10))), tmp_path / "a.parquet")
    pq.write_table(rows_to_table(rows.select(np.arange(10, REQUESTS))), tmp_path / "b.parquet")
    batches = [ids(RequestLoader(examples, store, features=SPEC, batch_requests=6)) for examples in (
        rows, rows_to_table(rows), tmp_path / "all.parquet", str(tmp_path / "all.parquet"),
        [tmp_path / "a.parquet", tmp_path / "b.parquet"])]
    assert all(other == batches[0] for other in batches)


def test_impossible_settings_are_refused(store):
    for settings_ in ({"batch_requests": 0}, {"batch_tokens": 0}, {"rank": 2, "world_size": 2}, {"world_size": 0},
                      {"workers": -1}, {"window": 0}, {"together": 0}):
        with pytest.raises(ValueError, match=r"must be"):
            RequestLoader(make_rows(), store, features=SPEC, **settings_)
    assert ids(RequestLoader(make_rows().select(np.empty(0, np.int64)), store, features=SPEC)) == []


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    """24 users of 400 events each and 480 requests at their times; the same users with their last 100 events only."""
    folder = tmp_path_factory.mktemp("tenants")
    rng = np.random.default_rng(2)
    users, when = np.tile(np.arange(24), 400), np.repeat(np.arange(400), 24)
    stores = []
    for name, keep in (("whole", when >= 0), ("last", when >= 300)):
        store = HistoryStore.create(folder / name, EventSchema({"item_id": pa.int64()}), shards=4)
        store.append(pa.table({"user_id": users[keep], "event_time": when[keep], "item_id": when[keep]}))
        store.compact()
        stores.append(store)
    at = np.sort(rng.integers(1, 400, 480))
    rows = RequestRows(
        np.array([f"r{i}" for i in range(480)], object), Pointers(rng.integers(0, 24, 480), at, np.array(1)),
        np.zeros(480, np.int64), {}, Jagged(np.arange(480), np.arange(481)), {}, {})
    yield *stores, rows
    for store in stores:
        store.close()


def test_affinity_saves_lookups_and_bytes_and_counts_them(long_store):
    store, _, rows = long_store
    counters = {}
    for shuffle in ("window", "full", None):
        loader = RequestLoader(rows, store, features=FeatureSpec(history_last=100), batch_requests=48, shuffle=shuffle)
        events = sum(int(batch.request["history"].offsets[-1]) for batch in loader)
        counters[shuffle] = loader.counters
        assert loader.counters.pointers == 480 and loader.counters.events_delivered == events
    window, full = counters["window"], counters["full"]
    assert window.events_delivered == full.events_delivered
    assert window.lookups < full.lookups / 2 and window.bytes_saved > 2 * full.bytes_saved
    assert window.bytes_read < 0.5 * window.bytes_delivered


def test_a_short_tenant_reads_what_it_would_read_alone(long_store):
    """Two loaders over one dataset, in turns; and a store that keeps only what the short one needs."""
    whole, last, rows = long_store
    recent = rows.select(np.flatnonzero(rows.pointers.as_of == 399))
    head = RequestRows(recent.request_id, Pointers(recent.pointers.user_id, 400, 1), recent.catalogue_version, {},
                       recent.candidates, {}, {})

    def tenant(store, length, rows=rows):
        return RequestLoader(rows, store, features=FeatureSpec(history_last=length), batch_requests=32, seed=5)

    alone = tenant(whole, 20)
    single = [batch.request["history"]["item_id"].values for batch in alone]
    short, long = tenant(whole, 20), tenant(whole, 399)
    for one, other, want in zip(short, long, single, strict=True):
        assert one.request_id.tolist() == other.request_id.tolist()
        assert torch.equal(one.request["history"]["item_id"].values, want)
    assert short.counters == alone.counters
    assert long.counters.events_delivered > 5 * short.counters.events_delivered
    kept, cut = tenant(whole, 100, head), tenant(last, 100, head)
    for one, other in zip(kept, cut, strict=True):
        assert torch.equal(one.request["history"]["item_id"].values, other.request["history"]["item_id"].values)
    assert kept.counters.events_delivered == cut.counters.events_delivered == 100 * len(head)
    assert kept.counters.bytes_read <= 1.1 * cut.counters.bytes_delivered


def test_a_state_of_a_store_with_other_shards_is_refused(store, tmp_path):
    state = RequestLoader(make_rows(), store, features=SPEC).state_dict()
    with HistoryStore.create(tmp_path / "other", EventSchema({"item_id": pa.int64()}), shards=5) as other:
        with pytest.raises(ValueError, match="fingerprint"):
            RequestLoader(make_rows(), other, features=SPEC).load_state_dict(state)
        full = RequestLoader(make_rows(), store, features=SPEC, shuffle="full").state_dict()
        RequestLoader(make_rows(), other, features=SPEC, shuffle="full").load_state_dict(full)


def test_batches_are_equal_whatever_materializes_them(store):
    def run(workers):
        return list(RequestLoader(make_rows(), store, features=SPEC, batch_requests=4, workers=workers))

    for one, other in zip(run(0), run(3), strict=True):
        assert torch.equal(one.request["history"]["item_id"].values, other.request["history"]["item_id"].values)
        assert torch.equal(one.label["like"], other.label["like"])


def test_a_loader_may_be_the_first_to_import_torch(store, tmp_path):
    """Its threads read rows while another of them imports it."""
    pq.write_table(rows_to_table(make_rows()), tmp_path / "rows.parquet")
    code = ("import sys; from semel.examples import RequestLoader; from semel.features import FeatureSpec\n"
            "from semel.history import HistoryStore\n"
            "store = HistoryStore.open(sys.argv[1]); assert 'torch' not in sys.modules\n"
            "spec = FeatureSpec(history_last=4)\n"
            "loader = RequestLoader(sys.argv[2], store, features=spec, batch_requests=1, workers=2)\n"
            "print(sum(batch.requests for batch in loader))")
    result = subprocess.run([sys.executable, "-c", code, str(store.path), str(tmp_path / "rows.parquet")],
                            capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and result.stdout.split() == [str(REQUESTS)], result.stderr


def test_requests_whose_events_were_deleted_are_counted_dropped_or_refused(tmp_path):
    schema = EventSchema({"item_id": pa.int64()})
    with HistoryStore.create(tmp_path / "s", schema, shards=2) as store:
        store.append(pa.table({"user_id": [1, 2, 3], "event_time": [1, 2, 3], "item_id": [5, 6, 7]}))
        rows = RequestRows(np.array(["a", "b", "c"], object), store.point([1, 2, 3], 10), np.zeros(3, np.int64), {},
                           Jagged(np.arange(6), offsets_of([1, 2, 3])), {"like": np.ones(6, np.float32)},
                           {"like": np.ones(6, bool)})
        store.delete(user_ids=[2])
        features = FeatureSpec(history=(Feature("item_id"),), tasks=(Task("like"),))

        def batch(withheld):
            loader = RequestLoader(rows, store, features=features, shuffle=None, withheld=withheld)
            return next(iter(loader)), loader.counters.withheld

        kept, count = batch("keep")
        assert count == 1 and kept.label_mask["like"].all()
        dropped, count = batch("drop")
        assert count == 1 and dropped.label_mask["like"].tolist() == [True, False, False, True, True, True]
        assert dropped.requests == 3 and dropped.request["history"].lengths.tolist() == [1, 0, 1]
        with pytest.raises(WithheldHistory, match=r"1 requests .* \(b \.\.\.\)"):
            batch("fail")
        with pytest.raises(ValueError, match='withheld must be "keep", "drop" or "fail"'):
            batch("ignore")


def test_without_features_a_batch_has_what_the_projection_and_the_rows_name(tmp_path):
    schema = EventSchema({"item_id": pa.int64(), "watch_time": pa.float32(), "action": pa.dictionary(
        pa.int8(), pa.string()), "vector": pa.list_(pa.float32(), 2)}, user_id=pa.string(), group="action")
    with HistoryStore.create(tmp_path / "store", schema, shards=2) as store, HistoryStore.create(
            tmp_path / "items", EventSchema({"price": pa.float64(), "kind": pa.string()}, key="item_id")) as items:
        store.append(pa.table({
            "user_id": ["ü", "ü", "b"], "event_time": [1, 2, 3], "item_id": [7, 8, 9], "watch_time": pa.array(
                [0.5, None, 2.0], pa.float32()), "action": pa.array(["like", "click", "like"]).dictionary_encode().cast(
                    schema.columns["action"]), "vector": pa.array([[1, 2], [3, 4], None], schema.columns["vector"])}))
        items.append(pa.table({"item_id": [7, 8], "event_time": [0, 0], "price": [1.5, None], "kind": ["x", "y"]}))
        rows = RequestRows(
            np.array(["r0", "r1"], object), store.point(np.array(["ü", "b"], object), 9), np.array([1, 1]),
            {"hour": np.array([3, 4]), "score": np.array([0.5, 1.5])}, Jagged(np.array([7, 8, 7]), np.array([0, 2, 3])),
            {"click": np.ones(3, np.float32)}, {"click": np.ones(3, bool)})
        pq.write_table(rows_to_table(rows), tmp_path / "rows.parquet")
        projection = Projection(("item_id", "watch_time", "vector"), last=5, groups=("like", "click"))
        for examples in (rows, tmp_path / "rows.parquet"):
            (batch,) = RequestLoader(examples, store, projection, catalogue=items, batch_requests=4, shuffle=None)
            history = batch.request["history"]
            assert set(history.columns) == {"event_time", "item_id", "watch_time", "vector"}
            assert history["item_id"].values.tolist() == [7, 8, 9] and history.offsets.tolist() == [0, 2, 3]
            assert history["watch_time"].values.isnan().tolist() == [False, True, False]
            assert history["vector"].values.shape == (3, 2)
            assert batch.request["hour"].tolist() == [3, 4] and batch.request["score"].tolist() == [0.5, 1.5]
            assert batch.candidate["price"].isnan().tolist() == [False, True, False]
            assert batch.candidate["kind"].dtype == torch.int64 and batch.label["click"].tolist() == [1, 1, 1]
        for bad, match in ((None, "needs a projection"), (Projection(("event_time",)), "no column of an event"),
                           (Projection(("itme",)), r"\['itme'\].*it has|\['itme'\]; the store")):
            with pytest.raises(ValueError, match=match):
                RequestLoader(rows, store, bad)

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, JaggedTable, Pointers, RequestRows, offsets_of
from semel.examples import history_checksum, materialize
from semel.features import MISSING, Feature, FeatureSpec, Task, stable_id
from semel.history import EventSchema, HistoryStore, Projection, VersionNotVisible

SPEC = FeatureSpec(
    history=(Feature("item_id"), Feature("rating", "numeric"), Feature("action")),
    request=(Feature("age"), Feature("hour", "numeric"), Feature("tags", "multi")),
    candidate=(Feature("genres", "multi"), Feature("year", "numeric"), Feature("maker")),
    tasks=(Task("like"), Task("rating", "regression")), history_last=3,
)
MASK64 = 2**64 - 1


@pytest.fixture(params=["integer ids", "string ids"])
def world(request, tmp_path):
    """A store and a catalogue that were appended to in several versions, late events and nulls included."""
    text = request.param == "string ids"
    user = (lambda n: f"ü{n}") if text else (lambda n: n)
    item = (lambda n: f"фильм {n}") if text else (lambda n: n)
    kind = pa.string() if text else pa.int64()
    columns = {"item_id": kind, "rating": pa.float32(), "action": pa.string()}
    store = HistoryStore.create(tmp_path / "store", EventSchema(columns, user_id=kind), shards=3)
    catalogue = HistoryStore.create(tmp_path / "catalogue", EventSchema(
        {"genres": pa.string(), "year": pa.int32(), "maker": kind}, user_id=kind, key="item_id"), shards=2)

    def events(*rows):
        names = ("user_id", "event_time", "item_id", "rating", "action")
        types = (kind, pa.int64(), kind, pa.float32(), pa.string())
        rows = [(user(u), t, item(i), r, a) for u, t, i, r, a in rows]
        return pa.table({name: pa.array([row[k] for row in rows], types[k]) for k, name in enumerate(names)})

    def items(*rows):
        return pa.table({
            "item_id": pa.array([item(i) for i, *_ in rows], kind), "event_time": pa.array([t for _, t, *_ in rows]),
            "genres": pa.array([g for _, _, g, *_ in rows], pa.string()),
            "year": pa.array([y for *_, y, _ in rows], pa.int32()),
            "maker": pa.array([None if m is None else item(m) for *_, m in rows], kind)})

    store.append(events((1, 10, 5, 4.0, "rate"), (1, 20, 6, None, "view"), (2, 10, 5, 1.0, None)))
    catalogue.append(items((5, 0, "drama|war", 1990, 1), (6, 0, None, None, None), (7, 0, "", 2001, 2)))
    store.append(events((1, 15, 7, 2.0, "buy"), (1, 20, 5, 5.0, "rate")))
    catalogue.append(items((5, 50, "war", 1991, 1)))
    yield store, catalogue, user, item
    store.close()
    catalogue.close()


def request_rows(user, item, requests):
    """requests: (user, as_of, version, catalogue_version, candidates)."""
    ids = [item(c) for *_, candidates in requests for c in candidates]
    count = len(requests)
    return RequestRows(
        np.array([f"r{i}" for i in range(count)], dtype=object),
        Pointers(np.array([user(r[0]) for r in requests]), np.array([r[1] for r in requests], dtype=np.int64),
                 np.array([r[2] for r in requests], dtype=np.int64)),
        np.array([r[3] for r in requests], dtype=np.int64),
        {"age": np.array(["25", None, "1"][:count], dtype=object), "hour": np.arange(count, dtype=np.float32),
         "tags": np.array(["a|b", None, ""][:count], dtype=object)},
        Jagged(np.array(ids, dtype=object) if ids and isinstance(ids[0], str) else np.array(ids, dtype=np.int64),
               offsets_of([len(r[4]) for r in requests])),
        {"like": np.arange(len(ids), dtype=np.float32)}, {"like": np.ones(len(ids), dtype=bool)},
    )


def test_a_batch_holds_what_each_request_saw(world):
    store, catalogue, user, item = world
    rows = request_rows(user, item, [(1, 100, 1, 1, [5, 6, 99]), (1, 100, 2, 2, [5]), (9, 100, 2, 2, [7])])
    for _ in range(2):
        batch = materialize(rows, store, catalogue, SPEC)
        history = batch.request["history"]
        sid = lambda *values: stable_id(np.array(values, dtype=object)).tolist()  # noqa: E731
        seen = [sid(*map(item, row)) for row in ([5, 6], [7, 6, 5], [])]  # the last three at version 2
        assert [row.tolist() for row in history["item_id"]] == seen
        assert history["event_time"].values.tolist() == [10, 20, 15, 20, 20]
        assert torch.nan_to_num(history["rating"].values, nan=-1).tolist() == [4, -1, 2, -1, 5]
        assert history["action"].values.tolist() == sid("rate", "view", "buy", "view", "rate")
        assert history.status.tolist() == [0, 0, 3]
        assert batch.request["user_id"].tolist() == sid(user(1), user(1), user(9))
        assert batch.request["age"].tolist() == [*sid("25"), MISSING, *sid("1")]
        assert [row.tolist() for row in batch.request["tags"]] == [sid("a", "b"), [], []]
        assert batch.request["hour"].dtype == torch.float32
        assert batch.candidate["item_id"].tolist() == sid(*map(item, [5, 6, 99, 5, 7]))
        assert [row.tolist() for row in batch.candidate["genres"]] == [sid("drama", "war"), [], [], sid("war"), []]
        assert torch.nan_to_num(batch.candidate["year"], nan=-1).tolist() == [1990, -1, -1, 1991, 2001]
        assert batch.candidate["maker"].tolist() == [*sid(item(1)), MISSING, MISSING, *sid(item(1), item(2))]
        assert batch.label["like"].tolist() == [0, 1, 2, 3, 4] and batch.label_mask["like"].all()
        assert not batch.label_mask["rating"].any() and batch.candidate_offsets.tolist() == [0, 3, 4, 5]
        store.compact()
        catalogue.compact()


def test_dictionaries_that_grow_between_batches_keep_their_ids(world):
    store, catalogue, user, item = world
    rows = request_rows(user, item, [(1, 100, 1, 1, [5, 6])])
    first = materialize(rows, store, catalogue, SPEC)
    kind = store.schema.user_id
    store.append(pa.table({
        "user_id": pa.array([user(3)], kind), "event_time": [5], "item_id": pa.array([item(1)], kind),
        "rating": pa.array([1.0], pa.float32()), "action": ["brand new"]}))
    late = materialize(request_rows(user, item, [(3, 100, store.version, 2, [7])]), store, catalogue, SPEC)
    assert late.request["history"]["action"].values.tolist() == stable_id(["brand new"]).tolist()
    again = materialize(rows, store, catalogue, SPEC)
    assert torch.equal(again.request["history"]["action"].values, first.request["history"]["action"].values)


def test_a_batch_is_the_sum_of_its_requests_and_no_candidates_or_requests_are_fine(world):
    store, catalogue, user, item = world
    requests = [(1, 100, 2, 2, [5, 6, 99]), (2, 100, 2, 2, []), (1, 18, 2, 1, [7, 5])]
    rows = request_rows(user, item, requests)
    whole = materialize(rows, store, catalogue, SPEC, checksum=True)
    for number in range(3):
        one = materialize(rows.select(np.array([number])), store, catalogue, SPEC, checksum=True)
        assert torch.equal(one.request["history"]["item_id"].values, whole.request["history"]["item_id"][number])
        assert one.request["history_checksum"][0] == whole.request["history_checksum"][number]
        assert torch.equal(one.request["tags"].values, whole.request["tags"][number])
        part = slice(*whole.candidate_offsets[number : number + 2].tolist())
        assert torch.equal(one.candidate["maker"], whole.candidate["maker"][part])
    empty = materialize(rows.select(np.empty(0, np.int64)), store, catalogue, SPEC, checksum=True)
    assert empty.requests == 0 and empty.candidates == 0 and len(empty.request["history"]) == 0
    assert len(empty.request["history_checksum"]) == 0


def test_a_projection_chooses_events_never_columns(world):
    store, catalogue, user, item = world
    rows = request_rows(user, item, [(1, 100, 2, 2, [5])])
    batch = materialize(rows, store, catalogue, SPEC, projection=Projection(columns=("item_id",), last=1))
    assert batch.request["history"].lengths.tolist() == [1] and "action" in batch.request["history"]
    batch = materialize(rows, store, catalogue, SPEC, projection=Projection(columns=("item_id",), since=20))
    assert batch.request["history"]["event_time"].values.tolist() == [20, 20]


def test_what_cannot_be_read_is_named(world):
    store, catalogue, user, item = world
    rows = request_rows(user, item, [(1, 100, 2, 2, [5])])

    def refuses(pattern, error=ValueError, catalogue=catalogue, rows=rows, **spec):
        with pytest.raises(error, match=pattern):
            materialize(rows, store, catalogue, FeatureSpec(**spec))

    refuses("'colour' is not a column of the store", history=(Feature("item_id"), Feature("colour")))
    refuses("'colour' is not a column of the catalogue", candidate=(Feature("colour"),))
    refuses("needs a catalogue", candidate=(Feature("genres"),), catalogue=None)
    refuses("'year' is multi", candidate=(Feature("year", "multi"),))
    refuses("'action' is numeric", history=(Feature("item_id"), Feature("action", "numeric")))
    refuses("'action' is multi", history=(Feature("item_id"), Feature("action", "multi")))
    refuses("'user_id'", request=(Feature("user_id"),))
    future = request_rows(user, item, [(1, 100, 99, 2, [5])])
    refuses("version 99", VersionNotVisible, rows=future)


def test_threads_share_a_store(world):
    store, catalogue, user, item = world
    rows = request_rows(user, item, [(1, 100, 2, 2, [5, 6, 7]), (2, 100, 2, 2, [5])])
    expected = materialize(rows, store, catalogue, SPEC)
    wrong = []

    def work():
        for _ in range(20):
            batch = materialize(rows, store, catalogue, SPEC)
            if not torch.equal(batch.candidate["genres"].values, expected.candidate["genres"].values):
                wrong.append(batch)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def plain_checksum(columns):
    """The checksum of one history as ``docs/formats/exposures.md`` defines it; columns[name]: uint64 words or None."""
    length = len(next(iter(columns.values())))
    state = mix((length + 0x9E3779B97F4A7C15) & MASK64)
    for name in sorted(columns):
        state = mix(state ^ int(stable_id([name])[0]))
        for word in columns[name]:
            if word is None:
                state = mix((state + 0xD6E8FEB86659FD93) & MASK64)
            else:
                state = (mix(state ^ word) + 0x9E3779B97F4A7C15) & MASK64
    return state


values = st.lists(st.tuples(st.integers(-2**63, 2**63 - 1), st.floats(width=32), st.sampled_from(["a", "ü", None])),
                  max_size=6)


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(values, min_size=1, max_size=4))
def test_the_checksum_is_the_documented_one(rows):
    flat = [event for row in rows for event in row]
    dictionary = np.array(["ü", "a"], dtype=object)
    table = JaggedTable(
        {"n": np.array([e[0] for e in flat], dtype=np.int64), "x": np.array([e[1] for e in flat], dtype=np.float32),
         "s": np.array([-1 if e[2] is None else int(e[2] == "a") for e in flat], dtype=np.int32)},
        offsets_of([len(row) for row in rows]), {"s": np.array([e[2] is not None for e in flat], dtype=bool)},
        {"s": dictionary})
    expected = [plain_checksum({
        "n": [e[0] & MASK64 for e in row], "x": [int(np.float32(e[1]).view(np.uint32)) for e in row],
        "s": [None if e[2] is None else int(stable_id([e[2]])[0]) for e in row]}) for row in rows]
    assert history_checksum(table).tolist() == expected


def test_the_checksum_tells_order_nulls_and_values_but_not_codes():
    def one(numbers, valid=None):
        return int(history_checksum(JaggedTable(
            {"n": np.array(numbers, dtype=np.int64)}, np.array([0, len(numbers)]),
            None if valid is None else {"n": np.array(valid)}))[0])

    different = [one([1, 2]), one([2, 1]), one([1]), one([]), one([1, 0]), one([1, 7], [True, False])]
    assert len(set(different)) == len(different)
    assert one([1, 7], [True, False]) == one([1, 9], [True, False])

    def text(codes, dictionary):
        return int(history_checksum(JaggedTable({"s": np.array(codes, dtype=np.int32)}, np.array([0, len(codes)]),
                                                dictionaries={"s": np.array(dictionary, dtype=object)}))[0])

    assert text([0, 1], ["a", "b"]) == text([2, 0], ["b", "c", "a"])
    small = JaggedTable({"n": np.array([-3], dtype=np.int8)}, np.array([0, 1]))
    assert int(history_checksum(small)[0]) == one([-3])

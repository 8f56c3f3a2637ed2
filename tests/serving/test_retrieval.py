"""Retrieval: the best of the whole catalogue, exactly, with filters and caps, and never behind the catalogue."""

import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.history import EventSchema, HistoryStore
from semel.serving import InvalidRequest, NonFiniteScore, Predictor, reference
from semel.serving.item_index import ItemIndex
from serving.stand_ins import SPEC, make_store, save_next_item, save_tiny_model, stand_in
from serving.test_versions import eventually

AUTHORS = ["a", "b", None, "c"]


def catalogue_at(path, kind=None):
    return HistoryStore.create(path, EventSchema({"author": pa.string(), "year": pa.int32()}, key="item_id",
                                                 user_id=kind or pa.int64()), shards=2)


def rows(ids, times, authors=None, years=None):
    return pa.table({"item_id": ids, "event_time": pa.array(times, pa.int64()),
                     "author": pa.array(authors or [None] * len(ids), pa.string()),
                     "year": pa.array(years or [0] * len(ids), pa.int32())})


def index_of(catalogue, block=4):
    """An index whose payload says which row each item was read from."""
    from semel.batch import Pointers
    from semel.history import Projection

    def payload(ids, as_of, version):
        found = catalogue.read(Pointers(ids, as_of, version), Projection(("year",), last=1))
        return found.columns["year"].copy()

    return ItemIndex(catalogue, payload, block)


def contents(items):
    """{id: (begins, payload)}, each once."""
    found = {}
    for block in items.blocks:
        assert (np.sort(block.ids) == block.ids).all() and block.last_begin == block.begins.max()
        for one, begins, year in zip(block.ids.tolist(), block.begins.tolist(), block.payload.tolist(), strict=True):
            assert one not in found
            found[one] = (begins, year)
    assert len(items) == len(found)
    places = np.random.default_rng(0).permutation(len(items))
    flat = np.concatenate([block.ids for block in items.blocks]) if items.blocks else np.empty(0)
    assert items.ids_at(places).tolist() == flat[places].tolist()
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(
    st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
    st.tuples(st.just("erase"), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["compact", "compact", "expire", "look"]), st.none())), min_size=1, max_size=8))
def test_the_index_holds_what_the_catalogue_holds_whatever_happens_to_it(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("catalogue")
    with catalogue_at(folder / "items") as catalogue:
        index, lazy, expected, number = index_of(catalogue), index_of(catalogue), {}, 0
        for what, values in steps:
            if what == "append":
                years = list(range(number, number := number + len(values)))
                catalogue.append(rows([one for one, _ in values], [at for _, at in values], years=years))
                for (one, at), year in zip(values, years, strict=True):
                    expected.setdefault(one, []).append((at, year))
            elif what in ("delete", "erase"):
                getattr(catalogue, what)(values)
                for one in values:
                    expected.pop(one, None)
            elif what == "look":
                lazy.items()
            else:
                catalogue.compact(retention="1d" if what == "expire" else None)
                if what == "expire":
                    expected.clear()  # all are of 1970
            now = {one: (min(at for at, _ in own), max(own, key=lambda row: (row[0], row[1]))[1])
                   for one, own in expected.items()}
            assert contents(index.items()) == now
            assert contents(index_of(catalogue).items()) == now  # made at once, or step by step,
        assert contents(lazy.items()) == now  # or over several steps, compactions among them


@pytest.mark.parametrize("strings", [False, True])
def test_a_compaction_is_no_reason_to_read_the_catalogue_again(tmp_path, strings):
    kind = pa.string() if strings else pa.int64()

    def append(catalogue, ids):
        catalogue.append(rows(pa.array([str(one) if strings else one for one in ids], kind), [1] * len(ids)))

    with catalogue_at(tmp_path / "items", kind) as catalogue:
        read = []
        with HistoryStore.open(tmp_path / "items") as reader:
            indexes = [ItemIndex(one, lambda ids, as_of, version: (read.append(len(ids)), ids)[1], 64)
                       for one in (catalogue, reader)]
            append(catalogue, range(1000))
            for turn in range(3):
                for index in indexes:
                    reader.refresh()
                    read.clear()
                    assert len(index.items()) == 1000 + turn and sum(read) == (1000 if turn == 0 else 2)
                catalogue.compact()
                append(catalogue, [7, 2000 + turn])  # one that is there, and one that is not
                catalogue.compact()


def test_many_small_blocks_are_joined(tmp_path):
    with catalogue_at(tmp_path / "items") as catalogue:
        index = index_of(catalogue, block=16)
        for number in range(60):
            catalogue.append(rows([number], [0]))
            index.items()
        items = index.items()
    assert len(items) == 60 and len(items.blocks) <= 60 / 8 + 9


@pytest.fixture(scope="module", params=[False, True], ids=["integers", "strings"])
def site(tmp_path_factory, request):
    """(folder, strings): a store with a catalogue of 20, a ranker and a retrieval model that knows 15 of them."""
    folder = tmp_path_factory.mktemp("site")
    for store in make_store(folder / "store", request.param):
        store.close()
    save_tiny_model(folder / "rank", request.param)
    save_next_item(folder / "next", request.param, known=15)
    return folder, request.param


def test_it_is_a_full_sort_of_the_catalogue_filters_and_caps_included(site):
    """Against rank: every item scored, sorted by (score, id), walked down."""
    folder, strings = site
    rng = np.random.default_rng(0)
    for retrieve in (folder / "next", None):
        with Predictor.load(folder / "rank", folder / "store", retrieve=retrieve, log_exposures=False) as predictor:
            ids = predictor.catalogue.keys()
            genres = dict(zip(ids.tolist(), column_of(predictor, ids, "genres"), strict=True))
            for _ in range(12):
                user = f"uü{rng.integers(0, 20)}" if strings else int(rng.integers(0, 25))
                limit, most = int(rng.integers(1, 25)), int(rng.integers(1, 6))
                blocked = rng.choice(ids, rng.integers(0, 12), replace=False)
                as_of = int(rng.integers(1, 10**15))
                every = predictor.retrieval.rank(user, ids, as_of=as_of)
                assert [item for item, _ in every.results] == sorted_by_score(every)
                score = dict(every.results)
                found = predictor.retrieve(user, limit, as_of=as_of, blocked=blocked,
                                           diversity={"column": "genres", "most": most})
                values = np.array([hash(genres[one]) % 1000 for one in ids.tolist()])
                expected = reference.retrieve(np.array([score[one] for one in ids.tolist()], np.float32), ids, limit,
                                              set(blocked.tolist()), values, most)
                assert [item for item, _ in found.results] == expected
                assert found.counts == {"in": 20, "scored": 20, "out": len(expected)}
                assert np.allclose([s for _, s in found.results], [score[one] for one in expected], atol=1e-6)


def sorted_by_score(result):
    score = dict(result.results)
    return sorted(score, key=lambda item: (-score[item], item))


def column_of(predictor, ids, column):
    from semel.batch import Pointers
    from semel.history import Projection

    found = predictor.catalogue.read(Pointers(ids, 2**62, predictor.catalogue.version), Projection((column,), last=1))
    return [found.dictionaries[column][code] for code in found.columns[column].tolist()]


def test_seen_items_never_come_back_however_little_the_model_reads(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    with store, catalogue:
        store.append(pa.table({"user_id": [900] * 80, "event_time": list(range(1, 81)), "item_id": [7] + [9] * 79,
                               "rating": pa.array([1.0] * 80, pa.float32()), "action": ["rate"] * 80}))
        save_next_item(tmp_path / "next")  # reads the last 50: the 7 lies further back
        with Predictor.load(tmp_path / "next", store, log_exposures=False) as predictor:
            found = {item for item, _ in predictor.retrieve(900, 20, exclude_seen=True).results}
            assert found == set(range(20)) - {7, 9}
            assert {item for item, _ in predictor.retrieve(900, 20, exclude_seen=True, as_of=2).results} \
                == set(range(20)) - {7}
            ranked = predictor.rank(900, [7, 8, 9, 10], exclude_seen=True, blocked=[10, 77])
            assert [item for item, _ in ranked.results] == [8] and ranked.counts == {"in": 4, "scored": 1, "out": 1}
            assert predictor.rank(900, [7, 9], exclude_seen=True).results == []


@pytest.mark.parametrize("dot", [True, False])
def test_a_new_item_is_found_by_the_next_request_and_not_before_its_time(tmp_path, dot):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    if dot:
        save_next_item(tmp_path / "run")
    else:
        save_tiny_model(tmp_path / "run")
    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a", log_exposures=False) as predictor:
        def ids(**said):
            return {item for item, _ in predictor.retrieve(3, 50, **said).results}

        assert ids() == set(range(20))
        now = time.time_ns() // 1000
        new = pa.table({"item_id": [500, 501], "event_time": [now - 10**9, now + 10**9], "title": ["x", "y"],
                        "genres": ["war", "war"], "year": pa.array([2026, 2027], pa.int32())})
        predictor.catalogue.append(new)
        assert ids() == {*range(20), 500}
        assert ids(as_of=now - 10**9) == set(range(20)) and ids(as_of=now - 10**9 + 1) == {*range(20), 500}
        predictor.catalogue.delete([3, 500])
        assert ids() == {*range(20)} - {3}
        predictor.catalogue.compact()
        assert ids() == {*range(20)} - {3}


def test_each_finds_its_own_items_while_others_add_theirs(tmp_path):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    save_next_item(tmp_path / "run")
    failed = []

    def add(predictor, number):
        try:
            mine = set()
            for turn in range(12):
                item = 1000 * (number + 1) + turn
                predictor.catalogue.append(pa.table({
                    "item_id": [item], "event_time": [0], "title": ["x"], "genres": ["war"],
                    "year": pa.array([2000], pa.int32())}))
                mine.add(item)
                found = [one for one, _ in predictor.retrieve(number, 500).results]
                assert mine <= set(found) and len(found) == len(set(found))
        except Exception as error:  # in a thread nobody would hear of it
            failed.append(error)

    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a", log_exposures=False) as predictor:
        threads = [threading.Thread(target=add, args=(predictor, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert failed == [] and len(predictor.retrieve(1, 500).results) == 20 + 4 * 12


def test_rows_that_are_newer_than_the_request_are_not_read(tmp_path):
    """The year decides; one item's year changes at time 100."""
    store, catalogue = make_store(tmp_path / "store")

    def year(batch):
        import torch

        return torch.nan_to_num(batch.candidate["year"])[:, None]

    with store, catalogue, Predictor(stand_in(year), store, catalogue) as predictor:
        assert [item for item, _ in predictor.retrieve(1, 2, as_of=50).results] == [19, 18]
        catalogue.append(pa.table({"item_id": [4], "event_time": [100], "title": ["x"], "genres": ["war"],
                                   "year": pa.array([3000], pa.int32())}))
        assert [item for item, _ in predictor.retrieve(1, 1).results] == [4]
        assert [item for item, _ in predictor.retrieve(1, 1, as_of=100).results] == [19]


def test_a_score_that_is_not_finite_is_an_error_that_names_the_item(tmp_path):
    store, catalogue = make_store(tmp_path / "store")

    def broken(batch):
        import torch

        return torch.where(batch.candidate["item_id"] == 4, torch.nan, 0.0)[:, None]

    with store, catalogue, Predictor(stand_in(broken), store, catalogue) as predictor, \
            pytest.raises(NonFiniteScore, match="item 4 of the catalogue"):
        predictor.retrieve(1)


def test_blocks_do_not_change_the_answer_and_a_budget_stops_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr("semel.serving.item_index.BLOCK", 6)
    store, catalogue = make_store(tmp_path / "store")
    save_next_item(tmp_path / "run")
    with store, catalogue, Predictor.load(tmp_path / "run", store, log_exposures=False) as predictor:
        whole = predictor.retrieve(3, 20)
        assert whole.counts == {"in": 20, "scored": 20, "out": 20}
        assert [item for item, _ in whole.results] == sorted_by_score(whole)
        cut = predictor.retrieve(3, 20, budget_ms=1e-6)
        assert cut.counts == {"in": 20, "scored": 6, "out": 6}
        assert predictor.retrieve(3, 20, budget_ms=1e6).results == whole.results
        assert set(whole.timings_ms) == {"history", "features", "scan", "model", "total"}


def test_equal_vectors_tie_to_the_bit_wherever_they_lie(tmp_path):
    """3,000 items that the model never saw have one vector: they come in the order of their ids."""
    for handle in make_store(tmp_path / "store"):
        handle.close()
    save_next_item(tmp_path / "run", known=5)
    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a", log_exposures=False) as predictor:
        predictor.retrieve(3)
        rng = np.random.default_rng(0)
        for part in np.array_split(1000 + rng.permutation(3000), 7):
            predictor.catalogue.append(pa.table({
                "item_id": part, "event_time": [0] * len(part), "title": ["x"] * len(part),
                "genres": ["war"] * len(part), "year": pa.array([2000] * len(part), pa.int32())}))
            predictor.retrieve(3, 10)
        results = predictor.retrieve(3, 2500).results
    assert len({score for item, score in results if item >= 5}) == 1
    assert [item for item, _ in results] == [item for item, _ in sorted(results, key=lambda one: (-one.score,
                                                                                                  one.item_id))]


@pytest.mark.parametrize(("arguments", "field"), [
    ({"limit": 0}, "limit"), ({"limit": True}, "limit"), ({"limit": 1 << 17}, "limit"), ({"limit": 1.5}, "limit"),
    ({"budget_ms": 0}, "budget_ms"), ({"budget_ms": float("nan")}, "budget_ms"), ({"budget_ms": "1"}, "budget_ms"),
    ({"budget_ms": True}, "budget_ms"), ({"user_id": "x"}, "user_id"), ({"as_of": -1}, "as_of"),
    ({"exclude_seen": 1}, "exclude_seen"), ({"blocked": "abc"}, "blocked"), ({"blocked": 5}, "blocked"),
    ({"blocked": [1, "x"]}, "blocked.1"), ({"blocked": [2**63]}, "blocked.0"), ({"blocked": range(10_001)}, "blocked"),
    ({"diversity": 1}, "diversity"), ({"diversity": {}}, "diversity"), ({"diversity": {"column": "no"}},
                                                                        "diversity.column"),
    ({"diversity": {"column": "year", "most": 0}}, "diversity.most"), ({"diversity": {"column": 3}},
                                                                       "diversity.column"),
    ({"diversity": {"column": "year", "more": 1}}, "diversity"), ({"context": {"hour": "x"}}, "context.hour"),
])
def test_what_is_wrong_is_refused_by_name_and_not_logged(predictor, arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        predictor.retrieve(**{"user_id": 1, **arguments})
    assert caught.value.field == field
    assert predictor.flush(10) and len(predictor._log.read()) == 0


def test_without_a_catalogue_there_is_nothing_to_retrieve(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    spec = type(SPEC)(history=SPEC.history, tasks=SPEC.tasks)
    with store, catalogue, Predictor(stand_in(lambda batch: batch.candidate["item_id"].float(), spec), store) as one:
        with pytest.raises(InvalidRequest, match="no catalogue"):
            one.retrieve(1)
        with pytest.raises(InvalidRequest, match="there is no catalogue"):
            one.rank(1, [1], diversity={"column": "genres"})


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "IVF8,Flat;nprobe=8"])
def test_faiss_is_asked_first_and_what_it_cannot_know_is_looked_at(tmp_path, monkeypatch, factory):
    pytest.importorskip("faiss")
    monkeypatch.setattr("semel.serving.item_index.BLOCK", 300)  # so that places lie in several blocks
    for handle in make_store(tmp_path / "store"):
        handle.close()
    save_next_item(tmp_path / "run", known=2000)

    def items(ids):
        return pa.table({"item_id": ids, "event_time": [0] * len(ids), "title": ["x"] * len(ids),
                         "genres": [f"g{one % 3}" for one in ids], "year": pa.array([2000] * len(ids), pa.int32())})

    with HistoryStore.open(tmp_path / "store" / "catalogue", mode="a") as catalogue:
        catalogue.append(items(list(range(20, 2000))))
    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a", log_exposures=False) as exact, \
            Predictor.load(tmp_path / "run", exact.store, log_exposures=False, faiss=factory) as near:
        near.catalogue.refresh()

        def both(user, **said):
            first = exact.retrieve(user, 20, **said)
            return {one for one, _ in first.results}, near.retrieve(user, 20, as_of=first.pointer.as_of, **said)

        shared, looked = 0, []
        for user in range(20):
            wanted, found = both(user)
            shared += len(wanted & {one for one, _ in found.results})
            looked.append(found.counts["scored"])
        assert shared >= (380 if factory == "HNSW32" else 400) and max(looked) <= 40 < found.counts["in"] == 2000
        exact.catalogue.append(items([5000, 5001]))
        exact.catalogue.delete([min(wanted)])
        wanted, found = both(3, blocked=sorted(wanted)[:5], exclude_seen=True)
        assert {one for one, _ in found.results} == wanted or factory == "HNSW32"
        assert found.counts["scored"] < 200  # the block that an item left is not looked at whole
        exhaustive, found = both(3, diversity={"column": "genres", "most": 2})  # three values: the scan has to help
        assert {one for one, _ in found.results} == exhaustive and found.counts["scored"] == found.counts["in"] == 2001
        exact.catalogue.append(items(list(range(6000, 8200))))  # more than a tenth: the index is made anew, beside
        assert near.retrieve(3, 20).counts["scored"] > 2200
        eventually(lambda: near.retrieve(3, 20).counts["scored"] <= 40)


def test_what_faiss_cannot_do_is_said_at_once(tmp_path, monkeypatch):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    save_next_item(tmp_path / "next")
    save_tiny_model(tmp_path / "rank")
    with pytest.raises(ValueError, match="sequence_ranker model has none"):
        Predictor.load(tmp_path / "rank", tmp_path / "store", faiss="Flat")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"pip install 'semel\[faiss\]'"):
        Predictor.load(tmp_path / "next", tmp_path / "store", faiss="Flat")
    monkeypatch.undo()
    pytest.importorskip("faiss")
    for nonsense in ("Nonsense", "Flat;nonsense=3", "IVF4,Flat;nprobe"):
        with pytest.raises(ValueError, match=f"no index of '{nonsense}'"):
            Predictor.load(tmp_path / "next", tmp_path / "store", faiss=nonsense)
    with Predictor.load(tmp_path / "next", tmp_path / "store", faiss="IVF64,Flat") as predictor, \
            pytest.raises(ValueError, match="cannot index 20 items"):
        predictor.warm_up()
    HistoryStore.open(tmp_path / "store", mode="a").close()

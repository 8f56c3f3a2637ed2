"""Request states that are kept, scoring together, and the broadcast form: none of it may change a bit or a meaning."""

import copy
import os
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import ExposureLog
from semel.loop.process import resident
from semel.serving import InvalidRequest, Predictor, replay
from semel.serving.results import RankRequest
from semel.serving.states import OVERHEAD, StateCache
from serving.stand_ins import make_store, save_tiny_model, seen_items, stand_in

KINDS = ["sequence_ranker", "dcnv2", "dlrm", "wukong", "rdcn", "deep_cross_attention", "sequence_dcnv2"]


@pytest.fixture
def site(tmp_path):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    return tmp_path / "run", tmp_path / "store"


def load(site, kind="sequence_ranker", **options):
    run, store = site
    if not run.exists():
        save_tiny_model(run, kind=kind)
    return Predictor.load(run, store, mode="a", **options)


def exact(site):
    report = replay(*site)
    assert report.histories_equal == report.bit_equal == report.requests > 0 and report.max_difference == 0
    assert report.incomplete_batches == 0 and report.exact
    return report


# The cache itself


@settings(max_examples=50, deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=30))
def test_a_cache_is_bounded_and_forgets_the_oldest(asked):
    """Against a list of keys in the order of their last use."""
    sizes, order, cache = {}, [], StateCache(3 * (OVERHEAD + 40) + 20)
    for number, floats in asked:
        key, size = b"%d" % number, sizes.setdefault(number, floats)
        known = number in order
        state = cache.get(key, lambda size=size: [torch.zeros(1, size)])
        assert state[0].shape == (1, size)
        order = [other for other in order if other != number] + [number]
        while sum(4 * sizes[kept] + 1 + OVERHEAD for kept in order) > cache.limit:
            order.pop(0)
        assert len(cache) == len(order) and cache.bytes == sum(4 * sizes[kept] + 1 + OVERHEAD for kept in order)
        if known:
            assert cache.get(key, lambda: pytest.fail("it was kept")) is state
    assert cache.hits + cache.misses >= len(asked) and cache.bytes <= cache.limit


def test_what_is_too_large_or_fails_is_not_kept():
    cache = StateCache(2 * OVERHEAD)
    cache.get(b"large", lambda: [torch.zeros(1, 10_000)])
    assert len(cache) == cache.bytes == 0 and cache.misses == 1
    with pytest.raises(ArithmeticError):
        cache.get(b"bad", lambda: 1 // 0)
    assert len(cache) == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        StateCache(-1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how much a process holds is read from /proc")
def test_the_limit_is_what_the_process_holds(site):
    with load(site) as predictor:
        predictor.rank(int(predictor.store.keys()[0]), [1, 2], {"surface": "home"})
        [(state, _)] = predictor.states._kept.values()  # there is no public way to a state
    cache, before = StateCache(32 << 20), resident(os.getpid())
    for number in range(40_000):
        cache.get(b"%0100d" % number, lambda: copy.deepcopy(state))
        if len(cache) <= number:
            break
    assert cache.bytes > 0.99 * cache.limit and len(cache) < 40_000
    assert resident(os.getpid()) - before < 1.2 * cache.limit


# Pages of one request


@pytest.mark.parametrize("kind", KINDS)
def test_pages_share_a_state_and_score_as_without_one(site, kind):
    context = {"surface": "home", "hour": 3.5}
    with load(site, kind) as predictor, load_other(site) as plain:
        user = int(predictor.store.keys()[0])
        first = predictor.rank(user, list(range(10)), context)
        as_of = first.pointer.as_of
        second = predictor.rank(user, list(range(10, 30)), context, as_of=as_of)
        assert (predictor.states.hits, predictor.states.misses) == (1, 1) and predictor.states.bytes > 0
        assert second.results == plain.rank(user, list(range(10, 30)), context, as_of=as_of).results
        assert plain.states.bytes == 0
    exact(site)


def load_other(site):
    """The same model and store without a cache, reading beside the other."""
    return Predictor.load(*site, log_exposures=False, state_bytes=0)


def test_a_state_is_of_one_history_one_time_and_one_context(site):
    def event(user, item, time_us):
        return pa.table({"user_id": [user], "event_time": [time_us], "item_id": [item],
                         "rating": pa.array([4.0], pa.float32()), "action": ["rate"]})

    with load(site) as predictor:
        users = predictor.store.keys()
        one, two = int(users[0]), int(users[1])
        as_of = predictor.rank(one, [1, 2, 3]).pointer.as_of

        def scores(user=one, as_of=as_of, **request):
            return dict(predictor.rank(user, [1, 2, 3], as_of=as_of, **request).results)

        before = scores()
        assert predictor.states.hits == 1
        assert scores(two) != before and scores(as_of=1) != before
        assert scores(context={"surface": "home"}) != before and scores(context={"hour": 3}) != before
        assert predictor.states.hits == 1
        predictor.store.append(event(two, 7, 10))  # someone else's
        assert scores() == before and predictor.states.hits == 2
        predictor.store.append(event(one, 7, 10))  # late, but it belongs to this history
        assert scores() != before and predictor.states.hits == 2
        predictor.store.delete(user_ids=[one])
        gone = scores()
        assert predictor.states.hits == 2
        assert gone == dict(predictor.rank(900, [1, 2, 3], as_of=as_of).results)  # as one who never came
        assert scores(two) != gone


def test_models_without_a_request_side_keep_nothing(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    with store, Predictor(stand_in(seen_items), store, catalogue) as predictor:
        predictor.rank(1, [1, 2])
        assert predictor.states.limit == 0 and predictor.states.misses == 0


# Scored together


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_scored_together_are_replayed_together(site, kind):
    rng = np.random.default_rng(0)
    with load(site, kind) as predictor, load_other(site) as alone:
        requests = [RankRequest(int(user), rng.permutation(60)[: rng.integers(1, 40)], {"surface": "home"},
                                int(rng.integers(1, 50))) for user in (*range(6), 900)]
        together = predictor.rank_together(requests)
        for request, result in zip(requests, together, strict=True):
            single = alone.rank(request.user_id, request.candidates, request.context, as_of=result.pointer.as_of)
            expected = dict(single.results)
            assert len(result.results) == min(request.limit, len(request.candidates))
            for item, score in result.results:
                assert score == pytest.approx(expected[item], abs=1e-5)
        assert len({result.request_id for result in together}) == len(requests)
        assert predictor.flush(10)
    rows = ExposureLog(site[1] / "exposures").read().to_pylist()
    assert [row["batch_index"] for row in rows] == list(range(7)) and {row["batch_requests"] for row in rows} == {7}
    assert len({row["batch_id"] for row in rows}) == 1
    assert {row["batch_candidates"] for row in rows} == {sum(len(row["candidates"]) for row in rows)}
    exact(site)
    assert replay(*site, limit=3).incomplete_batches == 3  # and within the tolerance
    assert replay(*site, limit=3).exact


def test_one_bad_request_does_not_spoil_the_others(site):
    with load(site) as predictor:
        good, bad, other = predictor.rank_together(
            [RankRequest(1, [1, 2]), RankRequest(1, [1, 1]), RankRequest(2, [5], as_of=7)])
        assert len(good.results) == 2 and len(other.results) == 1 and other.pointer.as_of == 7
        assert isinstance(bad, InvalidRequest) and bad.field == "candidates.1"
        assert all(isinstance(answer, InvalidRequest) for answer in predictor.rank_together([RankRequest(1, [])]))
        assert predictor.rank_together([]) == []
    assert exact(site).requests == 2


# Broadcast


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_gives_the_same_scores_and_its_own_replay(site, kind, monkeypatch):
    monkeypatch.setattr("semel.serving.broadcast.EVENTS", 100)  # several parts
    with load(site, kind, share=False) as predictor, load_other(site) as sharing:
        for user in (*range(5), 900):
            result = predictor.rank(user, list(range(30)), {"hour": 3})
            expected = dict(sharing.rank(user, list(range(30)), {"hour": 3}, as_of=result.pointer.as_of).results)
            for item, score in result.results:
                assert score == pytest.approx(expected[item], abs=1e-5)
        assert predictor.states.limit == 0
        predictor.warm_up()
    paths = ExposureLog(site[1] / "exposures").read()["path"].to_pylist()
    assert all(path.startswith("broadcast threads=") for path in paths)
    exact(site)


def test_broadcast_parts_hold_every_candidate_as_a_request(site, monkeypatch):
    monkeypatch.setattr("semel.serving.broadcast.EVENTS", 100)
    seen = []
    with load(site) as predictor:
        model = predictor.artifact.model
        requests = [RankRequest(int(user), list(range(9)), {"hour": 3}) for user in predictor.store.keys()[:3]]
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        predictor.share, predictor.states.limit = False, 0
        answers = predictor.rank_together(requests)
    assert len(seen) > 1 and sum(part.requests for part in seen) == 27
    assert all(part.candidate_offsets.tolist() == list(range(part.requests + 1)) for part in seen)
    lengths = np.concatenate([part.request["history"].lengths.numpy() for part in seen])
    assert len(set(lengths[:9])) == 1 and lengths.max() > 0
    assert torch.cat([part.candidate["item_id"] for part in seen]).tolist() == list(range(9)) * 3
    assert len(answers) == 3

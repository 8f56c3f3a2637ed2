"""Promise 7: every candidate gets a score, whatever is missing from the catalogue, the vocabulary or the store."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving.stand_ins import make_store, save_tiny_model

from semel.serving import Predictor

INT64 = st.integers(-(2**63), 2**63 - 1)
ITEMS = st.one_of(st.integers(-2, 45), INT64)
TEXT = st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable())
TEXT_ITEMS = st.one_of(st.integers(0, 45).map(lambda number: f"iü{number}"), TEXT)
CONTEXT = st.fixed_dictionaries({}, optional={
    "hour": st.one_of(st.none(), st.floats(-1e30, 1e30), INT64), "other": st.one_of(st.none(), st.text(max_size=3)),
    "surface": st.one_of(st.none(), st.text(max_size=5).filter(lambda text: text.isprintable()), st.booleans(),
                         st.integers(-(2**62), 2**62))})


@pytest.fixture(scope="module", params=[False, True], ids=["integers", "strings"])
def predictor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for store in make_store(folder / "store", strings=request.param):
        store.close()
    save_tiny_model(folder / "run", strings=request.param)
    with Predictor.load(folder / "run", folder / "store") as made:
        made.strings = request.param
        yield made


def covers(result, candidates):
    assert sorted(item for item, _ in result.results) == sorted(candidates)
    assert all(math.isfinite(score) for _, score in result.results)
    scores = [score for _, score in result.results]
    assert scores == sorted(scores, reverse=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_coverage_is_complete(predictor, data):
    users = st.one_of(st.integers(0, 25).map(lambda number: f"uü{number}"), TEXT) if predictor.strings \
        else st.one_of(st.integers(-1, 25), INT64)
    items = TEXT_ITEMS if predictor.strings else ITEMS
    user = data.draw(users)
    candidates = data.draw(st.lists(items, min_size=1, max_size=30, unique=True))
    as_of = data.draw(st.one_of(st.none(), st.integers(0, 10**15)))
    covers(predictor.rank(user, candidates, data.draw(CONTEXT), as_of=as_of), candidates)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_all_of_the_catalogue_is_retrieved_for_anybody(predictor, data):
    user = data.draw(TEXT if predictor.strings else INT64)
    everything = predictor.catalogue.keys().tolist()
    context = data.draw(CONTEXT)
    found = predictor.retrieve(user, len(everything) + 5, context)
    covers(found, everything)
    assert found.counts == {"in": len(everything), "scored": len(everything), "out": len(everything)}
    covers(predictor.recommend(user, len(everything), context), everything)


def test_the_most_candidates_and_a_user_without_events(predictor):
    name = (lambda number: f"iü{number}") if predictor.strings else (lambda number: number)
    candidates = [name(number) for number in range(predictor.max_candidates)]
    covers(predictor.rank("nobody" if predictor.strings else -7, candidates), candidates)


def test_every_one_is_in_the_exposure(predictor):
    name = (lambda number: f"iü{number}") if predictor.strings else (lambda number: number)
    candidates = [name(number) for number in range(30, 60)]
    result = predictor.rank("uü3" if predictor.strings else 3, candidates, limit=1)
    assert predictor.flush(30)
    row = next(row for row in predictor._log.read().to_pylist() if row["request_id"] == result.request_id)
    assert row["candidates"] == candidates and row["scored"] == [True] * 30
    assert all(math.isfinite(score) for score in row["scores"])

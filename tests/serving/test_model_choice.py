"""Which model serves: changed under load without a lost request, taken back, kept through restarts, replayed."""

import json
import threading
import time

import pytest

from semel import Client
from semel.examples import ExposureLog
from semel.models import current_version, model_versions, restore_version
from semel.serving import InvalidRequest, Predictor, ServerError, replay
from semel.serving.model_choice import ModelChoice
from serving.live import serving
from serving.stand_ins import make_store, save_next_item, save_tiny_model

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def site(tmp_path):
    """(runs, store, versions): run "one" with two versions, run "two" of another kind, a retrieval run."""
    for handle in make_store(tmp_path / "store"):
        handle.close()
    runs = tmp_path / "runs"
    versions = [save_tiny_model(runs / "one", seed=seed) for seed in (0, 1)]
    versions.append(save_tiny_model(runs / "two", seed=2, kind="dcnv2"))
    save_next_item(runs / "next")
    return runs, tmp_path / "store", versions


@pytest.fixture
def choosing(site):
    runs, store, _ = site
    with Predictor.load(runs / "one", store, retrieve=runs / "next") as predictor:
        choice = ModelChoice(predictor, interval=0.05)
        yield predictor, choice
        choice.close()


def test_what_serves_and_what_could(site, choosing):
    runs, _, (first, second, other) = site
    _, choice = choosing
    found = choice.models()
    assert set(found.stages) == {"rank", "retrieve"}
    assert found.stages["rank"].current.version == second and found.stages["rank"].current.run == "one"
    assert abs(found.stages["rank"].current.since - time.time_ns() // 1000) < 60_000_000
    assert not found.stages["rank"].pinned and found.stages["rank"].before == []
    assert {(one.version, one.run, one.kind) for one in found.available} == {
        (first, "one", "sequence_ranker"), (second, "one", "sequence_ranker"), (other, "two", "dcnv2"),
        (current_version(runs / "next"), "next", "next_item")}
    (runs / "broken").mkdir()
    (runs / "broken" / "model.json").write_text("{")
    assert choice.models().available == found.available


def test_forth_and_back_and_further_back(site, choosing):
    runs, store, (_, second, other) = site
    predictor, choice = choosing
    assert choice.serve("rank", other).stages["rank"].pinned
    assert predictor.model_version == other == predictor.rank(3, [1, 2]).model_version
    third = save_tiny_model(runs / "one", seed=5)  # training goes on: a pinned model stays
    predictor.versions.poll()
    assert predictor.model_version == other
    assert choice.serve("rank", "latest").stages["rank"].current.version == third
    found = choice.serve("rank", "previous").stages["rank"]
    assert (found.current.version, [one.version for one in found.before], found.pinned) == (other, [second], True)
    found = choice.serve("rank", "previous").stages["rank"]
    assert (found.current.version, found.before) == (second, [])
    with pytest.raises(InvalidRequest, match="nothing has served rank before"):
        choice.serve("rank", "previous")
    assert choice.serve("rank", run="two").stages["rank"].current.run == "two"
    newer = save_tiny_model(runs / "two", seed=6, kind="dcnv2")  # another run is followed like the first
    predictor.versions.poll()
    assert predictor.rank(3, [1, 2]).model_version == newer
    assert predictor.flush(10) and replay(runs / "two", store).exact


def test_a_new_retrieval_model_has_scored_the_catalogue_before_its_first_request(site, choosing):
    runs, *_ = site
    predictor, choice = choosing
    before = predictor.retrieve(3, 5)
    new = save_next_item(runs / "next", seed=9)
    choice.serve("retrieve", "latest")
    assert new in predictor.retrieval._scans  # made ready by the swap, not by the request
    after = predictor.retrieve(3, 5, as_of=before.pointer.as_of)
    assert after.model_version == new and after.results != before.results
    choice.serve("retrieve", "previous")
    again = predictor.retrieve(3, 5, as_of=before.pointer.as_of)
    assert again.results == before.results and again.model_version == before.model_version


@pytest.mark.parametrize(("said", "field"), [
    ({"stage": "prerank", "version": "latest"}, "stage"), ({"stage": "nothing", "version": "latest"}, "stage"),
    ({"stage": "rank"}, "version"), ({"stage": "rank", "version": "x", "run": "two"}, "version"),
    ({"stage": "rank", "version": "tiny-000000000000"}, "version"), ({"stage": "rank", "run": "none"}, "run"),
    ({"stage": "rank", "run": "../runs/two"}, "run"), ({"stage": "rank", "run": "/etc"}, "run"),
    ({"stage": "rank", "version": "../../two/model"}, "version"), ({"stage": "rank", "run": "next"}, "run"),
])
def test_what_cannot_be_served_is_refused_and_changes_nothing(site, choosing, said, field):
    runs, store, versions = site
    if said.get("run") == "next":  # a model of other tasks
        save_other_tasks(runs / "next")
    predictor, choice = choosing
    with pytest.raises(InvalidRequest) as caught:
        choice.serve(**said)
    assert caught.value.field == field
    assert predictor.model_version == versions[1] and not predictor.versions.paused
    assert not (store / "models.json").exists()


def save_other_tasks(run):
    import dataclasses

    from semel.features import Task
    from semel.models import load_model, save_model

    artifact = load_model(run)
    save_model(run, artifact.model, artifact.config, dataclasses.replace(artifact.features, tasks=(Task("buy"),)))


def test_two_processes_over_one_store_follow_one_choice(site):
    runs, store, (first, second, other) = site
    with Predictor.load(runs / "one", store) as here, Predictor.load(runs / "one", store) as there:
        one, two = ModelChoice(here, interval=0.05), ModelChoice(there, interval=0.05)
        try:
            for version in (first, other):
                one.serve("rank", version)
                wait_for(lambda version=version: there.model_version == version)
                assert there.versions.paused
            two.serve("rank", run="two")
            wait_for(lambda: here.versions.run.name == "two" and not here.versions.paused)
        finally:
            one.close()
            two.close()
    with Predictor.load(runs / "one", store) as later:  # started again as before: what was chosen counts
        ModelChoice(later).close()
        assert later.model_version == other
    with Predictor.load(runs / "two", store) as later:  # started with another run: that one counts
        ModelChoice(later).close()
        assert later.model_version == other and later.versions.run == runs / "two"
    (store / "models.json").write_text(json.dumps({"format_version": 99, "stages": {}}))
    with Predictor.load(runs / "one", store) as later:
        ModelChoice(later).close()
        assert later.model_version == second


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_run_is_taken_back_by_itself(site):
    runs, _, (first, second, _) = site
    assert restore_version(runs / "one") == first == current_version(runs / "one")
    with pytest.raises(FileNotFoundError, match="keeps no version before"):
        restore_version(runs / "one")
    assert restore_version(runs / "one", second) == second
    with pytest.raises(FileNotFoundError, match="does not keep model"):
        restore_version(runs / "one", "nothing")
    third = save_tiny_model(runs / "one", seed=4)
    assert current_version(runs / "one") == third
    assert [one.version for one in model_versions(runs / "one")] == [first, second, third]


def test_no_request_fails_while_weights_and_runs_change_under_load(site, tmp_path):
    """Over HTTP: six threads ask all endpoints without pause while versions, runs and a rollback are swapped in."""
    runs, store, (first, second, _) = site
    answered, failed, done = [], [], threading.Event()
    asks = [lambda client: client.rank(3, list(range(30))), lambda client: client.recommend(4, 5),
            lambda client: client.retrieve(5, 5), lambda client: client.prerank(6, list(range(60)), limit=5)]

    def hammer(number, url):
        with Client(url, retries=0, timeout=60) as client:
            while not done.is_set():
                try:
                    answered.append(asks[number % 4](client))
                except Exception as error:  # whatever it is, it is a failed request
                    failed.append(error)
                    return
                number += 1

    with serving(runs / "one", store, tmp_path / "errors", retrieve=str(runs / "next")) as server, \
            Client(server.url, timeout=60) as client:
        threads = [threading.Thread(target=hammer, args=(number, server.url)) for number in range(6)]
        for thread in threads:
            thread.start()
        try:
            for change in ({"version": first}, {"run": "two"}, {"version": "previous"}, {"version": "latest"},
                           {"version": "latest", "stage": "retrieve"}, {"version": second}):
                before = len(answered)
                client.serve(**change)
                save_tiny_model(runs / "two", seed=len(answered), kind="dcnv2")
                wait_for(lambda before=before: len(answered) > before + 6 or failed)
        finally:
            done.set()
            for thread in threads:
                thread.join(60)
        assert failed == []
        with pytest.raises(ServerError, match="no run here keeps") as caught:
            client.serve("nothing")
        assert caught.value.status == 422
        assert client.models().stages["rank"].current.version == second == client.health()["model_version"]
        assert server.stop() == 0
    assert (tmp_path / "errors").read_text() == ""
    assert {first, second, current_version(runs / "next")} <= {result.model_version for result in answered}
    assert {one.version for one in model_versions(runs / "two")} & {result.model_version for result in answered}
    log = ExposureLog(store / "exposures").read()
    assert {result.request_id for result in answered} <= set(log["request_id"].to_pylist())
    for run in ("one", "two", "next"):  # whatever served a request, its replay is exact
        assert replay(runs / run, store).exact

"""New weights under a running predictor: each request by one version, none lost, all of them replayed."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from semel.examples import ExposureLog
from semel.features import FeatureSpec, Task
from semel.models import load_model
from semel.serving import Predictor, VersionWatch, replay
from serving.stand_ins import SPEC, make_store, save_tiny_model, stand_in

CANDIDATES = list(range(20))


@pytest.fixture
def site(tmp_path):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "run", seed=0)
    return tmp_path / "run", tmp_path / "store"


def eventually(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_weights_that_training_saves_are_swapped_in_and_all_is_replayed(site):
    run, store = site
    with Predictor.load(run, store) as predictor:
        first = predictor.model_version
        before = predictor.rank(3, CANDIDATES, as_of=10**15)
        second = save_tiny_model(run, seed=1)
        eventually(lambda: predictor.model_version == second)
        after = predictor.rank(3, CANDIDATES, as_of=10**15)
        assert (before.model_version, after.model_version) == (first, second)
        assert dict(before.results) != dict(after.results)
    report = replay(run, store)
    assert report.exact and report.bit_equal == 2 and report.by_version == {first: 1, second: 1}


def test_a_swap_amid_requests_loses_none_and_mixes_nothing(site):
    run, store = site
    artifacts = [load_model(run)]
    save_tiny_model(run, seed=1)
    artifacts.append(load_model(run))
    with Predictor.load(run, store, log_exposures=False) as predictor:
        predictor.versions.close()
        expected = {}
        for artifact in artifacts:
            predictor.swap(artifact)
            expected[artifact.version] = [dict(predictor.rank(user, CANDIDATES, as_of=10**15).results)
                                          for user in range(5)]
        assert expected[artifacts[0].version] != expected[artifacts[1].version]
        seen, failed, done = set(), [], threading.Event()

        def ask(user):
            while not done.is_set():
                try:
                    result = predictor.rank(user, CANDIDATES, as_of=10**15)
                    seen.add(result.model_version)
                    assert dict(result.results) == expected[result.model_version][user]
                except Exception as error:
                    failed.append(error)
                    return

        threads = [threading.Thread(target=ask, args=(user,)) for user in range(3)]
        for thread in threads:
            thread.start()
        for number in range(20):
            predictor.swap(artifacts[number % 2])
        done.set()
        for thread in threads:
            thread.join(30)
    assert not failed and seen == {artifact.version for artifact in artifacts}


def test_what_cannot_be_served_is_left_and_the_version_before_goes_on(site):
    run, store = site
    with Predictor.load(run, store, log_exposures=False) as predictor:
        good = predictor.model_version
        other = FeatureSpec(SPEC.history, SPEC.request, SPEC.candidate, (Task("click"),), SPEC.history_last)
        with pytest.raises(ValueError, match="has other tasks"):
            predictor.swap(stand_in(lambda batch: None, spec=other, version="other"))
        lacking = FeatureSpec(tasks=SPEC.tasks, candidate=(*SPEC.candidate, SPEC.request[1]))
        with pytest.raises(ValueError, match="'surface', which the catalogue"):
            predictor.swap(stand_in(lambda batch: None, spec=lacking, version="lacking"))
        save_tiny_model(run, seed=1)
        described = json.loads((run / "model.json").read_text())
        predictor.versions.paused = True
        weights = run / described["weights"]
        whole = weights.read_bytes()
        weights.write_bytes(whole[:100])
        (run / "model.json").touch()
        predictor.swap(load_model(run, good))
        predictor.versions.paused = False
        eventually(lambda: predictor.versions.error is not None)
        assert "does not fit" in str(predictor.versions.error)
        assert predictor.model_version == good and predictor.rank(1, CANDIDATES).model_version == good
        weights.write_bytes(whole)
        assert predictor.versions.poll() and predictor.model_version == described["version"]


def test_a_pinned_version_stays_until_it_is_released(site):
    run, store = site
    with Predictor.load(run, store, log_exposures=False) as predictor:
        first = predictor.model_version
        second = save_tiny_model(run, seed=1)
        predictor.versions.poll()
        assert predictor.model_version == second
        predictor.versions.paused = True
        predictor.swap(load_model(run, first))  # a rollback
        save_tiny_model(run, seed=2)
        assert not predictor.versions.poll() and predictor.model_version == first
        predictor.versions.paused = False
        eventually(lambda: predictor.model_version != first)
        assert predictor.model_version == load_model(run).version


def test_requests_of_versions_that_are_gone_are_counted(site):
    run, store = site
    with Predictor.load(run, store) as predictor:
        predictor.rank(1, CANDIDATES)
    for seed in range(1, 7):
        save_tiny_model(run, seed=seed)
    with Predictor.load(run, store) as predictor:
        predictor.rank(1, CANDIDATES)
    assert len(ExposureLog(store / "exposures").read()) == 2
    report = replay(run, store)
    assert report.exact and (report.requests, report.other_versions) == (1, 1)


def test_bad_settings(site):
    with pytest.raises(ValueError, match="interval must be above 0"):
        VersionWatch(SimpleNamespace(model_version="x"), site[0], interval=0)

"""The predictor in process: what it returns, refuses and logs."""

import json
import math
import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from semel.examples import ExposureLog
from semel.features import Feature, FeatureSpec, Task
from semel.serving import InvalidRequest, NonFiniteScore, replay
from semel.serving.predictor import Predictor
from serving.stand_ins import SPEC, make_store, save_tiny_model, seen_items, stand_in


def event(user, item, time_us, rating=4.0):
    return pa.table({"user_id": [user], "event_time": [time_us], "item_id": [item],
                     "rating": pa.array([rating], pa.float32()), "action": ["rate"]})


def test_the_best_come_first_and_ties_keep_the_order_of_the_request(predictor):
    predictor.store.append(event(900, 7, 10))
    predictor.store.append(event(900, 7, 20))
    predictor.store.append(event(900, 9, 30))
    result = predictor.rank(900, [3, 9, 8, 7, 1])
    assert [item.item_id for item in result.results] == [7, 9, 3, 8, 1]
    assert result.results[0].score == pytest.approx(1 / (1 + math.exp(-2)))
    assert result.results[2].score == 0.5
    assert set(result.timings_ms) == {"history", "features", "model", "total"}
    assert result.pointer.user_id == 900 and result.pointer.version == predictor.store.version
    assert [item.item_id for item in predictor.rank(900, [3, 9, 8, 7, 1], limit=2).results] == [7, 9]
    assert len(predictor.rank(900, [3, 9], limit=50).results) == 2


@pytest.mark.parametrize("kind", ["rdcn", "isolated_wukong", "isolated_final_mlp", "isolated_dhen",
                                  "deep_cross_attention"])
def test_isolated_models_are_served_and_replayed_like_any_other(tmp_path, kind):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    save_tiny_model(tmp_path / "run", kind=kind)
    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a") as predictor:
        user = int(predictor.store.keys()[0])
        every = predictor.rank(user, list(range(12)), context={"surface": "home", "hour": 9.0})
        some = predictor.rank(user, [3, 5], context={"surface": "home", "hour": 9.0})
    scores = {item.item_id: item.score for item in every.results}
    assert len(set(scores.values())) > 1
    for item in some.results:
        assert item.score == pytest.approx(scores[item.item_id], abs=2e-6)
    report = replay(tmp_path / "run", tmp_path / "store")
    assert report.histories_equal == report.requests == 2 and report.max_difference == 0


def test_what_the_sigmoid_rounds_together_keeps_its_order(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    steep = stand_in(lambda batch: batch.candidate["item_id"].float() + 100)
    with store, Predictor(steep, store, catalogue) as predictor:
        result = predictor.rank(1, [1, 3, 2])
    assert [item.item_id for item in result.results] == [3, 2, 1]
    assert {item.score for item in result.results} == {1.0}


def test_unknown_users_and_items_score(predictor):
    result = predictor.rank(-(2**63), [2**63 - 1, -5, 3])
    assert len(result.results) == 3 and all(math.isfinite(item.score) for item in result.results)


def test_as_of_asks_for_the_past_and_never_for_the_future(predictor):
    predictor.store.append(event(900, 7, 1000))
    assert predictor.rank(900, [3, 7], as_of=1001).results[0].item_id == 7
    assert predictor.rank(900, [3, 7], as_of=1000).results[0].item_id == 3  # strictly before
    with pytest.raises(InvalidRequest, match=r"as_of: .* in the future"):
        predictor.rank(900, [3, 7], as_of=time.time_ns() // 1000 + 60_000_000)


@pytest.mark.parametrize(("arguments", "field"), [
    ({"user_id": "1"}, "user_id"), ({"user_id": 1.0}, "user_id"), ({"user_id": True}, "user_id"),
    ({"user_id": 2**63}, "user_id"), ({"candidates": []}, "candidates"), ({"candidates": range(31)}, "candidates"),
    ({"candidates": [1, 2, 1]}, "candidates.2"), ({"candidates": [1, "2"]}, "candidates.1"),
    ({"candidates": [1, 2.0]}, "candidates.1"), ({"candidates": [1, None]}, "candidates.1"),
    ({"candidates": [1, 2**63]}, "candidates.1"), ({"candidates": np.array([1.5])}, "candidates.0"),
    ({"limit": 0}, "limit"), ({"limit": True}, "limit"), ({"as_of": -1}, "as_of"), ({"as_of": 1.5}, "as_of"),
    ({"context": [1]}, "context"), ({"context": {1: 2}}, "context"), ({"context": {"hour": "3"}}, "context.hour"),
    ({"context": {"hour": math.nan}}, "context.hour"), ({"context": {"hour": 10**400}}, "context.hour"),
    ({"context": {"hour": 1e300}}, "context.hour"), ({"context": {"hour": True}}, "context.hour"),
    ({"context": {"surface": 1.5}}, "context.surface"), ({"context": {"surface": ["a"]}}, "context.surface"),
    ({"context": {"surface": "\ud800"}}, "context.surface"), ({"context": {"surface": 2**63}}, "context.surface"),
    ({"context": {"other": math.inf}}, "context.other"), ({"context": {"other": object()}}, "context.other"),
])
def test_what_is_wrong_is_refused_by_name_and_not_logged(predictor, arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        predictor.rank(**{"user_id": 1, "candidates": [1, 2], **arguments})
    assert caught.value.field == field
    assert predictor.flush(10) and len(predictor._log.read()) == 0


def test_numpy_ids_are_ids(predictor):
    assert predictor.rank(np.int32(1), np.array([3, 4], dtype=np.int32)).results == predictor.rank(1, [3, 4]).results


def test_string_ids(tmp_path):
    store, catalogue = make_store(tmp_path / "store", strings=True)
    spec = FeatureSpec(history=SPEC.history, tasks=SPEC.tasks)
    artifact = stand_in(lambda batch: torch.zeros(batch.candidates), spec)
    with store, Predictor(artifact, store, catalogue, exposures=ExposureLog(tmp_path / "log")) as predictor:
        result = predictor.rank("uü3", ["iü1", "日本", "\x00"])
        assert [item.item_id for item in result.results] == ["iü1", "日本", "\x00"]
        for wrong in (3, "", "a" * 1025, "\ud800", None):
            with pytest.raises(InvalidRequest, match="user_id"):
                predictor.rank(wrong, ["a"])
        predictor.flush(10)
        assert predictor._log.read()["candidates"].to_pylist() == [["iü1", "日本", "\x00"]]


def test_regressions_and_next_item_models_give_the_output_itself(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    values = stand_in(lambda batch: -batch.candidate["item_id"].float(),
                      FeatureSpec(tasks=(Task("rating", "regression"),)))
    logits = stand_in(lambda batch: -batch.candidate["item_id"].float()[:, None], FeatureSpec(), kind="next_item")
    for artifact in (values, logits):
        predictor = Predictor(artifact, store, catalogue)
        assert [tuple(item) for item in predictor.rank(1, [5, 2]).results] == [(2, -2.0), (5, -5.0)]
    store.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_nan_is_an_error_that_names_the_request_and_never_a_score(tmp_path, bad, column):
    def forward(batch):
        out = torch.zeros(batch.candidates, 2)
        out[-1, column] = bad
        return out

    store, catalogue = make_store(tmp_path / "store")
    with store, Predictor(stand_in(forward), store, catalogue, exposures=ExposureLog(tmp_path / "log")) as predictor:
        with pytest.raises(NonFiniteScore, match=r"request [0-9a-f]{32}: .* NaN or infinity"):
            predictor.rank(1, [1, 2])
        predictor.flush(10)
        assert len(ExposureLog(tmp_path / "log").read()) == 0


def test_an_exposure_says_all_that_a_replay_and_a_join_need(predictor):
    context = {"surface": "home", "hour": 7, "experiment": {"arm": [1, None]}}
    result = predictor.rank(3, [5, 6, 7, 8], context, limit=2)
    assert predictor.flush(10)
    [row] = ExposureLog(predictor.store.path / "exposures").read().to_pylist()
    assert row["request_id"] == result.request_id and row["batch_id"] == result.request_id
    assert (row["user_id"], row["as_of"], row["version"]) == result.pointer
    assert row["catalogue_version"] == predictor.catalogue.version
    assert json.loads(row["context"]) == context and row["surface"] == "home"
    assert row["candidates"] == [5, 6, 7, 8] and row["scored"] == [True] * 4 and row["shown"] is None
    best = [item.item_id for item in result.results]
    assert [item for item, sent in zip(row["candidates"], row["returned"], strict=True) if sent] == sorted(best)
    assert [row["position"][row["candidates"].index(item)] for item in best] == [0, 1]
    assert sum(place is None for place in row["position"]) == 2
    scores = dict(zip(row["candidates"], row["scores"], strict=True))
    assert all(scores[item.item_id] == item.score for item in result.results)
    assert len(row["task_scores"]) == 4 * 2 and row["task_scores"][0::2] == row["scores"]
    assert row["model_version"] == result.model_version == "stand-in-1"
    assert row["history_length"] > 0 and row["history_checksum"] > 0 and row["history_status"] == 0
    assert (row["batch_index"], row["batch_requests"], row["batch_candidates"]) == (0, 1, 4)
    assert row["device"] == "cpu" and row["path"].startswith("eager threads=")
    assert abs(row["served_at"] - time.time_ns() // 1000) < 60e6 and row["memory"] is None


def test_closing_writes_every_exposure(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    with store:
        with Predictor(stand_in(seen_items), store, catalogue, exposures=ExposureLog(tmp_path / "log")) as predictor:
            ids = [predictor.rank(1, [1, 2]).request_id for _ in range(20)]
        assert ExposureLog(tmp_path / "log").read()["request_id"].to_pylist() == ids
        predictor.close()  # again is fine


def test_a_model_of_the_wrong_shape_is_an_error(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    wrong = stand_in(lambda batch: torch.zeros(batch.candidates + 1, 2), FeatureSpec(request=(Feature("hour"),)))
    with store, Predictor(wrong, store, catalogue) as predictor, pytest.raises(ValueError, match="outputs of shape"):
        predictor.rank(1, [1, 2])


def test_loading_what_does_not_fit_says_why_and_leaves_nothing_open(tmp_path):
    from semel.history import EventSchema, HistoryStore

    save_tiny_model(tmp_path / "run")
    bare = EventSchema({"item_id": pa.int64()})
    HistoryStore.create(tmp_path / "bare", bare).close()
    with pytest.raises(ValueError, match="reads history column 'rating', which"):
        Predictor.load(tmp_path / "run", tmp_path / "bare", mode="a")
    HistoryStore.open(tmp_path / "bare", mode="a").close()
    HistoryStore.create(tmp_path / "plain", EventSchema({"item_id": pa.int64(), "rating": pa.float32()})).close()
    with pytest.raises(ValueError, match="reads item feature 'genres', which"):
        Predictor.load(tmp_path / "run", tmp_path / "plain")


def test_a_reader_sees_what_another_process_appends(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    save_tiny_model(tmp_path / "run")
    with store, catalogue, Predictor.load(tmp_path / "run", tmp_path / "store") as reader:
        before = reader.rank(900, [1, 2])
        store.append(event(900, 1, 10))
        after = reader.rank(900, [1, 2])
    assert after.pointer.version == before.pointer.version + 1
    assert before.results != after.results


def test_warming_up_leaves_no_trace(predictor):
    before = predictor.store.version, predictor.catalogue.version
    predictor.warm_up()
    assert (predictor.store.version, predictor.catalogue.version) == before
    assert predictor.pending_exposures == 0 and predictor.flush(5)
    assert not len(predictor._log.read())

"""The HTTP surface in process: the issue's bodies, every refusal, and what is logged and counted."""

import json
import re
import threading
import time

import pytest
import torch
from fastapi.testclient import TestClient

from semel.examples import ExposureLog, OutcomeLog
from semel.serving.predictor import Predictor
from semel.serving.server import create_app
from serving.stand_ins import make_store, seen_items, stand_in


def client_of(predictor, **options):
    return TestClient(create_app(predictor, **options), base_url="http://127.0.0.1:8080")


@pytest.fixture
def http(predictor):
    with client_of(predictor) as client:
        yield client


def refused(response, status, field=None):
    """The error of a refusal, after checking its form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"} and set(error) == {"field", "message"} and error["message"]
    assert error["field"] == field
    return error["message"]


def test_rank_answers_in_the_documented_form(http, predictor):
    response = http.post("/v1/rank", json={"user_id": 3, "candidates": [5, 6, 7], "context": {"hour": 7}, "limit": 2})
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"request_id", "model_version", "pointer", "results", "timings_ms", "counts"}
    assert body["counts"] == {"in": 3, "scored": 3, "out": 2}
    assert set(body["pointer"]) == {"user_id", "as_of", "version"} and body["pointer"]["user_id"] == 3
    assert [set(item) for item in body["results"]] == [{"item_id", "score"}] * 2
    assert body["results"][0]["score"] >= body["results"][1]["score"]
    assert set(body["timings_ms"]) == {"queue", "history", "features", "model", "total"}
    assert body["model_version"] == predictor.model_version


def test_an_event_is_seen_by_the_next_request(http):
    for number in range(20):
        item = 1000 + number
        written = http.post("/v1/events", json={"events": [{"user_id": 77, "item_id": item, "action": "rate"}]}).json()
        assert written == {"version": written["version"], "accepted": 1, "duplicates": 0}
        ranked = http.post("/v1/rank", json={"user_id": 77, "candidates": [1, item]}).json()
        assert ranked["pointer"]["version"] >= written["version"]
        assert ranked["results"][0]["item_id"] == item


def test_event_keys_make_events_idempotent_over_requests_and_restarts(http, predictor):
    event = {"user_id": 77, "item_id": 5, "event_time": 10, "event_key": "a"}
    first = http.post("/v1/events", json={"events": [event, event, {**event, "user_id": 78}]}).json()
    assert (first["accepted"], first["duplicates"]) == (2, 1)
    again = http.post("/v1/events", json={"events": [event, {**event, "event_key": "b"}]}).json()
    assert (again["accepted"], again["duplicates"]) == (1, 1)
    only = http.post("/v1/events", json={"events": [event]}).json()
    assert only == {"version": again["version"], "accepted": 0, "duplicates": 1}
    http.__exit__(None, None, None)
    with client_of(predictor) as restarted:
        assert restarted.post("/v1/events", json={"events": [event]}).json() == only
    assert len(predictor.store.read(predictor.store.point([77], 100), _all()).columns["item_id"]) == 2


def _all():
    from semel.history import Projection

    return Projection(("item_id",))


def test_concurrent_posts_share_appends_and_lose_nothing(http, predictor):
    before = predictor.store.version
    statuses, versions = [], []

    def post(worker):
        for number in range(10):
            response = http.post("/v1/events", json={"events": [
                {"user_id": 500 + worker, "item_id": number, "event_key": f"{worker}-{number}"}]})
            statuses.append(response.status_code)
            versions.append(response.json()["version"])

    threads = [threading.Thread(target=post, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 60
    pointers = predictor.store.point(list(range(500, 506)), predictor.clock.now())
    assert predictor.store.read(pointers, _all()).lengths.tolist() == [10] * 6
    assert before < min(versions) and max(versions) == predictor.store.version <= before + 60


def test_new_items_are_known_at_once(http):
    body = {"user_id": 1, "candidates": [8888], "context": {}}
    http.post("/v1/rank", json=body)
    item = {"item_id": 8888, "title": "新しい", "genres": "war", "year": 2024}
    written = http.post("/v1/items", json={"items": [item]})
    assert written.status_code == 200 and written.json()["accepted"] == 1
    ranked = http.post("/v1/rank", json=body).json()
    log = http.app.state.service.predictor
    log.flush(10)
    rows = ExposureLog(log.store.path / "exposures").read().to_pylist()
    assert [row["task_scores"][1] for row in rows] == [0.0, 2024.0]  # the stand-in's second task is the year
    assert rows[1]["request_id"] == ranked["request_id"]


def test_outcomes_are_logged_by_task_and_once_by_key(http, predictor):
    request_id = http.post("/v1/rank", json={"user_id": 1, "candidates": [1, 2]}).json()["request_id"]
    outcome = {"request_id": request_id, "item_id": 1, "outcome_key": "k",
               "label": {"like": 1, "rating": 4.5, "shown": 1}}
    assert http.post("/v1/outcomes", json={"outcomes": [outcome]}).json() == {"accepted": 3, "duplicates": 0}
    assert http.post("/v1/outcomes", json={"outcomes": [outcome]}).json() == {"accepted": 0, "duplicates": 3}
    rows = OutcomeLog(predictor.store.path / "outcomes").read().to_pylist()
    assert {(row["task"], row["value"]) for row in rows} == {("like", 1.0), ("rating", 4.5), ("shown", 1.0)}
    assert {row["request_id"] for row in rows} == {request_id}


@pytest.mark.parametrize(("path", "body", "field"), [
    ("rank", {"user_id": "1", "candidates": [1]}, "user_id"), ("rank", {"candidates": [1]}, "user_id"),
    ("rank", {"user_id": 1, "candidates": list(range(31))}, "candidates"),
    ("rank", {"user_id": 1, "candidates": [1, 2, 1]}, "candidates.2"),
    ("rank", {"user_id": 1, "candidates": [1, "x"]}, "candidates.1"),
    ("rank", {"user_id": 1, "candidates": [1], "context": {"hour": "noon"}}, "context.hour"),
    ("rank", {"user_id": 1, "candidates": [1], "as_of": 2**62}, "as_of"),
    ("rank", {"user_id": 1, "candidates": [1], "extra": 1}, "extra"),
    ("events", {"events": [{"user_id": 1, "item_id": 1, "color": "red"}]}, "events.0.color"),
    ("events", {"events": [{"user_id": 1, "item_id": 1, "rating": "4"}]}, "events.0.rating"),
    ("events", {"events": [{"user_id": 1, "item_id": 1, "event_time": 2**62}]}, "events.0.event_time"),
    ("events", {"events": [{"user_id": 1, "item_id": None}]}, "events.0.item_id"),
    ("items", {"items": [{"item_id": "a"}]}, "items.0.item_id"), ("items", {"items": []}, "items"),
    ("outcomes", {"outcomes": [{"request_id": "r", "item_id": 1, "label": {"liek": 1}}]}, "outcomes.0.label.liek"),
])
def test_what_is_wrong_is_422_with_its_field(http, path, body, field):
    refused(http.post(f"/v1/{path}", json=body), 422, field)


def test_nan_and_broken_json_are_422(http):
    headers = {"content-type": "application/json"}
    assert "finite" in refused(http.post("/v1/events", headers=headers,
                                         content='{"events": [{"user_id": 1, "item_id": 1, "rating": NaN}]}'),
                               422, "events.0.rating")
    context = '{"user_id": 1, "candidates": [1], "context": {"%s": NaN}}'
    refused(http.post("/v1/rank", headers=headers, content=context % "hour"), 422, "context.hour")
    refused(http.post("/v1/rank", headers=headers, content=context % "unknown"), 422, "context.unknown")
    for text in ("", "{", "nul", '{"user_id": 1e', "[" * 500, '"\\ud800"', b"\xff\xfe"):
        refused(http.post("/v1/rank", headers=headers, content=text), 422, "body")


def test_the_content_type_must_be_json(http):
    body = '{"user_id": 1, "candidates": [1]}'
    response = http.post("/v1/rank", content=body, headers={"content-type": "text/plain"})
    assert "application/json" in refused(response, 422, "content-type")
    good = http.post("/v1/rank", content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert good.status_code == 200


def test_bodies_are_limited_also_without_a_declared_length(predictor):
    with client_of(predictor, body_limit=1000) as http:
        headers = {"content-type": "application/json"}
        large = json.dumps({"user_id": 1, "candidates": [1], "context": {"x": "y" * 1000}})
        assert "1,000 bytes" in refused(http.post("/v1/rank", content=large, headers=headers), 413, "body")
        chunks = (part.encode() for part in (large[:600], large[600:]))
        refused(http.post("/v1/rank", content=chunks, headers=headers), 413, "body")
        assert http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}).status_code == 200


def test_unknown_paths_and_methods_are_errors_in_the_same_form(http):
    refused(http.get("/v1/nothing%0A2026%20ERROR%20forged"), 404, "path")
    refused(http.get("/v1/rank"), 405, "path")


def test_a_token_is_needed_where_one_is_set(predictor):
    body = {"user_id": 1, "candidates": [1]}
    with client_of(predictor, token="s3cret-token") as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret-token"},
                        {"authorization": "Bearer s3cret-token "}, {"authorization": b"Bearer \xff"}):
            response = http.post("/v1/rank", json=body, headers=headers)
            refused(response, 401, "authorization")
            assert response.headers["www-authenticate"] == "Bearer"
        refused(http.get("/metrics"), 401, "authorization")
        good = {"authorization": "Bearer s3cret-token", "host": "rank.example.org"}
        assert http.post("/v1/rank", json=body, headers=good).status_code == 200
        assert http.get("/healthz").status_code == 200 and http.get("/readyz").status_code == 200


def test_without_a_token_only_this_machine_is_answered(http):
    for host in ("evil.example.org", "evil.example.org:8080", "127.0.0.1.example.org", "[::2]:80"):
        refused(http.get("/healthz", headers={"host": host}), 403, "host")
    for host in ("localhost", "localhost:1", "127.0.0.1:8080", "[::1]:8080", "[::1]"):
        assert http.get("/healthz", headers={"host": host}).status_code == 200


def test_nan_from_the_model_is_500_with_the_request_id_and_a_clean_log_line(tmp_path, caplog):
    store, catalogue = make_store(tmp_path / "store")
    broken = stand_in(lambda batch: torch.full((batch.candidates, 1), torch.nan), version="evil\nversion")
    with store, Predictor(broken, store, catalogue) as predictor, client_of(predictor) as http:
        message = refused(http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}), 500)
        assert re.search(r"request [0-9a-f]{32}: ", message)
        assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]


def test_errors_inside_say_nothing_about_the_inside(tmp_path, caplog):
    def forward(batch):
        raise RuntimeError("secret detail")

    store, catalogue = make_store(tmp_path / "store")
    with store, Predictor(stand_in(forward), store, catalogue) as predictor, client_of(predictor) as http:
        assert "secret" not in refused(http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}), 500)
        assert "secret detail" in caplog.text


def test_overload_is_503_at_once_and_nothing_else(tmp_path):
    gate = threading.Event()

    def slow(batch):
        gate.wait(20)
        return torch.zeros(batch.candidates, 2)

    store, catalogue = make_store(tmp_path / "store")
    with store, Predictor(stand_in(slow), store, catalogue) as predictor, client_of(predictor, queue=2) as http:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(
            http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}))) for _ in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while len(answers) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [answer.status_code for answer in answers] == [503] * 5  # while the others still wait
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        refused(answers[0], 503)
        assert 'semel_refused_total{reason="overload"} 5.0' in http.get("/metrics").text
        assert "queue is full" in refused(http.get("/readyz"), 503)
        gate.set()
        for thread in threads:
            thread.join(20)
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
        assert http.get("/readyz").status_code == 200


def test_a_full_disk_is_503_for_what_must_be_written_and_scores_still_come(http, predictor, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    events = {"events": [{"user_id": 1, "item_id": 1, "event_key": "k"}]}
    with monkeypatch.context() as patch:
        patch.setattr(predictor.store, "append", full)
        response = http.post("/v1/events", json=events)
        assert "No space left" in refused(response, 503) and response.headers["retry-after"]
        assert http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}).status_code == 200
        assert "events cannot be written" in refused(http.get("/readyz"), 503)
    # The first attempt's events were logged as an intent: with space again they are appended, once.
    written = http.post("/v1/events", json=events).json()
    assert (written["accepted"], written["duplicates"]) == (0, 1)
    assert predictor.store.read(predictor.store.point([1], 2**60), _all()).columns["item_id"].tolist().count(1) >= 1
    assert http.get("/readyz").status_code == 200


def test_exposures_wait_for_the_disk_and_are_not_lost(http, predictor, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(predictor._log, "append", full)
        ranked = [http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}).json()["request_id"] for _ in range(3)]
        deadline = time.monotonic() + 20
        while predictor.exposure_failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "exposures cannot be written" in refused(http.get("/readyz"), 503)
        assert "semel_exposures_pending 3.0" in http.get("/metrics").text
    assert predictor.flush(20) and http.get("/readyz").status_code == 200
    assert ExposureLog(predictor.store.path / "exposures").read()["request_id"].to_pylist() == ranked


def test_a_reader_refuses_writes(predictor):
    from semel.history import HistoryStore

    with HistoryStore.open(predictor.store.path) as store, \
            Predictor(predictor.artifact, store, predictor.catalogue) as reader, client_of(reader) as http:
        assert "only reads" in refused(http.post("/v1/events", json={"events": []}), 422, "events")
        assert http.post("/v1/rank", json={"user_id": 1, "candidates": [1]}).status_code == 200


def test_metrics_count_what_happened(http):
    http.post("/v1/rank", json={"user_id": 1, "candidates": [1, 2]})
    http.post("/v1/rank", json={"user_id": 1})
    http.post("/v1/events", json={"events": [{"user_id": 1, "item_id": 1}]})
    text = http.get("/metrics").text
    assert 'semel_responses_total{code="200",endpoint="rank"} 1.0' in text
    assert 'semel_responses_total{code="422",endpoint="rank"} 1.0' in text
    assert 'semel_rows_total{kind="events",outcome="accepted"} 1.0' in text
    assert 'semel_rank_stage_seconds_count{stage="model"} 1.0' in text
    assert "semel_rank_candidates_sum 2.0" in text and "semel_ready 1.0" in text


def test_the_documentation_describes_this_stores_bodies(http):
    assert http.get("/docs").status_code == 200
    spec = http.get("/openapi.json").json()
    assert set(spec["paths"]) == {"/v1/retrieve", "/v1/prerank", "/v1/rank", "/v1/recommend", "/v1/events", "/v1/items",
                                  "/v1/outcomes", "/v1/models", "/healthz", "/readyz", "/metrics"}
    schemas = spec["components"]["schemas"]
    assert schemas["RankRequest"]["properties"]["user_id"]["type"] == "integer"
    assert set(schemas["Event"]["properties"]) == {"user_id", "event_time", "item_id", "rating", "action", "event_key"}
    assert schemas["Event"]["required"] == ["user_id", "item_id"]

    def references(value):
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    assert {reference.rsplit("/", 1)[1] for reference in references(spec)} <= set(schemas)


def test_shutdown_writes_what_waits(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    with store, Predictor(stand_in(seen_items), store, catalogue,
                          exposures=ExposureLog(tmp_path / "store" / "exposures")) as predictor:
        with client_of(predictor) as http:
            for _ in range(5):
                http.post("/v1/rank", json={"user_id": 1, "candidates": [1]})
        assert len(ExposureLog(tmp_path / "store" / "exposures").read()) == 5

"""The endpoints of the stages and of the models over HTTP: their forms, every refusal by name, what is counted."""

import json

import pytest
from fastapi.testclient import TestClient

from semel.serving import Predictor
from semel.serving.requests import MOST_RETRIEVED
from semel.serving.server import create_app
from serving.stand_ins import make_store, save_next_item, save_tiny_model


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for store in make_store(folder / "store"):
        store.close()
    save_tiny_model(folder / "runs" / "rank")
    save_tiny_model(folder / "runs" / "light", seed=1, kind="dcnv2")
    save_next_item(folder / "runs" / "next")
    with Predictor.load(folder / "runs" / "rank", folder / "store", mode="a", retrieve=folder / "runs" / "next",
                        prerank=folder / "runs" / "light") as predictor, \
            TestClient(create_app(predictor), base_url="http://127.0.0.1:8080") as client:
        client.predictor = predictor
        yield client


def test_answers_have_the_documented_form(http):
    retrieved = http.post("/v1/retrieve", json={"user_id": 3, "limit": 4, "context": None}).json()
    assert set(retrieved) == {"request_id", "model_version", "pointer", "results", "timings_ms", "counts"}
    assert set(retrieved["timings_ms"]) == {"queue", "history", "features", "scan", "model", "total"}
    assert retrieved["counts"] == {"in": 20, "scored": 20, "out": 4}
    items = [one["item_id"] for one in retrieved["results"]]
    preranked = http.post("/v1/prerank", json={"user_id": 3, "candidates": items, "limit": 2}).json()
    assert set(preranked["timings_ms"]) == {"queue", "history", "features", "model", "total"}
    assert preranked["counts"] == {"in": 4, "scored": 4, "out": 2}
    body = {"user_id": 3, "limit": 3, "context": {"hour": 9}, "exclude_seen": True, "blocked": [1],
            "diversity": {"column": "genres", "most": 2}, "retrieve": {"candidates": 10, "budget_ms": 1000},
            "prerank": {"candidates": 5}, "rank": {"budget_ms": 1000.5}}
    found = http.post("/v1/recommend", json=body).json()
    assert set(found) == {"request_id", "model_version", "pointer", "results", "stages", "timings_ms"}
    assert set(found["timings_ms"]) == {"queue", "retrieve", "prerank", "rank", "total"}
    assert [set(stage) for stage in found["stages"]] == [
        {"stage", "model_version", "counts", "timings_ms", "cut"}] * 3
    assert len(found["results"]) == 3 and found["model_version"] == http.predictor.model_version
    many = {"user_id": 3, "candidates": list(range(16384)), "limit": 1}
    assert http.post("/v1/prerank", json=many).status_code == 200
    everything = http.post("/v1/recommend", json={"user_id": 3, "retrieve": None, "prerank": None, "rank": None,
                                                  "diversity": None, "blocked": None, "limit": None}).json()
    assert len(everything["results"]) == 20


def test_a_new_item_is_recommended_by_the_next_request(http):
    before = http.post("/v1/retrieve", json={"user_id": 3, "limit": 100}).json()
    http.post("/v1/items", json={"items": [{"item_id": 700, "genres": "war", "year": 2024}]})
    after = http.post("/v1/recommend", json={"user_id": 3, "limit": 100}).json()
    assert {one["item_id"] for one in after["results"]} == {one["item_id"] for one in before["results"]} | {700}


WRONG = [
    ("retrieve", {"limit": 0}, "limit", "at least 1, got 0"), ("retrieve", {"limit": "5"}, "limit", "an integer"),
    ("retrieve", {"limit": MOST_RETRIEVED + 1}, "limit", "at most 65536"), ("retrieve", {"limit": 2.5}, "limit", ""),
    ("retrieve", {"budget_ms": 0}, "budget_ms", "above 0"), ("retrieve", {"budget_ms": "x"}, "budget_ms", "a number"),
    ("retrieve", {"candidates": [1]}, "candidates", "not a field here; there are user_id"),
    ("retrieve", {"user_id": "x"}, "user_id", "an integer"), ("retrieve", {"user_id": 2**70}, "user_id", ""),
    ("retrieve", {"exclude_seen": 1}, "exclude_seen", "true or false"),
    ("retrieve", {"blocked": 1}, "blocked", "a list"),
    ("retrieve", {"blocked": [1, "x"]}, "blocked.1", "an integer"),
    ("retrieve", {"blocked": [0] * 10001}, "blocked", "at most 10000"),
    ("retrieve", {"diversity": []}, "diversity", "an object"), ("retrieve", {"diversity": {}}, "diversity.column", ""),
    ("retrieve", {"diversity": {"column": "nothing"}}, "diversity.column", "it has title, genres, year"),
    ("retrieve", {"diversity": {"column": "year", "most": 0}}, "diversity.most", "at least 1"),
    ("retrieve", {"diversity": {"column": "year", "many": 1}}, "diversity.many", "column, most"),
    ("retrieve", {"as_of": 2**62}, "as_of", "in the future"),
    ("recommend", {"context": {"hour": "x"}}, "context.hour", ""),
    ("prerank", {}, "candidates", "is required"), ("prerank", {"candidates": [1, 1]}, "candidates.1", "twice"),
    ("prerank", {"candidates": list(range(16385))}, "candidates", "at most 16384"),
    ("prerank", {"candidates": [1], "budget_ms": 5}, "budget_ms", "not a field"),
    ("rank", {"candidates": [1], "diversity": {"column": "no"}}, "diversity.column", ""),
    ("rank", {"candidates": [1], "blocked": [None]}, "blocked.0", "an integer"),
    ("recommend", {"limit": -1}, "limit", "at least 1"), ("recommend", {"retrieve": 5}, "retrieve", "an object"),
    ("recommend", {"retrieve": {"candidates": 0}}, "retrieve.candidates", "at least 1"),
    ("recommend", {"retrieve": {"budget_ms": -1}}, "retrieve.budget_ms", "above 0"),
    ("recommend", {"prerank": {"limit": 5}}, "prerank.limit", "not a field"),
    ("recommend", {"rank": {"candidates": 5}}, "rank.candidates", "not a field"),
    ("recommend", {"candidates": [1]}, "candidates", "not a field"),
    ("models", {"version": 5}, "version", "a string"), ("models", {}, "version", "either a version or a run"),
    ("models", {"version": "latest", "run": "rank"}, "version", "either"), ("models", {"run": ""}, "run", "at least 1"),
    ("models", {"run": "../rank"}, "run", "there is no run"),
    ("models", {"version": "x" * 300}, "version", "at most 256"),
    ("models", {"version": "latest", "stage": "no\nsuch"}, "stage", "retrieve, prerank, rank"),
]


@pytest.mark.parametrize(("endpoint", "body", "field", "says"), WRONG)
def test_every_refusal_names_the_field(http, endpoint, body, field, says):
    asked = body if endpoint == "models" else {"user_id": 3, **body}
    response = http.post(f"/v1/{endpoint}", json=asked)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["field"] == field and says in error["message"] and "\n" not in error["message"]


def test_a_stage_that_is_not_served(tmp_path):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "rank")
    with Predictor.load(tmp_path / "rank", tmp_path / "store") as predictor, \
            TestClient(create_app(predictor), base_url="http://127.0.0.1") as client:
        response = client.post("/v1/recommend", json={"user_id": 3, "prerank": {"candidates": 5}})
        assert response.status_code == 422 and "--prerank RUN" in response.json()["error"]["message"]
        assert client.post("/v1/prerank", json={"user_id": 3, "candidates": [1, 2]}).status_code == 200
        assert list(client.get("/v1/models").json()["stages"]) == ["rank"]


def test_models_over_http_and_in_the_description(http):
    listed = http.get("/v1/models").json()
    assert set(listed["stages"]) == {"retrieve", "prerank", "rank"} and len(listed["available"]) == 3
    served = http.post("/v1/models", json={"stage": "rank", "run": "light"}).json()
    assert served["stages"]["rank"]["current"]["run"] == "light"
    answer = http.post("/v1/rank", json={"user_id": 3, "candidates": [1]}).json()
    assert answer["model_version"] == served["stages"]["rank"]["current"]["version"]
    http.post("/v1/models", json={"version": "previous"})
    assert http.get("/healthz").json()["model_version"] == listed["stages"]["rank"]["current"]["version"]
    spec = http.get("/openapi.json").json()
    for name in ("retrieve", "prerank", "rank", "recommend", "models"):
        body = spec["paths"][f"/v1/{name}"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert body.removeprefix("#/components/schemas/") in spec["components"]["schemas"]
        assert "200" in spec["paths"][f"/v1/{name}"]["post"]["responses"]
    assert "200" in spec["paths"]["/v1/models"]["get"]["responses"]
    for reference in set(json.dumps(spec).split('"#/components/schemas/')[1:]):
        assert reference.split('"')[0] in spec["components"]["schemas"]


def test_what_each_stage_took_is_a_metric(http):
    http.post("/v1/recommend", json={"user_id": 3})
    text = http.get("/metrics").text
    for stage in ("queue", "retrieve", "prerank", "rank", "total"):
        assert f'semel_endpoint_stage_seconds_count{{endpoint="recommend",stage="{stage}"}}' in text

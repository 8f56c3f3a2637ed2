"""The HTTP surface against its own description: whatever is sent, the answer is one that is described, and no 5xx but
503. Each rule of the schemas is broken once; what a generator makes of them comes on top."""

import json

import pytest
from fastapi.testclient import TestClient

from semel.examples import ExposureLog
from semel.serving.predictor import Predictor
from semel.serving.server import create_app
from serving.stand_ins import make_store, seen_items, stand_in

FILTERS = {"exclude_seen": False, "blocked": [9], "diversity": {"column": "genres", "most": 2}}
RANK = {"user_id": 1, "candidates": [4, 5], "context": {"hour": 3.0}, "limit": 1, "as_of": 10, **FILTERS}
SIZE = {"candidates": 10, "budget_ms": 1000.0}
VALID = {
    "/v1/rank": RANK,
    "/v1/prerank": RANK,
    "/v1/retrieve": {"user_id": 1, "limit": 2, "context": {"hour": 3.0}, "as_of": 10, "budget_ms": 1000.0, **FILTERS},
    "/v1/recommend": {"user_id": 1, "limit": 2, "context": {"hour": 3.0}, "as_of": 10, "retrieve": SIZE,
                      "rank": {"budget_ms": 1000.0}, **FILTERS},
    "/v1/events": {"events": [{"user_id": 1, "item_id": 4, "event_time": 5, "rating": 2.0, "action": "a",
                               "event_key": "k"}]},
    "/v1/items": {"items": [{"item_id": 4, "event_time": 5, "title": "t", "genres": "war", "year": 1999}]},
    "/v1/outcomes": {"outcomes": [{"request_id": "r", "item_id": 4, "label": {"like": 1, "rating": 2.5, "shown": 1},
                                   "outcome_key": "k"}]},
}
WRONG = {"integer": ["1", 1.5, True, [], {}], "number": ["1", True, [], {}, 10**400],
         "string": [1, 1.5, True, [], {}], "array": [1, "x", {}, None], "object": [1, "x", [], None],
         "boolean": [1, "true", None]}


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """One server for all that is refused: it must be none the worse for it."""
    path = tmp_path_factory.mktemp("fuzz") / "store"
    store, catalogue = make_store(path)
    with (store, Predictor(stand_in(seen_items), store, catalogue, exposures=ExposureLog(path / "exposures"),
                           max_candidates=30) as predictor,
          TestClient(create_app(predictor), base_url="http://127.0.0.1:8080") as client):
        yield client


def violations(schema, value, spec, path=()):
    """(path, wrong value): every rule of ``schema`` broken once, around the valid ``value``."""
    schema = resolved(schema, spec)
    kinds = schema.get("anyOf", [schema])
    nullable = any(one.get("type") == "null" for one in kinds)
    schema = resolved(next(one for one in kinds if one.get("type") != "null"), spec)
    kind = schema.get("type")
    yield from ((path, wrong) for wrong in WRONG.get(kind, []) if not (wrong is None and nullable))
    if "minimum" in schema:
        yield path, min(schema["minimum"] - 1, 2 * schema["minimum"])  # where floats are coarse, 1 is nothing
        yield path, -(2**200)
    if "maximum" in schema:
        yield path, max(schema["maximum"] + 1, 2 * schema["maximum"])
        yield path, 2**200
    if "enum" in schema:
        yield path, max(schema["enum"]) + 0.5
    if value is None and kind in ("array", "object"):  # left out of the valid body: nothing inside to break
        return
    if kind == "string":
        yield from ((path, "x" * (schema["maxLength"] + 1)) for _ in range("maxLength" in schema))
        yield from ((path, "") for _ in range(schema.get("minLength", 0) > 0))
        yield path, "\ud800"  # half a character
    if kind == "array":
        yield from ((path, []) for _ in range(schema.get("minItems", 0) > 0))
        if schema.get("maxItems", 10**9) <= 10_000:
            yield path, [value[0]] * (schema["maxItems"] + 1)
        yield from violations(schema["items"], value[0], spec, (*path, 0))
    if kind == "object":
        for name in schema.get("required", []):
            yield path, {key: one for key, one in value.items() if key != name}
        if schema.get("additionalProperties") is False:
            yield path, {**value, "no_such_field": 1}
        for name, inner in schema.get("properties", {}).items():
            yield from violations(inner, value.get(name), spec, (*path, name))


def resolved(schema, spec):
    while "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def placed(value, path, wrong):
    if not path:
        return wrong
    inner = placed(value[path[0]] if isinstance(value, list) else value.get(path[0]), path[1:], wrong)
    return {**value, path[0]: inner} if isinstance(value, dict) else [inner, *value[1:]]


@pytest.mark.parametrize("path", VALID)
def test_every_rule_of_the_schema_is_kept_and_says_which(http, path):
    spec = http.get("/openapi.json").json()
    schema = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert http.post(path, json=VALID[path]).status_code == 200
    broken = list(violations(schema, VALID[path], spec))
    assert len(broken) > 25
    for place, wrong in broken:
        content = json.dumps(placed(VALID[path], place, wrong))
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 422, (place, wrong, response.text)
        error = response.json()["error"]
        where = ".".join(map(str, place))
        assert error["field"] == "body" or error["field"].startswith(where), (place, wrong, error)
        assert len(error["message"]) < 600
    assert http.post(path, json=VALID[path]).status_code == 200


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("body", [
    b"", b"null", b"[]", b"{", b'"', b"\xff\xfe", b"{}" * 2, b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b"NaN",
    b'{"user_id":' + b"9" * 100_000 + b"}", b'{"user_id":1,"user_id":[]}', b'{"\x00":1}', b'{"a":"\\ud800"}'],
    ids=lambda body: f"{body[:8]!r}x{len(body)}")
def test_bodies_that_are_none(http, path, body):
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422 and response.json()["error"]["message"]


def test_deep_and_huge_contexts(http):
    for depth in (50, 150, 5_000):
        context = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
        response = http.post("/v1/rank", content=b'{"user_id":1,"candidates":[4],"context":' + context + b"}",
                             headers={"content-type": "application/json"})
        assert response.status_code == (200 if depth == 50 else response.status_code) != 500
        assert response.status_code in (200, 422)
    big = {str(number): "x" * 100 for number in range(5_000)}
    assert http.post("/v1/rank", json={"user_id": 1, "candidates": [4], "context": big}).status_code == 200


@pytest.mark.parametrize("user", [2**63 - 1, -(2**63), 0])
def test_the_largest_ids(http, user):
    assert http.post("/v1/rank", json={"user_id": user, "candidates": [2**63 - 1, -(2**63)]}).status_code == 200
    assert http.post("/v1/events", json={"events": [{"user_id": user, "item_id": user}]}).status_code == 200
    assert http.post("/v1/rank", json={"user_id": user + (1 if user >= 0 else -1) * 2**63 if user else 2**64,
                                       "candidates": [1]}).status_code == 422


def test_what_a_generator_makes_of_the_schema(predictor):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(predictor),
                                                  headers={"host": "127.0.0.1"})
    statuses = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = list(GenerationMode) if operation.method.upper() == "POST" else [GenerationMode.POSITIVE]
        for mode in modes:  # what takes nothing cannot be asked wrongly

            @settings(max_examples=24, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
                      suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                response = case.call(headers={**(case.headers or {}), "host": "127.0.0.1"})
                statuses.add((case.path, response.status_code))
                assert response.status_code < 500 or response.status_code == 503, response.text

            check()
    for path in VALID:
        assert {(path, 200), (path, 422)} <= statuses

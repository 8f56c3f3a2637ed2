"""OpenTelemetry: a span a request with its caller as parent, its stages as children, and no user data."""

import pytest
from fastapi.testclient import TestClient

from semel.serving.server import create_app
from semel.serving.tracing import Tracing, check_collector, stages


def test_stages_come_in_order_and_without_totals():
    timings = {"retrieve": {"scan": 2.0, "total": 3.0}, "rank": {"queue": 0.5, "model": 4}, "total": 9.0}
    assert list(stages(timings)) == [("retrieve.scan", 2.0), ("rank.queue", 0.5), ("rank.model", 4.0)]
    assert list(stages(None)) == list(stages({})) == []


def test_a_collector_must_be_a_url():
    with pytest.raises(ValueError, match="--otlp must be the URL of a collector"):
        check_collector("localhost")


@pytest.fixture
def spans(predictor):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    with TestClient(Tracing(create_app(predictor), provider), base_url="http://127.0.0.1") as http:
        yield http, exporter


def test_a_request_is_a_span_and_its_stages_are_children(spans):
    http, exporter = spans
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    answer = http.post("/v1/rank", json={"user_id": 12345678, "candidates": [87654321]},
                       headers={"traceparent": f"00-{trace}-{caller}-01"}).json()
    http.get("/healthz")
    *children, parent = sorted(exporter.get_finished_spans(), key=lambda span: span.name.startswith("POST"))
    assert parent.name == "POST /v1/rank" and parent.attributes["http.response.status_code"] == 200
    assert parent.attributes["semel.request_id"] == answer["request_id"]
    assert f"{parent.context.trace_id:032x}" == trace and f"{parent.parent.span_id:016x}" == caller
    assert [span.name for span in children] == ["queue", "history", "features", "model"]
    for span in children:
        assert span.parent.span_id == parent.context.span_id
        milliseconds = (span.end_time - span.start_time) / 1e6
        assert milliseconds == pytest.approx(answer["timings_ms"][span.name], abs=0.001)
    assert parent.start_time == children[0].start_time <= children[-1].end_time <= parent.end_time
    written = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "12345678" not in written and "87654321" not in written


def test_refusals_are_spans_too_and_paths_cannot_be_made_up(spans):
    http, exporter = spans
    assert http.post("/v1/rank", json={"user_id": "x"}).status_code == 422
    assert http.get("/secret-user-7").status_code == 404
    first, second = exporter.get_finished_spans()
    assert first.attributes["http.response.status_code"] == 422
    assert second.name == "GET other"

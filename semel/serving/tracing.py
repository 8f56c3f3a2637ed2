"""OpenTelemetry spans: one a request, and one a stage that its answer names (extra ``otel``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

SILENT = frozenset({"/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"})


def traced(app: Any, endpoint: str) -> Any:
    """``app`` with its spans sent to the OpenTelemetry collector at ``endpoint`` (OTLP over HTTP, such as
    ``http://127.0.0.1:4318``), in batches, from a thread of their own. Raises ValueError where the extra is missing."""
    check_collector(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ValueError("--otlp needs OpenTelemetry: pip install 'semel[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "semel"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))
    return Tracing(app, provider)


def check_collector(endpoint: str) -> None:
    """Raises ValueError for what is no URL."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp must be the URL of a collector (http://127.0.0.1:4318), got {endpoint!r}")


class Tracing:
    """ASGI middleware: a span for each request of the API, child of the caller's (``traceparent``), with the status,
    the request's id and the model's version; its children are the stages in ``timings_ms`` of the answer, laid end to
    end from the request's start. No ids of users or items. ``provider``: an OpenTelemetry ``TracerProvider``."""

    def __init__(self, app: Any, provider: Any):
        self._app, self._provider = app, provider
        self._tracer = provider.get_tracer("semel.serving")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            self._provider.shutdown()
            return
        if scope["type"] != "http" or scope["path"] in SILENT:
            await self._app(scope, receive, send)
            return
        started, seen = time.time_ns(), _Seen(send)
        try:
            await self._app(scope, receive, seen)
        finally:
            self._record(scope, started, seen)

    def _record(self, scope: Any, started: int, seen: _Seen) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
                   if name in (b"traceparent", b"tracestate")}
        path = scope["path"] if scope["path"].startswith("/v1/") and len(scope["path"]) < 40 else "other"
        span = self._tracer.start_span(f"{scope['method']} {path}", TraceContextTextMapPropagator().extract(carrier),
                                       SpanKind.SERVER, start_time=started)
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("http.response.status_code", seen.status)
        answer = seen.answer()
        for name in ("request_id", "model_version"):
            if isinstance(answer.get(name), str):
                span.set_attribute(f"semel.{name}", answer[name])
        at = started
        for stage, milliseconds in stages(answer.get("timings_ms")):
            child = self._tracer.start_span(stage, set_span_in_context(span), start_time=at)
            at += round(1e6 * milliseconds)
            child.end(at)
        span.end(max(at, time.time_ns()))


class _Seen:
    """What is sent, noted on its way."""

    def __init__(self, send: Any):
        self._send, self.status, self._body = send, 0, bytearray()

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self.status == 200:
            self._body += message.get("body", b"")
        await self._send(message)

    def answer(self) -> dict[str, Any]:
        from pydantic_core import from_json

        try:
            value = from_json(bytes(self._body)) if self._body else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def stages(timings: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(stage, milliseconds) in the order of the answer, without totals; stages of stages as ``rank.model``."""
    for name, value in timings.items() if isinstance(timings, Mapping) else ():
        if isinstance(value, Mapping):
            yield from stages(value, f"{prefix}{name}.")
        elif name != "total" and isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)

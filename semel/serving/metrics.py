"""Prometheus metrics of one server. ``docs/serving.md`` says what each means and which alert belongs on it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """A registry of its own for each server, so that two in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.responses = Counter("semel_responses", "Responses by endpoint and status code", ["endpoint", "code"],
                                 registry=registry)
        self.seconds = Histogram("semel_response_seconds", "From the request's body to its response, by endpoint",
                                 ["endpoint"], buckets=_SECONDS, registry=registry)
        self.stage = Histogram("semel_rank_stage_seconds", "Time of a ranked request by stage", ["stage"],
                               buckets=_SECONDS, registry=registry)
        self.stages = Histogram("semel_endpoint_stage_seconds", "Time of a request for items by endpoint and stage",
                                ["endpoint", "stage"], buckets=_SECONDS, registry=registry)
        self.candidates = Histogram("semel_rank_candidates", "Candidates of a ranked request",
                                    buckets=(1, 10, 50, 100, 250, 500, 1000, 2000, 5000), registry=registry)
        self.together = Histogram("semel_rank_together", "Requests that were scored as one batch",
                                  buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry)
        self.rows = Counter("semel_rows", "Rows that were posted, by kind and what became of them", ["kind", "outcome"],
                            registry=registry)
        self.refused = Counter("semel_refused", "Requests answered 503, by reason", ["reason"], registry=registry)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A gauge that is read when metrics are scraped."""
        Gauge(name, help, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""The loop's figures for Prometheus: one ``/metrics`` for all of its processes."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

FIGURES = {
    "requests": "Requests answered so far",
    "requests_per_s": "Requests answered a second, over ten seconds",
    "p50_ms": "Median latency of an answer, by the client", "p99_ms": "99th percentile of the same",
    "behind_s": "Seconds that requests are asked later than they were due",
    "coverage": "Share of candidates that got a score", "stale_reads": "Answers that did not see the user's own events",
    "served_ne": "NE of what was served, recent labels", "best_ne": "NE of the true probabilities, the same labels",
    "gap": "served_ne - best_ne", "prequential_ne": "NE of the trainer on rows it had not seen, since its last report",
    "skew": "NE served - NE trained, on the same labels, of all so far",
    "event_visible_p99_ms": "From posting an event to its being visible",
    "item_shown_p50_s": "From uploading an item to its first recommendation",
    "item_shown_p99_s": "99th percentile of it",
    "items_unseen": "Items that were uploaded and not shown yet", "events_waiting": "Answers whose events are not sent",
    "outcomes_waiting": "Answers whose outcomes are not sent", "windows_open": "Exposures whose window is open",
    "files_waiting": "Files of request rows that are not trained on", "rows": "Request rows joined",
    "trained_rows": "Labels trained on", "watermark_age_s": "Age of the last request that was joined",
}


class Published:
    """Gauges ``semel_loop_...``, and ``semel_loop_up``, ``_restarts``, ``_rss_bytes`` by process. OSError where the
    port is taken."""

    def __init__(self, port: int = 0) -> None:
        registry = CollectorRegistry()
        self._gauges = {name: Gauge(f"semel_loop_{name}", text, registry=registry) for name, text in FIGURES.items()}
        self._by_process = {name: Gauge(f"semel_loop_{name}", text, ["process"], registry=registry) for name, text in (
            ("up", "1 if the process runs"), ("restarts", "Times it was started again"),
            ("hangs", "Times it gave no sign of life and was killed"),
            ("rss_bytes", "Memory of its own that it holds"))}
        self._failed = Gauge("semel_loop_failed_attempts", "Attempts that failed and were repeated", ["why"],
                             registry=registry)
        self._outcomes = Gauge("semel_loop_outcomes", "Outcomes by what became of them", ["fate"], registry=registry)
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def update(self, sample: dict[str, Any]) -> None:
        for name, gauge in self._gauges.items():
            value = sample.get(name)
            gauge.set(float("nan") if value is None else float(value))
        for name, facts in sample["processes"].items():
            self._by_process["up"].labels(name).set(float(facts["up"]))
            self._by_process["restarts"].labels(name).set(facts["restarts"])
            self._by_process["hangs"].labels(name).set(facts["hangs"])
            self._by_process["rss_bytes"].labels(name).set(1e6 * (facts["rss_mb"] or 0.0))
        for why, count in sample["failed"].items():
            self._failed.labels(why).set(count)
        for fate, count in sample["outcomes"].items():
            self._outcomes.labels(fate).set(count)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

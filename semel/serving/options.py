"""The settings of a server, as its command, its processes and its children pass them on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from semel.serving.compactor import COMPACT_ROWS
from semel.serving.gate import check_binding
from semel.serving.tracing import check_collector

if TYPE_CHECKING:
    from semel.serving.predictor import Predictor


@dataclass(frozen=True)
class ServerOptions:
    """``run``, ``store``: folders. ``scorers``: requests that are scored at the same time in one process, each with
    ``threads`` torch threads. ``queue``: requests that may wait for them; ``latency_target``: seconds in which an
    answer must be likely, else the request is refused at once. ``retrieve``, ``prerank``, ``share``, ``state_bytes``,
    ``max_candidates``, ``memory``, ``faiss``: as of ``Predictor.load``; ``compact_rows``: as of ``Compactor``.
    ``body_limit``: bytes. ``log_level``: "warning", or "info" for a line a request. ``otlp``: where spans go (the URL
    of an OpenTelemetry collector), None for nowhere. JSON can carry all of it."""

    run: str
    store: str
    retrieve: str | Path | None = None
    prerank: str | Path | None = None
    token: str | None = None
    max_candidates: int = 2000
    queue: int = 64
    latency_target: float = 1.0
    scorers: int = 1
    threads: int = 1
    share: bool = True
    state_bytes: int = 256 << 20
    memory: str | None = None
    faiss: str | None = None
    body_limit: int = 1 << 20
    compact_rows: int = COMPACT_ROWS
    log_level: str = "warning"
    otlp: str | None = None

    def check(self, host: str, port: int, workers: int) -> None:
        """Raises ValueError for what no server can be started with."""
        check_binding(host, self.token)
        if not 0 <= port <= 65535:
            raise ValueError(f"--port must be between 0 and 65535, got {port}")
        for name, value in (("workers", workers), ("scorers", self.scorers), ("threads", self.threads)):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.compact_rows < 0:
            raise ValueError(f"--compact-rows must not be negative, got {self.compact_rows}; 0 never compacts")
        if self.latency_target <= 0:
            raise ValueError(f"--latency-target must be above 0, got {1e3 * self.latency_target:g} ms")
        if self.otlp is not None:
            check_collector(self.otlp)
        if self.log_level not in ("warning", "info"):
            raise ValueError(f"--log-level must be warning or info, got {self.log_level!r}")

    def predictor(self, mode: Literal["r", "a"], exposures: Any) -> Predictor:
        """Load what they describe. Raises what ``Predictor.load`` raises."""
        from semel.serving.predictor import Predictor

        return Predictor.load(self.run, self.store, retrieve=self.retrieve, prerank=self.prerank, mode=mode,
                              exposures=exposures, max_candidates=self.max_candidates, share=self.share,
                              state_bytes=self.state_bytes, memory=self.memory, faiss=self.faiss)

    def to_json(self) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

"""A worker and its siblings: one's metrics are all's, and what an erasure asks of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from semel.history.server.listening import MessageServer
from semel.serving.runtime import Runtime, ask_each


class Processes:
    """Of worker ``number`` of the server that meets in ``runtime``, which was started ``starts`` times."""

    def __init__(self, runtime: Runtime, number: int, starts: int):
        self.number, self.starts = number, starts
        self._runtime = runtime
        self._server = MessageServer(runtime.worker(number), self._answer)
        self._own: Callable[[], bytes] = bytes
        self._told: Callable[[str], bool] = bool

    def start(self, metrics: Callable[[], bytes], told: Callable[[str], bool]) -> None:
        """Answer siblings and the writer from now on: ``metrics`` gives this process's own, ``told(verb)`` does what an
        erasure asks of it."""
        self._own, self._told = metrics, told
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def metrics(self) -> bytes:
        """Those of all workers, each sample with the label ``process``: Prometheus sums, or tells them apart. A worker
        that does not answer is left out."""
        own = self._runtime.worker(self.number)
        texts = [(own.stem, self._own().decode())]
        others = [path for path in self._runtime.workers() if path != own]
        texts += [(name, answer["text"]) for name, answer in ask_each(others, {"do": "metrics"}, timeout=2.0)]
        return merged(sorted(texts))

    def _answer(self, text: dict[str, Any], _: bytearray) -> dict[str, Any]:
        if text.get("do") == "metrics":
            return {"text": self._own().decode()}
        return {"done": self._told(str(text.get("do")))}


def merged(texts: list[tuple[str, str]]) -> bytes:
    """Prometheus texts of several processes as one."""
    families: dict[str, Metric] = {}
    for process, text in texts:
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, "process": process}))

    class Collector:
        def collect(self) -> Iterator[Metric]:
            yield from families.values()

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry)

"""The client library's own broker, in this process, and JSON events for it."""

from __future__ import annotations

import json
from typing import Any

from confluent_kafka import Producer


class Broker:
    """A cluster of one broker that lives as long as this object. Topics have four partitions and are made by the first
    message to them; a partition keeps its last 5 MB."""

    def __init__(self) -> None:
        self._producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        found = self._producer.list_topics(timeout=10)
        self.address = ",".join(f"{broker.host}:{broker.port}" for broker in found.brokers.values())
        self.cluster = found.cluster_id

    def url(self, topic: str) -> str:
        return f"kafka://{self.address}/{topic}"

    def make(self, topic: str) -> None:
        """An empty topic."""
        self._producer.list_topics(topic, timeout=10)

    def send(self, topic: str, *values: Any, partition: int | None = None) -> None:
        """Each value a message, as JSON where it is not bytes (or None) yet; in turn to partitions 0, 1, 2."""
        for i, value in enumerate(values):
            data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            self._producer.produce(topic, data, partition=i % 3 if partition is None else partition)
            self._producer.poll(0)
        assert self._producer.flush(20) == 0


def event(user: int, item: int, time: int, **others: Any) -> dict[str, Any]:
    return {"user_id": user, "item_id": item, "event_time": time, **others}

"""A Kafka topic, read by one process from the offsets that it is given: all partitions, in the order of each.

Partitions are assigned, not subscribed: no group shares them out, so nothing is taken away in the middle. Offsets that
Kafka keeps play no part; with ``group`` they are committed too, for monitors of lag.
"""

from __future__ import annotations

import difflib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SCHEME = "kafka://"
REFRESH_SECONDS = 30.0  # how often a look is taken for partitions that were added, and an outage spoken of
_POLL_SECONDS = 0.2
_MOST = 100_000  # messages of one poll; the client takes no more than a million
_ANEW = "it was made anew; ingest a topic of another name, or into another store"
_OURS = ("bootstrap.servers", "group.id", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset",
         "enable.partition.eof")

log = logging.getLogger("semel.datasets")


class Message(NamedTuple):
    partition: int
    offset: int
    value: bytes | None


def split_url(url: str) -> tuple[str, str]:
    """``kafka://broker[:port][,broker]/topic`` -> (brokers, topic). ValueError for another form."""
    brokers, slash, topic = url.removeprefix(SCHEME).partition("/")
    if not url.startswith(SCHEME) or not slash or not all(broker.strip() for broker in brokers.split(",")):
        raise ValueError(f"{url!r}: say {SCHEME}broker[:port][,broker]/topic")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic):
        raise ValueError(f"{url!r}: {topic!r} cannot be the name of a topic")
    return brokers, topic


class KafkaTopic:
    """``config``: further settings of the client (librdkafka's names), such as ``security.protocol``. ``next``: offset
    of the next message by partition, once started. Raises ValueError for a URL, a setting or a topic that is not there
    (or not for us), ConnectionError where no broker answers within ``timeout`` seconds."""

    def __init__(self, url: str, config: Mapping[str, str] | None = None, group: str | None = None,
                 timeout: float = 5.0) -> None:
        self.brokers, self.topic = split_url(url)
        self._kafka, self._group, self._timeout = _client(), group, timeout
        self.next: dict[int, int] = {}
        self.lost = 0
        self._skip_lost, self._started, self._looked = False, False, time.monotonic()
        self._trouble = ""  # what the client said last about its connections, and when that was logged last
        self._logged: float | None = None
        self._committed = False
        for name in config or {}:
            if name in _OURS:
                raise ValueError(f"{name} is not for the client's settings: the store decides on it")
        settings: dict[str, Any] = {
            "client.id": "semel", "log_level": 0, "allow.auto.create.topics": False, **(config or {}),
            "bootstrap.servers": self.brokers, "group.id": group or "semel", "enable.auto.commit": False,
            "enable.auto.offset.store": False, "auto.offset.reset": "error", "enable.partition.eof": True,
            "error_cb": self._on_trouble, "on_commit": self._on_commit}
        try:
            self._consumer = self._kafka.Consumer(settings)
        except self._kafka.KafkaException as error:
            raise ValueError(f"the Kafka client refuses its settings: {_text(error)}") from None
        try:
            self.cluster, self._partitions = self._look()
        except BaseException:
            self._consumer.close()
            raise

    @property
    def source(self) -> str:
        """What the store calls it: brokers come and go, the cluster's id stays."""
        return f"kafka:{self.cluster}/{self.topic}"

    def start(self, offsets: Mapping[int, int], skip_lost: bool = False) -> dict[int, int]:
        """Read on from ``offsets``, other partitions from their beginning; the offset behind the last message of each,
        now. Raises ValueError where the messages that come next are gone from the broker (unless ``skip_lost``: then
        ``lost`` counts their offsets), or never were there."""
        self._skip_lost = skip_lost
        gone = sorted(set(offsets) - set(self._partitions))
        if gone:
            raise ValueError(f"{self.topic} has no partition {gone[0]}, and the store has messages of it: {_ANEW}")
        ends = {}
        for partition in self._partitions:
            self.next[partition], ends[partition] = self._from(partition, offsets.get(partition))
        self._assign()
        self._started = True
        return ends

    def reached(self, ends: Mapping[int, int]) -> bool:
        return all(self.next[partition] >= end for partition, end in ends.items())

    def take(self, most: int, linger: float, done: Callable[[], bool]) -> list[Message]:
        """Up to ``most`` messages: what has come ``linger`` seconds after the first, or when ``done()``. Empty only
        then. ``next`` is behind them."""
        out: list[Message] = []
        until: float | None = None
        while len(out) < most and not done():
            wait = _POLL_SECONDS if until is None else min(_POLL_SECONDS, until - time.monotonic())
            if wait <= 0:
                break
            if not out and time.monotonic() - self._looked > REFRESH_SECONDS:
                self._add_partitions()
            for message in self._consumer.consume(min(most - len(out), _MOST), wait):
                error = message.error()
                if error is not None:
                    self._on_error(message.partition(), message.offset(), error)
                elif message.offset() >= self.next[message.partition()]:
                    if self._logged is not None:
                        self._logged = None
                        log.warning("Kafka at %s answers again", self.brokers)
                    out.append(Message(message.partition(), message.offset(), message.value()))
                    self.next[message.partition()] = message.offset() + 1
            if out and until is None:
                until = time.monotonic() + linger
        return out

    def commit(self) -> None:
        """Tell Kafka how far we are, for those who watch the group's lag; a refusal does not matter."""
        if self._group is None or not self.next:
            return
        self._committed = False
        self._consumer.commit(offsets=[self._kafka.TopicPartition(self.topic, *item) for item in self.next.items()],
                              asynchronous=True)

    def finish(self) -> None:
        """After the last append: commit, and wait a moment for Kafka to have it."""
        if self._logged is not None:
            return  # Kafka is away
        self.commit()
        deadline = time.monotonic() + self._timeout
        while self._group is not None and not self._committed and time.monotonic() < deadline:
            self._consumer.poll(_POLL_SECONDS)  # what it returns is read again by the next run

    def close(self) -> None:
        """Without waiting for brokers that are away: the client would for a commit that is under way, for minutes."""
        closing = threading.Thread(target=self._consumer.close, name="kafka-close", daemon=True)
        closing.start()
        closing.join(self._timeout)

    # -- the client -------------------------------------------------------------------------------------------------

    def _look(self) -> tuple[str, list[int]]:
        """(the cluster's id, the topic's partitions)."""
        try:
            found = self._consumer.list_topics(self.topic, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise self._unreachable(error) from None
        topic = found.topics[self.topic]
        if topic.error is not None:
            if topic.error.code() != self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise ValueError(f"{self.topic} at {self.brokers}: {topic.error.str()}")
            names = self._consumer.list_topics(timeout=self._timeout).topics
            known = sorted(name for name in names if not name.startswith("__"))
            near = difflib.get_close_matches(self.topic, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known[:10]) or 'none'}"
            raise ValueError(f"there is no topic {self.topic!r} at {self.brokers}; {hint}")
        return str(found.cluster_id or self.brokers), sorted(topic.partitions)

    def _add_partitions(self) -> None:
        self._looked = time.monotonic()
        try:
            new = [partition for partition in self._look()[1] if partition not in self.next]
        except (ConnectionError, ValueError) as error:  # it will come back; if not, the messages say so
            log.warning("%s", error)
            return
        if new:
            self.next.update((partition, self._from(partition, None)[0]) for partition in new)
            self._assign()

    def _assign(self) -> None:
        self._consumer.assign([self._kafka.TopicPartition(self.topic, *item) for item in self.next.items()])

    def _from(self, partition: int, offset: int | None) -> tuple[int, int]:
        """(where to read on, where the partition ends)."""
        try:
            low, high = self._consumer.get_watermark_offsets(self._kafka.TopicPartition(self.topic, partition),
                                                             timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise self._unreachable(error, partition) from None
        if offset is None:
            return low, high
        if offset > high:
            raise ValueError(f"{self.topic}, partition {partition}, ends at offset {high}, and the store has its "
                             f"messages up to {offset}: {_ANEW}")
        if offset < low:
            if not self._skip_lost:
                raise ValueError(f"{self.topic}, partition {partition}: the broker has messages from offset {low} on; "
                                 f"those from {offset} on were removed before they were ingested; to go on without "
                                 "them: --skip-lost")
            self.lost += low - offset
        return max(offset, low), high

    def _on_error(self, partition: int, offset: int, error: Any) -> None:
        codes = self._kafka.KafkaError
        if error.code() == codes._PARTITION_EOF:  # also behind what is no message, such as the marks of transactions
            self.next[partition] = max(self.next[partition], offset)
        elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
            self.next[partition], _ = self._from(partition, self.next[partition])
            self._assign()
        elif error.fatal() or not (error.retriable() or error.code() in (codes._TRANSPORT, codes._ALL_BROKERS_DOWN,
                                                                         codes._TIMED_OUT, codes._RESOLVE)):
            raise ValueError(f"{self.topic}, partition {partition}: {error.str()}")

    def _on_trouble(self, error: Any) -> None:
        self._trouble = error.str()
        now = time.monotonic()
        if self._started and (self._logged is None or now - self._logged > REFRESH_SECONDS):
            self._logged = now  # the client tries again until it is told to stop, many times a second
            log.warning("Kafka at %s: %s", self.brokers, self._trouble)

    def _on_commit(self, error: Any, _: Any) -> None:
        self._committed = True
        if error is not None and self._logged is None:
            log.warning("offsets of %s were not committed to Kafka: %s", self.topic, error.str())

    def _unreachable(self, error: Exception, partition: int | None = None) -> OSError:
        self._consumer.poll(0)  # hands over what the client has to say
        where = "" if partition is None else f" for partition {partition} of {self.topic}"
        why = self._trouble or _text(error)
        return ConnectionError(f"no answer from Kafka at {self.brokers}{where} within {self._timeout:g} s ({why})")


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise ValueError(f"to read from Kafka, install the extra: pip install 'semel[kafka]' ({error})") from None
    return confluent_kafka


def _text(error: Exception) -> str:
    inner = error.args[0] if error.args else error
    return str(inner.str() if hasattr(inner, "str") else inner)

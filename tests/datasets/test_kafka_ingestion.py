"""A Kafka topic into a store: nothing lost, nothing twice, whatever stops it; and what a message cannot be."""

import logging
import random
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.datasets import EventColumns, ingest_files, ingest_kafka, kafka_ingestion
from semel.history import EventSchema, HistoryStore, PositionMoved, Projection, StoreLocked

pytest.importorskip("confluent_kafka", reason="needs the client of the extra semel[kafka]")

import kafka_broker
from kafka_broker import Broker, event

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def broker():
    return Broker()


@pytest.fixture
def topic(request):
    """A name of its own for each test."""
    return f"t-{abs(hash(request.node.nodeid)):x}"


def take(broker, topic, store, **options):
    return ingest_kafka(broker.url(topic), store, until_end=True, **{"linger": 0.05, **options})


def items(store, *users, columns=("item_id",)):
    """{user: items in order}."""
    with HistoryStore.open(store) as handle:
        users = users or handle.keys()
        table = handle.read(handle.point(users, 10**15), Projection(columns))
    return {user: list(zip(*(table.row(i)[name].tolist() for name in columns), strict=True)) if len(columns) > 1
            else table.row(i)[columns[0]].tolist() for i, user in enumerate(users)}


# Round trips


def test_a_topic_becomes_a_store_and_goes_on_where_it_was(broker, topic, tmp_path):
    store = tmp_path / "store"
    broker.send(topic, *(event(i % 4, i, 10 + i, price=i / 2, action="click", note=None) for i in range(100)))
    report = take(broker, topic, store, batch=30)
    assert (report.messages, report.events, report.bad, report.lost) == (100, 100, 0, 0)
    assert report.positions == {0: 34, 1: 33, 2: 33, 3: 0}
    assert items(store) == {user: list(range(user, 100, 4)) for user in range(4)}
    with HistoryStore.open(store) as handle:
        assert handle.schema == EventSchema(
            {"item_id": pa.int64(), "price": pa.float64(), "action": pa.string()}, group="action")
        assert handle.stats()["events"]["log"] == 0 and handle.version == 4
    with HistoryStore.open(store / "catalogue") as catalogue:
        assert catalogue.keys().tolist() == list(range(100))
    assert "'note' has no value" in "; ".join(report.notes)

    again = take(broker, topic, store)
    assert again.messages == again.events == 0 and again.version == report.version
    broker.send(topic, event(0, 100, 200, action="view"), event(9, 101, 200))
    more = take(broker, topic, store)
    assert more.events == 2 and more.positions == {0: 35, 1: 34, 2: 33, 3: 0}
    assert items(store, 0, 9) == {0: [*range(0, 100, 4), 100], 9: [101]}


def test_it_runs_until_it_is_stopped_and_finishes_its_batch(broker, topic, tmp_path):
    broker.make(topic)
    stop, reports, seen = threading.Event(), [], []
    thread = threading.Thread(target=lambda: reports.append(ingest_kafka(
        broker.url(topic), tmp_path / "store", stop=stop, linger=60, batch=50,
        progress=lambda what, done, total: seen.append((what, done, total)))))
    thread.start()
    try:
        broker.send(topic, *(event(1, i, i) for i in range(60)))
        deadline = time.monotonic() + 30
        while ("append events", 50, None) not in seen and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)  # ten more wait for others, for a minute
    finally:
        stop.set()
        thread.join(30)
    (report,) = reports
    assert report.events == 60 and seen == [("append events", 50, None), ("append events", 60, None)]
    assert sorted(items(tmp_path / "store")[1]) == list(range(60))


def test_keys_are_mapped_nested_ones_too_and_types_are_as_asked(broker, topic, tmp_path):
    broker.send(topic, {"who": "u1", "payload": {"sku": "a", "price": 3, "vector": [1, 2]}, "at": 5, "a.b": True},
                {"who": "u1", "payload": {"sku": "b", "price": 2.5, "vector": [0.5, 1]}, "at": 6.5})
    columns = EventColumns("who", "payload.sku", "at", "s", {"price": "payload.price", "flag": "a.b",
                                                              "vector": "payload.vector"})
    types = {"price": pa.float32(), "vector": pa.list_(pa.float32(), 2)}
    take(broker, topic, tmp_path / "store", columns=columns, types=types)
    with HistoryStore.open(tmp_path / "store") as handle:
        assert handle.schema == EventSchema({"item_id": pa.string(), "price": pa.float32(), "flag": pa.bool_(),
                                             "vector": pa.list_(pa.float32(), 2)}, user_id=pa.string())
        table = handle.read(handle.point(["u1"], 10**9), Projection(("event_time", "price", "vector", "flag")))
    assert table.columns["event_time"].tolist() == [5_000_000, 6_500_000]
    assert table.columns["price"].tolist() == [3, 2.5]
    assert table.columns["vector"].tolist() == [[1, 2], [0.5, 1]]
    assert table.validity["flag"].tolist() == [True, False]


def test_two_topics_and_files_go_into_one_store(broker, topic, tmp_path):
    store = tmp_path / "store"
    for i in range(2):
        broker.send(f"{topic}{i}", event(1, i, 10 + i))
        assert take(broker, f"{topic}{i}", store).events == 1
    (tmp_path / "old.csv").write_text("user_id,item_id,event_time\n1,7,1\n")
    assert ingest_files([tmp_path / "old.csv"], store).appended == 1
    broker.send(f"{topic}0", event(1, 2, 12), event(1, 3, 13))
    assert take(broker, f"{topic}0", store).events == 2
    assert items(store) == {1: [7, 0, 1, 2, 3]}


def test_an_empty_topic_makes_nothing_and_is_no_error(broker, topic, tmp_path):
    broker.make(topic)
    report = take(broker, topic, tmp_path / "store")
    assert report.messages == 0 and not (tmp_path / "store").exists() and "no store was made" in report.notes[-1]


@settings(max_examples=12, deadline=None)
@given(runs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 4)), max_size=6),
       bad=st.integers(2, 9), compact=st.integers(5, 40))
def test_however_it_is_cut_into_runs_and_batches(broker, tmp_path_factory, runs, bad, compact):
    """Each run finds some more messages, takes so many at a time and is stopped after so many appends."""
    store, topic, sent = tmp_path_factory.mktemp("runs") / "store", f"runs-{uuid.uuid4()}", 0
    broker.make(topic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_ingestion, "COMPACT_EVENTS", compact)
        for count, batch, appends in [*runs, (5, 100, 100)]:
            values = [b"?" if i % bad == 0 else event(i % 3, i, 1000) for i in range(sent, sent + count)]
            for i, value in enumerate(values, sent):
                broker.send(topic, value, partition=i % 3)
            sent += count
            stop, made = threading.Event(), []

            def progress(what, done, total, stop=stop, made=made, appends=appends):
                made.append(what)
                if made.count("append events") == appends:
                    stop.set()

            take(broker, topic, store, batch=batch, on_bad="skip", stop=stop, progress=progress)
    expected = {user: [i for i in range(user, sent, 3) if i % bad] for user in range(3)}
    found = items(store) if store.exists() else {}
    assert found == {user: wanted for user, wanted in expected.items() if wanted}


# Bad messages

BAD = [
    (b"{", "not JSON"), (b"[1]", "no object"), (None, "no value"), (b"\xff", "not JSON"), (b"", "not JSON"),
    ({"item_id": 1, "event_time": 1}, "no user_id"), (event(None, 1, 1), "no user_id"),
    (event(1, None, 1), "no item_id"),
    (event("x", 1, 1), "user_id"), (event(1.5, 1, 1), "user_id"), (event(True, 1, 1), "user_id"),
    (event(2**63, 1, 1), "user_id"), (event(1, 1, None), "no event time"), (event(1, 1, -1), "before 1970"),
    (event(1, 1, 10**19), "event_time"), (event(1, 1, 9 * 10**15), "after 2200"), (event(1, 1, "soon"), "soon"),
    (event(1, 1, [1]), "no time"), (event(1, 1, 1, price="dear"), "price"), (event(1, 1, 1, price=[1]), "price"),
    (event(1, 1, 1, small=128), "small"), (event(1, 1, 1, small=0.5), "small"), (event(1, 1, 1, kind=5), "kind"),
    (b'{"user_id": 1, "item_id": 1, "event_time": 1, "kind": "\\ud800"}', "kind"), (b"[" * 100_000, "not JSON"),
    (event(1, 1, 1, at="never"), "never"), (event(1, 1, 1, flag=1), "flag"), (event(1, 1, 1, vector=[1]), "vector"),
]
SCHEMA = EventSchema({"item_id": pa.int64(), "price": pa.float64(), "small": pa.int8(),
                      "kind": pa.dictionary(pa.int8(), pa.string()), "at": pa.timestamp("ms"), "flag": pa.bool_(),
                      "vector": pa.list_(pa.float32(), 2), "big": pa.uint64()})


def test_every_bad_message_is_named_or_skipped(broker, topic, tmp_path, caplog):
    store = tmp_path / "store"
    HistoryStore.create(store, SCHEMA).close()
    good = event(1, 1, 5, price=1, small=-128, kind="a", at="2020-01-01T00:00:00.5", flag=False, vector=[1, 2.5],
                 big=2**64 - 1)
    for value, _ in BAD:
        broker.send(topic, good, value, good, partition=0)
    for number, (_, reason) in enumerate(BAD):
        with pytest.raises(ValueError, match=f"partition 0, offset {3 * number + 1}: .*{reason}.*--on-bad skip"):
            take(broker, topic, store, batch=3)
        with caplog.at_level(logging.WARNING, "semel.datasets"):  # one batch further
            stop = threading.Event()
            ingest_kafka(broker.url(topic), store, batch=3, on_bad="skip", stop=stop, linger=0.05,
                         progress=lambda *_, stop=stop: stop.set())
    assert "messages left out so far: 1; the last" in caplog.text
    assert items(store) == {1: [1] * 2 * len(BAD)}
    with HistoryStore.open(store) as handle:
        table = handle.read(handle.point([1], 10), Projection(("at", "big", "vector"), last=1))
    assert table.columns["at"].tolist() == [1577836800500] and table.columns["big"].tolist() == [2**64 - 1]


def test_skipped_messages_are_counted_and_not_seen_again(broker, topic, tmp_path):
    broker.send(topic, *(event(1, i, i) if i % 3 else b"?" for i in range(30)))
    report = take(broker, topic, tmp_path / "store", on_bad="skip", batch=7)
    assert (report.messages, report.events, report.bad) == (30, 20, 10)
    assert sum("left out: " in note for note in report.notes) == 5
    broker.send(topic, b"?", b"?")
    for _ in range(2):
        report = take(broker, topic, tmp_path / "store", on_bad="skip")
    assert report.messages == 0 and sum(report.positions.values()) == 32


@pytest.mark.parametrize(("columns", "types", "message"), [
    (EventColumns(event_time="at", others={}), {}, "unit"),
    (EventColumns(others={"price": "price"}), {"prize": pa.float32()}, "--column prize"),
    (EventColumns(), {"user_id": pa.float32()}, "user_id"),
    (EventColumns(), {}, "several types"),
])
def test_what_makes_no_store(broker, topic, tmp_path, columns, types, message):
    broker.send(topic, event(1, 1, 1, at=5, price=1), event(1, 2, 1, at=5, price="two"))
    with pytest.raises(ValueError, match=message):
        take(broker, topic, tmp_path / "store", columns=columns, types=types, on_bad="skip")
    assert not (tmp_path / "store").exists()


def test_what_contradicts_a_store_that_is_there(broker, topic, tmp_path):
    HistoryStore.create(tmp_path / "store", EventSchema({"item_id": pa.int64()})).close()
    broker.send(topic, event(1, 1, 1))
    with pytest.raises(ValueError, match="no column 'price'"):
        take(broker, topic, tmp_path / "store", columns=EventColumns(others={"price": "price"}))
    with pytest.raises(ValueError, match="keeps int64"):
        take(broker, topic, tmp_path / "store", types={"item_id": pa.string()})
    with HistoryStore.open(tmp_path / "store", mode="a"), pytest.raises(StoreLocked):
        take(broker, topic, tmp_path / "store")
    HistoryStore.create(tmp_path / "other", EventSchema({"film": pa.int64()})).close()
    with pytest.raises(ValueError, match="no column 'item_id'"):
        take(broker, topic, tmp_path / "other")


# Where Kafka is not as the store remembers it


def test_an_unknown_topic_and_a_broker_that_does_not_answer(broker, tmp_path):
    broker.make("clicks")
    with pytest.raises(ValueError, match=r"no topic 'clics'.*did you mean 'clicks'"):
        take(broker, "clics", tmp_path / "store")
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"no answer from Kafka at 127\.0\.0\.1:1 .*refused"):
        ingest_kafka("kafka://127.0.0.1:1/clicks", tmp_path / "store")
    assert time.monotonic() - began < 10 and not (tmp_path / "store").exists()


@pytest.mark.parametrize("url", ["kafka://", "kafka://host", "kafka://host/", "kafka:///topic", "kafka://a,,b/t",
                                 "kafka://host/a b", "kafka://host/a/b", "broker/topic"])
def test_urls(url, tmp_path):
    with pytest.raises(ValueError, match="kafka://"):
        ingest_kafka(url, tmp_path / "store")


@pytest.mark.parametrize("config", [{"auto.offset.reset": "latest"}, {"no.such.thing": "1"}, {"fetch.min.bytes": "x"}])
def test_settings(broker, config, tmp_path):
    with pytest.raises(ValueError, match=next(iter(config))):
        ingest_kafka(broker.url("t"), tmp_path / "store", config=config)


def test_messages_that_were_removed_before_they_were_read(broker, topic, tmp_path):
    store = tmp_path / "store"
    broker.send(topic, event(1, 0, 0), partition=0)
    assert take(broker, topic, store).events == 1
    broker.send(topic, *(event(1, i, i, filler="x" * 100_000) for i in range(1, 100)), partition=0)  # 5 MB are kept
    with pytest.raises(ValueError, match=r"has messages from offset \d+ on; those from 1 on were removed.*--skip-lost"):
        take(broker, topic, store)
    report = take(broker, topic, store, skip_lost=True)
    assert report.events + report.lost == 99 and report.lost > 0
    assert items(store) == {1: [0, *range(report.lost + 1, 100)]}


def test_a_topic_that_was_made_anew(broker, topic, tmp_path):
    broker.send(topic, event(1, 0, 0))
    take(broker, topic, tmp_path / "store")
    with HistoryStore.open(tmp_path / "store", mode="a") as handle:
        position = handle.position(f"kafka:{broker.cluster}/{topic}")
        assert position.state == {"0": 1, "1": 0, "2": 0, "3": 0}
        handle.append(handle.schema.arrow.empty_table(), token=position.then({"0": 50}))
        with pytest.raises(PositionMoved):
            handle.append(handle.schema.arrow.empty_table(), token=position.then({"0": 60}))
    with pytest.raises(ValueError, match=r"partition 0, ends at offset 1, .*up to 50: it was made anew"):
        take(broker, topic, tmp_path / "store")
    with HistoryStore.open(tmp_path / "store", mode="a") as handle:
        position = handle.position(f"kafka:{broker.cluster}/{topic}")
        handle.append(handle.schema.arrow.empty_table(), token=position.then({"7": 1}))
    with pytest.raises(ValueError, match=r"no partition 7.* made anew"):
        take(broker, topic, tmp_path / "store")


def test_offsets_are_committed_for_monitors_and_not_read(broker, topic, tmp_path):
    from confluent_kafka import Consumer, TopicPartition

    broker.send(topic, *(event(1, i, i) for i in range(9)))
    take(broker, topic, tmp_path / "a", group="semel-lag")
    assert take(broker, topic, tmp_path / "b", group="semel-lag").events == 9
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "semel-lag", "log_level": 0})
    try:
        committed = consumer.committed([TopicPartition(topic, p) for p in range(3)], timeout=10)
    finally:
        consumer.close()
    assert [partition.offset for partition in committed] == [3, 3, 3]


BROKER = """
from kafka_broker import Broker, event
broker = Broker()
broker.send("t", *(event(1, i, i) for i in range(30)))
print(broker.address, flush=True)
input()
"""


def test_a_broker_that_goes_away_is_waited_for_quietly_and_does_not_hold_up_the_end(tmp_path, caplog):
    child = subprocess.Popen([sys.executable, "-c", BROKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             cwd=Path(kafka_broker.__file__).parent)
    stop, appended, reports = threading.Event(), threading.Event(), []
    try:
        url = f"kafka://{child.stdout.readline().strip()}/t"
        thread = threading.Thread(daemon=True, target=lambda: reports.append(ingest_kafka(
            url, tmp_path / "store", stop=stop, linger=0.1, group="lag", progress=lambda *_: appended.set())))
        thread.start()
        assert appended.wait(60)
        child.kill()  # while offsets are being committed to it
        time.sleep(3)
        assert thread.is_alive()
        began = time.monotonic()
    finally:
        child.kill()
        child.communicate()
        stop.set()
        thread.join(60)
    assert time.monotonic() - began < 20 and not thread.is_alive()
    assert reports[0].events == 30
    assert 1 <= len([record for record in caplog.records if record.name == "semel.datasets"]) <= 3


# Killed

COMMAND = """
import semel.datasets.kafka_ingestion
semel.datasets.kafka_ingestion.COMPACT_EVENTS = 40
from semel.cli import main
main()
"""


def kill_and_restart(broker, topic, store, kills, chance):
    """Messages arrive while the command, which compacts now and then, is killed again and again; at the end every event
    is there once, those of a partition in order."""
    sent = 0

    def send(count):
        nonlocal sent
        for i in range(sent, sent + count):
            broker.send(topic, event(i % 3, i, 1000, text=f"t{i % 5}"), partition=i % 3)
        sent += count

    send(50)
    command = [sys.executable, "-c", COMMAND, "ingest", broker.url(topic), "--store", str(store), "--batch", "7",
               "--linger", "0.02"]
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            before, deadline = version(store), time.monotonic() + 60
            if chance.random() < 0.2:  # at any moment of its start, the making of the store included
                deadline = time.monotonic() + 3 * chance.random()
            while version(store) <= before and process.poll() is None and time.monotonic() < deadline:
                send(1)
                time.sleep(0.02)
            send(chance.randint(0, 60))
            time.sleep(chance.random() * 0.2)
            assert process.poll() is None, process.communicate()
        finally:
            process.kill()
            process.communicate()
    take(broker, topic, store)
    found = items(store)
    assert found == {user: list(range(user, sent, 3)) for user in range(3)}


def version(store):
    if not (store / "manifest.json").is_file():
        return 0
    with HistoryStore.open(store) as handle:
        return handle.version


@pytest.mark.timeout(240)
def test_killed_at_any_moment_nothing_is_lost_or_repeated(broker, topic, tmp_path):
    kill_and_restart(broker, topic, tmp_path / "store", kills=3, chance=random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_killed_many_times(broker, topic, tmp_path, seed):
    kill_and_restart(broker, f"{topic}", tmp_path / "store", kills=50, chance=random.Random(seed))

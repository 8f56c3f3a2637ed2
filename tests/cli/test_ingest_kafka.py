"""``semel ingest kafka://...``: until the end or a signal; options that belong elsewhere; without the client."""

import json
import signal
import subprocess
import sys
import time

import pytest

from semel.history import HistoryStore, Projection

COMMAND = [sys.executable, "-m", "semel.cli", "ingest"]


@pytest.fixture(scope="module")
def broker():
    pytest.importorskip("confluent_kafka", reason="needs the client of the extra semel[kafka]")
    from kafka_broker import Broker

    return Broker()


def view(user, item, at, **others):
    return {"who": user, "film": item, "at": at, **others}


NAMES = ["--user", "who", "--item", "film", "--time", "at", "--time-unit", "ms", "--column", "stars=meta.stars"]


def test_until_the_end_with_mapped_columns(semel, broker, tmp_path):
    broker.send("views", *(view(f"u{i % 2}", i, i, meta={"stars": i % 5}) for i in range(20)), b"rubbish")
    (tmp_path / "client.properties").write_text("# how to connect\n\nclient.id = tests\nfetch.min.bytes=1\n")
    arguments = ["ingest", broker.url("views"), "--store", tmp_path / "s", "--until-end", "--batch", "6", "--on-bad",
                 "skip", "--kafka-config", tmp_path / "client.properties", "--type", "stars=float32", *NAMES]
    result = semel(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "20 events of 21 messages, 1 left out" in " ".join(result.stdout.split())
    assert "note: left out: views, partition 2, offset 6: it is not JSON" in result.stderr
    result = semel(*arguments, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    facts = json.loads(result.stdout)
    assert facts["events"] == 0 and facts["positions"] == {"0": 7, "1": 7, "2": 7, "3": 0}
    with HistoryStore.open(tmp_path / "s") as store:
        table = store.read(store.point(["u1"], 10**9), Projection(("event_time", "stars"), last=2))
        assert table.columns["event_time"].tolist() == [17_000, 19_000] and table.columns["stars"].tolist() == [2, 4]


def has_events(store):
    if not (store / "manifest.json").exists():
        return False
    with HistoryStore.open(store) as handle:
        return handle.version > 0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(semel, broker, tmp_path, number):
    topic = f"until-{int(number)}"
    broker.send(topic, *(view(1, i, i) for i in range(10)))
    command = [*COMMAND, broker.url(topic), "--store", str(tmp_path / "s"), "--batch", "10", "--linger", "60", "--json",
               *NAMES[:-2]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not has_events(tmp_path / "s") and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        broker.send(topic, *(view(1, i, i) for i in range(10, 14)))
        time.sleep(1)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    facts = json.loads(stdout)
    assert 10 <= facts["events"] == facts["messages"] and "Traceback" not in stderr
    result = semel(*command[3:], "--until-end")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert facts["events"] + json.loads(result.stdout)["events"] == 14


def test_what_is_refused(refused, broker, tmp_path):
    store = ["--store", tmp_path / "s"]
    broker.send("films", view(1, 1, 1), b"?")
    url = broker.url("films")
    assert "did you mean 'films'" in refused("ingest", broker.url("filmes"), *store)
    assert "--on-bad skip" in refused("ingest", url, *store, "--until-end", *NAMES)
    assert "--time-unit" in refused("ingest", url, *store, "--until-end", "--on-bad", "skip", *NAMES[:6])
    assert "on_bad" in refused("ingest", url, *store, "--on-bad", "ask")
    assert "alone" in refused("ingest", url, "more.csv", *store)
    assert "alone" in refused("ingest", url, *store, "--from-fat-rows")
    assert "NAME=TYPE" in refused("ingest", url, *store, "--type", "price")
    assert "float31" in refused("ingest", url, *store, "--type", "price=float31")
    (tmp_path / "client.properties").write_text("client.id=x\nsecret\n")
    assert "line 2" in refused("ingest", url, *store, "--kafka-config", tmp_path / "client.properties")
    assert "gone" in refused("ingest", url, *store, "--kafka-config", tmp_path / "gone")
    assert "are for kafka://" in refused("ingest", tmp_path / "a.csv", *store, "--until-end")
    assert "topic" in refused("ingest", "kafka://broker", *store)
    assert not (tmp_path / "s").exists()


def test_without_the_client_it_says_what_to_install(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    assert "pip install 'semel[kafka]'" in refused("ingest", "kafka://b/t", "--store", tmp_path / "s")

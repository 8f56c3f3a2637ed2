"""The Ray Serve application, on a local Ray: the same surface, one writer, replicas that see its appends."""

import json
import socket
import urllib.error
import urllib.request

import pytest

from semel.examples import ExposureLog
from serving.stand_ins import make_store, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_replicas_answer_as_the_server_does_and_write_through_one(tmp_path):
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from semel.serving.ray_app import application

    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "run")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        serve.run(application(tmp_path / "run", tmp_path / "store", replicas=2, latency_target=60.0))

        def post(path, body):
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)

        asked = []
        for number in range(6):
            event = {"user_id": 700, "item_id": number, "event_key": str(number)}
            written = post("/v1/events", {"events": [event]})
            assert written["accepted"] == 1
            assert post("/v1/events", {"events": [event]})["duplicates"] == 1  # whichever replica it was
            ranked = post("/v1/rank", {"user_id": 700, "candidates": [1, 2]})
            assert ranked["pointer"]["version"] >= written["version"]
            asked.append(ranked["request_id"])
        with pytest.raises(urllib.error.HTTPError) as caught:
            post("/v1/rank", {"user_id": "x", "candidates": [1]})
        assert caught.value.code == 422
    finally:
        serve.shutdown()
        ray.shutdown()
    assert set(asked) <= set(ExposureLog(tmp_path / "store" / "exposures").read()["request_id"].to_pylist())


def test_options_that_are_none_are_refused_before_anything_starts(tmp_path):
    pytest.importorskip("ray.serve")
    from semel.serving.ray_app import application

    with pytest.raises(TypeError, match="no_such"):
        application(tmp_path, tmp_path, no_such=1)
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        application(tmp_path, tmp_path, replicas=0)

"""Log lines: JSON, one each, and nothing that a client sends can make two of one."""

import io
import json
import logging

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.serving.logs import JsonLines
from semel.serving.server import create_app


def lines(*records):
    formatter = JsonLines()
    out = io.StringIO()
    for record in records:
        out.write(formatter.format(record) + "\n")
    return out.getvalue()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(), st.dictionaries(st.text(), st.text(), max_size=3))
def test_every_record_is_one_line_of_ascii_that_says_what_it_was_given(text, fields):
    made = lines(logging.makeLogRecord({"msg": "%s", "args": (text,), "name": "n"}),
                 logging.makeLogRecord({"msg": dict(fields), "name": "n"}))
    assert made.isascii() and made.isprintable() is False and made.count("\n") == 2 and "\r" not in made
    first, second = map(json.loads, made.splitlines())
    assert first["message"] == text and first["logger"] == "n"
    for name, value in fields.items():
        assert second[name] == value or name in ("time", "level", "process", "logger")
    assert second["logger"] == "n"  # a field cannot pass for one of ours


def test_no_user_data_and_no_forged_line_in_a_servers_log(predictor, caplog):
    evil = 'x"}\n{"level":"error","message":"forged \x1b[2J'
    caplog.set_level(logging.INFO, "semel.serving")
    with TestClient(create_app(predictor), base_url="http://127.0.0.1") as http:
        http.post("/v1/rank", json={"user_id": 1, "candidates": [4], "context": {"surface": evil}})
        http.post("/v1/rank", json={"user_id": evil, "candidates": [4]})
        http.post("/v1/events", json={"events": [{"user_id": 1, "item_id": 4, "action": evil}]})
        http.post("/v1/outcomes", json={"outcomes": [{"request_id": evil, "item_id": 4, "label": {"like": 1}}]})
        http.get("/" + "%0a%0dforged")
    made = lines(*caplog.records)
    assert len(made.splitlines()) == len(caplog.records) >= 4 and "forged" not in made
    requests = [line for line in map(json.loads, made.splitlines()) if line.get("event") == "request"]
    assert [(line["path"], line["status"]) for line in requests] == [
        ("/v1/rank", 200), ("/v1/rank", 422), ("/v1/events", 200), ("/v1/outcomes", 200)]
    assert all(set(line) == {"time", "level", "process", "logger", "event", "path", "status", "milliseconds"}
               for line in requests)

"""Each wrong body is refused with the path of its first wrong field; no body of any kind raises anything else."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.serving.errors import InvalidRequest
from semel.serving.schemas import MAX_FUTURE_US, events_body, outcomes_body, rank_body, rows_table

COLUMNS = {"item_id": pa.int64(), "rating": pa.float32(), "action": pa.string(), "dwell": pa.int16(),
           "sound": pa.bool_(), "model_x": pa.uint8(), "copy": pa.dictionary(pa.int32(), pa.string()),
           "vector": pa.list_(pa.float32(), 2)}
RANK = rank_body(pa.int64(), pa.int64(), 5)
TEXT_RANK = rank_body(pa.string(), pa.string(), 5)
EVENTS = events_body("user_id", pa.int64(), COLUMNS, ("item_id",), "events", "Event", idempotent=True)
OUTCOMES = outcomes_body(pa.int64(), {"like": True, "rating": False, "shown": True})


def field_of(body, text):
    with pytest.raises(InvalidRequest) as caught:
        body.parse(text if isinstance(text, bytes) else text.encode())
    assert caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 400
    return caught.value.field


@pytest.mark.parametrize(("text", "field"), [
    ('{"candidates": [1]}', "user_id"),
    ('{"user_id": null, "candidates": [1]}', "user_id"),
    ('{"user_id": "1", "candidates": [1]}', "user_id"),
    ('{"user_id": 1.0, "candidates": [1]}', "user_id"),
    ('{"user_id": true, "candidates": [1]}', "user_id"),
    ('{"user_id": 9223372036854775808, "candidates": [1]}', "user_id"),
    ('{"user_id": -9223372036854775809, "candidates": [1]}', "user_id"),
    ('{"user_id": [1], "candidates": [1]}', "user_id"),
    ('{"user_id": 1}', "candidates"),
    ('{"user_id": 1, "candidates": []}', "candidates"),
    ('{"user_id": 1, "candidates": 7}', "candidates"),
    ('{"user_id": 1, "candidates": [1, 2, 3, 4, 5, 6]}', "candidates"),
    ('{"user_id": 1, "candidates": [1, "2"]}', "candidates.1"),
    ('{"user_id": 1, "candidates": [1, null]}', "candidates.1"),
    ('{"user_id": 1, "candidates": [1, NaN]}', "candidates.1"),
    ('{"user_id": 1, "candidates": [1, 2.5]}', "candidates.1"),
    ('{"user_id": 1, "candidates": [1], "limit": 0}', "limit"),
    ('{"user_id": 1, "candidates": [1], "limit": "3"}', "limit"),
    ('{"user_id": 1, "candidates": [1], "context": [1]}', "context"),
    ('{"user_id": 1, "candidates": [1], "as_of": -1}', "as_of"),
    ('{"user_id": 1, "candidates": [1], "candidate": [1]}', "candidate"),
    ('{"user_id": 1, "candidates": [1]', "body"),
    ('', "body"), ('[]', "body"), ('null', "body"), ('1e999', "body"), ('"' + "a" * 1000 + '"', "body"),
    ('[' * 100_000, "body"), ('{"user_id": ' + "9" * 5000 + ', "candidates": [1]}', "body"),
    (b'{"user_id": 1, "candidates": [1], "context": {"a": "\xff"}}', "body"),
    ('{"user_id": 1, "candidates": [1], "context": {"a": "\\ud800"}}', "body"),
])
def test_a_wrong_rank_body_names_its_field(text, field):
    assert field_of(RANK, text) == field


@pytest.mark.parametrize(("text", "field"), [
    ('{"user_id": 1, "candidates": ["a"]}', "user_id"),
    ('{"user_id": "", "candidates": ["a"]}', "user_id"),
    ('{"user_id": "a", "candidates": ["a", 3]}', "candidates.1"),
    (json.dumps({"user_id": "a" * 1025, "candidates": ["a"]}), "user_id"),
])
def test_string_ids_are_checked_too(text, field):
    assert field_of(TEXT_RANK, text) == field


def test_good_rank_bodies_pass():
    widest = RANK.parse(b'{"user_id": -9223372036854775808, "candidates": [9223372036854775807, -0]}')
    assert widest == {"user_id": -2**63, "candidates": [2**63 - 1, 0]}
    assert TEXT_RANK.parse('{"user_id": "Ünïcode \\u0000", "candidates": ["日本"]}'.encode())["candidates"] == ["日本"]
    assert RANK.parse(b'{"user_id": 1, "candidates": [1], "limit": null, "context": null, "as_of": null}')


def one(**changes):
    return json.dumps({"events": [{"user_id": 1, "item_id": 2}, {"user_id": 1, "item_id": 2, **changes}]})


@pytest.mark.parametrize(("text", "field"), [
    ('{"events": []}', "events"), ('{"events": {}}', "events"), ('{}', "events"), ('{"events": [7]}', "events.0"),
    ('{"events": [{"user_id": 1}]}', "events.0.item_id"), ('{"events": [{"item_id": 1}]}', "events.0.user_id"),
    (one(item_id=None), "events.1.item_id"), (one(rating=None), "events.1.rating"),
    (one(rating="4"), "events.1.rating"), (one(rating=float("nan")), "events.1.rating"),
    (one(rating=float("inf")), "events.1.rating"), (one(rating=1e39), "events.1.rating"),
    (one(rating=True), "events.1.rating"), (one(action=3), "events.1.action"), (one(dwell=40000), "events.1.dwell"),
    (one(dwell=1.5), "events.1.dwell"), (one(sound=1), "events.1.sound"), (one(model_x=-1), "events.1.model_x"),
    (one(event_time=-1), "events.1.event_time"), (one(event_time=1.5), "events.1.event_time"),
    (one(event_time=2**63), "events.1.event_time"), (one(colour=1), "events.1.colour"),
    (one(event_key=""), "events.1.event_key"), (one(event_key=1), "events.1.event_key"), (one(copy=1), "events.1.copy"),
    (one(event_key="k" * 257), "events.1.event_key"), (one(vector=[1.0]), "events.1.vector"),
    (one(vector=[1.0, None]), "events.1.vector.1"),
])
def test_a_wrong_event_names_its_place(text, field):
    assert field_of(EVENTS, text) == field


def test_events_become_the_tables_a_store_appends():
    rows = EVENTS.parse(one(rating=4, action="like", dwell=3, sound=False, model_x=1, copy="a", vector=[0.5, 1],
                            event_time=7, event_key="k").encode())["events"]
    table = rows_table(rows, "user_id", pa.int64(), COLUMNS, now=100, where="events")
    assert table.schema == pa.schema([("user_id", pa.int64()), ("event_time", pa.int64()), *COLUMNS.items()])
    assert table.to_pylist()[0] == {"user_id": 1, "event_time": 100, "item_id": 2, "rating": None, "action": None,
                                    "dwell": None, "sound": None, "model_x": None, "copy": None, "vector": None}
    assert table.to_pylist()[1] == {"user_id": 1, "event_time": 7, "item_id": 2, "rating": 4.0, "action": "like",
                                    "dwell": 3, "sound": False, "model_x": 1, "copy": "a", "vector": [0.5, 1.0]}


def test_event_times_may_be_a_day_ahead_and_no_more():
    rows = [{"user_id": 1, "item_id": 1, "event_time": 100 + MAX_FUTURE_US}]
    assert len(rows_table(rows, "user_id", pa.int64(), COLUMNS, now=100, where="events")) == 1
    with pytest.raises(InvalidRequest, match=r"events\.0\.event_time: .* more than a day in the future"):
        rows_table(rows, "user_id", pa.int64(), COLUMNS, now=99, where="events")


@pytest.mark.parametrize(("outcome", "field"), [
    ({}, "outcomes.0.request_id"), ({"request_id": 5}, "outcomes.0.request_id"),
    ({"request_id": "r"}, "outcomes.0.item_id"), ({"request_id": "r", "item_id": "x"}, "outcomes.0.item_id"),
    ({"request_id": "r", "item_id": 1}, "outcomes.0.label"),
    ({"request_id": "r", "item_id": 1, "label": {}}, "outcomes.0.label"),
    ({"request_id": "r", "item_id": 1, "label": 1}, "outcomes.0.label"),
    ({"request_id": "r", "item_id": 1, "label": {"lik": 1}}, "outcomes.0.label.lik"),
    ({"request_id": "r", "item_id": 1, "label": {"like": 0.5}}, "outcomes.0.label.like"),
    ({"request_id": "r", "item_id": 1, "label": {"like": True}}, "outcomes.0.label.like"),
    ({"request_id": "r", "item_id": 1, "label": {"rating": float("nan")}}, "outcomes.0.label.rating"),
    ({"request_id": "r", "item_id": 1, "label": {"shown": 2}}, "outcomes.0.label.shown"),
])
def test_a_wrong_outcome_names_its_place(outcome, field):
    assert field_of(OUTCOMES, json.dumps({"outcomes": [outcome]})) == field


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["user_id", "item_id", "candidates", "events", "label", "rating", "x"]), inner,
                        max_size=4), max_leaves=8)


@given(JSON)
def test_no_json_raises_anything_but_invalid_request(value):
    text = json.dumps(value).encode()
    for body in (RANK, TEXT_RANK, EVENTS, OUTCOMES):
        try:
            body.parse(text)
        except InvalidRequest as error:
            assert error.field


@given(st.binary(max_size=50))
def test_no_bytes_raise_anything_but_invalid_request(data):
    for body in (RANK, EVENTS, OUTCOMES):
        with pytest.raises(InvalidRequest):
            body.parse(data)


def message_of(body, text):
    with pytest.raises(InvalidRequest) as caught:
        body.parse(text.encode())
    return str(caught.value)


def test_messages_say_what_to_do():
    assert message_of(RANK, '{"user_id": 1, "candidates": [1, 2, 3, 4, 5, 6]}') == \
        "candidates: must have at most 5 values, it has 6"
    assert message_of(RANK, '{"user_id": "7", "candidates": [1]}') == 'user_id: must be an integer, got "7"'
    assert message_of(EVENTS, one(colour="red")).startswith(
        "events.1.colour: is not a field here; there are user_id, event_time, item_id, rating, action")
    assert message_of(EVENTS, '{"events": [{"user_id": 1}]}') == "events.0.item_id: is required"
    assert message_of(EVENTS, one(event_time=-1)) == "events.1.event_time: must be at least 0, got -1"
    assert message_of(RANK, "{") == "body: not valid JSON: EOF while parsing an object at line 1 column 1"

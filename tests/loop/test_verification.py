"""Verification finds what was lost, what is there twice, and memory that grows."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from semel.examples import OutcomeLog
from semel.history import EventSchema, HistoryStore
from semel.loop import LoopConfig, LoopFolder, verify
from semel.loop.ledger import Answer, Ledger
from semel.loop.verification import memory_growth


def answer(number, slots=3):
    events = [{"user_id": number % 4, "item_id": slot, "event_time": 1000 * number + slot,
               "event_key": f"{number}-{slot}"} for slot in range(slots)]
    outcomes = [{"request_id": f"r{number}", "item_id": slot, "label": {"shown": 1.0, "click": 0.0},
                 "outcome_key": f"{number}-{slot}"} for slot in range(slots)]
    return Answer(number, f"r{number}", number % 4, 1.0, "m", [], events, outcomes)


@pytest.fixture
def loop(tmp_path):
    """A loop of ten answers, all sent and acknowledged; ``build(events, labels)`` stores what is given of them."""
    folder = LoopFolder(tmp_path / "loop")
    folder.settle(LoopConfig())
    answers = [answer(number) for number in range(10)]
    with Ledger(folder.ledger) as ledger:
        for one in answers:
            ledger.add(one)
        ledger.acknowledge("events", range(10), 1.0)
        ledger.acknowledge("outcomes", range(9), 1.0)
        ledger.add_items([{"item_id": 5}], 0)
        ledger.items_uploaded([5], 1.0, 2.0)

    def build(leave_event=None, twice_event=None, leave_label=None, items=(5,)):
        rows = [row for one in answers for row in one.events if row["event_key"] != leave_event]
        rows += [row for one in answers for row in one.events if row["event_key"] == twice_event]
        schema = EventSchema({"item_id": pa.int64()})
        with HistoryStore.create(folder.store, schema, shards=2) as store:
            store.append(pa.Table.from_pylist([{k: v for k, v in row.items() if k != "event_key"} for row in rows]))
        of_items = EventSchema({"topic": pa.string()}, key="item_id")
        with HistoryStore.create(folder.store / "catalogue", of_items) as there:
            there.append(pa.table({"item_id": [1, *items], "event_time": [0] * (1 + len(items)),
                                   "topic": ["t"] * (1 + len(items))}))
        log = OutcomeLog(folder.store / "outcomes")
        labels = [(row, task) for one in answers for row in one.outcomes for task in row["label"]]
        log.append(pa.Table.from_pylist([
            {"request_id": row["request_id"], "item_id": row["item_id"], "task": task, "value": 1.0, "received_at": 1,
             "outcome_key": f"{row['outcome_key']}/{task}"} for row, task in labels
            if f"{row['outcome_key']}/{task}" != leave_label]))
        log.close()
        return verify(folder, replay_all=False)

    return build


def test_all_is_there(loop):
    found = loop()
    assert found.good and found.nothing_lost and (found.events, found.outcomes, found.items) == (30, 54, 1)
    assert found.answers == 10 and found.answers_not_logged == 10  # there is no log of exposures here


def test_a_lost_event_a_lost_label_a_lost_item(loop):
    found = loop(leave_event="3-1", leave_label="2-0/click", items=())
    assert (found.events_lost, found.outcomes_lost, found.items_lost) == (1, 1, 1) and not found.good


def test_a_label_that_was_not_acknowledged_may_be_missing(loop):
    assert loop(leave_label="9-0/click").good


def test_an_event_that_is_there_twice(loop):
    found = loop(twice_event="7-2")
    assert found.events_repeated == 1 and found.nothing_lost and not found.good


def test_a_replay_that_is_not_exact_is_not_good(loop):
    found = loop()
    assert not replace(found, replayed={"exact": False}).good and replace(found, replayed={"exact": True}).good
    assert not replace(found, coverage=0.99).good


def samples(path, size_at, seconds=600, pid=7):
    with path.open("a") as file:
        for second in range(0, seconds, 2):
            process = {"pid": pid, "rss_mb": float(size_at(second)), "up": True}
            file.write(json.dumps({"time": float(second), "processes": {"server": process}}) + "\n")


def test_memory_that_grows_is_told_from_a_warm_up(tmp_path):
    samples(tmp_path / "steady", lambda s: 100 + min(s, 120) + np.sin(s))
    steady = memory_growth(tmp_path / "steady")["server"]
    assert steady["steady"] and abs(steady["mb_per_minute"]) < 1
    samples(tmp_path / "leak", lambda s: 100 + 0.2 * s)
    leak = memory_growth(tmp_path / "leak")["server"]
    assert not leak["steady"] and leak["mb_per_minute"] == pytest.approx(12, rel=0.05)
    samples(tmp_path / "short", lambda s: 100 + s, seconds=100)
    assert memory_growth(tmp_path / "short") == {} and memory_growth(tmp_path / "none") == {}


def test_no_loop(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such ledger"):
        verify(LoopFolder(tmp_path))

"""The ledger: what was answered and acknowledged, as it is after a restart or a kill."""

import os
import signal
import subprocess
import sys

import pytest

from semel.loop.ledger import Answer, Ledger


def answer(number, **changes):
    row = {"user_id": "u", "item_id": 1, "event_key": f"k{number}"}
    return Answer(**{"number": number, "request_id": f"r{number}", "user_id": "u", "answered_at": 1.5,
                     "model_version": "m", "shown": [(1, 0.25, 1.0, None)], "events": [row], "outcomes": [row],
                     **changes})


def test_what_was_added_is_read_again_in_the_order_of_the_answers(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        for number in (2, 0, 5):
            ledger.add(answer(number))
    with Ledger(tmp_path / "l") as ledger:
        assert list(ledger.answers()) == [answer(2), answer(0), answer(5)]
        assert list(ledger.answers(most=2)) == [answer(0), answer(5)]
        assert ledger.answered(5) and not ledger.answered(1)
        assert ledger.first_unanswered() == 1


def test_first_unanswered(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.first_unanswered() == 0
        ledger.add(answer(0))
        ledger.add(answer(1))
        assert ledger.first_unanswered() == 2


def test_unsent_are_those_that_were_not_acknowledged(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        for number in range(4):
            ledger.add(answer(number, **({"events": []} if number == 3 else {})))
        ledger.acknowledge("events", [1, 2], 9.0)
        assert [one.number for one in ledger.unsent("events")] == [0]  # 3 has none to send
        assert [one.number for one in ledger.unsent("outcomes")] == [0, 1, 2, 3]
        assert ledger.counts() == {"answers": 4, "events": 3, "outcomes": 0}


def test_an_item_is_shown_for_the_first_time_once(tmp_path):
    with Ledger(tmp_path / "l") as ledger:
        ledger.add_items([{"item_id": 7}, {"item_id": "8"}], position=100)
        ledger.add_items([{"item_id": 7}], position=120)
        assert ledger.items_position() == 120 and len(ledger.items_to_upload()) == 2
        assert ledger.item_shown(7, "r", 5.0) is None  # not uploaded
        ledger.items_uploaded([7], 10.0, 10.5)
        assert ledger.items_unseen() == [7] and ledger.items_acknowledged() == [{"item_id": 7}]
        assert ledger.item_shown(7, "r", 12.0) == 2.0 and ledger.item_shown(7, "r", 13.0) is None
        assert ledger.freshness() == ([2.0], 0) and ledger.items_to_upload() == [{"item_id": "8"}]


def test_what_was_added_outlives_a_kill(tmp_path):
    script = ("import sys, os, signal; sys.path.insert(0, sys.argv[2]);"
              "from tests_ledger_kill import answer; from semel.loop.ledger import Ledger; from pathlib import Path;"
              "l = Ledger(Path(sys.argv[1])); [l.add(answer(n)) for n in range(50)];"
              "l.acknowledge('events', [3], 1.0); os.kill(os.getpid(), signal.SIGKILL)")
    (tmp_path / "tests_ledger_kill.py").write_text(
        "from semel.loop.ledger import Answer\n"
        "def answer(n):\n    return Answer(n, f'r{n}', 1, 1.0, 'm', [], [{'event_key': n}], [])\n")
    code = subprocess.run([sys.executable, "-c", script, str(tmp_path / "l"), str(tmp_path)], timeout=100,
                          env={**os.environ}).returncode
    assert code == -signal.SIGKILL
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.counts() == {"answers": 50, "events": 1, "outcomes": 50}


def test_a_ledger_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not run"):
        Ledger(tmp_path / "none", read_only=True)

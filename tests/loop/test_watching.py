"""A watched process: started again when it ends, killed when silent, ended in order, found by the next watcher."""

import signal
import subprocess
import sys
import time

import pytest

from semel.loop import process
from semel.loop.process import Child, born, describe, end_leftover, resident

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def child(tmp_path):
    made = []

    def make(command, **options):
        one = Child("one", command, tmp_path / "log", tmp_path / "pid", **options)
        made.append(one)
        return one

    yield make
    for one in made:
        one.kill()
        one.wait(10)


def until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)


def test_started_again_after_a_kill(child):
    one = child(SLEEP)
    one.watch(time.monotonic())
    first = one.pid
    assert first and one.facts()["up"] and one.facts()["rss_mb"] > 0
    one.kill()
    said = []
    until(lambda: said.append(one.watch(time.monotonic())) or (one.up and one.pid != first))
    assert one.restarts == 1 and any("SIGKILL" in text for text in said if text)


def test_an_end_in_order_is_not_undone(child):
    one = child(SLEEP)
    one.start()
    one.ask_to_end()
    assert one.wait(20) == -signal.SIGTERM
    assert one.watch(time.monotonic()) is None and not one.up


def test_what_does_not_end_is_killed(child, tmp_path):
    one = child([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                                       "print('ready', flush=True); time.sleep(60)"])
    one.start()
    until(lambda: "ready" in (tmp_path / "log").read_text())
    one.ask_to_end()
    assert one.wait(0.3) is None and not one.up


def test_silence_is_not_suffered(child, monkeypatch):
    monkeypatch.setattr(process, "STARTING_S", 5.0)
    one = child(SLEEP, silence=2.0)
    one.start()
    now = time.monotonic()
    assert one.watch(now + 4.0) is None  # it has time to start
    one.sign()
    assert one.watch(time.monotonic() + 1.0) is None
    assert "no sign of life" in one.watch(time.monotonic() + 3.0)
    until(lambda: not one.up)


def test_it_waits_longer_for_what_ends_at_once(child):
    one = child([sys.executable, "-c", "raise SystemExit(3)"])
    began, said = time.monotonic(), []
    until(lambda: said.append(one.watch(time.monotonic())) or one.restarts >= 2, 60)
    assert one.last_code == 3 and time.monotonic() - began > process.BACKOFF_S[1] + process.BACKOFF_S[2]
    assert sum("code 3" in text for text in said if text) == 2


def test_a_leftover_is_ended_and_a_stranger_is_not(tmp_path):
    left = subprocess.Popen(SLEEP)
    try:
        (tmp_path / "pid").write_text(f"{left.pid} {born(left.pid)}")
        assert end_leftover(tmp_path / "pid") and left.wait(10) == -signal.SIGTERM
        assert not (tmp_path / "pid").exists() and not end_leftover(tmp_path / "pid")
    finally:
        left.kill()
        left.wait()
    other = subprocess.Popen(SLEEP)
    try:
        (tmp_path / "pid").write_text(f"{other.pid} 12345")  # another process of the same number
        assert not end_leftover(tmp_path / "pid") and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_of_processes_that_are_gone():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert born(gone.pid) == "" and resident(gone.pid) == 0
    assert describe(3) == "code 3" and describe(-9) == "SIGKILL"

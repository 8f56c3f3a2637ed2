"""A trainer that hangs, which is not one that ends: it is seen, killed and started again, and the dashboard says so."""

import os
import signal
import sys
import time

import pytest

from semel.cli.loop.dashboard import processes
from semel.loop import Loop, LoopConfig
from semel.loop.process import Child
from semel.loop.supervisor import SILENCE_S
from semel.training.follow import ALIVE

TRAINER = "import pathlib, sys, time\nwhile True: pathlib.Path(sys.argv[1]).touch(); time.sleep(0.05)"


def test_every_process_has_a_deadline():
    assert set(SILENCE_S) == {"server", "joiner", "trainer", "driver"} and all(SILENCE_S.values())


def test_a_stopped_trainer_is_killed_and_started_again(tmp_path):
    live = Loop(LoopConfig(), tmp_path / "loop")
    live.folder.settle(live.config)
    live._run_folder = tmp_path
    child = Child("trainer", [sys.executable, "-c", TRAINER, str(tmp_path / ALIVE)], tmp_path / "log", tmp_path / "pid",
                  silence=2.0)
    live.children = {"trainer": child}
    said = []
    live._say = said.append

    def until(true):
        deadline = time.monotonic() + 40
        while not true():
            assert time.monotonic() < deadline, said
            live._watch(time.monotonic())
            time.sleep(0.05)

    try:
        until(lambda: child.has_lived)
        first = child.pid
        os.kill(first, signal.SIGSTOP)
        until(lambda: child.hangs == 1 and child.pid not in (None, first))
        child.has_lived = False
        until(lambda: child.has_lived)  # by what the new one touches, not by what the old one left
        assert child.restarts == 1 and any("trainer gave no sign of life for 2 s" in line for line in said)
        table = processes({"processes": {"trainer": child.facts()}})
        assert list(table.columns[2].cells) == ["1 (1 hung)"]
    finally:
        child.kill()
        child.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_real_trainer_that_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(SILENCE_S, "trainer", 8.0)
    live = Loop(LoopConfig(users=80, rate=8.0, window=3.0), tmp_path / "loop")
    stopped = []

    def watch(sample):
        child = live.children["trainer"]
        if not stopped and child.has_lived and sample["trained_rows"] > 0:
            stopped.append(sample["trained_rows"])
            os.kill(child.pid, signal.SIGSTOP)
        elif stopped and child.hangs and sample["trained_rows"] > stopped[0]:
            live.stop()

    last = live.run(400, watch)
    assert last["processes"]["trainer"]["hangs"] >= 1 and last["trained_rows"] > stopped[0]

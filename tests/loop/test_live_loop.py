"""The whole loop, by its command: each process killed in turn, nothing lost, all replayed; stopped and gone on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semel.loop import Loop, LoopConfig, verify
from semel.loop.process import born

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMMAND = [sys.executable, "-m", "semel.cli", "loop", "site_rank", "--simulate", "--users", "80", "--rate", "8",
           "--window", "3", "--json"]


def processes_of(folder: Path):
    """(pid, when it was born) of the loop's processes."""
    return [tuple(path.read_text().split()) for path in (folder / "status").glob("*.pid")]


@pytest.fixture
def loop(tmp_path):
    started = []

    def start(*options, folder=tmp_path / "loop"):
        process = subprocess.Popen([*COMMAND, "--dir", str(folder), *map(str, options)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        started.append((process, folder))
        return process

    yield start
    for process, folder in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pid, birth in processes_of(folder):
            if born(int(pid)) == birth:
                os.kill(int(pid), signal.SIGKILL)


def result_of(process):
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, (process.returncode, errors[-3000:])
    assert "Traceback" not in errors
    return json.loads(out)


def test_each_process_killed_in_turn(loop, tmp_path):
    live = Loop(LoopConfig(users=80, rate=8.0, window=3.0), tmp_path / "loop", chaos=4.0)

    def enough(sample):
        back = [kill["process"] for kill in live.kills if kill["back_s"] is not None]
        if len(back) >= 4 and sample["trained_rows"] > 0:
            live.stop()

    found = live.run(400, enough)
    assert [kill["process"] for kill in found["kills"]][:4] == ["server", "joiner", "trainer", "driver"]
    assert all(facts["restarts"] >= 1 for facts in found["processes"].values())
    verified = verify(live.folder).to_json()
    assert verified["good"] and verified["events"] > 100 and verified["outcomes"] > 200
    assert verified["events_lost"] == verified["outcomes_lost"] == verified["items_lost"] == 0
    assert verified["events_repeated"] == verified["outcomes_repeated"] == 0 and verified["coverage"] == 1.0
    replayed = verified["replayed"]
    assert replayed["histories_equal"] == replayed["requests"] == verified["exposures"] and replayed["exact"]
    assert found["trained_rows"] > 0 and found["stale_reads"] == 0
    assert not processes_of(tmp_path / "loop")
    # Gone on with: the same requests are not asked again, and everything still holds.
    again = result_of(loop("--duration", 6))
    assert again["requests"] > found["requests"] and again["verification"]["good"]
    assert again["verification"]["answers"] == again["requests"]
    assert (tmp_path / "loop" / "report.html").stat().st_size > 100_000


def test_sigterm_ends_all_and_a_killed_supervisor_is_taken_over_from(loop, tmp_path):
    folder = tmp_path / "loop"
    first = loop("--no-verify")
    deadline = time.monotonic() + 300
    while len(processes_of(folder)) < 4 and time.monotonic() < deadline:
        assert first.poll() is None, first.communicate()
        time.sleep(0.2)
    first.kill()
    first.wait()
    left = processes_of(folder)
    assert len(left) == 4 and all(born(int(pid)) == birth for pid, birth in left)  # the rest goes on
    second = loop("--no-verify")
    while time.monotonic() < deadline:
        now = processes_of(folder)
        if len(now) == 4 and not set(now) & set(left):
            break
        assert second.poll() is None, second.communicate()
        time.sleep(0.2)
    assert not any(born(int(pid)) == birth for pid, birth in left)
    now = processes_of(folder)
    second.send_signal(signal.SIGTERM)
    assert result_of(second)["dir"] == str(folder)
    assert not any(born(int(pid)) == birth for pid, birth in now)

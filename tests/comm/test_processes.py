"""Processes of one job: results, failures that end all of them at once, and signals."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import process_checks
import pytest

from semel.comm import PeerLost, ProcessDied, World, join, spawn


def test_one_process_is_a_call():
    assert spawn(lambda x: (x, join()), 1, 5) == [(5, World(0, 1, 0, 1))]
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        spawn(print, 0)


def test_half_of_torchruns_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK is set but MASTER_ADDR, MASTER_PORT is not"):
        join()


def test_a_killed_process_ends_the_others_with_a_clear_message():
    started = time.monotonic()
    with pytest.raises(ProcessDied, match="the process of rank 1 of 2 was ended by SIGKILL") as told:
        spawn(process_checks.fail, 2, "SIGKILL", 1)
    assert time.monotonic() - started < 60
    assert told.value.exit_code == 128 + signal.SIGKILL


def test_what_one_process_raises_is_raised_here():
    with pytest.raises(ValueError, match="no data for rank 0") as told:
        spawn(process_checks.fail, 2, "raise", 0)
    assert "in rank 0 of 2" in told.value.__notes__[0]


@pytest.mark.slow
def test_sigterm_reaches_every_process(tmp_path):
    def tell():
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=tell, daemon=True).start()
    assert spawn(process_checks.wait_for_sigterm, 2, tmp_path) == [0, 1]
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_process_that_stops_answering_counts_as_gone():
    with pytest.raises(PeerLost, match=r"another process ended or does not answer.*last checkpoint"):
        spawn(process_checks.fail, 3, "SIGSTOP", 1, timeout_s=5)


@pytest.mark.slow
def test_a_process_that_leaves_is_told_with_its_exit_code():
    with pytest.raises(ProcessDied, match="rank 1 of 2 ended with exit code 7") as told:
        spawn(process_checks.fail, 2, "leave", 1)
    assert told.value.exit_code == 7


@pytest.mark.slow
def test_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import torch
        from semel.comm import join
        from semel.comm.transport import transport
        world = join()
        assert join() == world
        print("ranks", transport().all_gather(torch.tensor(world.rank)).wait().tolist(), world.local_world_size)
    """))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run([*torchrun, script], capture_output=True, text=True, timeout=100,
                         env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("ranks [0, 1] 2") == 2

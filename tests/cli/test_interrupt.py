"""Ctrl-C while a model trains: a checkpoint, exit code 130, and a line that says how to go on."""

import signal
import subprocess
import sys
import time

import pytest


@pytest.mark.timeout(180)
def test_ctrl_c_saves_and_resume_goes_on(semel, trained, tmp_path):
    command = [sys.executable, "-m", "semel.cli", "train", "movies_rank", "--store", str(trained.store), "--out",
               str(tmp_path), "--set", "epochs=500", "--set", "patience=500", "--set", "batch=16", "--set",
               "model.encoder.layers=1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/metrics.jsonl")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    (run,) = tmp_path.iterdir()
    assert f"resume {run}" in " ".join(stderr.split())
    assert list((run / "checkpoints").glob("step-*"))
    assert semel("train", "--resume", run, "--set", "epochs=2", "--json").exit_code == 0

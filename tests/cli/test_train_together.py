"""``semel train --nproc`` and ``torchrun -m semel.cli.train``: one run of several processes, told to stop or killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semel.training import Run

SMALL = ["--set", "model.encoder.layers=1", "--set", "batch=16", "--set", "optimizer.warmup_steps=5"]
FOREVER = [*SMALL, "--set", "epochs=500", "--set", "patience=500"]


def start(trained, out, *arguments):
    command = [sys.executable, "-m", "semel.cli", "train", "movies_rank", "--store", str(trained.store), "--out",
               str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(out, process, what="*/checkpoints/step-*"):
    deadline = time.monotonic() + 150
    while not list(out.glob(what)) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)


def end(process):
    process.kill()
    process.wait()


def ranks_of(process):
    """The processes that it started and that train, by their command line."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ctrl_c_saves_on_all_ranks_and_resume_goes_on(semel, trained, tmp_path):
    process = start(trained, tmp_path, *FOREVER, "--nproc", "2", "--json")
    try:
        wait_for(tmp_path, process, "*/metrics.jsonl")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    (run,) = tmp_path.iterdir()
    assert f"resume {run}" in " ".join(stderr.split())
    saved = list((run / "checkpoints").glob("step-*"))
    assert len(saved) >= 1
    result = semel("train", "--resume", run, "--set", "epochs=1", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["ranks"] == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.timeout(400)
def test_a_killed_rank_is_one_clear_message_within_a_minute(trained, tmp_path):
    process = start(trained, tmp_path, *FOREVER, "--nproc", "2")
    try:
        wait_for(tmp_path, process)
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert time.monotonic() - killed < 60 and process.returncode == 1
    errors = [line for line in stderr.splitlines() if "error" in line]
    assert len(errors) == 1 and "rank 1 of 2 was ended by SIGKILL" in errors[0] and "--resume" in errors[0]
    assert "Traceback" not in stderr


@pytest.mark.timeout(200)
def test_bad_input_is_one_line_also_with_several_processes(trained, tmp_path):
    process = start(trained, tmp_path, *SMALL, "--nproc", "2", "--set", "examples.validation_fraction=0.0")
    try:
        _, stderr = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 2 and stderr.count("error: ") == 1 and "validation split" in stderr, stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_gives_the_run_of_one_process(semel, trained, tmp_path):
    arguments = ["movies_rank", "--store", str(trained.store), *SMALL, "--set", "epochs=1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "-m", "semel.cli.train", *arguments, "--out", str(tmp_path / "two"),
               "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout[done.stdout.index("{"):])
    assert facts["ranks"] == 2 and "found in sys.modules" not in done.stderr
    assert semel("train", *arguments, "--out", tmp_path / "one").exit_code == 0
    (one,) = (tmp_path / "one").iterdir()
    curves = [[line["loss"] for line in run.metrics if line["kind"] == "train"]
              for run in (Run.open(one), Run.open(facts["run"]))]
    assert curves[0] == curves[1]

"""``semel train --follow``: from a trained run, over files of request rows, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from semel.examples import open_examples, rows_to_table
from semel.training import Run


def write_rows(trained, folder):
    folder.mkdir()
    rows = open_examples(trained.store, Run.open(trained.run).recipe.examples.name).rows("validation")
    half = len(rows) // 2
    for name, part in (("a", np.arange(half)), ("b", np.arange(half, len(rows)))):
        pq.write_table(rows_to_table(rows.select(part)), folder / f"{name}.parquet")
    return len(rows)


def test_a_run_goes_on_with_files_and_says_how_good_it_was_at_them(semel, trained, tmp_path):
    requests = write_rows(trained, tmp_path / "rows")
    arguments = ["train", "--from", trained.run, "--follow", tmp_path / "rows", "--out", tmp_path / "runs",
                 "--until-idle", "0"]
    result = semel(*arguments, "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    facts = json.loads(result.stdout)
    assert facts["files"] == 2 and facts["rows"] >= requests and 0.3 < facts["prequential"]["ne"] < 1.3
    assert facts["model_version"] != Run.open(trained.run).summary["model_version"]
    assert "prequential: ne" in semel(*arguments).stdout


def test_refusals(refused, trained, tmp_path):
    assert "belong to --follow" in refused("train", "movies_rank", "--until-idle", "3")
    assert "not a folder" in refused("train", "--from", trained.run, "--follow", tmp_path / "none")
    assert "trained in epochs" in refused("train", "--resume", trained.run, "--follow", tmp_path)
    assert "give one of them" in refused("train", "--resume", trained.run, "--from", trained.run, "--follow", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sigterm_saves_the_position(semel, trained, tmp_path):
    write_rows(trained, tmp_path / "rows")
    command = [sys.executable, "-m", "semel.cli", "train", "--from", str(trained.run), "--follow",
               str(tmp_path / "rows"), "--out", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/*/checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in stderr, stderr
    (run,) = (tmp_path / "runs").iterdir()
    result = semel("train", "--resume", run, "--follow", tmp_path / "rows", "--until-idle", "0", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["files"] == 2

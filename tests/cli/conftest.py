"""How the tests of the command run it, and a small store and run that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from semel.cli import app

SMALL = ["--set", "model.encoder.layers=1", "--set", "batch=16", "--set", "optimizer.warmup_steps=5"]


def run_semel(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="semel")


@pytest.fixture
def semel() -> Callable[..., Any]:
    """Runs ``semel ARGUMENTS`` in this process; the result has ``exit_code``, ``stdout`` and ``stderr``."""
    return run_semel


@pytest.fixture
def refused() -> Callable[..., str]:
    """Runs a command that must end with code 2 and one line on stderr, and returns that line."""

    def run(*arguments: Any) -> str:
        result = run_semel(*arguments)
        assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert result.stdout == ""
        assert len(errors) == 1 and result.stderr.rstrip().endswith(errors[0]), result.stderr
        assert "Traceback" not in result.stderr
        return errors[0]

    return run


@pytest.fixture(scope="session")
def small_data(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 40 users of ml-latest-small, in its layout."""
    folder = tmp_path_factory.mktemp("ml-small")
    header, *rows = (shared_data / "ml-latest-small" / "ratings.csv").read_text().splitlines()
    kept = [row for row in rows if int(row.split(",")[0]) <= 40]
    (folder / "ratings.csv").write_text("\n".join([header, *kept]) + "\n")
    films = {row.split(",")[1] for row in kept}
    header, *rows = (shared_data / "ml-latest-small" / "movies.csv").read_text().splitlines()
    (folder / "movies.csv").write_text("\n".join([header, *(r for r in rows if r.split(",")[0] in films)]) + "\n")
    return folder


@dataclass(frozen=True)
class Trained:
    """A store of ``small_data`` and a ranking run on it, made by the command."""

    store: Path
    run: Path
    ingested: str
    trained: str


@pytest.fixture(scope="session")
def trained(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("loop")
    store = folder / "store"
    ingested = run_semel("ingest", small_data, "--store", store, "--json")
    assert ingested.exit_code == 0, ingested.stderr
    result = run_semel("train", "movies_rank", "--store", store, "--out", folder / "runs", *SMALL, "--set", "epochs=2",
                       "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    (run,) = (folder / "runs").iterdir()
    return Trained(store, run, ingested.stdout, result.stdout)

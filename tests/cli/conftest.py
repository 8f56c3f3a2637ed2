"""How the tests of the command run it."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from semel.cli import app


@pytest.fixture
def semel() -> Any:
    """Runs ``semel ARGUMENTS`` in this process; the result has ``exit_code``, ``stdout`` and ``stderr``."""

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="semel")

    return run


@pytest.fixture
def refused(semel: Any) -> Any:
    """Runs a command that must end with code 2 and one line on stderr, and returns that line."""

    def run(*arguments: Any) -> str:
        result = semel(*arguments)
        assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
        lines = result.stderr.strip().splitlines()
        assert result.stdout == ""
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        return lines[0]

    return run

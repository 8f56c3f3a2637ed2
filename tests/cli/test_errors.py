"""Bad input gives one line and exit code 2; a bug keeps its traceback; Ctrl-C is quiet."""

import resource
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from semel.cli.errors import Verbs, line_of, unknown


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Verbs)

    @app.callback()
    def options(context: typer.Context, traceback: bool = False) -> None:
        context.find_root().meta["traceback"] = traceback

    @app.command("fail")
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("column 'raitng' is not there"), "error: column 'raitng' is not there"),
    (ValueError("two\n  lines"), "error: two lines"),
    (KeyError("no column 'x'"), "error: no column 'x'"),
    (FileNotFoundError(2, "No such file or directory", "gone.csv"), "error: gone.csv: No such file or directory"),
    (PermissionError(13, "Permission denied", "locked"), "error: locked: Permission denied"),
    (FileNotFoundError("no run at 'runs/x'"), "error: no run at 'runs/x'"),
])
def test_what_the_input_caused_is_one_line_and_code_2(error, line):
    result = CliRunner().invoke(app_that_raises(error), ["fail"])
    assert (result.exit_code, result.stderr.strip(), result.stdout) == (2, line, "")


def test_traceback_is_shown_on_request():
    result = CliRunner().invoke(app_that_raises(ValueError("bad")), ["--traceback", "fail"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and result.stderr.strip().endswith("error: bad")


def test_a_bug_is_not_dressed_up_as_bad_input():
    result = CliRunner().invoke(app_that_raises(ZeroDivisionError("oops")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert line_of(ZeroDivisionError()) is None


def test_interrupt_ends_with_130_and_says_nothing():
    result = CliRunner().invoke(app_that_raises(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.stdout) == (130, "")


def test_unknown_names_suggest_the_nearest():
    assert str(unknown("recipe", "ml1m_ramk", ["ml1m_rank", "ml1m_next"])) == (
        "unknown recipe 'ml1m_ramk'; did you mean 'ml1m_rank'?")
    assert "there are: a, b" in str(unknown("recipe", "zzzzzz", ["b", "a"]))


def test_unknown_verbs_and_options_are_one_line(refused):
    assert "ingest" in refused("ingset")
    assert "--json" in refused("info", "--jsn")


@pytest.mark.parametrize("statement", ["import semel", "import semel.cli"])
def test_imports_neither_torch_nor_arrow(statement):
    heavy = ("torch", "pyarrow", "numba", "rich.progress")
    code = f"{statement}; import sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("command", "most"), [(["-c", "import semel"], 0.2), (["-m", "semel.cli", "--help"], 0.5)])
def test_start_is_instant(command, most):
    def once() -> float:  # seconds of a processor: those on the clock also count whoever else is at work
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    once()  # compiles what was never imported
    assert min(once() for _ in range(5)) < most

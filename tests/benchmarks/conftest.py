"""Running benchmarks as their commands do."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``printed("history", "--users", "200")``: the one document that this benchmark prints with ``--json``. In this
    process, which has imported torch already: a new one spends as long on that as on the benchmark at such a size."""
    def run(module: str, *arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", [module, *arguments, "--json"])
        importlib.import_module(f"benchmarks.{module}").main()
        return json.loads(capsys.readouterr().out)

    return run

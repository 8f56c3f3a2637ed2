"""The real HTTP server as a process of its own: started on a free port, awaited, ended by SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_WITHIN_S = 120.0
DRAINED_WITHIN_S = 45.0


@contextmanager
def serving(run: Path, store: Path, log: Path) -> Iterator[str]:
    """``semel serve`` for the duration of the block; yields its address, its remarks go to the file ``log``.

    Raises RuntimeError, with the last lines of the log, if it does not become ready or does not end cleanly.
    """
    command = [sys.executable, "-m", "semel.cli", "serve", str(run), "--store", str(store), "--port", "0", "--json"]
    with log.open("w") as remarks:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=remarks, text=True)
        try:
            yield _address(process, log)
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(DRAINED_WITHIN_S)
            except subprocess.TimeoutExpired:
                within = f"within {DRAINED_WITHIN_S:.0f} s of SIGTERM"
                raise RuntimeError(f"the server did not end {within}; {tail(log)}") from None
            if code != 0:
                raise RuntimeError(f"the server ended with code {code}; {tail(log)}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log, for an error's text."""
    text = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]
    return f"{log} ends with: {' / '.join(text)}" if text else f"{log} is empty"


def _address(process: subprocess.Popen[str], log: Path) -> str:
    """The address that the server prints once it takes requests."""
    assert process.stdout is not None
    too_late = threading.Timer(READY_WITHIN_S, process.kill)  # ends the wait for its line, too
    too_late.start()
    try:
        line = process.stdout.readline()
    finally:
        too_late.cancel()
    if not line:
        code = process.wait()
        raise RuntimeError(f"the server ended with code {code} before it took requests; {tail(log)}")
    return json.loads(line)["url"]

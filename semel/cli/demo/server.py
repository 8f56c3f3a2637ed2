"""The real HTTP server as a process of its own: started on a free port, awaited, ended by SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_WITHIN_S = 120.0
DRAINED_WITHIN_S = 30.0


@contextmanager
def serving(run: Path, store: Path, log: Path) -> Iterator[str]:
    """``semel serve`` for the duration of the block; yields its address, its output goes to ``log``.

    Raises RuntimeError, with the last lines of the log, if it does not become ready or does not end cleanly.
    """
    port = free_port()
    command = [sys.executable, "-m", "semel.cli", "serve", str(run), "--store", str(store), "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _await_ready(process, address, log)
            yield address
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(DRAINED_WITHIN_S)
            except subprocess.TimeoutExpired:
                within = f"within {DRAINED_WITHIN_S:.0f} s of SIGTERM"
                raise RuntimeError(f"the server did not end {within}; {tail(log)}") from None
            if code not in (0, -signal.SIGTERM):
                raise RuntimeError(f"the server ended with code {code}; {tail(log)}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log, for an error's text."""
    text = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-lines:]
    return f"{log} ends with: {' / '.join(text)}" if text else f"{log} is empty"


def _await_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode} before it was ready; {tail(log)}")
        try:
            if httpx.get(f"{address}/readyz", timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {READY_WITHIN_S:.0f} s; {tail(log)}")

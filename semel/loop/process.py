"""One process of the loop: started, watched, started again when it has ended, and ended in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STARTING_S = 240.0
"""For a process to give its first sign of life: a cold start compiles and loads, on a machine that may be busy."""
STEADY_S = 20.0
"""Up for so long, a process counts as well: its next end is waited for as briefly as its first."""
LOG_BYTES = 8 << 20


@dataclass
class Child:
    """``command``'s process, in a session of its own, so that a Ctrl-C for the supervisor does not reach it. Its output
    goes to ``log``. ``silence``: seconds without a sign of life (``alive()``) after which it is killed; None: it gives
    none."""

    name: str
    command: Sequence[str]
    log: Path
    pid_file: Path
    silence: float | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = self.last_sign = self.started_at = 0.0
        self.ended_at: float | None = None
        self.last_code: int | None = None
        self.wanted = True
        self._signed = self._killed = False
        self.has_lived = False
        """Whether any of its processes gave a sign of life."""
        self.failures = 0
        self.hangs = 0
        """How often it was killed for giving no sign of life."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    @property
    def up(self) -> bool:
        return self.pid is not None

    def start(self) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            os.replace(self.log, self.log.with_suffix(".log.1"))
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(list(self.command), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                            start_new_session=True)
        self.pid_file.write_text(f"{self.process.pid} {born(self.process.pid)}")
        self.started = self.last_sign = time.monotonic()
        self.started_at = time.time()
        self.ended_at, self._signed, self._killed = None, False, False

    def watch(self, now: float) -> str | None:
        """To be called often: starts what is not up and should be. A line about what happened, or None."""
        if self.process is None:
            if self.wanted:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            patience = self.silence if self._signed else STARTING_S
            if self.silence is None or patience is None or now - self.last_sign <= patience or self._killed:
                return None
            self.kill()
            self._killed = True
            self.hangs += 1
            return f"{self.name} gave no sign of life for {patience:.0f} s and was killed"
        if self.ended_at is None:
            self.ended_at, self.last_code = now, code
            self.failures = 0 if now - self.started > STEADY_S else self.failures + 1
            if self.wanted:
                return f"{self.name} ended with {describe(code)}; it is started again ({self.log})"
        elif self.wanted and now - self.ended_at >= BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]:
            self.restarts += 1
            self.start()
        return None

    def sign(self) -> None:
        """It is alive."""
        self.last_sign, self._signed, self.has_lived = time.monotonic(), True, True

    def kill(self) -> None:
        """Without giving it a chance: what a crash is like."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def ask_to_end(self) -> None:
        self.wanted = False
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int | None:
        """Its code once it has ended; killed after ``seconds`` (then None)."""
        if self.process is None:
            return 0
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        finally:
            self.pid_file.unlink(missing_ok=True)

    def facts(self) -> dict[str, Any]:
        pid = self.pid
        return {"up": pid is not None, "restarts": self.restarts, "hangs": self.hangs, "pid": pid,
                "seconds": time.monotonic() - self.started if pid is not None else 0.0,
                "rss_mb": resident(pid) / 1e6 if pid is not None else None}


def end_leftover(pid_file: Path, seconds: float = 20.0) -> bool:
    """End the process that a killed supervisor left, if it still runs: it holds the store, and has another's parent."""
    try:
        words = pid_file.read_text().split()
        pid, started = int(words[0]), " ".join(words[1:])
    except (FileNotFoundError, ValueError, IndexError):
        return False
    try:
        if not started or born(pid) != started:
            return False
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + seconds
        while born(pid) == started and time.monotonic() < until:
            time.sleep(0.05)
        if born(pid) == started:
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        return True
    except ProcessLookupError:
        return False
    finally:
        pid_file.unlink(missing_ok=True)


def born(pid: int) -> str:
    """Tells a process from a later one of the same number; empty where there is none (or it is a zombie)."""
    if sys.platform.startswith("linux"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] == "Z" else fields[19]
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return " ".join(found.stdout.split())


def resident(pid: int) -> int:
    """Bytes that a process holds in memory, without mapped files where that can be told; 0 of none."""
    if sys.platform.startswith("linux"):
        try:
            pages = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            return 0
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return 1024 * int(found.stdout.split()[0]) if found.stdout.split() else 0


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"

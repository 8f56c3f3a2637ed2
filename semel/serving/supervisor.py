"""The parent of several server processes: starts them, starts again the one that dies, ends them in order."""

from __future__ import annotations

import json
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semel.history.server.messages import error_of
from semel.serving.logs import log_to_stderr
from semel.serving.options import ServerOptions
from semel.serving.runtime import Runtime
from semel.serving.shared_clock import SharedClock

log = logging.getLogger("semel.serving")
GRACE_SECONDS = 45.0
"""For a worker to finish what it accepted (30 s) and to have its exposures written."""
LIVED_SECONDS = 20.0
"""A child that lived this long did start: the next one is started at once."""
SLOWEST_RESTART = 10.0


class Child:
    """One process, ``writer`` or ``worker-N``. ``starts``: how often it has been started."""

    def __init__(self, name: str, settings: dict[str, Any], inherited: tuple[int, ...] = ()):
        self.name, self.starts = name, 0
        self._settings, self._inherited = settings, inherited
        self.process: subprocess.Popen[str] | None = None
        self._started_at = 0.0
        self._failed = 0

    def start(self, says: Callable[[Child, dict[str, Any] | None], None]) -> None:
        """``says`` gets what it prints, and None when it has ended, from a thread of its own."""
        self.starts += 1
        self._started_at = time.monotonic()
        # -c and not -m: a package that is imported on the way must not meet its own module a second time.
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from semel.serving.children import main; main()", self.name], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=self._inherited)
        assert self.process.stdin is not None
        try:
            # Not as arguments, which every user of the machine can read: there may be a token among them.
            self.process.stdin.write(json.dumps({**self._settings, "starts": self.starts}) + "\n")
            self.process.stdin.flush()  # and kept open: its end tells the child that its parent is gone
        except BrokenPipeError:
            pass  # it has ended already, as its thread will notice
        threading.Thread(target=self._listen, args=(self.process, says), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str], says: Callable[[Child, dict[str, Any] | None], None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                says(self, message)
            else:
                sys.stderr.write(line)  # some library's
        process.wait()
        says(self, None)

    def restart_in(self) -> float:
        """Seconds until it should be started again: longer each time that it ends soon after its start."""
        self._failed = 0 if time.monotonic() - self._started_at > LIVED_SECONDS else self._failed + 1
        return min(0.1 * (2**self._failed - 1), SLOWEST_RESTART)

    def end(self, seconds: float) -> None:
        """Ask it to end, and end it if it does not."""
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                log.error({"event": "killed", "child": self.name, "after_seconds": seconds})
                process.kill()
                process.wait()
        if process.stdin is not None:
            process.stdin.close()


def supervise(options: ServerOptions, workers: int, listener: socket.socket, started: Callable[[], None]) -> None:
    """Run one writer and ``workers`` workers, which share ``listener``, until SIGTERM or SIGINT. ``started`` is called
    when all answer. Raises what stopped a child from starting the first time; afterwards a child that ends is logged
    and started again."""
    log_to_stderr(options.log_level)
    runtime = Runtime.make()
    store = Path(options.store)
    settings = {"options": options.to_json(), "runtime": str(runtime.path)}
    writer = Child("writer", settings)
    fleet = [Child(f"worker-{number}", {**settings, "number": number, "listener": listener.fileno()},
                   (listener.fileno(),)) for number in range(workers)]
    said: queue.SimpleQueue[tuple[Child | None, dict[str, Any] | None]] = queue.SimpleQueue()

    def says(child: Child, message: dict[str, Any] | None) -> None:
        said.put((child, message))

    try:
        with _signals(lambda: said.put((None, None))):
            SharedClock.create(runtime.clock, workers + 1)
            writer.start(says)
            if _ready([writer], said):
                runtime.announce(store)
                for child in fleet:
                    child.start(says)
                if _ready(fleet, said):
                    started()
                    _keep([writer, *fleet], said, says)
    finally:
        threads = [threading.Thread(target=child.end, args=(GRACE_SECONDS,)) for child in fleet]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.end(GRACE_SECONDS)  # last: the workers' exposures go through it
        runtime.remove(store)


def _ready(children: list[Child], said: queue.SimpleQueue) -> bool:
    """Wait until all of them are; False when the server is told to end. Raises what one of them says is wrong."""
    waiting = set(children)
    while waiting:
        child, message = said.get()
        if child is None:
            return False
        if message is None:
            raise OSError(f"the server's {child.name} ended before it was ready; its messages are above")
        if "error" in message:
            raise error_of(message)
        if "ready" in message:
            waiting.discard(child)
    return True


def _keep(children: list[Child], said: queue.SimpleQueue,
          says: Callable[[Child, dict[str, Any] | None], None]) -> None:
    """Start again whoever ends, until the server is told to end."""
    due: dict[Child, float] = {}
    while True:
        now = time.monotonic()
        for child in [child for child, at in due.items() if at <= now]:
            del due[child]
            child.start(says)
        try:
            child, message = said.get(timeout=max(min(due.values()) - now, 0) if due else None)
        except queue.Empty:
            continue
        if child is None:
            return
        if message is None:
            wait = child.restart_in()
            code = child.process.returncode if child.process is not None else None
            log.error({"event": "ended", "child": child.name, "code": code, "restart_in_seconds": round(wait, 1)})
            due[child] = time.monotonic() + wait
        elif "error" in message:
            log.error({"event": "cannot start", "child": child.name, "error": str(error_of(message))})
        elif "ready" in message and child.starts > 1:
            log.warning({"event": "started again", "child": child.name, "starts": child.starts})


@contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: end()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

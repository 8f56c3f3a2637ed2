"""A server's child processes: ``python -m semel.serving.children writer`` or ``worker-N``, with settings on standard
input.

A child says on standard output when it is ready, or what is wrong; it ends when it is told to, and also when its
standard input ends, which is how it learns that its parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from semel.history.server.listening import MessageServer
from semel.history.server.messages import describe_error
from semel.serving.options import ServerOptions
from semel.serving.runtime import Runtime, ask_each

ORPHANED_SECONDS = 40.0
"""How long a writer whose parent is gone waits for the workers, which finish what they accepted (30 s) and log it."""


def main() -> None:
    name, settings = sys.argv[1], json.loads(sys.stdin.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends them in order
    options, runtime = ServerOptions(**settings["options"]), Runtime(Path(settings["runtime"]))
    orphaned = threading.Event()
    try:
        if name == "writer":
            write(options, runtime, orphaned)
        else:
            work(options, runtime, orphaned, settings)
    except Exception as error:
        print(json.dumps(describe_error(error)), flush=True)
        raise SystemExit(1) from (None if isinstance(error, (OSError, ValueError)) else error)


def _ready() -> None:
    print(json.dumps({"ready": os.getpid()}), flush=True)


def _watch_parent(orphaned: threading.Event, then: Callable[[], None]) -> None:
    def wait() -> None:
        while sys.stdin.read(1 << 16):
            pass
        orphaned.set()
        then()

    threading.Thread(target=wait, name="semel-parent", daemon=True).start()


def write(options: ServerOptions, runtime: Runtime, orphaned: threading.Event) -> None:
    """The writer: the only process that has the store open for appending."""
    from semel.serving.desk import MAX_BYTES, Desk
    from semel.serving.logs import log_to_stderr
    from semel.serving.shared_clock import SharedClock
    from semel.serving.stores import opened_writers

    log_to_stderr(options.log_level)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    clock = SharedClock(runtime.clock, 0)

    def everywhere(verb: str) -> bool:
        return all([answer["done"] for _, answer in ask_each(runtime.workers(), {"do": verb}, timeout=90)])

    with opened_writers(Path(options.store), clock.now, options.compact_rows) as writers, MessageServer(
            runtime.writer, Desk(writers, everywhere).answer, max_bytes=MAX_BYTES) as desk:
        _ready()
        _watch_parent(orphaned, ended.set)
        ended.wait()
        if orphaned.is_set():
            deadline = time.monotonic() + ORPHANED_SECONDS
            while (desk.connections or runtime.alive()) and time.monotonic() < deadline:
                time.sleep(0.1)
    if orphaned.is_set():
        runtime.remove(Path(options.store))


def work(options: ServerOptions, runtime: Runtime, orphaned: threading.Event, settings: dict[str, Any]) -> None:
    """A worker: answers requests from a view of the store that it shares with its siblings."""
    from semel.serving.process import serve_worker

    number = settings["number"]
    listener = socket.socket(fileno=settings["listener"])
    _watch_parent(orphaned, partial(os.kill, os.getpid(), signal.SIGTERM))
    serve_worker(options, runtime, number, settings["starts"], listener, _ready)


if __name__ == "__main__":
    main()

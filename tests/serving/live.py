"""A real server in a process of its own, for tests: started, found, and always ended."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

START = """
import json, sys
from semel.serving import run_server
run, store, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
run_server(run, store, ready=lambda url: print(url, flush=True), **options)
"""


class Server:
    """``url``; ``stop()`` sends SIGTERM and gives the exit code; ``kill()`` gives it no chance."""

    def __init__(self, run: Path, store: Path, errors: Path, **options):
        import json

        self.errors = errors
        # A latency target that a busy machine does not miss: what refuses is tested where it is.
        options = {"port": 0, "threads": 1, "latency_target": 60.0, **options}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(errors, "wb") as stderr:
            self.process = subprocess.Popen([sys.executable, "-c", START, str(run), str(store), json.dumps(options)],
                                            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            self.process.wait(30)
            raise RuntimeError(f"the server did not start: {errors.read_text()}")

    def stop(self, timeout: float = 40) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self.process.stdout.close()


@contextmanager
def serving(run, store, errors, **options):
    server = Server(run, store, errors, **options)
    try:
        yield server
    finally:
        server.kill()

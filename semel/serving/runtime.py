"""Where the processes of one server meet: a folder with their sockets and clock, which the store's folder names."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semel.history.server.asking import MessageClient, Unanswered

ANNOUNCEMENT = "server.json"
"""In the store's folder: which server writes it, for ``semel erase``."""


class Runtime:
    """The folder ``path``, for this user only: ``writer.sock``, ``worker-N.sock``, ``clock``. Short, since the name of
    a socket has about 100 bytes, which a store's path may not leave."""

    def __init__(self, path: Path):
        self.path = path
        self.writer, self.clock = path / "writer.sock", path / "clock"

    @classmethod
    def make(cls) -> Runtime:
        return cls(Path(tempfile.mkdtemp(prefix="semel-")))  # mode 700

    def worker(self, number: int) -> Path:
        return self.path / f"worker-{number}.sock"

    def workers(self) -> list[Path]:
        """The sockets of workers that were started; one that is being restarted may not answer."""
        return sorted(self.path.glob("worker-*.sock"))

    def alive(self) -> bool:
        """Whether a worker is there: one closes its socket when all that it accepted is done and written."""
        for path in self.workers():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    return True
        return False

    def announce(self, store: Path) -> None:
        """Let ``semel erase`` find the server of ``store``."""
        temporary = store / f".{ANNOUNCEMENT}.{os.getpid()}"
        temporary.write_text(json.dumps({"socket": str(self.writer), "pid": os.getpid()}))
        os.replace(temporary, store / ANNOUNCEMENT)

    def remove(self, store: Path | None = None) -> None:
        if store is not None and writer_of(store) == self.writer:
            (store / ANNOUNCEMENT).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def writer_of(store: Path) -> Path | None:
    """The socket of the server that writes ``store``, as it was announced; whether one answers there is not known."""
    try:
        return Path(json.loads((store / ANNOUNCEMENT).read_text())["socket"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ask_each(sockets: list[Path], text: dict[str, Any], timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(process name, answer) of those that answer; one that is not there is left out, one that fails raises."""
    for socket_path in sockets:
        client = MessageClient(socket_path, timeout, reconnect=0.0)
        try:
            yield socket_path.stem, client.ask(text)
        except Unanswered as error:
            if error.perhaps:
                raise
        finally:
            client.close()

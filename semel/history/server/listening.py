"""``MessageServer``: answers the messages that other processes of this machine send to a local socket."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semel.history.errors import StoreError, StoreLocked
from semel.history.server.messages import PROTOCOL, describe_error, receive, send

MAX_BYTES = 64 << 20
MESSAGE_SECONDS = 30.0  # a client that has begun a message and stops is given up after this

Answer = Callable[[dict[str, Any], bytearray], dict[str, Any]]


class MessageServer:
    """Gives each message at the Unix socket ``socket_path`` to ``answer(object, body)`` and sends back the object that
    it returns, or a description of what it raises. A thread for each connection; a client that breaks off, sends
    rubbish or is killed harms nobody. The socket file is for the user that the server runs as.

    ``hello``: what a client is told first. ``max_bytes``: the largest body. Usable as a context manager.
    """

    def __init__(self, socket_path: str | os.PathLike[str], answer: Answer, hello: Mapping[str, Any] | None = None,
                 max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes!r}")
        self.socket_path, self.max_bytes = Path(socket_path), max_bytes
        self._answer, self._hello = answer, dict(hello or {})
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> MessageServer:
        """Answer from now on. Raises StoreLocked where another server answers at the socket, FileExistsError
        where something else has its name, ValueError for a path that is too long for a socket."""
        if self._listener is not None:
            raise StoreError(f"the server at {self.socket_path} has been started already")
        self._listener = _listen(self.socket_path)
        self._inode = os.stat(self.socket_path).st_ino
        self._wake = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="message-server", daemon=True)
        self._accepting.start()
        return self

    def close(self) -> None:
        """Stop: messages that have arrived are answered, then connections are closed."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        assert self._wake is not None and self._accepting is not None
        self._wake[1].send(b"x")
        self._accepting.join()
        try:
            if os.stat(self.socket_path).st_ino == self._inode:
                self.socket_path.unlink()
        except FileNotFoundError:
            pass
        for end in (listener, *self._wake):
            end.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RD)  # a thread that waits for its client wakes, an answer is still sent
            except OSError:  # closed by its client
                pass
        for thread in connections.values():
            thread.join()

    @property
    def connections(self) -> int:
        """Clients that are connected now."""
        return len(self._connections)

    def __enter__(self) -> MessageServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        listener, wake = self._listener, self._wake
        assert listener is not None and wake is not None
        with selectors.DefaultSelector() as both, selectors.DefaultSelector() as only_wake:
            for selector in (both, only_wake):
                selector.register(wake[0], selectors.EVENT_READ)
            both.register(listener, selectors.EVENT_READ)
            self._accept_until_woken(listener, both, only_wake)

    def _accept_until_woken(self, listener: socket.socket, both: selectors.BaseSelector,
                            only_wake: selectors.BaseSelector) -> None:
        while True:
            if any(key.fileobj is not listener for key, _ in both.select()):
                return
            try:
                connection, _ = listener.accept()
            except OSError as error:  # the client is gone again, or there are too many open files
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    only_wake.select(0.1)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="message-connection", daemon=True)
            with self._lock:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """All messages of one client."""
        try:
            send(connection, {"protocol": PROTOCOL, "max_bytes": self.max_bytes, **self._hello})
            while True:
                connection.settimeout(None)
                try:
                    message = receive(connection, self.max_bytes, MESSAGE_SECONDS)
                except ValueError as error:  # where the next message starts is unknown now
                    send(connection, describe_error(error))
                    return
                if message is None:
                    return
                send(connection, self._answered(*message))
        except (OSError, EOFError):  # the client is gone; what it had sent whole is done, nothing else
            pass
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _answered(self, request: dict[str, Any], body: bytearray) -> dict[str, Any]:
        try:
            return self._answer(request, body)
        except Exception as error:
            return describe_error(error)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            _bind(listener, path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            _bind(listener, path)
        path.chmod(0o600)
        listener.listen(128)
        return listener
    except BaseException:
        listener.close()
        raise


def _bind(listener: socket.socket, path: Path) -> None:
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno is None:  # Python's own check of the length
            raise ValueError(f"{path} is too long for a socket's name (about 100 bytes); choose another") from None
        if error.errno == errno.EADDRINUSE:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise StoreLocked(f"another writer server answers at {path}; append through it, or choose another path")

"""``WriterClient``: append to a store through its writer server."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from semel.history.errors import StoreError, WriterUnavailable
from semel.history.schema import as_table
from semel.history.server.messages import PROTOCOL, error_of, receive, send

_ANSWER_BYTES = 0  # an answer is a JSON object alone


class WriterClient:
    """Appends through the ``WriterServer`` at ``socket_path``. Connects when first used, and again after the server
    was restarted or the process forked. One append at a time: threads that share a client take turns; give each its
    own to let them share a commit. ``timeout``: seconds that one append may take, reconnecting included."""

    def __init__(self, socket_path: str | os.PathLike[str], timeout: float = 30.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
        self.socket_path, self.timeout = Path(socket_path), timeout
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process = os.getpid()
        self._max_bytes = 0

    def append(self, data: Any, token: str | None = None) -> int:
        """As ``HistoryStore.append``, with the same errors; the version, on disk when this returns.

        Where the server goes away before it answers, an append with a token is sent again (it counts once), one
        without is not: WriterUnavailable then says that nobody knows whether it is there. WriterUnavailable also
        where no server answers in time; ValueError for an append that is larger than the server takes.
        """
        if token is not None and not isinstance(token, str):
            raise ValueError(f"token must be a string, got {token!r}")
        table = as_table(data)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body = sink.getvalue()
        with self._lock:
            if self._process != os.getpid():  # the connection is the parent's
                self._disconnect()
                self._process = os.getpid()
            return self._append(body, token, time.monotonic() + self.timeout)

    def _append(self, body: Any, token: str | None, deadline: float) -> int:
        perhaps = False  # whether an earlier attempt may have been committed without an answer
        wait = 0.01
        while True:
            sent = False
            try:
                connection = self._connected(deadline)
                if len(body) > self._max_bytes:
                    raise ValueError(f"an append of {len(body)} bytes is larger than the {self._max_bytes} that the "
                                     f"server at {self.socket_path} takes; append fewer events at a time")
                connection.settimeout(_left(deadline))
                send(connection, {"token": token}, body)
                sent = True
                answer = receive(connection, _ANSWER_BYTES)
                if answer is None:
                    raise ConnectionError("the connection was closed before an answer")
                break
            except StoreError:
                self._disconnect()
                raise
            except OSError as error:
                self._disconnect()
                perhaps |= sent
                if (sent and token is None) or time.monotonic() + wait >= deadline:
                    raise self._unavailable(error, token, perhaps) from error
                time.sleep(wait)
                wait = min(2 * wait, 0.5)
            except BaseException:
                self._disconnect()  # an answer may still come, which is not that of the next append
                raise
        if "error" in answer[0]:
            raise error_of(answer[0])
        return int(answer[0]["version"])

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def __enter__(self) -> WriterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _unavailable(self, error: OSError, token: str | None, perhaps: bool) -> WriterUnavailable:
        what = "nothing was appended"
        if perhaps:
            what = "whether the events are in the store is unknown: " + (
                "append them again with the same token" if token is not None else "a token makes repeating safe")
        return WriterUnavailable(f"no answer from a writer server at {self.socket_path} ({error}); {what}")

    def _connected(self, deadline: float) -> socket.socket:
        """A connection whose server has said what it is. Raises OSError where none answers, StoreError for one of
        another protocol."""
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(_left(deadline))
                connection.connect(str(self.socket_path))
                hello = receive(connection, _ANSWER_BYTES)
                if hello is None:
                    raise ConnectionError("the connection was closed at once")
                if hello[0].get("protocol") != PROTOCOL:
                    raise StoreError(f"the server at {self.socket_path} speaks protocol {hello[0].get('protocol')!r}, "
                                     f"this Semel {PROTOCOL}")
                self._max_bytes = int(hello[0]["max_bytes"])
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)

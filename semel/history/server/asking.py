"""``MessageClient``: asks a ``MessageServer`` of this machine."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from semel.history.errors import StoreError
from semel.history.server.messages import PROTOCOL, error_of, receive, send

_ANSWER_BYTES = 0  # an answer is a JSON object alone


class Unanswered(ConnectionError):
    """No answer came. ``perhaps``: the message may have arrived, and what it asks for may have been done."""

    def __init__(self, message: str, perhaps: bool):
        super().__init__(message)
        self.perhaps = perhaps


class MessageClient:
    """Asks the server at ``socket_path``. Connects when first used, and again after the server was restarted or the
    process forked. One question at a time: threads that share a client take turns. ``timeout``: seconds that an answer
    may take, reconnecting included; ``reconnect``: seconds of them that are spent on finding a server (all if None)."""

    def __init__(self, socket_path: str | os.PathLike[str], timeout: float = 30.0,
                 reconnect: float | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
        self.socket_path, self.timeout = Path(socket_path), timeout
        self._reconnect = reconnect
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process = os.getpid()
        self._max_bytes = 0

    def ask(self, text: dict[str, Any], body: Any = b"", again: bool = False) -> dict[str, Any]:
        """The answer to one message. ``again``: it may be sent once more where the server went away before it answered.
        Raises what the server describes, Unanswered, ValueError for a body that is larger than the server takes."""
        with self._lock:
            if self._process != os.getpid():  # the connection is the parent's
                self._disconnect()
                self._process = os.getpid()
            answer = self._ask(text, body, again, time.monotonic())
        if "error" in answer:
            raise error_of(answer)
        return answer

    def _ask(self, text: dict[str, Any], body: Any, again: bool, started: float) -> dict[str, Any]:
        perhaps = False  # whether an earlier attempt may have arrived
        deadline = started + self.timeout
        give_up = deadline if self._reconnect is None else started + self._reconnect
        wait = 0.01
        while True:
            sent = False
            try:
                connection = self._connected(deadline)
                if len(body) > self._max_bytes:
                    raise ValueError(f"an append of {len(body)} bytes is larger than the {self._max_bytes} that the "
                                     f"server at {self.socket_path} takes; append fewer events at a time")
                connection.settimeout(_left(deadline))
                send(connection, text, body)
                sent = True
                answer = receive(connection, _ANSWER_BYTES)
                if answer is None:
                    raise ConnectionError("the connection was closed before an answer")
                return answer[0]
            except StoreError:
                self._disconnect()
                raise
            except OSError as error:
                self._disconnect()
                perhaps |= sent
                if (sent and not again) or time.monotonic() + wait >= give_up:
                    raise Unanswered(str(error), perhaps) from error
                time.sleep(wait)
                wait = min(2 * wait, 0.5)
            except BaseException:
                self._disconnect()  # an answer may still come, which is not that of the next message
                raise

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def __enter__(self) -> MessageClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

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

"""Messages between a writer server and its clients: a header with two lengths, a JSON object, any bytes.

``docs/formats/history.md`` gives the bytes. Errors travel as the name of their class and their message, and come out
as the same exception type.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from semel.history import errors

PROTOCOL = 1
_HEADER = struct.Struct("<4sIQ")  # "SMSG", bytes of the JSON, bytes of the body
_MAGIC = b"SMSG"
_TEXT_BYTES = 1 << 20  # a token, a version or an error take less

_TYPES: dict[str, type[Exception]] = {  # what keeps its type on the way; others become their nearest base among these
    kind.__name__: kind for kind in (
        ValueError, KeyError, TypeError, OSError, MemoryError, errors.StoreError, errors.StoreNotFound,
        errors.StoreExists, errors.StoreLocked, errors.WriterFenced, errors.WriterUnavailable,
        errors.PositionMoved, errors.VersionNotVisible, errors.NotCompacted, errors.CorruptFile)
}


def send(connection: socket.socket, text: dict[str, Any], body: Any = b"") -> None:
    """One message. When this raises, the other side has not got all of it."""
    encoded = json.dumps(text).encode()
    body = memoryview(body).cast("B")
    connection.sendall(_HEADER.pack(_MAGIC, len(encoded), len(body)) + encoded)
    if len(body):
        connection.sendall(body)


def receive(connection: socket.socket, most: int,
            within: float | None = None) -> tuple[dict[str, Any], bytearray] | None:
    """The next message, or None where the other side closed the connection between two.

    ``most``: bytes that a body may have. ``within``: seconds that the rest of a message may take once it has begun.
    Raises ConnectionError where it ends in the middle, TimeoutError, ValueError for bytes that are no message or one
    that is too large (the connection is of no use then)."""
    header = _exactly(connection, _HEADER.size, first=True, within=within)
    if not header:
        return None
    magic, text_bytes, body_bytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ValueError(f"this is no message of a writer server or client: it starts with {magic!r}")
    if text_bytes > _TEXT_BYTES or body_bytes > most:
        raise ValueError(f"a message of {text_bytes} + {body_bytes} bytes is larger than {_TEXT_BYTES} + {most}; "
                         "append fewer events at a time")
    text = json.loads(_exactly(connection, text_bytes))
    if not isinstance(text, dict):
        raise ValueError(f"a message must be a JSON object, got {type(text).__name__}")
    return text, _exactly(connection, body_bytes)


def _exactly(connection: socket.socket, size: int, first: bool = False, within: float | None = None) -> bytearray:
    """``size`` bytes; none at all where ``first`` and the connection was closed before them."""
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if not count:
            if first and not got:
                return bytearray()
            raise ConnectionError(f"the connection was closed in the middle of a message ({got} of {size} bytes)")
        if first and not got:
            connection.settimeout(within)
        got += count
    return data


def describe_error(error: BaseException) -> dict[str, Any]:
    """What ``error_of`` turns into an exception again: of the same type, or the nearest one that both sides know."""
    name = next((cls.__name__ for cls in type(error).__mro__ if _TYPES.get(cls.__name__) is cls), "")
    message = str(error.args[0]) if name == "KeyError" and error.args else str(error)
    if not name:
        name, message = "StoreError", f"{type(error).__name__}: {message}"
    described: dict[str, Any] = {"error": name, "message": message}
    if name == "OSError" and isinstance(error, OSError) and error.errno is not None:
        described |= {"errno": error.errno, "message": error.strerror or message}
    return described


def error_of(described: dict[str, Any]) -> Exception:
    cls, message = _TYPES.get(described["error"], errors.StoreError), described.get("message", "")
    if cls is OSError and "errno" in described:
        return OSError(described["errno"], message)
    return cls(message)

"""Reading the bodies of requests, and of those that are refused: as much of them as is good for both sides."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect

from semel.serving.checks import show
from semel.serving.errors import InvalidRequest

BODY_SECONDS = 30.0
DRAIN_BYTES, DRAIN_SECONDS = 16 << 20, 2.0


class BodyTooLarge(ValueError):
    """The request's body is longer than the limit."""


class BodyTooSlow(TimeoutError):
    """The request's body did not arrive in time."""


async def read_body(scope: Any, receive: Any, limit: int, seconds: float = BODY_SECONDS) -> bytes:
    """The body, which must be JSON by its content type: a web page cannot send that elsewhere without being asked.

    Raises InvalidRequest for another type, BodyTooLarge beyond ``limit`` bytes, declared or not (the rest is drained),
    BodyTooSlow where it takes longer than ``seconds``, ClientDisconnect."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("content-type", f"must be application/json, got {show(kind)}")
    too_large = f"the body has more than {limit:,} bytes; send it in parts"
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        await drain(scope, receive)
        raise BodyTooLarge(too_large)
    chunks, size, more = [], 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size > limit:  # chunked bodies do not declare their length
                    break
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {seconds:g} s ({size:,} bytes of it did)") from None
    if size > limit:
        if more:
            await drain(scope, receive)
        raise BodyTooLarge(too_large)
    return b"".join(chunks)


async def drain(scope: Any, receive: Any, most: int = DRAIN_BYTES, seconds: float = DRAIN_SECONDS) -> None:
    """Take the rest of a body that nobody wants: a connection that is closed with unread bytes is reset, and the answer
    may be lost with it (RFC 9112, section 9.6). At most ``most`` bytes, for at most ``seconds``. One who asks first
    (``Expect: 100-continue``) has sent nothing yet."""
    if any(name == b"expect" for name, _ in scope["headers"]):
        return
    try:
        async with asyncio.timeout(seconds):
            while most > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                most -= len(message.get("body", b""))
    except TimeoutError:
        pass

"""Who may talk to the server: the token, the Host header, and which addresses may be bound without a token."""

from __future__ import annotations

import hmac
import ipaddress
import json
from typing import Any

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Answered without a token: they tell nothing about users, items or traffic, and probes cannot send headers easily."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, token: str | None) -> None:
    """Raises ValueError where a server would be open to the network without a token, or the token is unusable."""
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token):
        raise ValueError("--token must be at least 8 printable ASCII characters without spaces")
    if token is None and not is_loopback(host):
        raise ValueError(f"binding to {host} would let anyone on the network read histories and write events; "
                         "give a --token, or bind to 127.0.0.1")


class Gate:
    """ASGI middleware. With a token: all but ``OPEN_PATHS`` needs ``Authorization: Bearer TOKEN``. Without one: the
    Host header must name this machine, so that a web page cannot reach the server under a name of its own (DNS
    rebinding)."""

    def __init__(self, app: Any, token: str | None = None):
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.rsplit(":", 1)[0]
            if host and not is_loopback(name):
                await _refuse(scope, receive, send, 403, "host",
                              "a server without a token answers only to localhost and 127.0.0.1")
                return
        elif scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _refuse(scope, receive, send, 401, "authorization",
                              "a valid token is needed: 'Authorization: Bearer TOKEN'",
                              (b"www-authenticate", b"Bearer"))
                return
        await self._app(scope, receive, send)


async def _refuse(scope: Any, receive: Any, send: Any, status: int, field: str, message: str,
                  *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": {"field": field, "message": message}}).encode()
    from semel.serving.bodies import drain

    # The request's body is not wanted: some of it is thrown away, and the connection cannot be used again.
    await drain(scope, receive)
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
        *headers]})
    await send({"type": "http.response.body", "body": body})

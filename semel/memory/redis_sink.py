"""A log of deltas in Redis or Valkey: one hash a log, a field a record, which is set once and never changed.

``redis://HOST:PORT/DB/NAME`` (``rediss``, ``valkey``, ``valkeys``): NAME is the hash, "deltas" by default. HSETNX
creates a record whole or says that it is there; so the log has the promises of a folder, as long as the server keeps
what it has acknowledged (``appendonly yes``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
TIMEOUT_S = 5.0


class RedisSink:
    """Raises OSError where the server does not answer within ``TIMEOUT_S`` seconds."""

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ModuleNotFoundError as error:
            raise ValueError(f"{url}: Redis and Valkey need redis-py: pip install 'semel[redis]' ({error})") from None
        self.url = url
        parts = urlsplit(url)
        database, _, name = parts.path.strip("/").partition("/")
        if not database.isdigit():
            database, name = "0", "/".join(part for part in (database, name) if part)
        self.name = name or "deltas"
        self._errors = redis.RedisError
        try:
            self._server: Any = redis.Redis.from_url(
                f"{SCHEMES[parts.scheme]}://{parts.netloc}/{database}" + (f"?{parts.query}" if parts.query else ""),
                socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None

    def create(self, name: str, content: bytes) -> None:
        if not self._ask(lambda: self._server.hsetnx(self.name, name, content)):
            raise FileExistsError(f"{self.url}/{name} exists already")

    def read(self, name: str) -> bytes:
        content = self._ask(lambda: self._server.hget(self.name, name))
        if content is None:
            raise FileNotFoundError(f"{self.url}/{name} does not exist")
        return content

    def names(self, prefix: str = "") -> list[str]:
        found = [name.decode() for name in self._ask(lambda: self._server.hkeys(self.name))]
        return sorted(name for name in found if name.startswith(prefix))

    def remove(self, name: str) -> None:
        self._ask(lambda: self._server.hdel(self.name, name))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._errors as error:
            raise OSError(f"{self.url}: {error}") from error

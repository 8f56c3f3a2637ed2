"""A log of deltas in NATS JetStream: one stream a log, a message a record, which is published once.

``nats://HOST:PORT/NAME`` (or ``tls://``): NAME is the stream, "deltas" by default, made with file storage where there
is none. A message is refused where its subject has one already (``Nats-Expected-Last-Subject-Sequence: 0``), so a
record is created whole or is said to be there. What is larger than the server's messages may be goes ahead of its
record, in parts; without the record they are nothing. The server keeps what it has acknowledged through a crash of its
machine only with ``sync_interval: always``.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

T = TypeVar("T")
SCHEMES = ("nats", "tls")
TIMEOUT_S = 5.0
_ROOM = 4096
"""Bytes of a message that are left for its headers."""
_EXISTS = 10071
"""The server's code for a message whose subject is not as was expected."""


class NatsSink:
    """Raises OSError where the server does not answer within ``TIMEOUT_S`` seconds."""

    def __init__(self, url: str) -> None:
        try:
            import nats  # noqa: F401
        except ModuleNotFoundError as error:
            raise ValueError(f"{url}: NATS needs nats-py: pip install 'semel[nats]' ({error})") from None
        self.url = url
        parts = urlsplit(url)
        self.name = parts.path.strip("/") or "deltas"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"{url}: {self.name!r} cannot be the name of a stream; use letters, digits, - and _")
        if not parts.hostname:
            raise ValueError(f"{url}: names no host; write {parts.scheme}://HOST:PORT/{self.name}")
        self._server = f"{parts.scheme}://{parts.netloc}"
        self._client: Any = None
        self._stream: Any = None
        self._asking = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="semel-nats", daemon=True).start()

    def create(self, name: str, content: bytes) -> None:
        if not self._ask(self._create(name, content)):
            raise FileExistsError(f"{self.url}/{name} exists already")

    def read(self, name: str) -> bytes:
        content = self._ask(self._read(name))
        if content is None:
            raise FileNotFoundError(f"{self.url}/{name} does not exist")
        return content

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._ask(self._names()) if name.startswith(prefix))

    def remove(self, name: str) -> None:
        self._ask(self._remove(name))

    def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        from nats.errors import Error

        with self._asking:
            try:
                return asyncio.run_coroutine_threadsafe(self._connected(call), self._loop).result()
            except (Error, OSError, TimeoutError) as error:
                raise OSError(f"{self.url}: {str(error) or f'no answer within {TIMEOUT_S:g} s'}") from error

    async def _connected(self, call: Coroutine[Any, Any, T]) -> T:
        import nats
        from nats.js.errors import NotFoundError

        async def quiet(*_: Any) -> None:
            """Who asks is told; the client goes on trying."""

        try:
            if self._client is None:
                self._client = await asyncio.wait_for(nats.connect(
                    self._server, connect_timeout=TIMEOUT_S, max_reconnect_attempts=-1, reconnect_time_wait=0.2,
                    error_cb=quiet), TIMEOUT_S)
            if self._stream is None:
                stream = self._client.jetstream(timeout=TIMEOUT_S)
                try:
                    await stream.stream_info(self.name)
                except NotFoundError:
                    await stream.add_stream(name=self.name, subjects=[f"{self.name}.>"], max_msgs_per_subject=1)
                self._stream = stream
        except BaseException:
            call.close()
            raise
        return await call

    def _subject(self, kind: str, name: str) -> str:
        return f"{self.name}.{kind}.{quote(name, safe='').replace('.', '%2E')}"

    async def _create(self, name: str, content: bytes) -> bool:
        from nats.js.errors import APIError

        most = max(1, self._client.max_payload - _ROOM)
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        parts = ""
        if len(content) > most:
            parts = f"{self._subject('part', name)}.{uuid.uuid4().hex}"
            starts = range(0, len(content), most)
            for number, start in enumerate(starts):
                await self._stream.publish(f"{parts}.{number}", content[start : start + most])
            content = b""
            headers["Semel-Parts"] = json.dumps([parts, len(starts)])
        try:
            await self._stream.publish(self._subject("record", name), content, headers=headers)
        except APIError as error:
            if error.err_code != _EXISTS:
                raise
            if parts:
                await self._stream.purge_stream(self.name, subject=f"{parts}.*")
            return False
        return True

    async def _read(self, name: str) -> bytes | None:
        from nats.js.errors import NotFoundError

        try:
            record = await self._stream.get_last_msg(self.name, self._subject("record", name))
            parts = (record.headers or {}).get("Semel-Parts")
            if parts is None:
                return record.data or b""
            subject, count = json.loads(parts)
            return b"".join([(await self._stream.get_last_msg(self.name, f"{subject}.{number}")).data
                             for number in range(count)])
        except NotFoundError:
            return None

    async def _names(self) -> list[str]:
        info = await self._stream.stream_info(self.name, subjects_filter=f"{self.name}.record.*")
        return [unquote(subject.rsplit(".", 1)[1]) for subject in info.state.subjects or ()]

    async def _remove(self, name: str) -> None:
        await self._stream.purge_stream(self.name, subject=self._subject("record", name))
        await self._stream.purge_stream(self.name, subject=f"{self._subject('part', name)}.>")

"""How long a connection may keep the server waiting, and what becomes of one that is closed on one side."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with an end to its patience, in seconds: ``head_seconds`` for the head of a request, from the
    connection or from its first byte on (a client that sends a byte now and then, slowloris, holds a socket this long);
    ``body_seconds`` for the rest (the application answers 408 before, this is for those that do not even take that);
    ``write_seconds`` for taking the answer once the connection is to be closed.

    A client that has sent its request and closed its side (half closed) still gets the answer.
    """

    head_seconds = 15.0
    body_seconds = 40.0
    write_seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._patience: asyncio.TimerHandle | None = None
        self._wait(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.transport.is_closing():
            self._wait(self.write_seconds)
        elif self._at_work():
            self._wait(None)
        elif self._reading_body():
            if self.cycle is not before:
                self._wait(self.body_seconds)  # from its head on, however its parts come
        elif self._patience is None:
            self._wait(self.head_seconds)  # the first bytes of another request

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, to be answered."""
        if not self._at_work():
            return False
        self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        self._wait(None)
        before = self.cycle
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait(self.write_seconds)
        elif self.cycle is not before and self._reading_body():  # that of a request which was sent along
            self._wait(self.body_seconds)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait(self.write_seconds)

    def _reading_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    def _at_work(self) -> bool:
        """Whether a whole request waits for its answer."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _wait(self, seconds: float | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if seconds is not None:
            self._patience = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        self.transport.abort()

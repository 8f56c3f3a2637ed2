"""``WriterClient``: append to a store through its writer server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from semel.history.errors import WriterUnavailable
from semel.history.schema import as_table
from semel.history.server.asking import MessageClient, Unanswered


class WriterClient:
    """Appends through the ``WriterServer`` at ``socket_path``. Connects when first used, and again after the server
    was restarted or the process forked. One append at a time: threads that share a client take turns; give each its
    own to let them share a commit. ``timeout``: seconds that one append may take, reconnecting included."""

    def __init__(self, socket_path: str | os.PathLike[str], timeout: float = 30.0) -> None:
        self._client = MessageClient(socket_path, timeout)
        self.socket_path = Path(socket_path)

    @property
    def timeout(self) -> float:
        return self._client.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._client.timeout = seconds

    def append(self, data: Any, token: str | None = None) -> int:
        """As ``HistoryStore.append``, with the same errors; the version, on disk when this returns.

        Where the server goes away before it answers, an append with a token is sent again (it counts once), one
        without is not: WriterUnavailable then says that nobody knows whether it is there. WriterUnavailable also
        where no server answers in time; ValueError for an append that is larger than the server takes.
        """
        if token is not None and not isinstance(token, str):
            raise ValueError(f"token must be a string, got {token!r}")
        body = stream_of(as_table(data))
        try:
            return int(self._client.ask({"token": token}, body, again=token is not None)["version"])
        except Unanswered as error:
            what = "nothing was appended"
            if error.perhaps:
                what = "whether the events are in the store is unknown: " + (
                    "append them again with the same token" if token is not None else "a token makes repeating safe")
            raise WriterUnavailable(
                f"no answer from a writer server at {self.socket_path} ({error}); {what}") from error

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> WriterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream_of(table: pa.Table) -> Any:
    """Rows as the body of a message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()

"""``WriterServer``: many processes append to a store through the one that writes it, over a local socket."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from semel.history.errors import StoreError
from semel.history.server.listening import MAX_BYTES, MessageServer
from semel.history.store import HistoryStore


class WriterServer:
    """Takes the appends of ``WriterClient``s at the Unix socket ``socket_path`` and commits them to ``store``
    (``mode="a"``), those that arrive together in one group. A thread for each connection; a client that breaks off,
    sends rubbish or is killed harms nobody. The socket file is for the user that the server runs as.

    ``max_bytes``: the largest append, as an Arrow stream. The store stays the caller's: compact it while the server
    runs, close it after the server. Usable as a context manager::

        with HistoryStore.open("store", mode="a") as store, WriterServer(store, "store/writer.sock"):
            ...
    """

    def __init__(self, store: HistoryStore, socket_path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        if store.mode != "a":
            raise StoreError(f'{store.path} is open with mode="r"; a writer server needs mode="a"')
        self.store = store
        self._server = MessageServer(socket_path, self._append, {"store": str(store.path)}, max_bytes)
        self.socket_path, self.max_bytes = self._server.socket_path, max_bytes

    def start(self) -> WriterServer:
        """Take appends from now on. Raises StoreLocked where another server answers at the socket, FileExistsError
        where something else has its name, ValueError for a path that is too long for a socket."""
        self._server.start()
        return self

    def close(self) -> None:
        """Stop: appends that have arrived are committed and answered, then connections are closed."""
        self._server.close()

    def __enter__(self) -> WriterServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, request: dict[str, Any], body: bytearray) -> dict[str, Any]:
        return {"version": self.store.append(table_of(body), request.get("token"))}


def table_of(body: bytearray) -> pa.Table:
    """The rows that a message brings. Raises ValueError for what is no Arrow stream."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            return reader.read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"the body of an append must be an Arrow stream: {error}") from None

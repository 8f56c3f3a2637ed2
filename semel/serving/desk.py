"""What the process that writes a store does for others: it takes their rows, and erases users everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from semel.history.erasure import traces
from semel.history.server.server import table_of
from semel.serving.errors import InvalidRequest, Overloaded
from semel.serving.remote import DIGESTS
from semel.serving.writers import Writers
from semel.serving.writes import Rows, Written

MAX_BYTES = 256 << 20
"""Of one message: a group of exposures of 2,000 candidates each."""


class Desk:
    """``answer`` is for a ``MessageServer``. ``everywhere(verb)`` has every process that reads the store ``flush`` (its
    exposures are with the writer then) or ``forget`` (it has let go of what it kept of users); whether all did."""

    def __init__(self, writers: Writers, everywhere: Callable[[str], bool]):
        self._writers, self._everywhere = writers, everywhere

    def answer(self, text: dict[str, Any], body: bytearray) -> dict[str, Any]:
        try:
            return self._answer(text, body)
        except InvalidRequest as error:
            return {"invalid": [error.field, error.message]}
        except Overloaded as error:
            return {"overloaded": str(error), "retry_after": error.retry_after}

    def _answer(self, text: dict[str, Any], body: bytearray) -> dict[str, Any]:
        kind = text.get("kind")
        if kind == "erase":
            return self.erase(text["users"], [Path(path) for path in text["also"]])
        if kind == "exposures" and self._writers.exposures is not None:
            self._writers.exposures.append(table_of(body))
            return {}
        if kind == "outcomes":
            return _counts(self._writers.outcomes.submit(table_of(body)).result())
        if kind in self._writers.rows:
            return _counts(self._writers.rows[kind].submit(_rows(table_of(body))).result())
        raise ValueError(f"this writer knows no {kind!r}")

    def erase(self, users: list[int] | list[str], also: list[Path]) -> dict[str, Any]:
        """``HistoryStore.erase`` while the server runs, over all that it holds; ``traces`` are what a scan of every
        byte still found. Posts and exposures wait meanwhile."""
        store = self._writers.store
        if not self._everywhere("flush"):
            raise OSError("a process of the server could not write its exposures in time; nothing was erased")
        with self._writers.stopped():
            found = len(set(users) & set(store.keys().tolist()))
            report = store.erase(users, also)
            if not self._everywhere("forget"):
                raise OSError("the files hold these users no longer, but a process of the server did not let go of "
                              "what it kept in time; erase again")
            ids = np.array(users, object if store.schema.string_keys else np.int64)
            left = traces([Path(store.path), *also], store.schema.key, ids)
        return {"users": found, **report, "traces": left}


def _counts(written: Written) -> dict[str, Any]:
    return {"version": written.version, "accepted": written.accepted, "duplicates": written.duplicates}


def _rows(table: pa.Table) -> Rows:
    return Rows(table.drop_columns([DIGESTS]), table[DIGESTS].to_pylist())

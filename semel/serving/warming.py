"""Compiling before the first request: readers are compiled for a store's columns when they first meet them.

A live store changes its state under way (events wait in the log, then join a generation), and each state has code of
its own. A twin with the same columns and one event in each place meets all of it before the server is ready.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.history import HistoryStore
    from semel.serving.results import Id


def twin(store: HistoryStore, path: Path, key: Id) -> HistoryStore:
    """A small store at ``path`` with the columns of ``store``: one event of ``key`` compacted, one in the log."""
    import pyarrow as pa

    from semel.history import HistoryStore

    schema = store.schema
    small = HistoryStore.create(path, schema, shards=1)
    event = pa.Table.from_pylist([{schema.key: key, "event_time": 1}], schema=schema.arrow)
    small.append(event)
    small.compact()
    small.append(event)
    return small

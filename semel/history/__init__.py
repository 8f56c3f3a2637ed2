"""Store once: histories kept once, read through pointers exactly as a request saw them.

Usable alone::

    store = HistoryStore.create("store", EventSchema({"item_id": pa.int64()}))
    version = store.append(table)                        # user_id, event_time (microseconds), item_id
    pointers = store.point([1, 2], as_of=now)            # O(1) bytes each
    history = store.read(pointers, Projection(("item_id",), last=100))
"""

from semel.batch import Jagged, JaggedTable, Pointers
from semel.history.errors import (
    CorruptFile,
    NotCompacted,
    PositionMoved,
    StoreError,
    StoreExists,
    StoreLocked,
    StoreNotFound,
    VersionNotVisible,
    WriterFenced,
    WriterUnavailable,
)
from semel.history.log import SegmentWriter, read_segments
from semel.history.positions import Position
from semel.history.schema import EventSchema, Projection, Status
from semel.history.store import HistoryStore
from semel.history.writer_client import WriterClient
from semel.history.writer_server import WriterServer

__all__ = [
    "CorruptFile", "EventSchema", "HistoryStore", "Jagged", "JaggedTable", "NotCompacted", "Pointers", "Position",
    "PositionMoved", "Projection", "SegmentWriter", "Status", "StoreError", "StoreExists", "StoreLocked",
    "StoreNotFound", "VersionNotVisible", "WriterClient", "WriterFenced", "WriterServer", "WriterUnavailable",
    "read_segments",
]

"""Store once: histories kept once, read through pointers exactly as a request saw them.

Usable alone::

    store = HistoryStore.create("store", EventSchema({"item_id": pa.int64()}))
    version = store.append(table)                        # user_id, event_time (microseconds), item_id
    pointers = store.point([1, 2], as_of=now)            # O(1) bytes each
    history = store.read(pointers, Projection(("item_id",), last=100))

Begin with ``store``. Its rooms, each of which knows those before it only: ``kernels``, ``generation``, ``log``,
``storage``, ``view``, ``reading``, ``compaction``, ``writing``; and ``server``, which knows the store.
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
from semel.history.log.positions import Position
from semel.history.log.segments import SegmentWriter, read_segments
from semel.history.schema import EventSchema, Projection, Status
from semel.history.server.client import WriterClient
from semel.history.server.server import WriterServer
from semel.history.store import HistoryStore

__all__ = [
    "CorruptFile", "EventSchema", "HistoryStore", "Jagged", "JaggedTable", "NotCompacted", "Pointers", "Position",
    "PositionMoved", "Projection", "SegmentWriter", "Status", "StoreError", "StoreExists", "StoreLocked",
    "StoreNotFound", "VersionNotVisible", "WriterClient", "WriterFenced", "WriterServer", "WriterUnavailable",
    "read_segments",
]

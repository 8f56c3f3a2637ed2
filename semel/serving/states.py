"""Request states that are kept: more candidates of a request that was scored before cost only their own side."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semel.batch import RequestBatch

OVERHEAD = 6144
"""Bytes that an entry takes beside its tensors' values: the objects around them, two thirds of a KiB a tensor, of which
the states of most models have up to eight."""


def state_key(batch: RequestBatch) -> bytes:
    """All that the state of ``batch``'s one request depends on: who, when, the request features as the model reads
    them, and the history's checksum.

    The checksum stands where a pointer has a version: a version moves with every append of anyone, the checksum only
    with this history. So a late event or a deletion is seen at once, and other users' events cost nothing.
    """
    parts = []
    for name, value in sorted(batch.request.items()):
        if name == "history":
            continue
        arrays = (value.values, value.offsets) if hasattr(value, "offsets") else (value,)
        parts += [name.encode(), *(array.numpy().tobytes() for array in arrays)]
    return b"\0".join(b"%d:%b" % (len(part), part) for part in parts)


class StateCache:
    """At most ``limit`` bytes of states, those that were not asked for the longest leave first. For one model; may be
    used from several threads. ``hits``, ``misses``: of ``get``; ``bytes``: kept now."""

    def __init__(self, limit: int):
        if limit < 0:
            raise ValueError(f"the state cache cannot have {limit} bytes; 0 keeps nothing")
        self.limit = limit
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._changing = threading.Lock()
        self.hits = self.misses = self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, make: Callable[[], Any]) -> Any:
        """The state under ``key``, from ``make()`` if it is not kept. What ``make`` raises passes through."""
        with self._changing:
            found = self._kept.get(key)
            if found is not None:
                self.hits += 1
                self._kept.move_to_end(key)
                return found[0]
            self.misses += 1
        state = make()  # outside the lock: two threads may make the same one, which is the same to the bit
        self._keep(key, state)
        return state

    def clear(self) -> None:
        """Forget all states, and what was counted."""
        with self._changing:
            self._kept.clear()
            self.hits = self.misses = self.bytes = 0

    def _keep(self, key: bytes, state: Any) -> None:
        from semel.models.states import bytes_of

        size = bytes_of(state) + len(key) + OVERHEAD
        if size > self.limit:
            return
        with self._changing:
            _, before = self._kept.pop(key, (None, 0))
            self._kept[key] = state, size
            self.bytes += size - before
            while self.bytes > self.limit:
                _, (_, gone) = self._kept.popitem(last=False)
                self.bytes -= gone

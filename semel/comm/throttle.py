"""Another transport as if it were on a slow link: for benchmarks of overlap on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from semel.comm.interface import Handle, Later, Transport, row_bytes
from semel.comm.worker import Worker


class Throttled:
    """``transport`` over a link of ``bytes_per_s`` each way and ``latency_s`` a call.

    Like a network card the link serves one call after the other, in the order asked, while the caller computes; a call
    begins when all ranks have joined it and takes ``latency_s`` + the larger of the bytes that this rank sends to and
    receives from others / ``bytes_per_s``. Rows that stay cost nothing. Raises ValueError for a link that is not
    positive.
    """

    def __init__(self, transport: Transport, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ValueError(f"bytes_per_s must be above 0 and latency_s at least 0, got {bytes_per_s}, {latency_s}")
        self.transport, self.bytes_per_s, self.latency_s = transport, bytes_per_s, latency_s
        self.rank, self.world_size = transport.rank, transport.world_size
        self.busy_s = 0.0
        """Seconds that the link was in use so far."""
        self._link = Worker("semel-throttled")

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        others = max(sum(send) - send[self.rank], sum(receive) - receive[self.rank])
        return self._submit(lambda: self.transport.all_to_all(values, send, receive), others * row_bytes(values))

    def all_gather(self, values: Tensor) -> Handle:
        return self._submit(lambda: self.transport.all_gather(values),
                            (self.world_size - 1) * values.numel() * values.element_size())

    def _submit(self, begin: Callable[[], Handle], size: int) -> Handle:
        seconds = self.latency_s + size / self.bytes_per_s

        def carry() -> Tensor:
            received = begin().wait()  # all have joined
            until = time.perf_counter() + seconds
            while (left := until - time.perf_counter()) > 0:
                time.sleep(left)
            self.busy_s += seconds
            return received

        return Later(self._link.submit(carry).result)

"""A memory at a quarter of its size, for serving: int8 rows, each with a scale of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.memory import index
from semel.memory import rows as loops
from semel.memory.table import ItemMemory, in_parallel


class QuantizedMemory:
    """What ``memory`` holds now, read-only: value = scale x int8, scale = largest magnitude of the row / 127. A value
    is off by at most half a scale: 0.4 % of the row's largest magnitude (``error``: the most of all rows)."""

    def __init__(self, memory: ItemMemory) -> None:
        rows = memory.rows()
        self.dim = memory.dim
        vectors = rows.vectors.numpy()
        self._scale = (np.abs(vectors).max(axis=1, initial=0.0) / 127).astype(np.float32)
        safe = np.where(self._scale > 0, self._scale, 1)[:, None]
        self._bytes = np.ascontiguousarray(np.rint(vectors / safe).clip(-127, 127).astype(np.int8))
        if not len(self._bytes):  # the loops look at a first row, also for misses
            self._scale, self._bytes = np.zeros(1, np.float32), np.zeros((1, self.dim), np.int8)
        self._slots = index.new_slots(max(len(rows), 1))
        loops.rebuilt(self._slots, rows.keys.numpy(), np.full(len(rows), loops.LIVE, np.uint8))
        self._memory = memory

    @property
    def error(self) -> float:
        """The most that any value is off."""
        return float(self._scale.max()) / 2

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes + self._scale.nbytes + self._slots.nbytes

    def read(self, keys: Any, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``keys`` [N] -> vectors [N, dim] float32 (in ``out`` where it is given), hit [N] bool; a miss is zeros."""
        numbers, _ = self._memory._keys(keys, known=False)
        if out is None:
            out = torch.empty(len(numbers), self.dim)
        elif tuple(out.shape) != (len(numbers), self.dim) or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"out must be contiguous float32 [{len(numbers)}, {self.dim}], got {out.dtype} "
                             f"{list(out.shape)}")
        hit = np.empty(len(numbers), np.bool_)
        given = [self._slots, numbers, self._bytes, self._scale]
        target = out.numpy()
        in_parallel(len(numbers), lambda a, b: loops.read_bytes(*given, a, b, target, hit))
        return out, torch.from_numpy(hit)

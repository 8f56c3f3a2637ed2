"""Which shard a user's events lie in."""

from __future__ import annotations

import numpy as np

from semel.history.arrays import frozen
from semel.history.kernels import gather


def shards_of(keys: np.ndarray | list[bytes], shards: int) -> np.ndarray:
    """[n] int64 ids or UTF-8 strings -> the shard of each: ``hash % shards``."""
    out = np.empty(len(keys), np.int64)
    if isinstance(keys, list):
        gather.shards_of_strings(*packed(keys), shards, out)
    else:
        gather.shards_of_integers(frozen(keys), shards, out)
    return out


def packed(keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Strings -> (offsets [n + 1], bytes), read-only."""
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum([len(key) for key in keys], out=offsets[1:])
    return frozen(offsets), frozen(np.frombuffer(b"".join(keys), np.uint8))

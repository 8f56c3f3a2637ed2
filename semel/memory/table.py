"""``ItemMemory``: item id -> embedding, written in training, read at serving.

One row a key, found by probing an index that compares whole keys: two items never share a row. When rows run out the
least recently used ones leave (``policy="lru"``), or those written longest ago (``"ttl"``).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from semel.features import stable_id
from semel.memory import index
from semel.memory import rows as loops
from semel.memory.rows import LIVE, STEP, TOWER, USED

Policy = Literal["lru", "ttl"]
_PARALLEL = 4096
"""Fewer keys than this are not worth a second thread."""
MISS = -1
"""The age of a key without a row."""


@dataclass(frozen=True)
class Rows:
    """Rows of a memory: ``keys`` [N] int64, ``vectors`` [N, dim], ``step``, ``written`` (microseconds since 1970) and
    ``tower`` [N] int64."""

    keys: Tensor
    vectors: Tensor
    step: Tensor
    written: Tensor
    tower: Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, index: Tensor) -> Rows:
        """Those of an index or a mask."""
        return Rows(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def then(self, other: Rows) -> Rows:
        """These and the other ones behind them."""
        return Rows(*(torch.cat([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Changes:
    """What a memory's readers have to hear: rows that were written, keys that are gone. No key is in both."""

    rows: Rows
    gone: Tensor


class ItemMemory(nn.Module):
    """At most ``capacity`` rows of ``dim`` float32.

    Keys are int64, or strings, which stand for their ``semel.features.stable_id`` and are kept beside it: two that
    would share an id are refused. ``policy``: which rows leave when there is no room, the least recently used or those
    written longest ago; with "ttl" a row is besides a miss from ``ttl`` seconds after it was written. ``probes``: the
    most index slots that finding a key may take; the index doubles before it takes more.

    One thread writes and reads; others may call ``changes`` beside it. ``read_only``: why nobody may write, if so.
    Vectors may lie on a GPU (``to``), the index stays on the host. ``state_dict`` holds the rows in use, as tensors
    only. Raises ValueError for impossible settings.
    """

    def __init__(self, capacity: int, dim: int, policy: Policy = "lru", probes: int = 128,
                 ttl: float | None = None) -> None:
        super().__init__()
        for name, value, most in (("capacity", capacity, 1 << 31), ("dim", dim, 1 << 16), ("probes", probes, 1 << 31)):
            if not 1 <= value < most:
                raise ValueError(f"{name} must be from 1 to {most - 1}, got {value}")
        if policy not in ("lru", "ttl"):
            raise ValueError(f'policy must be "lru" or "ttl", got {policy!r}')
        if (policy == "ttl") != (ttl is not None) or (ttl is not None and not 0 < ttl < float("inf")):
            raise ValueError(f'policy "ttl" needs ttl, in seconds and above 0, "lru" takes none; got {policy!r} and '
                             f"ttl={ttl}")
        self.capacity, self.dim, self.policy, self.probes, self.ttl = capacity, dim, policy, probes, ttl
        self.vectors: Tensor
        table = torch.from_numpy(index.zeros(capacity, dim, dtype=np.float32))
        self.register_buffer("vectors", table, persistent=False)
        self.read_only = ""
        self._lock = threading.RLock()
        self._empty()

    def _empty(self) -> None:
        capacity = self.capacity
        self._slots = index.new_slots(capacity)
        self._facts = index.zeros(capacity, 3)
        self._written = index.zeros(capacity)
        self._key_of = np.zeros(capacity, np.int64)
        self._state = np.zeros(capacity, np.uint8)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._unused = capacity
        self._stamp = 1
        self._changed = np.empty(capacity, np.int32)
        self._changes = 0
        self._gone: list[np.ndarray] | None = None  # nobody has asked for changes
        self._oldest: tuple[np.ndarray, np.ndarray] | None = None  # rows that leave next, and their stamps
        self._names: dict[int, str] = {}
        self._seen = np.zeros(1 << max(3, (capacity - 1).bit_length()), np.uint8)
        self.evicted = self.reads = self.hits = 0
        self._warned = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return self.capacity - self._unused

    def extra_repr(self) -> str:
        return f"{len(self)} of {self.capacity} rows, {self.dim} wide, {self.policy}"

    def write(self, keys: Any, vectors: Tensor, step: int = 0, *, tower: int = 0, now: int | None = None) -> None:
        """Sets the rows of ``keys`` [N] to ``vectors`` [N, dim], bit for bit; of a key that comes twice the last one
        stays. ``step``, ``tower``: of training, of the tower's weights; ``now``: microseconds, the clock's by default.

        Raises ValueError for shapes or types that do not fit and for vectors that are not finite, and writes nothing
        then. Rows leave for new ones as ``policy`` says, never those that the same (quarter of the capacity of) keys
        name.
        """
        self._may_write()
        if not isinstance(vectors, Tensor):
            raise ValueError(f"vectors must be a tensor [N, {self.dim}], got {type(vectors).__name__}; "
                             "torch.as_tensor makes one")
        vectors = vectors.detach()
        numbers, names = self._keys(keys)
        if vectors.dim() != 2 or tuple(vectors.shape) != (len(numbers), self.dim):
            raise ValueError(f"{len(numbers)} keys need vectors [{len(numbers)}, {self.dim}], got "
                             f"{list(vectors.shape)}")
        if vectors.dtype != torch.float32:
            raise ValueError(f"vectors must be float32, got {vectors.dtype}; convert them (vectors.float())")
        given = np.ascontiguousarray(vectors.cpu().numpy())
        bad = loops.first_not_finite(given)
        if bad >= 0:
            raise ValueError(f"the vector of key {int(numbers[bad])} (row {bad}) holds a NaN or an infinity")
        now = _microseconds() if now is None else now
        facts = (np.full(len(numbers), value, np.int64) for value in (now, step, tower))
        with self._lock:
            self._names.update(names)
            self._write(numbers, given, *facts)

    def _write(self, keys: np.ndarray, vectors: np.ndarray, *facts: np.ndarray) -> None:
        """``facts``: written, step and tower, each [N]."""
        part = max(1, self.capacity // 4)
        on_host = self.vectors.device.type == "cpu"
        table = self.vectors.numpy() if on_host else np.empty((self.capacity, 0), np.float32)
        for start in range(0, len(keys), part):
            some = slice(start, start + part)
            rows = self._place(keys[some])
            stamp = self._stamp
            self._stamp += len(rows)
            source = vectors[some] if on_host else vectors[some, :0]
            given = [rows, source, *(fact[some] for fact in facts), stamp, self._written, self._facts, table]
            in_parallel(len(rows), lambda a, b, given=given: loops.store(*given, a, b))
            if not on_host:
                last = self._facts[rows, USED] == stamp + np.arange(len(rows))
                where = torch.from_numpy(rows[last]).to(self.vectors.device)
                self.vectors[where] = torch.from_numpy(vectors[some][last]).to(self.vectors.device)

    def _place(self, keys: np.ndarray) -> np.ndarray:
        """A row for each key, others leaving for them where there is no room."""
        missing = loops.count_new(self._slots, keys)
        if missing > self._unused:
            loops.touch(self._slots, keys, self._facts, self._stamp + len(keys))
            missing = loops.count_new(self._slots, np.unique(keys))
            if missing > self._unused:
                self._evict(missing - self._unused, self._stamp + len(keys))
            self._stamp += len(keys) + 1
        rows = np.empty(len(keys), np.int64)
        self._unused, self._changes, longest = loops.place(
            self._slots, keys, self._stamp, self._free, self._unused, self._key_of, self._facts, self._state,
            self._changed, self._changes, self._seen, rows)
        if longest > self.probes and len(self._slots) < 64 * self.capacity:
            self._slots = index.zeros(2 * len(self._slots), 2)
            loops.rebuilt(self._slots, self._key_of, self._state)
        return rows

    def _evict(self, count: int, spared: int) -> None:
        """``count`` rows leave, none of those whose stamp is ``spared``."""
        leaving: list[np.ndarray] = []
        while count:
            if self._oldest is None:
                rows = np.flatnonzero(self._state & LIVE)
                rows = rows[self._facts[rows, USED] != spared]
                by = self._facts[rows, USED]
                many = min(len(rows), max(count, self.capacity // 16))
                first = np.argpartition(by, many - 1)[:many] if many < len(rows) else np.arange(len(rows))
                first = first[np.argsort(by[first], kind="stable")]
                self._oldest = rows[first], by[first]
            rows, stamps = self._oldest
            still = (self._facts[rows, USED] == stamps) & (self._state[rows] & LIVE != 0)
            chosen = np.flatnonzero(still)[:count]
            end = chosen[-1] + 1 if len(chosen) == count else len(rows)
            self._oldest = (rows[end:], stamps[end:]) if end < len(rows) else None
            self._release(rows[chosen])
            leaving.append(rows[chosen])
            count -= len(chosen)
        self.evicted += sum(map(len, leaving))

    def _release(self, rows: np.ndarray) -> None:
        keys = self._key_of[rows]
        if self._gone is not None:
            self._gone.append(keys)
        for key in keys.tolist() if self._names else ():
            self._names.pop(key, None)
        self._unused = loops.release(self._slots, rows, self._key_of, self._state, self._free, self._unused)

    def read(self, keys: Any, out: Tensor | None = None, *, now: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``keys`` [N] -> vectors [N, dim] (in ``out`` where it is given), hit [N] bool, age [N] int64: microseconds
        since the row was written. A miss is a row of zeros, its age -1. With "lru" a read in train mode is a use.

        Raises ValueError for an ``out`` that does not fit."""
        numbers, _ = self._keys(keys, known=False)
        on_host = self.vectors.device.type == "cpu"
        device = self.vectors.device
        if out is None:
            out = torch.empty(len(numbers), self.dim, device=device)
        elif tuple(out.shape) != (len(numbers), self.dim) or out.dtype != torch.float32 or out.device != device or \
                not out.is_contiguous():
            raise ValueError(f"out must be contiguous float32 [{len(numbers)}, {self.dim}] on {device}, got "
                             f"{out.dtype} {list(out.shape)} on {out.device}")
        now = _microseconds() if now is None else now
        hit, age = np.empty(len(numbers), np.bool_), np.empty(len(numbers), np.int64)
        oldest = -(1 << 62) if self.ttl is None else now - round(self.ttl * 1e6) + 1
        table = self.vectors.numpy() if on_host else np.empty((self.capacity, 0), np.float32)
        target = out.detach().numpy() if on_host else np.empty((len(numbers), 0), np.float32)
        given = [self._slots, numbers, self._written, table, oldest, now]
        in_parallel(len(numbers), lambda a, b: loops.read(*given, a, b, target, hit, age))
        if not on_host:
            rows = np.empty(len(numbers), np.int64)
            index.find(self._slots, numbers, 0, len(numbers), rows)
            where = torch.from_numpy(np.where(hit, rows, 0)).to(device)
            torch.index_select(self.vectors, 0, where, out=out)
            out.mul_(torch.from_numpy(hit).to(device)[:, None])
        if self.training and self.policy == "lru":
            with self._lock:
                loops.touch(self._slots, numbers, self._facts, self._stamp)
                self._stamp += 1
        self._count(len(numbers), int(hit.sum()))
        return out, torch.from_numpy(hit).to(device), torch.from_numpy(age).to(device)

    def ages(self, keys: Any, *, now: int | None = None) -> Tensor:
        """[N] microseconds since each key's row was written, -1 where it has none. No use of the rows."""
        numbers, _ = self._keys(keys, known=False)
        age = np.empty(len(numbers), np.int64)
        loops.read_ages(self._slots, numbers, self._written, _microseconds() if now is None else now, age)
        return torch.from_numpy(age)

    def _count(self, reads: int, hits: int) -> None:
        """Warns where rows leave before they are asked for, anew when twice as many have left."""
        self.reads += reads
        self.hits += hits
        if self.training and self.evicted > max(self.capacity, 2 * self._warned) and self.hits < 0.9 * self.reads:
            self._warned = self.evicted
            bits = 8 * len(self._seen)
            clear = bits - int(np.unpackbits(self._seen).sum())
            distinct = round(bits * np.log(bits / max(clear, 1)))  # linear counting (Whang et al. 1990)
            warnings.warn(
                f"ItemMemory: {self.hits / self.reads:.0%} of reads find their row, {self.evicted} rows have left for "
                f"others: {self.capacity} rows are too few for about {distinct} distinct keys (capacity={distinct} "
                "would hold them all)", stacklevel=3)

    def delete(self, keys: Any) -> int:
        """Takes the rows of ``keys`` out; how many there were. Keys without a row are passed over."""
        self._may_write()
        numbers, _ = self._keys(keys, known=False)
        return self._delete(numbers)

    def _delete(self, numbers: np.ndarray) -> int:
        with self._lock:
            rows = np.empty(len(numbers), np.int64)
            index.find(self._slots, numbers, 0, len(numbers), rows)
            rows = np.unique(rows[rows >= 0])
            self._release(rows)
        return len(rows)

    def expire(self, now: int | None = None) -> int:
        """With ``policy="ttl"``: rows past their time leave; how many. They are misses before that already."""
        if self.ttl is None:
            return 0
        now = _microseconds() if now is None else now
        with self._lock:
            old = (self._written <= now - round(self.ttl * 1e6)) & (self._state & LIVE != 0)
            rows = np.flatnonzero(old)
            self._release(rows)
            self.evicted += len(rows)
        return len(rows)

    def rows(self) -> Rows:
        """All rows in use, by key."""
        with self._lock:
            rows = np.flatnonzero(self._state & LIVE)
            return self._rows(rows[np.argsort(self._key_of[rows])])

    def _rows(self, rows: np.ndarray) -> Rows:
        facts = self._facts[rows]
        vectors = self.vectors[torch.from_numpy(rows).to(self.vectors.device)].cpu()
        step, written, tower = (torch.from_numpy(np.ascontiguousarray(fact))
                                for fact in (facts[:, STEP], self._written[rows], facts[:, TOWER]))
        return Rows(torch.from_numpy(self._key_of[rows]), vectors, step, written, tower)

    def changes(self) -> Changes:
        """What has changed since the last call, each key once, by key; the first call gives all rows. One reader of
        changes a memory."""
        with self._lock:
            rows = self._changed[: self._changes].astype(np.int64)
            self._state[rows] &= np.uint8(LIVE)
            self._changes = 0
            gone = np.unique(np.concatenate([np.empty(0, np.int64), *(self._gone or ())]))
            if self._gone is None:
                rows = np.arange(self.capacity)
            self._gone = []
            rows = rows[self._state[rows] & LIVE != 0]
            again = np.empty(len(gone), np.int64)
            index.find(self._slots, gone, 0, len(gone), again)
            return Changes(self._rows(rows[np.argsort(self._key_of[rows])]), torch.from_numpy(gone[again < 0]))

    def merge(self, changes: Changes) -> None:
        """Another memory's ``changes``: keys that are gone leave, rows are written with their own step and time."""
        rows = changes.rows
        if tuple(rows.vectors.shape) != (len(rows), self.dim):
            raise ValueError(f"changes of vectors {list(rows.vectors.shape)} do not fit a memory {self.dim} wide")
        with self._lock:
            self._delete(changes.gone.numpy())
            facts = (fact.numpy() for fact in (rows.written, rows.step, rows.tower))
            self._write(rows.keys.numpy(), rows.vectors.numpy(), *facts)

    @property
    def changed(self) -> int:
        """Rows that were written, or have left, since ``changes`` was last called; a row that did both counts twice."""
        return self._changes + sum(map(len, self._gone or ()))

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nobody writes within the block but who opened it."""
        with self._lock:
            yield

    def _may_write(self) -> None:
        if self.read_only:
            raise ValueError(f"this memory is read-only: {self.read_only}; write to the trainer's")

    def name_of(self, key: int) -> str | None:
        """The string that a key stands for, None where it came as a number (or has no row)."""
        return self._names.get(key)

    def _keys(self, keys: Any, known: bool = True) -> tuple[np.ndarray, dict[int, str]]:
        """[N] int64, and the names of those that came as strings."""
        array = keys.detach().cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
        if array.ndim != 1:
            raise ValueError(f"keys must be a vector, got shape {list(array.shape)}")
        if array.dtype.kind == "u" and array.size and int(array.max()) >= 1 << 63:
            raise ValueError(f"key {int(array.max())} does not fit int64; take it as a string, or as its int64 bits")
        if array.dtype.kind in "iu" or not array.size:
            return np.ascontiguousarray(array, dtype=np.int64), {}
        if array.dtype.kind not in "OUT" or not all(isinstance(key, str) for key in array.tolist()):
            raise ValueError(f"keys must be integers or strings, got {array.dtype}")
        numbers = stable_id(array.astype(object))
        names = dict(zip(numbers.tolist(), array.tolist(), strict=True))
        for number, name in names.items() if known else ():
            if self._names.get(number, name) != name:
                raise ValueError(f"keys {self._names[number]!r} and {name!r} have the same stable id {number}; rename "
                                 "one")
        return numbers, names

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with self._lock:
            rows = np.flatnonzero(self._state & LIVE)
            rows = rows[np.argsort(self._facts[rows, USED], kind="stable")]  # least recently used first
            kept = self._rows(rows)
        for name in ("keys", "vectors", "step", "written", "tower"):
            destination[prefix + name] = getattr(kept, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
                              missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
        names = [prefix + name for name in ("keys", "vectors", "step", "written", "tower")]
        lacking = [name for name in names if name not in state_dict]
        if lacking:
            missing_keys.extend(lacking)
            return
        found = Rows(*(state_dict[name] for name in names))
        if tuple(found.vectors.shape) != (len(found), self.dim):
            error_msgs.append(f"{prefix}vectors have shape {list(found.vectors.shape)}, this memory is {self.dim} wide")
            return
        if len(found) > self.capacity:
            error_msgs.append(f"{len(found)} rows do not fit a memory of {self.capacity}; make it larger (capacity=)")
            return
        with self._lock:
            self._empty()
            self.merge(Changes(found, torch.empty(0, dtype=torch.int64)))


def _microseconds() -> int:
    return time.time_ns() // 1000


def in_parallel(count: int, loop: Any) -> None:
    """``loop(start, stop)`` over all, in as many parts as there are threads."""
    threads = torch.get_num_threads() if count >= _PARALLEL else 1
    edges = [count * i // threads for i in range(threads + 1)]
    waiting: list[Future[Any]] = [_pool(threads).submit(loop, a, b) for a, b in pairwise(edges[1:])]
    loop(0, edges[1])
    for part in waiting:
        part.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="semel-memory")

"""Balanced samples at run time: whole requests of one global batch trade places between ranks, behind the step before.

FreeScale (arXiv 2604.24073, algorithm 1) in three dependent stages: all ranks gather the length, the candidates and
the modelled cost of every request; each computes the same assignment from the same numbers; whole requests go to where
they were assigned. What moves is what ``start`` is given: ``RequestRows``, which hold pointers, so that the receiver
reads the histories, or a materialized ``RequestBatch``, histories and all.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch

from semel.batch import JaggedTable, RequestBatch, RequestRows, _to_numpy, offsets_of
from semel.comm import Transport, jagged
from semel.comm.worker import Worker
from semel.examples.rows import concat_rows
from semel.features import stable_id
from semel.training.packing import LENGTHS, Layout, Packed, pack, unpack

if TYPE_CHECKING:
    from semel.history import HistoryStore, Projection

Rows = TypeVar("Rows", RequestRows, RequestBatch)


class Partition(Protocol):
    """[N] costs of the requests of a global batch -> [N] the rank of each; deterministic, so that all ranks agree
    without talking. ``tokens``: [N] history events + candidates; ``token_cap``: the most that a rank may get. One that
    also has a parameter ``home`` gets [N], the rank where each request lies: so may it move few of them."""

    def __call__(self, costs: np.ndarray, world_size: int, *, tokens: np.ndarray | None = None,
                 token_cap: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class Report:
    """One exchange, over all ranks: ``requests``, of which ``moved`` changed rank, with ``moved_bytes``;
    ``idle_before`` and ``idle_after``: 1 - mean / max of the ranks' modelled costs; ``peak_tokens``: history events +
    candidates of the rank with most; ``reads_before`` and ``reads_after``: histories that the ranks read, where the
    requests of one user share a read within a rank; the difference is what moving pointers costs in reads."""

    requests: int
    moved: int
    moved_bytes: int
    idle_before: float
    idle_after: float
    peak_tokens: int
    reads_before: int
    reads_after: int


@dataclass(frozen=True)
class _Result(Generic[Rows]):
    rows: Rows | None
    report: Report
    done: bool


class Pending(Generic[Rows]):
    """An exchange under way."""

    def __init__(self, future: Future[_Result[Rows]]) -> None:
        self._future: Future[_Result[Rows]] = future

    def wait(self) -> Rows | None:
        """This rank's requests: those of rank 0 first, then of rank 1, each in their old order, whatever the timing.
        None only if no rank has ever had any. Raises what went wrong, here or on another rank."""
        return self._future.result().rows

    @property
    def report(self) -> Report:
        return self._future.result().report

    @property
    def done(self) -> bool:
        """Whether all ranks joined with ``start(None)``: there will be no more requests."""
        return self._future.result().done


class Exchange(Generic[Rows]):
    """Exchanges requests in a thread of its own, in the order in which they were started.

    ``transport``: for CPU tensors, and for nobody else's use (``semel.comm.transport.transport()``). ``partition``: a
    function of ``semel.training.balance``, or any ``Partition``. ``cost(lengths, candidates)``: [R] events of each
    request's history and [R] its candidates, both int64 -> [R] costs; each rank applies it to its own requests, so it
    may differ between ranks. ``lengths(rows)``: [R] of ``RequestRows``, see ``history_lengths``; a ``RequestBatch``
    knows those of its histories. ``token_cap``: handed to ``partition``. ``users_together``: all requests of a user go
    to one rank, as one to ``partition``, so that they share the read of a history there.

    Every rank must call ``start`` as often as every other: one that is at its end joins with ``start(None)`` until
    ``done``. ``balanced`` does this. Errors of one rank are raised on all, and nothing hangs.
    """

    def __init__(self, transport: Transport, partition: Partition,
                 cost: Callable[[np.ndarray, np.ndarray], np.ndarray], token_cap: int | None = None, *,
                 lengths: Callable[[RequestRows], np.ndarray] | None = None, users_together: bool = False) -> None:
        self.transport, self.partition, self.cost, self.token_cap = transport, partition, cost, token_cap
        self.lengths, self.users_together = lengths, users_together
        self._asks_home = "home" in inspect.signature(partition).parameters
        self._layouts: dict[int, Layout] = {}
        self._own_layout: Layout | None = None
        self._worker = Worker("semel-exchange")

    def start(self, rows: Rows | None) -> Pending[Rows]:
        """Begin to exchange this rank's part of a global batch; None: this rank is at its end. The tensors of a batch
        come out on the CPU."""
        return Pending(self._worker.submit(lambda: self._run(rows)))

    def balanced(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """This rank's requests of each global batch, of which ``batches`` are its own parts. The next batch is
        exchanged while the caller works on one. Ends when all ranks are at their end; on a rank whose ``batches`` end
        earlier it goes on with what others have too much. All ranks must go through to the end."""
        source = iter(batches)
        pending = self.start(next(source, None))
        while not pending.done:
            following = self.start(next(source, None))
            rows = pending.wait()
            if rows is not None:
                yield rows
            pending = following

    def close(self) -> None:
        """Ends the thread once what was started is over."""
        self._worker.close()

    def _run(self, rows: Rows | None) -> _Result[Rows]:
        own, error = None, None
        try:
            own = None if rows is None else _Own.of(rows, self)
        except Exception as raised:
            error = raised
        world = self._gather(own, error)
        _check_alike([self._layouts[key] for key in np.unique(world.layouts[world.source]).tolist()])
        ranks = self._assign(world)
        received, offsets, layouts = self._move(world, own, ranks)
        taken = self._unpack(received, offsets, layouts)
        return _Result(taken, _report(world, ranks), bool(world.done.all()))

    def _gather(self, own: _Own | None, error: Exception | None) -> _World:
        """Two all-gathers, a third when a layout is new: how many requests each rank has, and what is known of them.
        An ``error`` of this rank is raised once the others know of it, who would wait."""
        if own is not None:
            self._own_layout = own.packed.layout
        text = b"" if self._own_layout is None else self._own_layout.to_text().encode()
        size, rank = self.transport.world_size, self.transport.rank
        count = 0 if own is None else len(own.costs)
        head = torch.tensor([count, own is None, error is not None, _layout_id(text), len(text)])
        heads = self.transport.all_gather(head).wait().numpy()
        if heads[:, 2].any():
            raise error or ValueError(f"rank {int(heads[:, 2].argmax())} of {size} could not prepare its requests for "
                                      "exchange; its own message says why")
        if not set(heads[heads[:, 4] > 0, 3].tolist()) <= self._layouts.keys():  # the same on all ranks
            texts = torch.zeros(int(heads[:, 4].max()), dtype=torch.uint8)
            texts[: len(text)] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
            gathered = self.transport.all_gather(texts).wait()
            for line, (_, _, _, key, length) in zip(gathered, heads.tolist(), strict=True):
                if length:
                    self._layouts[key] = Layout.from_text(bytes(line[:length].tolist()).decode())
        counts = heads[:, 0]
        table = torch.zeros(int(counts.max()), 5, dtype=torch.int64)
        if own is not None:
            table[: len(own.costs)] = torch.from_numpy(own.table())
        tables = self.transport.all_gather(table).wait().numpy() if len(table) else np.zeros((size, 0, 5), np.int64)
        joined = np.concatenate([tables[r, : counts[r]] for r in range(size)])
        return _World(np.repeat(np.arange(size), counts), joined[:, 0], joined[:, 1],
                      np.ascontiguousarray(joined[:, 2]).view(np.float64), joined[:, 3], joined[:, 4], heads[:, 1] > 0,
                      heads[:, 3], rank, size)

    def _assign(self, world: _World) -> np.ndarray:
        """[N] the rank of each request, or of each user's requests."""
        if not len(world.costs):
            return np.empty(0, np.int64)
        costs, tokens, home, unit = world.costs, world.tokens, world.source, np.arange(len(world.costs))
        if self.users_together:
            _, first, unit = np.unique(world.users, return_index=True, return_inverse=True)
            costs, home = np.bincount(unit, costs), home[first]
            tokens = np.bincount(unit, tokens).astype(np.int64)
        more = {"home": home} if self._asks_home else {}
        ranks = np.asarray(self.partition(costs, world.size, tokens=tokens, token_cap=self.token_cap, **more))
        named = ranks.shape == costs.shape and ranks.dtype.kind in "iu"
        if not named or not 0 <= ranks.min() <= ranks.max() < world.size:
            raise ValueError(f"the partition of {len(costs)} requests over {world.size} ranks gave {ranks!r}; it must "
                             "give the rank of each")
        return ranks.astype(np.int64, copy=False)[unit]

    def _move(self, world: _World, own: _Own | None, ranks: np.ndarray,
              ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(bytes, offsets of each request, layout of each request) of the requests that this rank gets."""
        mine = ranks == world.rank
        receive = np.zeros(world.size, np.int64)
        np.add.at(receive, world.source[mine], world.sizes[mine])
        if own is not None:
            sent = jagged.dispatch(own.packed.values, own.packed.offsets, ranks[world.source == world.rank], world.size)
            values, send = torch.from_numpy(sent.values), sent.counts
        else:
            values, send = torch.empty(0, dtype=torch.uint8), np.zeros(world.size, np.int64)
        if len(ranks):
            values = self.transport.all_to_all(values, send.tolist(), receive.tolist()).wait()
        return values.numpy(), offsets_of(world.sizes[mine]), world.layouts[world.source[mine]]

    def _unpack(self, values: np.ndarray, offsets: np.ndarray, layouts: np.ndarray) -> Rows | None:
        if not self._layouts:
            return None
        kinds = np.unique(layouts)
        if len(kinds) == 0:
            return unpack(self._own_layout or self._layouts[min(self._layouts)], values, offsets)  # type: ignore[return-value]
        if len(kinds) == 1:
            return unpack(self._layouts[int(kinds[0])], values, offsets)  # type: ignore[return-value]
        places = [np.flatnonzero(layouts == kind) for kind in kinds]
        parts = [unpack(self._layouts[int(kind)], *jagged.permute(values, offsets, rows))
                 for kind, rows in zip(kinds, places, strict=True)]
        return concat_rows(parts).select(np.argsort(np.concatenate(places)))  # type: ignore[arg-type, return-value]


@dataclass(frozen=True)
class _Own:
    """What this rank brings along."""

    packed: Packed
    lengths: np.ndarray
    candidates: np.ndarray
    costs: np.ndarray
    users: np.ndarray

    @classmethod
    def of(cls, rows: RequestRows | RequestBatch, exchange: Exchange) -> _Own:
        if isinstance(rows, RequestRows):
            if exchange.lengths is None:
                raise ValueError("request rows do not hold their histories' lengths; give Exchange "
                                 "lengths=history_lengths(store, projection)")
            lengths, candidates = np.asarray(exchange.lengths(rows), np.int64), rows.candidates.lengths
        else:
            candidates = _to_numpy(rows.candidate_offsets[1:] - rows.candidate_offsets[:-1])
            tables = [value for value in rows.request.values() if isinstance(value, JaggedTable)]
            lengths = sum((_to_numpy(table.lengths) for table in tables), np.zeros(len(candidates), np.int64))
        costs = np.ascontiguousarray(exchange.cost(lengths, candidates), dtype=np.float64)
        if costs.shape != lengths.shape or not np.isfinite(costs).all() or (costs < 0).any():
            raise ValueError(f"cost must give a finite number from 0 on for each of {len(lengths)} requests, it gave "
                             f"{costs!r}")
        return cls(pack(rows), lengths, candidates, costs, _users(rows))

    def table(self) -> np.ndarray:
        """[R, 5]: what the others need to know of each request."""
        return np.stack([self.lengths, self.candidates, self.costs.view(np.int64), np.diff(self.packed.offsets),
                         self.users], 1)


@dataclass(frozen=True)
class _World:
    """The requests of all ranks, rank by rank: ``source``, ``lengths``, ``candidates``, ``costs``, ``sizes`` (bytes)
    and ``users`` [N]; ``done`` and ``layouts`` [world_size]."""

    source: np.ndarray
    lengths: np.ndarray
    candidates: np.ndarray
    costs: np.ndarray
    sizes: np.ndarray
    users: np.ndarray
    done: np.ndarray
    layouts: np.ndarray
    rank: int
    size: int

    @property
    def tokens(self) -> np.ndarray:
        return self.lengths + self.candidates


def history_lengths(store: HistoryStore, projection: Projection) -> Callable[[RequestRows], np.ndarray]:
    """For ``Exchange(lengths=...)``: the events that each request's pointer yields, without reading them."""
    return lambda rows: store.lengths(rows.pointers, projection)[0]


def _layout_id(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _check_alike(layouts: list[Layout]) -> None:
    """Raises ValueError, on all ranks, where requests of different ranks cannot be put together: request rows may
    differ in types (a null makes an object of a number), batches may not."""
    for other in layouts[1:]:
        fields = sorted(set(layouts[0].fields) ^ set(other.fields), key=lambda field: field.name)
        if layouts[0].kind == "batch" or other.kind == "batch":
            some = ", ".join(f"{field.name} ({field.tensor or field.dtype})" for field in fields[:2])
            raise ValueError(f"the batches of different ranks have different columns or types: {some}")
        contexts = [{f.name for f in layout.fields if f.name.startswith("context.")} for layout in (layouts[0], other)]
        for name in sorted(contexts[0] ^ contexts[1]):
            if not name.endswith(LENGTHS):
                raise ValueError("the requests of different ranks have different context columns: only some have "
                                 f"{name}")


def _idle(costs: np.ndarray, ranks: np.ndarray, world_size: int) -> float:
    loads = np.bincount(ranks, costs, world_size)
    return float(1 - loads.mean() / loads.max()) if loads.max() > 0 else 0.0


def _users(rows: RequestRows | RequestBatch) -> np.ndarray:
    """[R] a number for each user; where a batch does not say, one for each request."""
    return stable_id(rows.pointers.user_id) if rows.pointers is not None else stable_id(np.asarray(rows.request_id))


def _reads(users: np.ndarray, ranks: np.ndarray, world_size: int) -> int:
    return sum(len(np.unique(users[ranks == rank])) for rank in range(world_size))


def _report(world: _World, ranks: np.ndarray) -> Report:
    moved = ranks != world.source
    return Report(
        len(ranks), int(moved.sum()), int(world.sizes[moved].sum()), _idle(world.costs, world.source, world.size),
        _idle(world.costs, ranks, world.size), int(np.bincount(ranks, world.tokens, world.size).max()),
        _reads(world.users, world.source, world.size), _reads(world.users, ranks, world.size))

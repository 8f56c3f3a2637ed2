"""When a sharded table's rows and gradients travel: ``Blocking``, the plain order, and ``Prioritized``, the same result
with all of it under the computation but the rows that two successive batches share (FreeScale, arXiv 2604.24073,
section "prioritized embedding updates").

    schedule = Prioritized(table)                         # or Blocking(table): the same numbers
    for batch, vectors in schedule(batches, ids=lambda batch: batch.ids):
        loss = loss_of(model(batch, vectors))             # vectors [T, D]: a leaf that wants a gradient
        loss.backward()
        schedule.step()                                   # the rows' optimizer step; the model's is the caller's

Invariant: a row is read for batch n + 1 only after every update of it from the batches up to n. Each row is updated
once a step. A row's gradient is the sum over ranks, in their order, of ``gradient_scale`` times the sum over its places
in the rank's batch, in their order. So both schedules give the same bits.

Scale: with ``loss = local sum / global count`` the sum over ranks is the gradient of the global mean:
``gradient_scale=1``. Where the same loss also feeds DDP, which *averages* over ranks, the loss is ``local sum * world /
global count``, and ``gradient_scale=1 / world`` makes both right.

Several tables: give a dict, ``ids`` then returns a dict of the same names, and ``vectors`` is one. Micro-batches that
make one step: announce their ids as one batch and take slices of the vectors. A rank that has no more data goes on
answering the others until none has any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from semel.comm.worker import Worker
from semel.training.embedding.exchange import Batch, Part, answer, ask, compare, give, together
from semel.training.embedding.table import ShardedEmbedding

Example = TypeVar("Example")
Vectors = Any  # Tensor, or dict[str, Tensor] where the schedule has several tables
ONE = ""


@dataclass
class StepReport:
    """Of one step on this rank. ``exposed_s``: seconds that the loop spent in calls of the schedule. ``rows``: distinct
    ids; ``collisions``: those whose rows the step before used too, on any rank (``Blocking`` does not count them);
    ``sent_bytes`` to other ranks: these three are filled in when the step's last gradients have arrived."""

    exposed_s: float
    rows: int
    collisions: int
    sent_bytes: int


@dataclass
class _Update:
    """What a batch's backward left: gradients (None: skip), and by table the learning rate and the step's number."""

    gradients: dict[str, Tensor] | None
    rates: dict[str, tuple[float, int]]
    report: StepReport


@dataclass
class Report:
    """Grows by a step each step; a long run may clear ``steps`` whenever it has logged them."""

    steps: list[StepReport] = field(default_factory=list)

    @property
    def collision_rate(self) -> float:
        """Share of the rows asked for that the step before used too."""
        return sum(step.collisions for step in self.steps) / max(sum(step.rows for step in self.steps), 1)

    @property
    def exposed_s(self) -> float:
        """Mean over the steps."""
        return sum(step.exposed_s for step in self.steps) / max(len(self.steps), 1)


class Schedule(Generic[Example]):
    """What both schedules share: the loop, one or several tables, and the clock.

    A loop of one's own calls, in this order: ``announce(ids)`` of the first batch; then for each batch ``forward()``,
    ``announce`` of the following one (None: there is none), and after ``backward`` ``step()``, or ``skip()`` on all
    ranks to leave the rows as they are. ``forward`` returns None when no rank has data; ``close`` ends it earlier.
    Calls out of order raise RuntimeError.
    """

    def __init__(self, tables: ShardedEmbedding | Mapping[str, ShardedEmbedding], gradient_scale: float = 1.0) -> None:
        # By name: all ranks must send for their tables in one order.
        self.tables = {ONE: tables} if isinstance(tables, ShardedEmbedding) else dict(sorted(tables.items()))
        self.gradient_scale = gradient_scale
        self.report = Report()
        self._vectors: dict[str, Tensor] | None = None
        self._announced = False
        self._exposed = 0.0
        for table in self.tables.values():
            table.settle = self.synchronize

    def __call__(self, batches: Iterable[Example], ids: Callable[[Example], Any]) -> Iterator[tuple[Example, Vectors]]:
        """Each batch with its vectors, in order; ``step`` or ``skip`` before the next is taken. Where the loop ends
        early, it must end after the same batch on all ranks."""
        upcoming = iter(batches)
        batch = next(upcoming, None)
        self.announce(None if batch is None else ids(batch))
        try:
            while (vectors := self.forward()) is not None:
                following = next(upcoming, None)
                self.announce(None if following is None else ids(following))
                if batch is not None:
                    yield batch, vectors
                else:
                    self.step()  # nothing to do here, but others use rows that lie here
                batch = following
        finally:
            self.close()

    def announce(self, ids: Any) -> None:
        """The ids of the following batch: [T] or jagged, integers or strings, by table where there are several."""
        if self._announced:
            raise RuntimeError("announce() again before forward() has taken the batch announced last")
        with self._clock():
            named = dict.fromkeys(self.tables) if ids is None else {ONE: ids} if ONE in self.tables else dict(ids)
            if named.keys() != self.tables.keys():
                raise KeyError(f"ids are for {sorted(named)}, the tables are {sorted(self.tables)}")
            self._announce({name: None if value is None else self.tables[name].flat_ids(value)
                            for name, value in named.items()})
            self._announced = True

    def forward(self) -> Vectors | None:
        """The vectors [T, D] of the batch announced last, as leaves that want a gradient."""
        if self._vectors is not None:
            raise RuntimeError("forward() before step(); call skip() where a batch is not to be learned from")
        if not self._announced:
            raise RuntimeError("forward() without a batch; announce() its ids first")
        with self._clock():
            batches = self._forward()
        self._announced = False
        if batches is None:
            return None
        self._vectors = {name: batch.vectors.requires_grad_() for name, batch in batches.items()}
        return self._vectors[ONE] if ONE in self._vectors else dict(self._vectors)

    def step(self) -> None:
        """Updates the rows of the batch by the gradients of its vectors (none: zeros), each row once. The gradients are
        read later, too: they must not be changed in place."""
        self._end({name: torch.zeros_like(vectors) if vectors.grad is None else vectors.grad.contiguous()
                   for name, vectors in (self._vectors or {}).items()})

    def skip(self) -> None:
        """No update from this batch."""
        self._end(None)

    def _end(self, gradients: dict[str, Tensor] | None) -> None:
        if self._vectors is None:
            raise RuntimeError("step() or skip() without a batch; call forward() first")
        if not self._announced:
            raise RuntimeError("step() or skip() before announce(); announce the following batch, or None, first")
        report = StepReport(0.0, 0, 0, 0)
        with self._clock():
            self._vectors = None
            for table in self.tables.values():
                table.steps += gradients is not None
            self._step(_Update(gradients, {name: (table.optimizer.learning_rate, table.steps)
                                           for name, table in self.tables.items()}, report))
        report.exposed_s, self._exposed = self._exposed, 0.0
        self.report.steps.append(report)

    def close(self) -> None:
        """Ends the loop: forgets the batch announced last, after the updates asked for are done."""
        self.synchronize()
        self._vectors, self._announced, self._exposed = None, False, 0.0

    def abandon(self) -> None:
        """Ends it after an error, here or elsewhere: waits for nothing, and what was under way may be lost."""

    def synchronize(self) -> None:
        """Returns when every update asked for is done."""
        raise NotImplementedError

    def _announce(self, ids: dict[str, Tensor | None]) -> None:
        raise NotImplementedError

    def _forward(self) -> dict[str, Batch] | None:
        raise NotImplementedError

    def _step(self, update: _Update) -> None:
        raise NotImplementedError

    def _ask(self, ids: dict[str, Tensor | None]) -> dict[str, Batch] | None:
        asked = together({name: ask(table, ids[name]) for name, table in self.tables.items()})
        batches = {name: batch for name, batch in asked.items() if batch is not None}
        return batches if len(batches) == len(asked) else None

    def _answer(self, batches: dict[str, Batch], part: Callable[[Batch], Part | None]) -> None:
        together({name: answer(self.tables[name], batch, part(batch)) for name, batch in batches.items()})

    def _give(self, batches: dict[str, Batch], part: Callable[[Batch], Part | None], update: _Update) -> None:
        gradients = update.gradients
        if gradients is not None:
            together({name: give(self.tables[name], batch, part(batch), gradients[name], self.gradient_scale,
                                 *update.rates[name]) for name, batch in batches.items()})

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._exposed += time.perf_counter() - start


class Blocking(Schedule[Example]):
    """Each exchange when it is needed, and the loop waits for it: the reference."""

    def _announce(self, ids: dict[str, Tensor | None]) -> None:
        self._ids = ids

    def _forward(self) -> dict[str, Batch] | None:
        self._now = self._ask(self._ids)
        if self._now is not None:
            self._answer(self._now, lambda batch: batch.whole)
        return self._now

    def _step(self, update: _Update) -> None:
        assert self._now is not None
        self._give(self._now, lambda batch: batch.whole, update)
        _count(update.report, self._now)

    def synchronize(self) -> None:
        pass  # nothing is ever under way


class Prioritized(Schedule[Example]):
    """Batch n + 1 is asked for while n computes; only rows that both use are waited for.

    A thread does, for each batch n in turn, ``_look_ahead`` (n + 1's ids, and the rows of n + 1 that n does not use:
    all updates up to n - 1 are done by then), ``_hand_over`` (gradients of the shared rows, their update, their new
    values: what ``forward`` waits for) and ``_finish`` (the other gradients).
    """

    def __init__(self, tables: ShardedEmbedding | Mapping[str, ShardedEmbedding], gradient_scale: float = 1.0) -> None:
        super().__init__(tables, gradient_scale)
        self._worker: Worker | None = None
        self._stream = SideStream(next(iter(self.tables.values())).weight.device)
        self._failed: BaseException | None = None
        self._now: dict[str, Batch] | None = None
        self._next: dict[str, Batch] | None = None
        self._ready: Future[Any] | None = None
        self._unfinished: _Update | None = None

    def _look_ahead(self, ids: dict[str, Tensor | None]) -> None:
        self._next = self._ask(ids)
        if self._next is not None:
            now: dict[str, Batch] = self._now or {}
            together({name: compare(self.tables[name], now.get(name), batch) for name, batch in self._next.items()})
            self._answer(self._next, lambda batch: batch.early)

    def _hand_over(self, update: _Update | None) -> dict[str, Batch] | None:
        if self._now is not None and update is not None:
            self._give(self._now, lambda batch: batch.urgent, update)
        if self._next is not None:
            self._answer(self._next, lambda batch: batch.late)
        self._past, self._now, self._next = self._now, self._next, None
        return self._now

    def _finish(self, update: _Update) -> None:
        assert self._past is not None
        self._give(self._past, lambda batch: batch.rest, update)
        _count(update.report, self._past)
        self._past = None

    def _announce(self, ids: dict[str, Tensor | None]) -> None:
        self._later(self._look_ahead, ids)
        if self._vectors is None:  # the first batch follows on none
            self._ready = self._later(self._hand_over, None)

    def _forward(self) -> dict[str, Batch] | None:
        assert self._ready is not None
        batches = self._ready.result()
        self._begin_finish()  # not before: nothing is to keep this thread from going on
        self._stream.join([batch.vectors for batch in (batches or {}).values()])
        return batches

    def _step(self, update: _Update) -> None:
        self._ready = self._later(self._hand_over, update)
        self._unfinished = update

    def _begin_finish(self) -> None:
        if self._unfinished is not None:
            self._later(self._finish, self._unfinished)
            self._unfinished = None

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.abandon()
            self._next = self._ready = self._unfinished = None

    def abandon(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def synchronize(self) -> None:
        if self._worker is not None:
            self._begin_finish()
            self._later(lambda: None).result()

    def _later(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Does it in the thread, unless something before it failed: then that is raised again."""
        begin = self._stream.fork()

        def run() -> Any:
            if self._failed is not None:
                raise self._failed
            try:
                with begin():
                    return work(*arguments)
            except BaseException as error:
                self._failed = error
                raise

        if self._worker is None:
            self._worker = Worker("semel-embedding")
        return self._worker.submit(run)


def _count(report: StepReport, batches: dict[str, Batch]) -> None:
    report.rows = sum(len(batch.whole.wanted.values) for batch in batches.values())
    report.collisions = sum(len(batch.late.wanted.values) for batch in batches.values() if batch.late is not None)
    report.sent_bytes = sum(batch.sent_bytes for batch in batches.values())


class SideStream:
    """On a GPU: the thread's own stream, so that its copies and kernels wait for the caller's only where they must. On
    CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> Callable[[], AbstractContextManager[Any]]:
        """Called by the caller; within the block that it returns, what the caller had asked for is done first, and at
        its end the thread's work is."""
        stream = self.stream
        if stream is None:
            return nullcontext
        asked = torch.cuda.current_stream(stream.device).record_event()

        @contextmanager
        def block() -> Iterator[None]:
            with torch.cuda.stream(stream):
                stream.wait_event(asked)
                yield
                stream.synchronize()

        return block

    def join(self, tensors: list[Tensor]) -> None:
        """The caller's stream goes on to use what the thread has made."""
        if self.stream is not None:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.stream.device))

"""The stages of a training step, in order: read, exchange, materialize, embed, forward, backward, update.

A ``Work`` is one batch on its way through them; the loops of ``semel.training.loops`` decide what runs when. All ranks
cut the same global batches into the same pieces and share the pieces out, so that a step does not depend on how many
ranks there are: two ranks with a piece each compute what one rank with two pieces does, bit for bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semel.examples.order import token_cuts
from semel.training.cost import CostModel, Shares
from semel.training.gradients import GradientSums
from semel.training.loops import Stage
from semel.training.objectives import Computed, Loader
from semel.training.pieces import Workers, add, cut_evenly, share_out, sums
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe
from semel.training.schedule import rate_at
from semel.training.timeline import Timeline
from semel.training.tuning import Tuning


class Exchange(Protocol):
    """Moves rows between ranks: ``start(rows).wait()`` are the rows that this rank computes. Called by all ranks for
    every batch, in the same order, in one thread."""

    def start(self, rows: Any) -> Any: ...


class Remembers(Protocol):
    """Takes what an item tower computed: within ``piece`` for a piece, and ``write`` once a batch, on all ranks. Where
    it ``recalls``, ``recall`` gets a batch's rows from other ranks before it is computed."""

    recalls: bool

    def recall(self, work: Work) -> None: ...
    def piece(self, number: int) -> AbstractContextManager[None]: ...
    def write(self, work: Work) -> None: ...


class Fetches(Protocol):
    """Tables of which a batch's rows are fetched before it is computed (``semel.training.sharded``)."""

    @property
    def leaves(self) -> list[Tensor]:
        """The batch's rows, from ``embed`` to ``learn``."""
        ...
    def wanted(self, batch: Any) -> dict[str, Tensor]: ...
    def embed(self, work: Work) -> None: ...
    def learn(self, gradients: Sequence[Tensor | None], rate: float) -> None: ...


@dataclass
class Update:
    """The batches that make one update of the weights, and what has been summed over them so far. ``done``: the share
    of the whole run's batches that lies behind it; ``step``: how many updates do, set where it is read."""

    loader: Loader
    batches: list[np.ndarray]
    done: float
    step: int = 0
    rows: list[Any] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    runs: list[list[tuple[int, int]]] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    counts: np.ndarray | None = None   # of this rank's rows; from the first forward on of all ranks'
    gradients: list[Tensor | None] | None = None
    used: list[bool] = field(default_factory=list)
    loss: Tensor | None = None
    not_finite: list[str] = field(default_factory=list)


@dataclass
class Work:
    """One batch. ``number``: which of its update's; ``piece``: the number of this rank's first piece. The first three
    are given, each stage sets what it makes."""

    update: Update
    number: int
    rows: Any = None
    histories: Any = None
    runs: list[tuple[int, int]] | None = None
    piece: int = 0
    batch: Any = None
    pieces: list[tuple[int, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    ids: dict[str, Tensor] | None = None
    row_gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def last(self) -> bool:
        return self.number == len(self.update.batches) - 1


def works(loader: Loader, accumulate_tokens: int | None, before: int, total: int) -> Iterator[Work]:
    """The rest of the loader's epoch. ``before`` of ``total`` batches of the whole run lie behind it."""
    for update in updates(loader, accumulate_tokens, before, total):
        for number in range(len(update.batches)):
            yield Work(update, number)


def updates(loader: Loader, accumulate_tokens: int | None, before: int, total: int) -> list[Update]:
    batches = loader.upcoming()
    cuts = np.arange(len(batches) + 1) if accumulate_tokens is None else token_cuts(
        np.array([loader.costs(batch).sum() for batch in batches], np.int64), accumulate_tokens)
    return [Update(loader, batches[a:b], (before + a) / max(total, 1)) for a, b in pairwise(cuts)]


class StepStages:
    """The stages over one model; ``step`` counts updates. ``stop``: asked before each update whether this rank has been
    told to stop; after it ``stopping`` says whether any has, the same on all ranks. ``tables``: those of the model that
    do not lie in it whole; then each batch must be an update. ``score`` is called with a batch before any weight has
    learned from it. ``memory``: where what an item tower computed goes, of a model that has one. ``tuning``: what
    requests cost and which share of the pieces each rank computes (None: as the recipe says, and equal).
    ``under_backward``: sums gradients over ranks meanwhile; without it they are summed afterwards."""

    def __init__(self, recipe: Recipe, objective: Computed, model: Any, optimizer: torch.optim.Optimizer,
                 workers: Workers, ranks: Ranks, timeline: Timeline, stop: Callable[[], bool],
                 exchange: Exchange | None = None, tables: Fetches | None = None,
                 score: Callable[[Work], None] | None = None, memory: Remembers | None = None,
                 tuning: Tuning | None = None, under_backward: GradientSums | None = None) -> None:
        self.recipe, self.objective, self.model, self.optimizer = recipe, objective, model, optimizer
        self.workers, self.ranks, self.timeline, self._stop = workers, ranks, timeline, stop
        self.exchange, self._tables, self._score, self._memory = exchange, tables, score, memory
        self._sums = under_backward
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.pieces = max(recipe.pieces, ranks.world_size)
        self.cost = tuning.cost if tuning is not None else CostModel(quadratic=recipe.quadratic)
        self.shares = (None if tuning is None else tuning.shares) or Shares.equal(ranks.world_size)
        self.step = 0
        self.stopping = False
        self.observed: list[list[float]] = []
        """Of each batch, what this rank's part was (``CostModel.features``) and the seconds that it computed."""
        self._seconds = 0.0

    def stages(self) -> list[Stage]:
        """In order, for updates from ``step`` on; exchange, embed, score, recall and remember only where there is
        something to do."""
        self._steps = itertools.count(self.step)
        return [
            Stage("read", self._read, ahead=True),
            *([Stage("exchange", self._exchange, ahead=True)] if self.exchange else []),
            Stage("materialize", self._materialize, ahead=True),
            *([Stage("embed", self._tables.embed)] if self._tables else []),
            *([Stage("score", self._score)] if self._score else []),
            *([Stage("recall", self._memory.recall)] if self._memory and self._memory.recalls else []),
            Stage("forward", self._forward),
            Stage("backward", self._backward),
            Stage("update", self._update),
            *([Stage("remember", self._memory.write)] if self._memory else []),
        ]

    def _read(self, work: Work) -> None:
        update = work.update
        if work.number == 0:  # all of the update's rows: over how much its loss is a mean is known before the first
            update.step = next(self._steps)
            for number, batch in enumerate(update.batches):
                tokens = update.loader.costs(batch)
                order, runs = share_out(self.cost.predict(tokens), self.pieces, self.recipe.balance)
                batch, tokens = batch[order], tokens[order]
                ends = np.cumsum(self.shares.sizes(len(runs)))[: self.ranks.world_size - 1]
                mine = np.split(np.arange(len(runs)), ends)[self.ranks.rank]
                own = [runs[i] for i in mine]
                first, stop = (own[0][0], own[-1][1]) if own else (0, 0)
                update.pieces.append(number * self.pieces + int(mine[0]) if own else 0)
                update.rows.append(update.loader.read(batch[first:stop]))
                update.costs.append(CostModel.features(tokens[first:stop]))
                update.runs.append([(a - first, b - first) for a, b in own])
                update.counts = self.objective.counts(update.rows[-1]) + (0 if update.counts is None else update.counts)
        work.rows, work.runs = update.rows[work.number], update.runs[work.number]
        update.rows[work.number] = None
        work.piece = update.pieces[work.number]
        if self.exchange is None:
            work.histories = self.objective.histories(work.rows)

    def _exchange(self, work: Work) -> None:
        assert self.exchange is not None
        work.rows, work.runs = self.exchange.start(work.rows).wait(), None
        each = -(-self.pieces // self.ranks.world_size)
        work.piece = work.number * self.pieces + self.ranks.rank * each

    def _materialize(self, work: Work) -> None:
        if self.exchange is not None:  # what moved are pointers: who computes a request reads its history
            work.histories = self.objective.histories(work.rows)
        work.batch = self.objective.materialize(work.rows, work.histories, work.update.step)
        if work.runs is None:
            each = -(-self.pieces // self.ranks.world_size)
            work.runs = cut_evenly(self.objective.costs(work.batch), each)
        work.pieces = [(work.piece + i, work.batch.slice(a, b)) for i, (a, b) in enumerate(work.runs)]
        work.rows = work.histories = None
        if self._tables is not None:
            work.ids = self._tables.wanted(work.batch)

    def _forward(self, work: Work) -> None:
        update = work.update
        assert update.counts is not None
        if work.number == 0:
            with self.timeline.span("straggler"):
                update.counts = self.ranks.sum(update.counts)
        counts = update.counts
        shares = {number: np.divide(self.objective.counts(piece), counts, out=np.zeros_like(counts), where=counts > 0)
                  for number, piece in work.pieces}
        self.model.train()
        began = time.perf_counter()
        work.losses = self.workers.losses(
            [(number, (number, piece, shares[number])) for number, piece in work.pieces], self.step,
            lambda piece, source: self._loss(piece[0], piece[1], piece[2], source))
        self._seconds = time.perf_counter() - began
        values = torch.stack([loss.detach() for loss in work.losses]) if work.losses else torch.zeros(1)
        update.loss = values.sum() if update.loss is None else update.loss + values.sum()
        if not torch.isfinite(values).all():
            for (_, piece), value in zip(work.pieces, values.tolist(), strict=True):
                if not np.isfinite(value):
                    update.not_finite += [str(name) for name in getattr(piece, "request_id", [])[:5]]

    def _loss(self, number: int, piece: Any, share: np.ndarray, source: torch.Generator) -> Tensor:
        with ExitStack() as around:
            if self._memory is not None:
                around.enter_context(self._memory.piece(number))
            if self.recipe.precision != "float32":
                around.enter_context(torch.autocast(self.parameters[0].device.type, torch.bfloat16))
            return self.objective.loss(self.model, piece, source, share)

    def _backward(self, work: Work) -> None:
        update = work.update
        began = time.perf_counter()
        targets = [*self.parameters, *([] if self._tables is None else self._tables.leaves)]
        if self._sums is not None and work.last:  # under way to the other ranks before this is done
            self._sums.begin(len(work.losses), update.gradients)
            parts = self.workers.parts(targets, work.losses, self._sums.piece)
            update.used = self._sums.end()
        else:
            parts = self.workers.parts(targets, work.losses)
            update.gradients = add(update.gradients, sums([part[:len(self.parameters)] for part in parts],
                                                          len(self.parameters)))
            update.used = [gradient is not None for gradient in update.gradients]
        work.row_gradients = sums([part[len(self.parameters):] for part in parts], len(targets) - len(self.parameters))
        self.observed.append([*update.costs[work.number], self._seconds + time.perf_counter() - began])
        work.losses = []

    def _update(self, work: Work) -> None:
        if not work.last:
            return
        update, config = work.update, self.recipe.optimizer
        assert update.loss is not None
        with self.timeline.span("straggler"):  # so few bytes that waiting for them is waiting for the slowest rank
            loss, broken, stop, *used = self.ranks.sum(
                [float(update.loss), not torch.isfinite(update.loss), self._stop(), *update.used])
        update.loss = torch.tensor(loss, dtype=torch.float32)
        if broken:
            self._report(update)
        rate = rate_at(config, self.step, update.done)
        if self._tables is not None:  # before the sums of the rest, under which what it sends is hidden
            self._tables.learn(work.row_gradients, rate)
            work.row_gradients = []
        with self.timeline.span("exposed_gradient"):
            found = self._sums.wait() if self._sums is not None else update.gradients
        assert found is not None
        for parameter, gradient, count in zip(self.parameters, found, used, strict=True):
            # A parameter that no rank used has no gradient, as on one rank: the optimizer leaves it alone.
            parameter.grad = (torch.zeros_like(parameter) if gradient is None else gradient) if count else None
        if self._sums is None:
            with self.timeline.span("exposed_gradient"):
                self.ranks.sum_in_place([p.grad for p in self.parameters if p.grad is not None])
        if config.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * rate
        self.optimizer.step()
        update.gradients = None
        self.stopping = bool(stop)
        self.step += 1

    def _report(self, update: Update) -> None:
        """The same error on all ranks, with what the ones saw that it happened to."""
        seen = [(rank, names) for rank, names in enumerate(self.ranks.gather(update.not_finite)) if names]
        where = "; its requests" + "; ".join(
            f"{f' on rank {rank}' if self.ranks.world_size > 1 else ''}: {', '.join(names)} ..."
            for rank, names in seen) if seen else ""
        assert update.loss is not None
        raise FloatingPointError(f"the loss is {float(update.loss)} at step {self.step}{where}; lower "
                                 f"optimizer.learning_rate or look at these requests' features")


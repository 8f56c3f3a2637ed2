"""A model's tables while they are shared by ranks: what the trainer does with them from stage to stage.

``ShardedTables`` takes the ``nn.Embedding`` of some features out of a model, gives its rows to the ranks
(``ShardedEmbedding``), and leaves ``FetchedRows`` in its place, which looks up what was fetched for the batch. So
the model's file knows nothing of it, and what is saved is an ordinary model again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import Jagged, RequestBatch
from semel.comm.transport import transport as make_transport
from semel.features import Feature
from semel.models import NextItem
from semel.models.embeddings import ITEM
from semel.models.vocabulary import Vocabulary
from semel.training.embedding import SGD, Adam, Blocking, Prioritized, RowOptimizer, RowWiseAdagrad, ShardedEmbedding
from semel.training.embedding.schedule import Schedule
from semel.training.recipe import Recipe
from semel.training.sequences import SequenceBatch
from semel.training.stages import Work
from semel.training.timeline import Timeline


class FetchedRows(nn.Module):
    """``index`` of any shape -> rows [..., dim], of those that were fetched: ``keys`` [U] ascending, ``vectors``
    [U, dim]. Raises KeyError for a row that was not."""

    def __init__(self, name: str, dim: int) -> None:
        super().__init__()
        self.name = name
        self.keys, self.vectors = torch.empty(0, dtype=torch.int64), torch.empty(0, dim)

    def forward(self, index: Tensor) -> Tensor:
        place = torch.searchsorted(self.keys, index.contiguous())
        if index.numel() and (not len(self.keys) or not torch.equal(
                self.keys[place.clamp(max=len(self.keys) - 1)], index)):
            raise KeyError(f"the model looks up a row of {self.name!r} that the batch does not name; a table that is "
                           f"looked up by other values cannot be sharded: take {self.name!r} out of sharding.tables")
        return nn.functional.embedding(place, self.vectors)


class ShardedTables:
    """The tables that ``recipe.sharding`` names, of ``model``, over all ranks. All ranks make it together.

    Stages: ``wanted`` beside a batch's materialization, ``embed`` before it is computed, ``learn`` with its gradients.
    Between ``embed`` and ``learn`` the ids of the batch behind it are announced, if ``meet`` has said which that is.
    Raises ValueError for a name that is no table.
    """

    def __init__(self, model: Any, recipe: Recipe, timeline: Timeline) -> None:
        self.model, self.config, self.timeline = model, recipe.sharding, timeline
        self._validates = recipe.examples.validate
        encoders = model.tables.encoders
        there = sorted(name for name, encoder in encoders.items() if isinstance(encoder, Vocabulary))
        for name in self.config.tables:
            if name not in there:
                raise ValueError(f"sharding.tables names {name!r}, which is no table of this model; it has "
                                 f"{', '.join(there)}")
        link = make_transport()
        self.rows: dict[str, FetchedRows] = {}
        tables: dict[str, ShardedEmbedding] = {}
        for name in sorted(self.config.tables):
            whole = model.tables.tables[name]
            table = tables[name] = ShardedEmbedding(whole.embedding_dim, link, rows=whole.num_embeddings,
                                                    optimizer=row_optimizer(recipe), seed=recipe.seed)
            table.start_at(whole.weight.detach())
            self.rows[name] = model.tables.tables[name] = FetchedRows(name, whole.embedding_dim)
        kind = Prioritized if self.config.schedule == "prioritized" else Blocking
        self.schedule: Schedule[Work] = kind(tables)
        self._rate = recipe.sharding.learning_rate or recipe.optimizer.learning_rate
        self._announced = False
        self._behind: Future[Work] | None = None

    @property
    def tables(self) -> Mapping[str, ShardedEmbedding]:
        return self.schedule.tables

    @property
    def parameters(self) -> int:
        return sum(table.size * table.dim for table in self.tables.values())

    def wanted(self, batch: RequestBatch | SequenceBatch) -> dict[str, Tensor]:
        """The distinct rows of each table that computing ``batch`` looks up, ascending."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.rows}
        places, items = self._of_sequences(batch) if isinstance(batch, SequenceBatch) else self._of_requests(batch)
        tables = self.model.tables
        for feature, value in places:
            name = tables.features.item if feature.name == ITEM else feature.name
            if name in found:
                ids = value.values if isinstance(value, Jagged) else value
                found[name].append(tables.encoders[name](ids).flatten())
        if tables.features.item in found:
            found[tables.features.item] += items
        return {name: torch.unique(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)
                for name, parts in found.items()}

    def _of_requests(self, batch: RequestBatch) -> tuple[list[tuple[Feature, Any]], list[Tensor]]:
        """The values that a ranking model looks up, and rows of the item table that it does besides."""
        spec = self.model.tables.features
        history = spec.history if getattr(self.model, "use_history", True) else ()
        # An id that is hidden reads the row of unknown ones.
        hidden = [torch.zeros(1, dtype=torch.int64)] if self.model.tables.unknown_rate > 0 else []
        return [*((feature, batch.request["history"].columns[feature.name]) for feature in history),
                *((feature, batch.request[feature.name]) for feature in spec.request),
                *((feature, batch.candidate[feature.name]) for feature in (Feature(ITEM), *spec.candidate))], hidden

    def _of_sequences(self, batch: SequenceBatch) -> tuple[list[tuple[Feature, Any]], list[Tensor]]:
        """The same of a next-item model, whose targets are items of the histories."""
        assert batch.negatives is not None
        columns = batch.history.columns
        negatives = [batch.negatives[0]] if len(batch.history) else []
        return [(feature, columns[feature.name]) for feature in self.model.tables.features.history], negatives

    def meet(self, work: Work, behind: Future[Work] | None) -> None:
        """``behind``: the batch that follows on ``work``, on its way."""
        self._behind = behind

    def embed(self, work: Work) -> None:
        """The batch's rows, as they are after the update before it."""
        assert work.ids is not None
        with self.timeline.span("exposed_embedding"):
            if not self._announced:
                self.schedule.announce(work.ids)
            vectors = self.schedule.forward()
        assert vectors is not None
        self._hold(work.ids, vectors)
        behind, self._behind = self._behind, None
        following = None
        if behind is not None:
            with self.timeline.span("input"):
                following = behind.result().ids
        with self.timeline.span("exposed_embedding"):
            self.schedule.announce(following)
        self._announced = behind is not None

    @property
    def leaves(self) -> list[Tensor]:
        """The vectors [U, dim] of the batch, by name of table: what ``learn`` takes gradients of."""
        return [rows.vectors for rows in self.rows.values()]

    def learn(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """One step of each row of the batch; ``rate``: what the schedule of learning rates makes of the whole rate."""
        for leaf, gradient, table in zip(self.leaves, gradients, self.tables.values(), strict=True):
            leaf.grad = gradient
            table.optimizer.learning_rate = rate * self._rate
        with self.timeline.span("exposed_embedding"):
            self.schedule.step()
            if not self._announced:
                self.schedule.close()

    def read(self, batch: RequestBatch) -> None:
        """The batch's rows, to compute with and not to learn from. All ranks together."""
        ids = self.wanted(batch)
        self._hold(ids, {name: table.read(ids[name]) for name, table in self.tables.items()})

    def reading(self, score: Callable[[RequestBatch], Tensor]) -> Callable[[RequestBatch], Tensor]:
        """``score`` of batches whose rows are read first; all ranks must ask for equally many."""
        def scored(batch: RequestBatch) -> Tensor:
            self.read(batch)
            return score(batch)

        return scored

    @contextmanager
    def judged(self) -> Iterator[Any]:
        """Within the block the model as an objective's ``validate`` takes it. All ranks together.

        A next-item model is judged by all items: every rank holds all rows meanwhile. One batch's scores take more,
        as long as it has more users than a row has numbers."""
        if not isinstance(self.model, NextItem):
            yield self.reading(self.model)
            return
        if self._validates:
            everything = {name: torch.arange(table.size) for name, table in self.tables.items()}
            self._hold(everything, {name: table.read(everything[name]) for name, table in self.tables.items()})
        yield self.model
        nothing = torch.empty(0, dtype=torch.int64)
        self._hold(dict.fromkeys(self.rows, nothing),
                   {name: torch.empty(0, table.dim) for name, table in self.tables.items()})

    def _hold(self, ids: Mapping[str, Tensor], vectors: Mapping[str, Tensor]) -> None:
        for name, rows in self.rows.items():
            rows.keys, rows.vectors = ids[name], vectors[name]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within the block rank 0's model has its tables back, whole: an ordinary model, to be saved. All ranks
        together."""
        tables = self.model.tables.tables
        try:
            for name, table in self.tables.items():
                whole = table.gather()
                if whole is not None:
                    tables[name] = nn.Embedding.from_pretrained(whole)
            yield
        finally:
            for name, rows in self.rows.items():
                tables[name] = rows

    def save(self, folder: Path) -> None:
        """Each rank its rows, with what their optimizer knows. All ranks together; ``load`` on any number of them."""
        for name, table in self.tables.items():
            table.save(folder / name)

    def load(self, folder: Path) -> None:
        for name, table in self.tables.items():
            table.load(folder / name)

    def report(self) -> dict[str, float]:
        """Of the steps that are done since the last time: the share of rows that the step before used too, as far as
        the schedule counts them, and what this rank has sent a step."""
        steps = self.schedule.report.steps
        done, self.schedule.report.steps = steps[:-2], steps[-2:]  # the gradients of the last ones are under way
        rows = sum(step.rows for step in done)
        return {"collision_rate": sum(step.collisions for step in done) / rows,
                "embedding_bytes": sum(step.sent_bytes for step in done) / len(done)} if rows else {}

    def close(self) -> None:
        """The end, of whatever kind: waits for nobody."""
        self.schedule.abandon()


def sharded_tables(model: Any, recipe: Recipe, timeline: Timeline) -> ShardedTables | None:
    """None where the recipe names no tables."""
    return ShardedTables(model, recipe, timeline) if recipe.sharding.tables else None


def row_optimizer(recipe: Recipe) -> RowOptimizer:
    """That of the sharded tables; its learning rate is set before each step."""
    kind, config = recipe.sharding.optimizer, recipe.optimizer
    if kind == "adam":
        return Adam(betas=(config.beta1, config.beta2))
    return RowWiseAdagrad() if kind == "row_wise_adagrad" else SGD()

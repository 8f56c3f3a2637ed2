"""What a model is trained on and how it is judged on the way: ranking requests, or the next item of a history.

An objective owns the data of a run. Both kinds offer the same few things, so that the trainer is one plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semel.batch import Jagged, JaggedTable, RequestBatch, RequestRows, expand_rows
from semel.examples import (
    RequestLoader,
    build_examples,
    history_tensors,
    leave_one_out,
    materialize,
    sequences_before,
)
from semel.examples.materialization import read_ahead
from semel.examples.shared_reads import Histories
from semel.features import Feature, FeatureSpec, Task
from semel.history import HistoryStore
from semel.metrics import AUC, NormalizedEntropy, Ranking, ranks_of_targets
from semel.models import Model, NextItem, make_model, ranking_loss
from semel.models.early_ranker import memory_layer
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe
from semel.training.sequences import SequenceBatch, SequenceLoader
from semel.training.statistics import FeatureStatistics, request_statistics
from semel.training.warm_start import co_occurrence_embeddings


class Loader(Protocol):
    """Batches of one epoch after the other, resumable, the same on every rank."""

    def __len__(self) -> int: ...
    def upcoming(self) -> list[np.ndarray]: ...
    def costs(self, index: np.ndarray) -> np.ndarray: ...
    def read(self, index: np.ndarray) -> Any: ...
    def took(self) -> None: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Computed(Protocol):
    """How rows become a batch, and a batch a loss. ``rows`` are what ranks exchange, a ``batch`` is what the model is
    given."""

    def histories(self, rows: Any) -> Any:
        """What rows point to, read; None where they hold it."""
        ...
    def materialize(self, rows: Any, histories: Any, step: int = 0) -> Any:
        """``step``: of the run, from 0; what is drawn for a whole batch follows from it and the seed."""
        ...
    def counts(self, data: Any) -> np.ndarray:
        """float64 [K]: over how much the loss of rows or of a batch is a mean; sums over parts of a batch."""
        ...
    def costs(self, batch: Any) -> np.ndarray:
        """[rows] int64: what each takes to compute, in events and candidates."""
        ...
    def loss(self, model: Any, part: Any, generator: torch.Generator, share: np.ndarray) -> Tensor:
        """What a part adds to the loss of the whole, of whose ``counts`` it has this share [K]."""
        ...
    def samples(self, batch: Any) -> int: ...
    def close(self) -> None: ...


class Objective(Computed, Protocol):
    """``score``: the validation figure that early stopping watches; smaller is better if ``smaller``."""

    loader: Loader
    score: str
    smaller: bool
    catalogue: HistoryStore | None

    def make_model(self) -> Model: ...
    def validate(self, model: Any) -> Mapping[str, float]:
        """Figures on the validation data, ``score`` among them, of all ranks together; nothing if there are none."""
        ...


class RequestObjective:
    """Request rows with labels, wherever they come from: what ranking from sessions and from exposures share.

    ``judged``: the first binary task, ``column`` its place in a model's output. ``checksum``: batches hold that of
    their histories."""

    def __init__(self, recipe: Recipe, checksum: bool = False) -> None:
        self.recipe, self.checksum = recipe, checksum
        binary = [i for i, task in enumerate(recipe.features.tasks) if task.kind == "binary"]
        if not binary:
            raise ValueError(f"recipe {recipe.name!r} has no binary task to validate by")
        self.column = binary[0]
        self.judged = recipe.features.tasks[self.column].name
        self.store, self.catalogue = open_stores(recipe.store)

    def histories(self, rows: RequestRows) -> Histories:
        return read_ahead(rows, self.store, self.recipe.features)

    def materialize(self, rows: RequestRows, histories: Histories, step: int = 0) -> RequestBatch:
        return materialize(rows, self.store, self.catalogue, self.recipe.features, histories=histories,
                           checksum=self.checksum)

    def counts(self, data: RequestRows | RequestBatch) -> np.ndarray:
        """Candidates, then the weight of the labels of each task."""
        return label_counts(data, self.recipe.features.tasks)

    def costs(self, batch: RequestBatch) -> np.ndarray:
        candidates = batch.candidate_offsets[1:] - batch.candidate_offsets[:-1]
        return (batch.request["history"].lengths + candidates).numpy()

    def loss(self, model: Any, part: RequestBatch, generator: torch.Generator, share: np.ndarray) -> Tensor:
        # A page out of a whole catalogue has a few labels: activations for the rest would grow with the catalogue. An
        # item memory gets rows of all of them.
        if memory_layer(model) is None:
            part = of_labelled(part)
        return shared_ranking_loss(model(part), part, self.recipe.features.tasks, share)

    def samples(self, batch: RequestBatch) -> int:
        return batch.candidates

    def labelled(self, model: Any, batch: RequestBatch) -> tuple[np.ndarray, np.ndarray]:
        """Labels and logits of the judged task, of the candidates that have a label."""
        return self.judged_rows(batch, model(batch))

    def judged_rows(self, batch: RequestBatch, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The same, of logits [C, tasks] that are there already."""
        mask = batch.label_mask[self.judged].numpy()
        return batch.label[self.judged].numpy()[mask], logits[:, self.column].float().numpy()[mask]

    def close(self) -> None:
        self.store.close()
        if self.catalogue is not None:
            self.catalogue.close()


class RankingObjective(RequestObjective):
    """Sessions of the store, split by time; validated by NE and AUC of the first binary task."""

    score, smaller = "ne", True

    def __init__(self, recipe: Recipe, ranks: Ranks | None = None) -> None:
        super().__init__(recipe)
        self.ranks = ranks or Ranks()
        config = recipe.examples
        examples = build_examples(
            recipe.store, config.name, recipe.features, gap_us=round(config.gap_minutes * 60_000_000),
            like_threshold=config.like_threshold, validation_fraction=config.validation_fraction,
            test_fraction=config.test_fraction, max_candidates=config.max_candidates,
        )
        for split in ("train", "validation"):
            if not examples.counts[split]["requests"]:
                raise ValueError(f"the {split} split of {recipe.store} has no requests; give it a larger fraction "
                                 f"(examples.{split}_fraction) or more events")
        self._validation_begins = examples.boundaries["validation"]
        common: dict[str, Any] = {"features": recipe.features, "catalogue": self.catalogue, "seed": recipe.seed}
        self.loader: Loader = RequestLoader(examples.paths["train"], self.store, batch_requests=recipe.batch,
                                            shuffle=config.shuffle, **common)
        self._validation = RequestLoader(examples.paths["validation"], self.store, batch_requests=256, shuffle=False,
                                         rank=self.ranks.rank, world_size=self.ranks.world_size, **common)
        self._first_pass = RequestLoader(examples.paths["train"], self.store, batch_requests=256, shuffle=False,
                                         **common)

    def make_model(self) -> Model:
        features = self.recipe.features
        model = make_model(self.recipe.model, features, request_statistics(features, self._first_pass).encoders())
        before = sequences_before(self.store, self._validation_begins, (features.item,))
        spec = FeatureSpec((Feature(features.item),), item=features.item)
        _warm_start(model, self.recipe, history_tensors(before.histories, spec))
        return model

    def validate(self, model: Any) -> dict[str, float]:
        ne, auc = NormalizedEntropy(), AUC()
        for batch in self._validation:
            label, logits = self.labelled(model, batch)
            ne.update_logits(label, logits)
            auc.update_logits(label, logits)
        return {"ne": self.ranks.sum_metric(ne).ne, "auc": self.ranks.sum_metric(auc).value}


class NextItemObjective:
    """Each user's history without the last two events; validated by predicting the one before the last (or without
    the last event, and not validated)."""

    score, smaller = "ndcg@10", False
    _USERS = 256

    def __init__(self, recipe: Recipe, ranks: Ranks | None = None) -> None:
        self.recipe, self.ranks = recipe, ranks or Ranks()
        self.store, self.catalogue = open_stores(recipe.store)
        columns = [feature.name for feature in recipe.features.history]
        validate = recipe.examples.validate
        sequences = leave_one_out(self.store, columns, holdout=2 if validate else 1,
                                  min_events=recipe.examples.min_events)
        if not len(sequences):
            raise ValueError(f"{recipe.store}: no user has {recipe.examples.min_events} events or more to train on")
        self._train = history_tensors(sequences.train(), recipe.features)
        self._before: JaggedTable | None = None
        if validate:
            before, target = sequences.validation()
            self._before = history_tensors(before, recipe.features)
            held_out = history_tensors(target, recipe.features)
            self._target, self._asked = held_out.columns[recipe.features.item], held_out.columns["event_time"]
        self.loader: Loader = SequenceLoader(self._train, batch=recipe.batch, last=recipe.features.history_last,
                                             seed=recipe.seed, earlier=recipe.examples.earlier_windows,
                                             epochs=recipe.epochs)

    def make_model(self) -> Model:
        statistics = FeatureStatistics(self.recipe.features)
        statistics.add_history(self._train.columns)
        encoders = statistics.encoders()
        vocabulary = encoders[self.recipe.features.item]
        index = vocabulary(self._train.columns[self.recipe.features.item])
        counts = torch.bincount(index, minlength=len(vocabulary) + 1)[1:].float()  # type: ignore[arg-type]
        model = NextItem(self.recipe.model, self.recipe.features, encoders, counts)
        _warm_start(model, self.recipe, self._train)
        self._draw_negatives = model.draw_negatives
        return model

    def histories(self, rows: JaggedTable) -> None:
        return None

    def materialize(self, rows: JaggedTable, histories: None, step: int = 0) -> SequenceBatch:
        """With sharded tables the step draws its negatives once, for all pieces and ranks: their rows are asked for
        before it is known who computes what. Otherwise each piece draws its own."""
        if not self.recipe.sharding.tables:
            return SequenceBatch(rows)
        # A key of its own: with [seed, step] alone it would be the source of piece 0.
        seed = np.random.SeedSequence([self.recipe.seed, step], spawn_key=(0,)).generate_state(1)[0]
        return SequenceBatch(rows, self._draw_negatives(torch.Generator().manual_seed(int(seed))))

    def counts(self, data: JaggedTable | SequenceBatch) -> np.ndarray:
        """Predictions: all events but the first of each history."""
        history = data.history if isinstance(data, SequenceBatch) else data
        return np.array([(history.lengths - 1).clamp(min=0).sum()], np.float64)

    def costs(self, batch: SequenceBatch) -> np.ndarray:
        return batch.history.lengths.numpy()

    def loss(self, model: Any, part: SequenceBatch, generator: torch.Generator, share: np.ndarray) -> Tensor:
        return model.loss(part.history, generator, part.negatives) * float(share[0])

    def samples(self, batch: SequenceBatch) -> int:
        return len(batch.history.columns["event_time"])

    def validate(self, model: Any) -> dict[str, float]:
        if self._before is None:
            return {}
        ranking = Ranking(ks=(10, 50))
        vocabulary = model.tables.encoders[self.recipe.features.item]
        loader = SequenceLoader(self._before, batch=self._USERS, last=self.recipe.features.history_last, shuffle=False)
        for start in range(self.ranks.rank * self._USERS, len(self._before),
                           self.ranks.world_size * self._USERS):
            users = np.arange(start, min(start + self._USERS, len(self._before)))
            index = vocabulary(self._target[start : start + self._USERS])
            known = index > 0
            request = {"history": loader.take(users), "as_of": self._asked[start : start + self._USERS]}
            nobody = torch.zeros(len(users) + 1, dtype=torch.int64)
            scores = model.score_items(RequestBatch(users, request, {}, nobody), vocabulary.ids)
            ranks = ranks_of_targets(scores[known].numpy(), (index[known] - 1).numpy())
            # A target that training never saw cannot be ranked: it counts as a miss, not as a smaller test.
            missed = np.full(int((~known).sum()), scores.shape[1])
            ranking.update(np.concatenate([ranks, missed]))
        ranking = self.ranks.sum_metric(ranking)
        return {name: float(value) for name, value in ranking.to_json().items() if isinstance(value, float)}

    def close(self) -> None:
        self.store.close()
        if self.catalogue is not None:
            self.catalogue.close()


def label_counts(data: RequestRows | RequestBatch, tasks: Sequence[Task]) -> np.ndarray:
    """float64 [1 + tasks]: candidates, then the weight of the labels of each task."""
    found = [float(len(data.candidates.values) if isinstance(data, RequestRows) else data.candidates)]
    for task in tasks:
        mask = data.label_mask.get(task.name)
        weight = None if mask is None else mask if data.weight is None else mask * data.weight
        found.append(0.0 if weight is None else float(weight.sum()))
    return np.array(found)


def of_labelled(batch: RequestBatch) -> RequestBatch:
    """``batch`` without the candidates that have no label of any task: they count in no task's loss. Itself where all
    have one, or none has."""
    labelled = np.zeros(batch.candidates, bool)
    for mask in batch.label_mask.values():
        labelled |= mask.numpy()
    rows = np.flatnonzero(labelled)
    if len(rows) in (0, batch.candidates):
        return batch

    def taken(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _taken(value, rows) for name, value in values.items()}

    return replace(batch, candidate=taken(batch.candidate), label=taken(batch.label),
                   candidate_offsets=torch.from_numpy(np.searchsorted(rows, batch.candidate_offsets.numpy())),
                   label_mask=taken(batch.label_mask), weight=None if batch.weight is None else batch.weight[rows])


def _taken(value: Any, rows: np.ndarray) -> Any:
    if not isinstance(value, Jagged):
        return value[torch.from_numpy(rows)]
    index, offsets = expand_rows(value.offsets.numpy(), rows)
    return Jagged(value.values[torch.from_numpy(index)], torch.from_numpy(offsets))


def shared_ranking_loss(logits: Tensor, part: RequestBatch, tasks: Sequence[Task], share: np.ndarray) -> Tensor:
    """What a part adds to ``ranking_loss`` of the whole batch: each task's mean counts by the part's share of the
    task's labels. ``share`` [1 + tasks], of ``label_counts``."""
    scaled = [replace(task, weight=task.weight * float(own / share[0] if share[0] else 0.0))
              for task, own in zip(tasks, share[1:], strict=True)]
    return ranking_loss(logits, part, scaled) * float(share[0])


def _warm_start(model: Model, recipe: Recipe, histories: JaggedTable) -> None:
    """Begin the item table at what the training histories say of which items go together."""
    if not recipe.model.warm_start:
        return
    vocabulary = model.tables.encoders[recipe.features.item]
    index = vocabulary(histories.columns[recipe.features.item])
    model.tables.start_items_at(co_occurrence_embeddings(
        index, histories.offsets, len(vocabulary), recipe.model.dim,  # type: ignore[arg-type]
        recipe.model.warm_start, recipe.seed))


def open_stores(store: str) -> tuple[HistoryStore, HistoryStore | None]:
    """The event store and its catalogue, if it has one."""
    folder = Path(store) / "catalogue"
    return HistoryStore.open(store), HistoryStore.open(str(folder)) if folder.exists() else None


def make_objective(recipe: Recipe, ranks: Ranks | None = None) -> Objective:
    kind = NextItemObjective if recipe.model.objective == "next_item" else RankingObjective
    return kind(recipe, ranks)

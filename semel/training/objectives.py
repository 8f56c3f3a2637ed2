"""What a model is trained on and how it is judged on the way: ranking requests, or the next item of a history.

An objective owns the data of a run. Both kinds offer the same few things, so that the trainer is one plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from semel.batch import JaggedTable, RequestBatch
from semel.examples import RequestLoader, build_examples, history_tensors, leave_one_out, sequences_before
from semel.features import Feature, FeatureSpec
from semel.history import HistoryStore
from semel.metrics import AUC, NormalizedEntropy, Ranking, ranks_of_targets
from semel.models import Model, NextItem, make_model, ranking_loss
from semel.training.pieces import cut_evenly
from semel.training.recipe import Recipe
from semel.training.sequences import SequenceLoader
from semel.training.statistics import FeatureStatistics, request_statistics
from semel.training.warm_start import co_occurrence_embeddings


class Loader(Protocol):
    """Batches of one epoch after the other, resumable."""

    wait_seconds: float

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Objective(Protocol):
    """``score``: the validation figure that early stopping watches; smaller is better if ``smaller``."""

    loader: Loader
    score: str
    smaller: bool

    def make_model(self) -> Model: ...
    def loss(self, model: Any, batch: Any, generator: torch.Generator) -> Tensor: ...
    def samples(self, batch: Any) -> int: ...
    def split(self, batch: Any, pieces: int) -> list[tuple[Any, float]]: ...
    def validate(self, model: Any) -> Mapping[str, float]:
        """Figures on the validation data, ``score`` among them; nothing if there are none."""
        ...
    def close(self) -> None: ...


class RankingObjective:
    """Sessions of the store, split by time; validated by NE and AUC of the first binary task."""

    score, smaller = "ne", True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.store, self.catalogue = open_stores(recipe.store)
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
                                         **common)
        binary = [task.name for task in recipe.features.tasks if task.kind == "binary"]
        if not binary:
            raise ValueError(f"recipe {recipe.name!r} has no binary task to validate by")
        self._judged = binary[0]
        self._column = [task.name for task in recipe.features.tasks].index(self._judged)
        self._first_pass = RequestLoader(examples.paths["train"], self.store, batch_requests=256, shuffle=False,
                                         **common)

    def make_model(self) -> Model:
        features = self.recipe.features
        model = make_model(self.recipe.model, features, request_statistics(features, self._first_pass).encoders())
        before = sequences_before(self.store, self._validation_begins, (features.item,))
        spec = FeatureSpec((Feature(features.item),), item=features.item)
        _warm_start(model, self.recipe, history_tensors(before.histories, spec))
        return model

    def loss(self, model: Any, batch: RequestBatch, generator: torch.Generator) -> Tensor:
        return ranking_loss(model(batch), batch, self.recipe.features.tasks)

    def samples(self, batch: RequestBatch) -> int:
        return batch.candidates

    def split(self, batch: RequestBatch, pieces: int) -> list[tuple[RequestBatch, float]]:
        """Runs of requests that cost about the same, each with its share of the candidates."""
        candidates = (batch.candidate_offsets[1:] - batch.candidate_offsets[:-1]).numpy()
        runs = cut_evenly(batch.request["history"].lengths.numpy() + candidates, pieces)
        return [(batch.slice(a, b), candidates[a:b].sum() / max(batch.candidates, 1)) for a, b in runs]

    def validate(self, model: Any) -> dict[str, float]:
        ne, auc = NormalizedEntropy(), AUC()
        for batch in self._validation:
            mask = batch.label_mask[self._judged].numpy()
            logits = model(batch)[:, self._column].float().numpy()[mask]
            label = batch.label[self._judged].numpy()[mask]
            ne.update_logits(label, logits)
            auc.update_logits(label, logits)
        return {"ne": ne.ne, "auc": auc.value}

    def close(self) -> None:
        self.store.close()
        if self.catalogue is not None:
            self.catalogue.close()


class NextItemObjective:
    """Each user's history without the last two events; validated by predicting the one before the last (or without
    the last event, and not validated)."""

    score, smaller = "ndcg@10", False
    _USERS = 256

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
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
        return model

    def loss(self, model: Any, batch: JaggedTable, generator: torch.Generator) -> Tensor:
        return model.loss(batch, generator)

    def samples(self, batch: JaggedTable) -> int:
        return len(batch.columns["event_time"])

    def split(self, batch: JaggedTable, pieces: int) -> list[tuple[JaggedTable, float]]:
        """Runs of histories that cost about the same, each with its share of the predictions."""
        predictions = (batch.lengths - 1).clamp(min=0).numpy()
        return [(batch.slice(a, b), predictions[a:b].sum() / max(predictions.sum(), 1))
                for a, b in cut_evenly(batch.lengths.numpy(), pieces)]

    def validate(self, model: Any) -> dict[str, float]:
        if self._before is None:
            return {}
        ranking = Ranking(ks=(10, 50))
        vocabulary = model.tables.encoders[self.recipe.features.item]
        loader = SequenceLoader(self._before, batch=self._USERS, last=self.recipe.features.history_last, shuffle=False)
        for start in range(0, len(self._before), self._USERS):
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
        return {name: float(value) for name, value in ranking.to_json().items() if isinstance(value, float)}

    def close(self) -> None:
        self.store.close()
        if self.catalogue is not None:
            self.catalogue.close()


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


def make_objective(recipe: Recipe) -> Objective:
    return NextItemObjective(recipe) if recipe.model.objective == "next_item" else RankingObjective(recipe)

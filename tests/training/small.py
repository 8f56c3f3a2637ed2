"""A small store and recipe, for tests of training in this process and in several."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from semel import EventSchema, HistoryStore
from semel.features import Feature, FeatureSpec, Task
from semel.models import EncoderConfig, ModelConfig
from semel.training import ExampleConfig, Recipe, override

HOUR = 3_600_000_000


def make_store(path: Path, users: int = 24) -> str:
    """Users who like even items, in sessions an hour apart; the last ones have long histories."""
    rng = np.random.default_rng(0)
    sessions = np.where(np.arange(users) % 4 == 3, 20, 6)
    user = np.repeat(np.arange(users), 3 * sessions)
    place = np.concatenate([np.arange(3 * count) for count in sessions])
    time = place // 3 * HOUR + place * 1_000_000 + user
    item = rng.integers(1, 30, len(user))
    handle = HistoryStore.create(str(path), EventSchema({"item_id": pa.int64(), "rating": pa.float32()}), shards=2)
    handle.append(pa.table({"user_id": user, "event_time": time, "item_id": item,
                            "rating": pa.array(np.where(item % 2 == 0, 5, 2), pa.float32())}))
    handle.close()
    return str(path)


def make_recipe(store: str, out: Path, kind: str = "sequence_ranker", **changes) -> Recipe:
    features = FeatureSpec((Feature("item_id"), Feature("rating")), tasks=(Task("like"),), history_last=10)
    model = ModelConfig(kind=kind, dim=8, hidden=(16,), negatives=8,
                        encoder=EncoderConfig(dim=8, layers=1, heads=1, head_dim=8, positions=11))
    base = Recipe("tiny", features, model, ExampleConfig(validation_fraction=0.2), epochs=2, batch=8, store=store,
                  out=str(out))
    return dataclasses.replace(base, **changes)


def without_draws(recipe: Recipe) -> Recipe:
    """The recipe with nothing random in a step."""
    return override(recipe, {f"model.{name}": 0.0 for name in ("dropout", "embedding_dropout", "unknown_rate",
                                                               "encoder.dropout")})

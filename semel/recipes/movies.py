"""Recipes for any store of film ratings (MovieLens of any size, MovieTweetings): no user features needed."""

from __future__ import annotations

from dataclasses import replace

from semel.features import Feature, FeatureSpec, Task
from semel.models.config import EncoderConfig, ModelConfig
from semel.recipes.movielens import ml1m_rank
from semel.training.recipe import OptimizerConfig, Recipe


def movies_rank() -> Recipe:
    """Like ``ml1m_rank``, from item, rating and genres alone."""
    recipe = ml1m_rank()
    features = FeatureSpec(history=recipe.features.history, candidate=(Feature("genres", "multi"),),
                           tasks=(Task("like"), Task("rating", "regression", weight=0.1)), history_last=100)
    return replace(recipe, name="movies_rank", features=features)


def movies_memory() -> Recipe:
    """Like ``ml1m_memory``, from item, rating and genres alone."""
    recipe = movies_rank()
    return replace(recipe, name="movies_memory",
                   model=replace(recipe.model, kind="early_ranker", memory_rows=100_000))


def movies_next() -> Recipe:
    """The next film for small data: the last 100 events, 512 shared negatives, 30 epochs of small batches."""
    return Recipe(
        name="movies_next",
        features=FeatureSpec(history=(Feature("item_id"),), tasks=(Task("next"),), history_last=100),
        model=ModelConfig(kind="next_item", dim=64, similarity="dot", temperature=1.0, negatives=512, popularity=0.75,
                          encoder=EncoderConfig(dim=64, layers=2, heads=2, head_dim=32, positions=101)),
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=20),
        epochs=30,
        batch=32,
        patience=5,
        validate_every=5,
    )

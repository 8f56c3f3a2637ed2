"""Recipes for any store of film ratings (MovieLens of any size, MovieTweetings): no user features needed."""

from __future__ import annotations

from dataclasses import replace

from semel.features import Feature, FeatureSpec, Task
from semel.recipes.movielens import ml1m_next_sampled, ml1m_rank
from semel.training.recipe import Recipe


def movies_rank() -> Recipe:
    """Like ``ml1m_rank``, from item, rating and genres alone."""
    recipe = ml1m_rank()
    features = FeatureSpec(history=recipe.features.history, candidate=(Feature("genres", "multi"),),
                           tasks=(Task("like"), Task("rating", "regression", weight=0.1)), history_last=100)
    return replace(recipe, name="movies_rank", features=features)


def movies_next() -> Recipe:
    """The next film for small data: the last 100 events, 512 shared negatives, 30 epochs of small batches."""
    recipe = ml1m_next_sampled()
    model = replace(recipe.model, encoder=replace(recipe.model.encoder, heads=2, head_dim=32, positions=101))
    return replace(recipe, name="movies_next", features=replace(recipe.features, history_last=100), model=model,
                   optimizer=replace(recipe.optimizer, warmup_steps=20, schedule="constant"), epochs=30,
                   validate_every=5)

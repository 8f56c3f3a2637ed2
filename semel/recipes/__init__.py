"""Recipes: functions that return a run's whole configuration. ``get("ml1m_rank")`` finds one by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.training.recipe import Recipe

_HOME = {
    "ml1m_memory": "movielens", "movies_memory": "movies",
    "ml1m_rank": "movielens", "ml1m_rank_dcnv2": "movielens", "ml1m_rank_dcnv2_no_history": "movielens",
    "ml1m_rank_deep_cross_attention": "movielens", "ml1m_rank_dhen": "movielens", "ml1m_rank_dlrm": "movielens",
    "ml1m_rank_final_mlp": "movielens", "ml1m_rank_isolated_dhen": "movielens",
    "ml1m_rank_isolated_final_mlp": "movielens", "ml1m_rank_isolated_wukong": "movielens",
    "ml1m_rank_rdcn": "movielens", "ml1m_rank_sequence_dcnv2": "movielens", "ml1m_rank_semi_local": "movielens",
    "ml1m_rank_transformer": "movielens",
    "ml1m_rank_wukong": "movielens", "ml1m_next": "movielens", "ml1m_next_full": "movielens",
    "ml1m_next_sasrec": "movielens", "movies_rank": "movies", "movies_next": "movies",
    "site_memory": "site", "site_rank": "site",
}


def names() -> list[str]:
    return sorted(_HOME)


def get(name: str) -> Recipe:
    """The recipe of this name. ValueError for an unknown one, naming the nearest."""
    return function(name)()


def function(name: str) -> Callable[[], Recipe]:
    from importlib import import_module

    if name not in _HOME:
        close = difflib.get_close_matches(name, _HOME, n=1, cutoff=0.0)
        raise ValueError(f"no recipe {name!r}; the nearest is {close[0]!r}, all are: {', '.join(names())}")
    return getattr(import_module(f"semel.recipes.{_HOME[name]}"), name)

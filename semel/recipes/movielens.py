"""MovieLens-1M: rank the films of a session, and predict the next film."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.features import Feature, FeatureSpec, Task
from semel.models.config import EncoderConfig, ModelConfig
from semel.training.recipe import ExampleConfig, OptimizerConfig, Recipe

RANK_FEATURES = FeatureSpec(
    history=(Feature("item_id"), Feature("rating")),
    request=(Feature("age"), Feature("gender"), Feature("occupation")),
    candidate=(Feature("year", "numeric"), Feature("genres", "multi")),
    tasks=(Task("like"), Task("rating", "regression", weight=0.1)),
    history_last=100,
)


def ml1m_rank() -> Recipe:
    """HSTU over the last 100 ratings, candidates attending to them; will the user like (rate 4 or 5) each film?

    Newcomers rate hundreds of films in one sitting: a new request begins after 50 of them, so that the later ones are
    asked with the earlier ones as history (half of all labels would otherwise have none).
    """
    return Recipe(
        name="ml1m_rank",
        features=RANK_FEATURES,
        model=ModelConfig(kind="sequence_ranker", dim=32,
                          encoder=EncoderConfig(dim=64, layers=1, heads=2, head_dim=32, dropout=0.1, positions=101)),
        examples=ExampleConfig(name="sittings", max_candidates=50),
        optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, schedule="linear"),
        epochs=4,
        batch=64,
        patience=2,
    )


def ml1m_rank_transformer() -> Recipe:
    """The same with a softmax transformer instead of HSTU."""
    recipe = ml1m_rank()
    encoder = replace(recipe.model.encoder, kind="transformer")
    return replace(recipe, name="ml1m_rank_transformer", model=replace(recipe.model, encoder=encoder))


def ml1m_rank_dcnv2() -> Recipe:
    """DCN V2 over request, candidate and pooled history."""
    recipe = ml1m_rank()
    return replace(recipe, name="ml1m_rank_dcnv2", model=replace(recipe.model, kind="dcnv2"))


def ml1m_rank_sequence_dcnv2() -> Recipe:
    """``ml1m_rank`` with DCN V2 as its scorer: HSTU over the history, and a cross network over the request, the
    candidate and what it reads of the history."""
    recipe = ml1m_rank()
    return replace(recipe, name="ml1m_rank_sequence_dcnv2", model=replace(recipe.model, kind="sequence_dcnv2"))


def ml1m_rank_dcnv2_no_history() -> Recipe:
    """DCN V2 that knows the user's age, gender and occupation only: what a history is worth."""
    recipe = ml1m_rank_dcnv2()
    return replace(recipe, name="ml1m_rank_dcnv2_no_history", model=replace(recipe.model, history=False))


def ml1m_rank_dlrm() -> Recipe:
    """DLRM over the same fields."""
    recipe = ml1m_rank()
    return replace(recipe, name="ml1m_rank_dlrm", model=replace(recipe.model, kind="dlrm"))


def ml1m_rank_semi_local() -> Recipe:
    """HSTU whose events and candidates see the first 10 events of the history and the last 30 before them."""
    recipe = ml1m_rank()
    encoder = replace(recipe.model.encoder, window=30, prefix=10)
    return replace(recipe, name="ml1m_rank_semi_local", model=replace(recipe.model, encoder=encoder))


def ml1m_rank_rdcn() -> Recipe:
    """rDCN: DCN V2 whose request rows never see candidates."""
    return _fields("ml1m_rank_rdcn", kind="rdcn")


def ml1m_rank_wukong() -> Recipe:
    """Wukong over the same fields as DCN V2."""
    return _fields("ml1m_rank_wukong", kind="wukong")


def ml1m_rank_isolated_wukong() -> Recipe:
    """Wukong whose request rows never see candidates."""
    return _fields("ml1m_rank_isolated_wukong", kind="isolated_wukong")


def ml1m_rank_final_mlp() -> Recipe:
    """FinalMLP over the same fields."""
    return _fields("ml1m_rank_final_mlp", kind="final_mlp")


def ml1m_rank_isolated_final_mlp() -> Recipe:
    """FinalMLP whose request units never see candidates."""
    return _fields("ml1m_rank_isolated_final_mlp", kind="isolated_final_mlp")


def ml1m_rank_dhen() -> Recipe:
    """DHEN, each layer an ensemble of a cross layer and pairs of fields."""
    return _fields("ml1m_rank_dhen", kind="dhen", dim=16)


def ml1m_rank_isolated_dhen() -> Recipe:
    """The same, no member showing candidates to the request."""
    return _fields("ml1m_rank_isolated_dhen", kind="isolated_dhen", dim=16)


def ml1m_rank_deep_cross_attention() -> Recipe:
    """Fields and the last 100 ratings meet at two depths, HSTU's layers encoding the history."""
    return _fields("ml1m_rank_deep_cross_attention", kind="deep_cross_attention", dim=16,
                   encoder=EncoderConfig(dim=32, layers=2, heads=1, head_dim=32, dropout=0.1, positions=101))


def ml1m_memory() -> Recipe:
    """Early ranking: a user's vector from HSTU over the last 100 ratings against items' vectors out of a memory, which
    training writes and serving reads. A product a candidate, in place of attention."""
    recipe = ml1m_rank()
    return replace(recipe, name="ml1m_memory", model=replace(recipe.model, kind="early_ranker", memory_rows=10_000))


def _fields(name: str, **changes: Any) -> Recipe:
    recipe = ml1m_rank()
    return replace(recipe, name=name, model=replace(recipe.model, **changes))


def ml1m_next() -> Recipe:
    """HSTU that predicts the next film among all, for the published leave-one-out protocol.

    Like the published runs it trains on all events but the last of each user. Users with more than 200 events first
    train on earlier stretches most of the time (a third of all events lie there), later more and more on their last.
    """
    return Recipe(
        name="ml1m_next",
        features=FeatureSpec(history=(Feature("item_id"),), tasks=(Task("next"),), history_last=200),
        model=ModelConfig(kind="next_item", dim=64, similarity="dot", temperature=1.0, negatives=1024, popularity=0.75,
                          embedding_dropout=0.1,
                          encoder=EncoderConfig(dim=64, layers=2, heads=1, head_dim=64, dropout=0.1, positions=201)),
        examples=ExampleConfig(validate=False, earlier_windows=0.8),
        optimizer=OptimizerConfig(learning_rate=5e-3, schedule="linear"),
        epochs=200,
        batch=64,
        patience=5,
        validate_every=5,
    )


def ml1m_next_full() -> Recipe:
    """The same with the softmax over all films: twice the time."""
    recipe = ml1m_next()
    return replace(recipe, name="ml1m_next_full", model=replace(recipe.model, negatives=0, popularity=0.0))


def ml1m_next_sasrec() -> Recipe:
    """The same with a SASRec-like transformer."""
    recipe = ml1m_next()
    encoder = replace(recipe.model.encoder, kind="transformer")
    return replace(recipe, name="ml1m_next_sasrec", model=replace(recipe.model, encoder=encoder))

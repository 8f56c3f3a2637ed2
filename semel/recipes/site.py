"""The simulated short-video site (``semel.datasets.simulate``): will the user click what it is shown?"""

from __future__ import annotations

from dataclasses import replace

from semel.features import Feature, FeatureSpec, Task
from semel.models.config import EncoderConfig, ModelConfig
from semel.training.recipe import ExampleConfig, OptimizerConfig, Recipe


def site_rank() -> Recipe:
    """HSTU over the last 50 views, for a site that new items come to all the time: what an item is about and who made
    it count where its id says nothing yet."""
    return Recipe(
        name="site_rank",
        features=FeatureSpec(
            history=(Feature("item_id"), Feature("click"), Feature("topic")),
            request=(Feature("age"), Feature("country")),
            candidate=(Feature("topic"), Feature("author_id")),
            tasks=(Task("click", unobserved=0.0),),
            history_last=50,
        ),
        model=ModelConfig(kind="sequence_ranker", dim=16, hidden=(64, 32), unknown_rate=0.1,
                          encoder=EncoderConfig(dim=32, layers=1, heads=2, head_dim=16, dropout=0.1, positions=51)),
        examples=ExampleConfig(name="views", max_candidates=50),
        optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, warmup_steps=20),
        epochs=2,
        batch=64,
    )


def site_memory() -> Recipe:
    """Early ranking of the same: a user's vector against items' vectors out of a memory that training writes and
    serving reads. A new item has one from the first update after its upload on."""
    recipe = site_rank()
    return replace(recipe, name="site_memory", model=replace(recipe.model, kind="early_ranker", memory_rows=50_000))

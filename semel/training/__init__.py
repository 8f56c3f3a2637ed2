"""Training: recipes, the loop, runs and their evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "ExampleConfig": "recipe", "OptimizerConfig": "recipe", "Recipe": "recipe", "override": "recipe",
    "ShardingConfig": "recipe", "read_overrides": "recipe",
    "Interrupted": "trainer", "Progress": "trainer", "Trainer": "trainer", "with_paths": "trainer",
    "Followed": "follow", "Follower": "follow", "Run": "run", "Ranks": "ranks", "parallelize": "parallel",
    "Evaluation": "evaluation", "evaluate": "evaluation",
}

__all__ = [
    "Evaluation", "ExampleConfig", "Followed", "Follower", "Interrupted", "OptimizerConfig", "Progress", "Ranks",
    "Recipe", "Run", "ShardingConfig", "Trainer", "evaluate", "override", "parallelize", "read_overrides", "with_paths",
]

if TYPE_CHECKING:
    from semel.training.evaluation import Evaluation, evaluate
    from semel.training.follow import Followed, Follower
    from semel.training.parallel import parallelize
    from semel.training.ranks import Ranks
    from semel.training.recipe import ExampleConfig, OptimizerConfig, Recipe, ShardingConfig, override, read_overrides
    from semel.training.run import Run
    from semel.training.trainer import Interrupted, Progress, Trainer, with_paths


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'semel.training' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"semel.training.{_HOME[name]}"), name)
    globals()[name] = value
    return value

"""What a score is worth: normalized entropy, AUC, calibration, ranking metrics, and intervals for all of them.

The classes here are sums in float64: ``update`` adds a batch, ``a + b`` adds two parts (of an epoch, or of two ranks:
``state()`` is a dict of arrays that may be summed with an all-reduce, ``from_state`` reads it back), and every figure
is derived from the sums when asked for. Predictions are probabilities; ``update_logits`` takes logits instead.
A figure without data (no rows, one class only) is NaN, in JSON ``null``.

Axis names: ``N`` labelled rows, ``R`` requests, ``I`` items, ``G`` clusters (users or requests), ``S`` sums.
"""

from semel.metrics.exact import auc, auc_by_group, grouped_auc, ranking_values, ranks_of_targets
from semel.metrics.intervals import (
    Interval,
    bootstrap,
    bootstrap_auc,
    bootstrap_difference,
    cluster_sums,
)
from semel.metrics.losses import EPSILON, entropy, log_losses, log_losses_of_logits, normalized_entropy, sigmoid
from semel.metrics.sums import AUC, Calibration, NormalizedEntropy, Ranking, RegressionError

__all__ = [
    "AUC",
    "EPSILON",
    "Calibration",
    "Interval",
    "NormalizedEntropy",
    "Ranking",
    "RegressionError",
    "auc",
    "auc_by_group",
    "bootstrap",
    "bootstrap_auc",
    "bootstrap_difference",
    "cluster_sums",
    "entropy",
    "grouped_auc",
    "log_losses",
    "log_losses_of_logits",
    "normalized_entropy",
    "ranking_values",
    "ranks_of_targets",
    "sigmoid",
]

"""Log loss, row by row, and what it is measured against."""

from __future__ import annotations

from typing import Any

import numpy as np

from semel.metrics import checks

EPSILON = 1e-7
"""Probabilities are clipped to ``[EPSILON, 1 - EPSILON]`` before a logarithm: a certain and wrong one costs 16.1."""


def sigmoid(logit: Any) -> np.ndarray:
    """Probabilities of logits, float64, without overflow."""
    logit = np.asarray(logit, dtype=np.float64)
    return np.exp(-np.logaddexp(0.0, -logit))


def entropy(rate: Any) -> Any:
    """Entropy in nats of a Bernoulli variable of this rate; NaN stays NaN."""
    rate = np.asarray(rate, dtype=np.float64)
    inside = (rate > 0) & (rate < 1)
    safe = np.where(inside, rate, 0.5)
    value = -(safe * np.log(safe) + (1 - safe) * np.log1p(-safe))
    return np.where(inside, value, np.where(np.isnan(rate), np.nan, 0.0))[()]


def log_losses(label: Any, prediction: Any) -> np.ndarray:
    """[N] losses in nats of probabilities, clipped by ``EPSILON``."""
    label = checks.binary(label)
    clipped = np.clip(checks.probability(prediction, len(label)), EPSILON, 1 - EPSILON)
    return -np.where(label == 1, np.log(clipped), np.log1p(-clipped))


def log_losses_of_logits(label: Any, logit: Any) -> np.ndarray:
    """[N] losses in nats of logits; exact where a float32 probability would already be 0 or 1."""
    label = checks.binary(label)
    logit = checks.vector(logit, "logit", len(label))
    return np.logaddexp(0.0, np.where(label == 1, -logit, logit))


def normalized_entropy(loss_sum: Any, weight_sum: Any, label_sum: Any) -> Any:
    """Mean log loss over the entropy of the base rate ``label_sum / weight_sum`` (He et al., "Practical lessons from
    predicting clicks on ads at Facebook", 2014, equation 1). NaN where there is one class only."""
    base = entropy(checks.ratio(label_sum, weight_sum))
    return checks.ratio(checks.ratio(loss_sum, weight_sum), base)

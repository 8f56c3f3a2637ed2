"""Request features as they were sent (JSON) -> raw columns of request rows. One parser for server, join and replay."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from semel.features import Feature


def context_value(feature: Feature, value: Any) -> Any:
    """One raw value in the form that request rows hold: str, int or None for a category, "a|b" or None for many, float
    (NaN where absent) for a number. Raises ValueError, naming the feature, for a value of another kind."""
    if feature.kind == "numeric":
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"context.{feature.name} must be a finite number, got {value!r}")
        return float(value)
    if feature.kind == "multi":
        if isinstance(value, list):
            if not all(isinstance(part, str) and "|" not in part for part in value):
                raise ValueError(f"context.{feature.name} must be a list of strings without '|', got {value!r}")
            return "|".join(value)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"context.{feature.name} must be a list of strings, got {value!r}")
        return value
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int) and -(1 << 63) < value < 1 << 63:
        return value
    raise ValueError(f"context.{feature.name} must be a string or a 64-bit integer, got {value!r}")


def context_columns(contexts: Sequence[dict[str, Any]], features: Sequence[Feature]) -> dict[str, np.ndarray]:
    """Raw context columns [R] of R contexts; keys that are no feature are ignored, absent ones are null."""
    columns: dict[str, np.ndarray] = {}
    for feature in features:
        values = [context_value(feature, context.get(feature.name)) for context in contexts]
        if feature.kind == "numeric":
            columns[feature.name] = np.asarray(values, dtype=np.float32)
        else:
            columns[feature.name] = np.empty(len(values), dtype=object)
            columns[feature.name][:] = values
    return columns


def parse_contexts(texts: Sequence[str], features: Sequence[Feature]) -> dict[str, np.ndarray]:
    """``context_columns`` of JSON texts. Raises ValueError for one that is not a JSON object."""
    contexts = []
    for text in texts:
        try:
            context = json.loads(text) if text else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"context {text[:80]!r} is not JSON: {error}") from None
        if not isinstance(context, dict):
            raise ValueError(f"context {text[:80]!r} must be a JSON object")
        contexts.append(context)
    return context_columns(contexts, features)

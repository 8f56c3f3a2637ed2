"""What every metric asks of its input: finite numbers of equal length, one clear ValueError otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np


def vector(values: Any, name: str, length: int | None = None) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers, got dtype {array.dtype}")
    array = array.astype(np.float64, copy=False)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has {len(array)} values, label has {length}")
    bad = ~np.isfinite(array)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name}[{row}] is {array[row]}; drop or mask rows without a finite value first")
    return array


def weights(weight: Any, length: int) -> np.ndarray:
    if weight is None:
        return np.ones(length)
    array = vector(weight, "weight", length)
    if array.size and array.min() < 0:
        raise ValueError(f"weight[{int(array.argmin())}] is {array.min()}; weights cannot be negative")
    return array


def binary(label: Any) -> np.ndarray:
    array = vector(label, "label")
    bad = (array != 0) & (array != 1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"label[{row}] is {array[row]:g}; a binary label is 0 or 1")
    return array


def probability(prediction: Any, length: int) -> np.ndarray:
    array = vector(prediction, "prediction", length)
    bad = (array < 0) | (array > 1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"prediction[{row}] is {array[row]:g}, outside [0, 1]; use update_logits for logits")
    return array


def ratio(numerator: Any, denominator: Any) -> Any:
    """Elementwise quotient, NaN where the denominator is zero."""
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    shape = np.broadcast_shapes(numerator.shape, denominator.shape)
    return np.divide(numerator, denominator, out=np.full(shape, np.nan), where=denominator != 0)[()]


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def cutoff(k: int) -> int:
    if int(k) != k or k < 1:
        raise ValueError(f"a cut-off k is a whole number from 1, got {k}")
    return int(k)

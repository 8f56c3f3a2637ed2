"""Metrics as sums: streaming, addable, and the same on one rank or many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from semel.metrics import checks
from semel.metrics.exact import ranking_values
from semel.metrics.losses import log_losses, log_losses_of_logits, normalized_entropy, sigmoid

_LOGIT_LIMIT = 16.0  # AUC's histogram spans logits of -16 to 16, about EPSILON to 1 - EPSILON
_Self = TypeVar("_Self", bound="_Sums")


class _Sums:
    """Named float64 arrays that add up: what the metrics below share."""

    _sums: dict[str, np.ndarray]

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the sums. Adding the states of all ranks array by array gives the state of the whole."""
        return {name: value.copy() for name, value in self._sums.items()}

    @classmethod
    def from_state(cls: type[_Self], state: Mapping[str, Any]) -> _Self:
        """The metric with these sums. Raises ValueError for a state of another metric."""
        try:
            metric = cls._like(state)
        except (KeyError, IndexError) as error:
            raise ValueError(f"not a state of {cls.__name__}: it has {', '.join(state) or 'nothing'}") from error
        if set(metric._sums) != set(state):
            raise ValueError(f"not a state of {cls.__name__}: it has {', '.join(state) or 'nothing'}")
        for name, value in metric._sums.items():
            array = np.asarray(state[name], dtype=np.float64)
            if array.shape != value.shape:
                raise ValueError(f"{cls.__name__} state {name!r} has shape {array.shape}, expected {value.shape}")
            metric._sums[name] = array.copy()
        return metric

    @classmethod
    def _like(cls: type[_Self], state: Mapping[str, Any]) -> _Self:
        return cls()

    def __add__(self: _Self, other: _Self) -> _Self:
        if type(other) is not type(self):
            return NotImplemented
        shapes = [{name: value.shape for name, value in metric._sums.items()} for metric in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"these two {type(self).__name__} count different things (other bins or other k)")
        return self.from_state({name: value + other._sums[name] for name, value in self._sums.items()})

    def _add(self, **sums: Any) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value


class NormalizedEntropy(_Sums):
    """Log loss and normalized entropy of a binary task.

    In training, ``update`` with predictions made before the update that the rows cause: NE is then prequential.
    """

    def __init__(self) -> None:
        self._sums = {name: np.zeros(()) for name in ("rows", "weight", "loss", "label")}

    def update(self, label: Any, prediction: Any, weight: Any = None) -> NormalizedEntropy:
        """Add [N] rows: labels 0 or 1, probabilities, weights (1 each when None). ValueError for anything else."""
        return self._update(log_losses(label, prediction), label, weight)

    def update_logits(self, label: Any, logit: Any, weight: Any = None) -> NormalizedEntropy:
        return self._update(log_losses_of_logits(label, logit), label, weight)

    def _update(self, loss: np.ndarray, label: Any, weight: Any) -> NormalizedEntropy:
        weight = checks.weights(weight, len(loss))
        self._add(rows=len(loss), weight=weight.sum(), loss=loss @ weight, label=checks.binary(label) @ weight)
        return self

    @property
    def rows(self) -> int:
        return int(self._sums["rows"])

    @property
    def base_rate(self) -> float:
        """Weighted mean label."""
        return float(checks.ratio(self._sums["label"], self._sums["weight"]))

    @property
    def log_loss(self) -> float:
        """Weighted mean log loss in nats."""
        return float(checks.ratio(self._sums["loss"], self._sums["weight"]))

    @property
    def ne(self) -> float:
        """Log loss over the entropy of the base rate: 1.0 knows nothing, 0.0 everything."""
        return float(normalized_entropy(self._sums["loss"], self._sums["weight"], self._sums["label"]))

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "base_rate": checks.number(self.base_rate), "log_loss": checks.number(self.log_loss),
                "ne": checks.number(self.ne)}


class AUC(_Sums):
    """Streaming area under the ROC curve: two histograms over ``bins`` equal steps of the logit from -16 to 16.

    Rows of one bin count as ties, so the exact value lies within ``error`` of ``value``; with 16,384 bins (logit steps
    of 0.002) that is below 1e-3 unless scores crowd together. ``auc`` below is exact and holds all rows.
    """

    def __init__(self, bins: int = 16_384) -> None:
        if bins < 2:
            raise ValueError(f"AUC needs at least 2 bins, got {bins}")
        self._sums = {"positive": np.zeros(bins), "negative": np.zeros(bins)}

    @classmethod
    def _like(cls, state: Mapping[str, Any]) -> AUC:
        return cls(np.asarray(state["positive"]).shape[0])

    def update(self, label: Any, prediction: Any, weight: Any = None) -> AUC:
        """Add [N] rows: labels 0 or 1, probabilities, weights (1 each when None)."""
        label = checks.binary(label)
        clipped = np.clip(checks.probability(prediction, len(label)), 1e-300, 1 - 1e-16)
        return self._update(label, np.log(clipped) - np.log1p(-clipped), weight)

    def update_logits(self, label: Any, logit: Any, weight: Any = None) -> AUC:
        label = checks.binary(label)
        return self._update(label, checks.vector(logit, "logit", len(label)), weight)

    def _update(self, label: np.ndarray, logit: np.ndarray, weight: Any) -> AUC:
        weight = checks.weights(weight, len(label))
        bins = len(self._sums["positive"])
        unit = (np.clip(logit, -_LOGIT_LIMIT, _LOGIT_LIMIT) + _LOGIT_LIMIT) / (2 * _LOGIT_LIMIT)
        bin_ = np.minimum((unit * bins).astype(np.int64), bins - 1)
        self._add(positive=np.bincount(bin_, weight * label, bins),
                  negative=np.bincount(bin_, weight * (1 - label), bins))
        return self

    @property
    def value(self) -> float:
        positive, negative = self._sums["positive"], self._sums["negative"]
        below = np.cumsum(negative) - negative
        return float(checks.ratio(positive @ (below + negative / 2), positive.sum() * negative.sum()))

    @property
    def error(self) -> float:
        """The most by which ``value`` can differ from the exact AUC: half the share of pairs that fell into one bin."""
        positive, negative = self._sums["positive"], self._sums["negative"]
        return float(checks.ratio(positive @ negative / 2, positive.sum() * negative.sum()))

    def to_json(self) -> dict[str, Any]:
        return {"auc": checks.number(self.value), "auc_error": checks.number(self.error)}


class Calibration(_Sums):
    """Mean prediction over mean label, and the reliability table over ``bins`` equal steps of the probability."""

    def __init__(self, bins: int = 20) -> None:
        if bins < 1:
            raise ValueError(f"Calibration needs at least 1 bin, got {bins}")
        self._sums = {name: np.zeros(bins) for name in ("weight", "prediction", "label")}

    @classmethod
    def _like(cls, state: Mapping[str, Any]) -> Calibration:
        return cls(np.asarray(state["weight"]).shape[0])

    def update(self, label: Any, prediction: Any, weight: Any = None) -> Calibration:
        """Add [N] rows: labels 0 or 1, probabilities, weights (1 each when None)."""
        label = checks.binary(label)
        prediction, weight = checks.probability(prediction, len(label)), checks.weights(weight, len(label))
        bins = len(self._sums["weight"])
        bin_ = np.minimum((prediction * bins).astype(np.int64), bins - 1)
        self._add(weight=np.bincount(bin_, weight, bins), prediction=np.bincount(bin_, weight * prediction, bins),
                  label=np.bincount(bin_, weight * label, bins))
        return self

    def update_logits(self, label: Any, logit: Any, weight: Any = None) -> Calibration:
        return self.update(label, sigmoid(checks.vector(logit, "logit")), weight)

    @property
    def ratio(self) -> float:
        """Mean prediction over mean label: 1.0 is calibrated, above it is too sure of positives."""
        return float(checks.ratio(self._sums["prediction"].sum(), self._sums["label"].sum()))

    @property
    def expected_error(self) -> float:
        """Mean distance of a bin's mean prediction from its mean label, weighted by rows (ECE)."""
        gap = np.abs(self._sums["prediction"] - self._sums["label"]).sum()
        return float(checks.ratio(gap, self._sums["weight"].sum()))

    def table(self) -> list[dict[str, float]]:
        """The bins that hold rows: ``low``, ``high``, ``weight``, mean ``prediction``, mean ``label``."""
        bins = len(self._sums["weight"])
        return [
            {"low": b / bins, "high": (b + 1) / bins, "weight": float(w),
             "prediction": float(self._sums["prediction"][b] / w), "label": float(self._sums["label"][b] / w)}
            for b, w in enumerate(self._sums["weight"]) if w > 0
        ]

    def to_json(self) -> dict[str, Any]:
        return {"calibration": checks.number(self.ratio),
                "expected_calibration_error": checks.number(self.expected_error), "reliability": self.table()}


class RegressionError(_Sums):
    """RMSE and MAE of a task whose labels are numbers."""

    def __init__(self) -> None:
        self._sums = {name: np.zeros(()) for name in ("rows", "weight", "squared", "absolute")}

    def update(self, label: Any, prediction: Any, weight: Any = None) -> RegressionError:
        """Add [N] rows of finite labels and predictions."""
        label = checks.vector(label, "label")
        gap, weight = checks.vector(prediction, "prediction", len(label)) - label, checks.weights(weight, len(label))
        self._add(rows=len(label), weight=weight.sum(), squared=(gap * gap) @ weight, absolute=np.abs(gap) @ weight)
        return self

    @property
    def rows(self) -> int:
        return int(self._sums["rows"])

    @property
    def rmse(self) -> float:
        return float(np.sqrt(checks.ratio(self._sums["squared"], self._sums["weight"])))

    @property
    def mae(self) -> float:
        return float(checks.ratio(self._sums["absolute"], self._sums["weight"]))

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "rmse": checks.number(self.rmse), "mae": checks.number(self.mae)}


class Ranking(_Sums):
    """HR@k, NDCG@k and MRR, averaged over requests, from the ranks of their targets (see ``ranking_values``)."""

    def __init__(self, ks: Iterable[int] = (10, 50, 200)) -> None:
        names = [f"{metric}@{checks.cutoff(k)}" for k in ks for metric in ("hr", "ndcg")]
        self._sums = {name: np.zeros(()) for name in ("requests", *names, "mrr")}

    @classmethod
    def _like(cls, state: Mapping[str, Any]) -> Ranking:
        return cls(int(name[3:]) for name in state if name.startswith("hr@"))

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(int(name[3:]) for name in self._sums if name.startswith("hr@"))

    @property
    def requests(self) -> int:
        return int(self._sums["requests"])

    def update(self, ranks: Any, request: Any = None) -> Ranking:
        """Add the targets' 0-based ranks [T]; ``request`` [T] names the request of each, None: one target each."""
        values = ranking_values(ranks, request, self.ks)
        self._add(requests=len(values["mrr"]), **{name: value.sum() for name, value in values.items()})
        return self

    def __getitem__(self, name: str) -> float:
        """The mean over requests of ``hr@10``, ``ndcg@10``, ``mrr``..."""
        if name == "requests" or name not in self._sums:
            raise KeyError(f"no {name!r}; there is {', '.join(n for n in self._sums if n != 'requests')}")
        return float(checks.ratio(self._sums[name], self._sums["requests"]))

    def to_json(self) -> dict[str, Any]:
        return {"requests": self.requests, **{n: checks.number(self[n]) for n in self._sums if n != "requests"}}

"""What a run's partitions go by, learned while it trains: what a request costs, and how fast each rank is.

Two numbers are tuned at the end of each epoch, from how long the ranks' steps took, and used from the next one on: the
cost model's terms (robust least squares, ``CostModel.fit``), and where ranks are not equally fast the share of a
batch's pieces that each of them computes (``Shares``, FreeScale's variable batch size). Times differ from run to run,
so what they lead to is written down: ``costs.json`` in the run's folder says what each epoch went by. A resumed run
goes on by it, and a new one with the recipe's ``costs`` set to that folder repeats the first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from semel.training import balance
from semel.training.cost import TERMS, CostModel, Shares
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe

FILE, FORMAT = "costs.json", 1
GIVEN, FIT = "given", "fit"
"""Of the recipe's ``costs``; anything else is the folder of a run."""


class Tuning:
    """``cost`` and ``shares`` (None: equal) of the current epoch, the same on all ranks, which call every method
    together. Raises as ``check_costs`` does."""

    def __init__(self, recipe: Recipe, folder: Path, ranks: Ranks) -> None:
        self.recipe, self.folder, self.ranks = recipe, folder, ranks
        self._seen = CostModel()
        source = None if recipe.costs in (GIVEN, FIT) else Path(recipe.costs)
        self._epochs: list[dict[str, Any]] = [] if source is None else read(source)
        self.begin(0)

    def restore(self, epoch: int) -> None:
        """What this run wrote before it was interrupted, in epoch ``epoch``."""
        if self.recipe.costs == FIT:
            known = self.ranks.first(lambda: read(self.folder) if (self.folder / FILE).exists() else [])
            self._epochs = known[: epoch + 1]
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        found = self._epochs[min(epoch, len(self._epochs) - 1)] if self._epochs else None
        self.cost = CostModel(quadratic=self.recipe.quadratic) if found is None else CostModel.from_json(found["cost"])
        shares = None if found is None else found["shares"]
        self.shares = Shares(np.array(shares)) if shares and len(shares) == self.ranks.world_size else None

    def learn(self, epoch: int, observed: list[list[float]], lengths: np.ndarray) -> dict[str, Any]:
        """At the end of ``epoch``: ``observed``, for each batch the features and seconds of this rank's part. Returns
        figures for the log: how idle ranks were by tokens, by cost as fitted and by time, the fit, and what the next
        epoch goes by. ``lengths``: tokens of some requests, for ``alpha``."""
        parts = np.array(self.ranks.gather(observed)).reshape(self.ranks.world_size, -1, len(TERMS) + 1)
        features, seconds = parts[..., :-1], parts[..., -1]
        fitted = self._seen if self.recipe.costs == FIT else CostModel()
        for step in range(parts.shape[1]):
            fitted.observe(features[:, step], seconds[:, step])
        fitted.fit()
        loads = {"tokens": features[..., 0], "cost": features @ [getattr(fitted, term) for term in TERMS],
                 "time": seconds}
        figures: dict[str, Any] = {f"idle_{name}": _idle(load) for name, load in loads.items()}
        figures["cost"] = fitted.describe()
        if self.recipe.costs == FIT:
            self._next(epoch, fitted, seconds)
        self.begin(epoch + 1)
        if self.recipe.costs != GIVEN:
            figures |= {"used": self.cost.describe(), "linear": self.cost.linear, "quadratic": self.cost.quadratic}
            if self.recipe.balance == "segments" and len(lengths):
                figures["alpha"] = self.cost.alpha(lengths, max(self.recipe.pieces, self.ranks.world_size))
            if self.shares is not None:
                figures["shares"] = self.shares.values.round(4).tolist()
        return figures

    def _next(self, epoch: int, fitted: CostModel, seconds: np.ndarray) -> None:
        """What the next epoch goes by. A fit that makes all requests free leaves the cost as it is."""
        usable = fitted.error is not None and (fitted.linear > 0 or fitted.quadratic > 0 or fitted.candidate > 0)
        shares = None
        times = np.median(seconds, axis=1) if seconds.size else np.zeros(0)
        if self.ranks.world_size > 1 and len(times) and (times > 0).all():
            tuned = Shares.equal(self.ranks.world_size) if self.shares is None else self.shares
            tuned.update(times)
            shares = tuned.values.tolist()
        one = {"cost": (fitted if usable else self.cost).to_json(), "shares": shares}
        if not self._epochs:
            self._epochs = [{"cost": self.cost.to_json(), "shares": None}]
        # Of rank 0: least squares of another kind of CPU may differ in its last bits.
        self._epochs = [*self._epochs[: epoch + 1], self.ranks.first(lambda: one)]
        if self.ranks.rank == 0:
            part = self.folder / f".{FILE}.part"
            part.write_text(json.dumps({"format": FORMAT, "epochs": self._epochs}, indent=1))
            os.replace(part, self.folder / FILE)


def check_costs(recipe: Recipe) -> None:
    """Raises FileNotFoundError or ValueError where the recipe names a run that tuned nothing."""
    if recipe.costs not in (GIVEN, FIT):
        read(Path(recipe.costs))


def read(folder: Path) -> list[dict[str, Any]]:
    """What each epoch of a run went by: ``cost`` (a ``CostModel`` as JSON) and ``shares`` of its ranks (or None)."""
    file = folder / FILE
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: costs must be {GIVEN!r}, {FIT!r} or the folder of a run that "
                                f"was trained with costs={FIT}")
    try:
        value = json.loads(file.read_text())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}, this version of semel reads {FORMAT}")
        epochs = [{"cost": CostModel.from_json(one["cost"]).to_json(), "shares": one["shares"]}
                  for one in value["epochs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not epochs:
        raise ValueError(f"{file} is damaged: it has no epochs")
    return epochs


def _idle(loads: np.ndarray) -> float:
    """[ranks, steps] -> the mean over steps."""
    steps = [balance.idle(load, np.arange(len(load)), len(load)) for load in loads.T]
    return float(np.mean(steps)) if steps else 0.0

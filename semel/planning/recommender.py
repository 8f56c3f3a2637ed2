"""What ranks of a sequence recommender wait for: the slowest of them, and rows of sharded tables.

Two functions come from the caller, so that what decides in training decides here: ``partition(costs, world_size)`` ->
[requests] rank (``semel.training.balance`` has them), and ``exchanges(volume)`` -> what is sent when (``blocking`` and
``prioritized`` below say in this form what ``semel.training.embedding`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from semel.planning.events import Tasks, run

Partition = Callable[[np.ndarray, int], np.ndarray]
WARM = 3
"""Steps at the start in which not all is fetched ahead yet, and at the end in which nothing is any more."""


@dataclass(frozen=True)
class Volume:
    """Bytes that a rank sends to others in a step: of ids, of the rows that come back, of their gradients. ``shared``:
    share of rows that the step before had too."""

    ids: float
    rows: float
    gradients: float
    shared: float


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of a step. ``follows``: (name, steps ago) of exchanges, or of "forward" and "backward", that must
    be over; ``blocks``: which of "forward", "backward" of its own step waits for it, "" if none does."""

    name: str
    bytes: float
    follows: tuple[tuple[str, int], ...]
    blocks: str = ""


Exchanges = Callable[[Volume], Sequence[Exchange]]


@dataclass(frozen=True)
class Step:
    """Means over steps. ``straggler``: the mean rank's wait for the slowest; ``exposed``: what is waited for exchanges;
    ``bubbles``: both, as a share of ``seconds``."""

    seconds: float
    computation: float
    straggler: float
    exposed: float

    @property
    def bubbles(self) -> float:
        return (self.straggler + self.exposed) / self.seconds

    @property
    def idle(self) -> float:
        """1 - mean / slowest of the ranks' computation."""
        return self.straggler / (self.straggler + self.computation)


def blocking(volume: Volume) -> list[Exchange]:
    """Ids, rows, and gradients of them, each waited for, as plain TorchRec does."""
    return [Exchange("ids", volume.ids, (("gradients", 1),)),
            Exchange("rows", volume.rows, (("ids", 0), ("gradients", 1)), "forward"),
            Exchange("gradients", volume.gradients, (("backward", 0),))]


def prioritized(volume: Volume) -> list[Exchange]:
    """FreeScale's order (arXiv 2604.24073, algorithm 2): ids a step ahead; rows that the step before does not have come
    beside its computation, once all older gradients are in; those that it has are waited for: their gradients go first,
    then they. Other gradients go beside the next step."""
    once, again = 1 - volume.shared, volume.shared
    return [Exchange("ids", volume.ids, (("forward", 1),)),
            Exchange("exclusive rows", once * volume.rows, (("ids", 0), ("exclusive gradients", 2)),
                     "forward"),
            Exchange("shared gradients", again * volume.gradients, (("backward", 0),)),
            Exchange("shared rows", again * volume.rows, (("shared gradients", 1),), "forward"),
            Exchange("exclusive gradients", once * volume.gradients, (("shared rows", -1),))]


def loads(lengths: Sequence[np.ndarray], world_size: int, partition: Partition,
          cost: Callable[[np.ndarray], np.ndarray], error: float = 0.0, seed: int = 0) -> np.ndarray:
    """[steps, world_size] computation of each rank, in the mean rank's. ``lengths``: each step's global batch;
    ``error``: a request takes up to this share more or less than its cost says (uniform), which no partition sees."""
    found = []
    for number, batch in enumerate(lengths):
        costs = np.asarray(cost(batch), np.float64)
        ranks = partition(costs, world_size)
        drawn = 1 + error * np.random.default_rng([seed, number]).uniform(-1, 1, len(costs))
        load = np.bincount(ranks, costs * drawn, world_size)
        found.append(load / load.mean())
    return np.array(found)


def step(load: np.ndarray, computation: float, forward: float, volume: Volume, exchanges: Exchanges, bandwidth: float,
         latency: float) -> Step:
    """``load`` [steps, ranks]: see ``loads``; ``computation``: the mean rank's seconds, of which ``forward`` is a
    share; ``bandwidth`` bytes/s and ``latency`` s of an all-to-all. The first and last ``WARM`` steps are left
    out. All ranks join an exchange, so the slowest's times are everyone's; exchanges that are under way together share
    the link. Raises ValueError for too few steps, or exchanges that wait for each other."""
    steps = len(load)
    if steps <= 2 * WARM:
        raise ValueError(f"{WARM} steps fill and {WARM} drain: give at least {2 * WARM + 1}, not {steps}")
    slowest = computation * load.max(1)
    follows: dict[tuple[str, int], list[tuple[str, int]]] = {}
    sent: dict[str, Exchange] = {one.name: one for one in exchanges(volume)}
    for number in range(steps):
        for one in sent.values():
            follows[one.name, number] = [(name, number - ago) for name, ago in one.follows if 0 <= number - ago < steps]
        for phase, before in (("forward", ("backward", number - 1)), ("backward", ("forward", number))):
            follows[phase, number] = [(one.name, number) for one in sent.values() if one.blocks == phase]
            follows[phase, number] += [before] if before[1] >= 0 else []
    tasks = Tasks()
    at: dict[tuple[str, int], int] = {}
    try:
        order = list(TopologicalSorter(follows).static_order())
    except CycleError as error:
        raise ValueError(f"exchanges wait for each other: {' <- '.join(name for name, _ in error.args[1])}") from error
    for name, number in order:
        if (name, number) not in follows:
            raise ValueError(f"an exchange follows {name!r}: there are forward, backward, {', '.join(sent)}")
        seconds = latency
        if name in ("forward", "backward"):
            seconds = slowest[number] * (forward if name == "forward" else 1 - forward)
        bytes_ = [("link", sent[name].bytes)] if name in sent else []
        at[name, number] = tasks.add(seconds, [at[key] for key in follows[name, number]], bytes_)
    end = run(tasks, {"link": bandwidth})[1]
    last = steps - WARM - 1
    whole = float(end[at["backward", last]] - end[at["backward", WARM - 1]]) / (last + 1 - WARM)
    worst = float(slowest[WARM:last + 1].mean())
    return Step(whole, computation, worst - computation, whole - worst)

"""Which rank computes which request of one global batch, so that no rank waits for another.

Usable alone, numpy in and out::

    costs = model.predict(lengths, candidates)               # or any measure of work, one number a request
    ranks = balance.equal_count(costs, world_size, tokens=lengths, token_cap=200_000)
    balance.idle(costs, ranks, world_size)                   # the share of the step that ranks wait for the slowest

All partitions are pure functions of the global batch, ``NAME(costs, world_size, *, tokens=None, token_cap=None)``, and
give an int64 array [requests], the rank of each. Their sorts are stable and their sums have one order: ranks that pass
the same numbers get the same answer without asking each other. So gather costs, or integers that they are computed
from; a power computed on another kind of CPU may differ in its last bit.

``costs`` [requests]: none negative, in any unit. ``tokens`` [requests]: what each request needs of a rank's memory, and
``token_cap`` how much of it a rank has. With a cap, every function keeps it: what the algorithm gives is mended by
exchanges where it does not fit. ValueError where a request alone or all together are over it, or where no assignment
within it was found. There may be fewer requests than ranks, or none.

Zigzag and segments are FreeScale's (arXiv 2604.24073, algorithm 1: fixed and variable batch size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Partition = Callable[..., np.ndarray]

FINE = 1e-6
"""How far above the mean, relative to it, the heaviest rank may stay: far below what any model of costs knows."""


def zigzag(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Equal counts: sorted by cost, dealt to the ranks forth and back. Needs no exact costs, only their order."""
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    return batch.within_cap(_dealt(batch.order, world_size), *batch.equal_counts)


def segments(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Any counts: sorted by cost, cut into contiguous segments of nearly equal cost, so that a rank has requests of
    nearly one length. ``costs``: FreeScale's weights are ``length ** alpha``. A request goes to the segment that its
    middle lies in; a rank beside one giant may stay empty. Without any cost, segments of equal count."""
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    weights = batch.costs[batch.order]
    if not weights.any():
        weights = np.ones_like(weights)
    ranks = np.empty(batch.requests, np.int64)
    middle = np.cumsum(weights) - weights / 2
    ranks[batch.order] = np.minimum(world_size * middle / max(weights.sum(), 1e-300), world_size - 1).astype(np.int64)
    return batch.within_cap(ranks, 0, batch.requests)


def karmarkar_karp(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Equal counts by largest differencing (Karmarkar and Karp 1982), as trainers of language models use it.

    Sorted requests, ``world_size`` at a time, are partial assignments of one request a rank. The two whose heaviest and
    lightest ranks differ most are joined, heaviest with lightest, until one is left.
    """
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    ranks = np.empty(batch.requests, np.int64)
    _kernels().differencing(batch.order, batch.costs, world_size, ranks)
    return batch.within_cap(ranks, *batch.equal_counts)


def lpt(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Any counts: longest processing time first (Graham 1969): each request, largest first, to the rank that has the
    least so far, of those that have room for its tokens."""
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    ranks, fits = batch.longest_first()
    return ranks if fits else batch.within_cap(_dealt(batch.order, world_size), 0, batch.requests)


def equal_count(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Equal counts (differing by one where they must), nearly equal costs: dealt as ``zigzag`` does, then the heaviest
    rank exchanges requests with the lightest until it is within ``FINE`` of the mean or nothing helps it."""
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    return batch.refined(_dealt(batch.order, world_size), *batch.equal_counts)[0]


def equal_cost(costs: Any, world_size: int, *, tokens: Any = None, token_cap: float | None = None) -> np.ndarray:
    """Any counts, nearly equal costs: requests are exchanged and moved as in ``equal_count``, beginning with equal
    counts or with ``lpt``, whichever ends better. The other is tried only where the first does not reach ``FINE``."""
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    found: list[tuple[float, np.ndarray]] = []
    for start in ("dealt", "lpt") if batch.cap == np.inf else ("lpt", "dealt"):  # lpt's ranks are nearer in tokens
        ranks, fits = batch.longest_first() if start == "lpt" else (_dealt(batch.order, world_size), True)
        if not fits:
            continue
        try:
            ranks, heaviest = batch.refined(ranks, 0, batch.requests)
        except ValueError:  # no way into the cap from here
            if not found:
                raise
            continue
        found.append((heaviest, ranks))
        if heaviest <= batch.goal():
            break
    return min(found, key=lambda one: one[0])[1]


def rebalance(costs: Any, world_size: int, home: Any, *, enough: float = 1e-3, tokens: Any = None,
              token_cap: float | None = None) -> np.ndarray:
    """Balance that moves few requests: all begin on ``home`` [requests], the rank where each is cheap (where it was
    read, where its user's events lie), and are exchanged until the heaviest rank is within ``enough`` of the mean.

    Counts stay between the least and the most that a rank has at home. Where exchanges do not get there (a tight cap),
    requests are dealt anew if that is better, and most of them move. Ranks keep requests of unlike lengths: an error of
    the cost model that depends on the length hurts more than after ``equal_count``.
    """
    batch = _Batch.of(costs, world_size, tokens, token_cap)
    start = _ranks(home, batch.requests, world_size, "home")
    counts = np.bincount(start, minlength=world_size)
    least, most = int(counts.min()), int(counts.max())
    try:
        ranks, heaviest = batch.refined(start, least, most, enough)
    except ValueError:  # no way from home into the cap
        return equal_count(costs, world_size, tokens=tokens, token_cap=token_cap)
    if heaviest > batch.goal(enough):
        try:
            other, load = batch.refined(_dealt(batch.order, world_size), *batch.equal_counts, enough)
        except ValueError:
            return ranks
        ranks = other if load < heaviest else ranks
    return ranks


def within(groups: Any, partition: Partition, costs: Any, home: Any, *, tokens: Any = None,
           token_cap: float | None = None) -> np.ndarray:
    """``partition`` (one of this module, or like it) inside each group of ranks: no request leaves the group of its
    ``home`` [requests]. ``groups`` [world_size]: the group of each rank, such as its host."""
    groups = np.asarray(groups)
    costs = np.asarray(costs)
    home = _ranks(home, len(costs), len(groups), "home")
    tokens = None if tokens is None else np.asarray(tokens)
    ranks = np.empty(len(costs), np.int64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        inside = np.flatnonzero(groups[home] == group)
        size = None if tokens is None else tokens[inside]
        ranks[inside] = members[partition(costs[inside], len(members), tokens=size, token_cap=token_cap)]
    return ranks


def loads(values: Any, ranks: Any, world_size: int) -> np.ndarray:
    """[world_size] float64: the sum of ``values`` [requests] of each rank."""
    values = np.asarray(values, np.float64)
    return np.bincount(_ranks(ranks, len(values), world_size, "ranks"), weights=values, minlength=world_size)


def idle(costs: Any, ranks: Any, world_size: int) -> float:
    """The share of a step that ranks wait for the slowest: 1 - mean / max of their costs. 0 where nothing costs."""
    sums = loads(costs, ranks, world_size)
    return float(1 - sums.mean() / sums.max()) if sums.max() > 0 else 0.0


def padding(lengths: Any, ranks: Any, world_size: int) -> float:
    """The share of a padded batch that is padding, if each rank pads its requests to its longest."""
    lengths = np.asarray(lengths, np.float64)
    ranks = _ranks(ranks, len(lengths), world_size, "ranks")
    longest = np.zeros(world_size)
    np.maximum.at(longest, ranks, lengths)
    full = float((np.bincount(ranks, minlength=world_size) * longest).sum())
    return float(1 - lengths.sum() / full) if full > 0 else 0.0


@dataclass(frozen=True)
class Moved:
    """What leaves its home: requests, tokens, bytes, and each as a share of all."""

    requests: int
    tokens: int
    bytes: int
    request_share: float
    token_share: float
    byte_share: float


def moved(ranks: Any, home: Any, *, tokens: Any = None, bytes: Any = None) -> Moved:
    """What an assignment sends to another rank than ``home``. ``tokens``, ``bytes`` [requests] count 0 if not given."""
    away = np.asarray(ranks) != np.asarray(home)
    none = np.zeros(len(away), np.int64)
    sums = []
    for values in (np.ones(len(away), np.int64), tokens, bytes):
        values = none if values is None else np.asarray(values)
        total = values.sum()
        sums.append((int(values[away].sum()), float(values[away].sum() / total) if total else 0.0))
    return Moved(*(amount for amount, _ in sums), *(share for _, share in sums))


def _kernels() -> Any:
    from semel.training import balance_kernels  # numba takes a while to import

    return balance_kernels


def _dealt(order: np.ndarray, world_size: int) -> np.ndarray:
    ranks = np.empty(len(order), np.int64)
    _kernels().deal(order, world_size, ranks)
    return ranks


def _measure(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise ValueError(f"{name} must be one number a request, [requests]; got shape {array.shape} of {array.dtype}")
    array = np.add(array, 0.0, dtype=np.float64)  # no -0.0: then bits order as numbers do
    if len(array) and not (array.min() >= 0 and array.max() < np.inf):
        wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[0]
        raise ValueError(f"{name}[{wrong}] is {array[wrong]}; it must be finite and not negative")
    return array


def _ranks(values: Any, requests: int, world_size: int, name: str) -> np.ndarray:
    ranks = np.array(values, np.int64)
    if ranks.shape != (requests,):
        raise ValueError(f"{name} must be one rank a request, [{requests}]; got shape {ranks.shape}")
    if requests and not (ranks.min() >= 0 and ranks.max() < world_size):
        raise ValueError(f"{name} has ranks {ranks.min()} to {ranks.max()}; a world of {world_size} has 0 to "
                         f"{world_size - 1}")
    return ranks


@dataclass(frozen=True)
class _Batch:
    """What a partition is asked about, checked. Without a cap it is infinite, and there are no ``tokens``: [0]."""

    costs: np.ndarray
    world_size: int
    tokens: np.ndarray
    cap: float

    @classmethod
    def of(cls, costs: Any, world_size: int, tokens: Any, token_cap: float | None) -> _Batch:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; there must be a rank")
        measured = _measure(costs, "costs")
        if token_cap is None:
            return cls(measured, int(world_size), np.empty(0), np.inf)
        if tokens is None:
            raise ValueError(f"token_cap={token_cap:g} needs tokens, how many each request has")
        size = _measure(tokens, "tokens")
        if len(size) != len(measured):
            raise ValueError(f"{len(size)} tokens for {len(measured)} costs; both are one number a request")
        if len(size) and size.max() > token_cap:
            raise ValueError(f"request {size.argmax()} has {size.max():g} tokens, more than token_cap={token_cap:g} of "
                             "a rank; keep fewer events or raise the cap")
        if size.sum() > world_size * token_cap:
            raise ValueError(f"{size.sum():g} tokens are more than {world_size} ranks of token_cap={token_cap:g} hold; "
                             f"make batches smaller or the cap at least {np.ceil(size.sum() / world_size):g}")
        return cls(measured, int(world_size), size, float(token_cap))

    @property
    def requests(self) -> int:
        return len(self.costs)

    @cached_property
    def order(self) -> np.ndarray:
        """Largest cost first, ties as they came."""
        return _kernels().descending(self.costs)

    @property
    def equal_counts(self) -> tuple[int, int]:
        """The least and the most requests of a rank."""
        return self.requests // self.world_size, -(-self.requests // self.world_size)

    def goal(self, enough: float = FINE) -> float:
        return float(self.costs.sum() / self.world_size * (1 + enough))

    def longest_first(self) -> tuple[np.ndarray, bool]:
        """LPT, and whether all found room."""
        ranks = np.empty(self.requests, np.int64)
        return ranks, _kernels().longest_first(self.order, self.costs, self.tokens, self.cap, self.world_size, ranks)

    def refined(self, ranks: np.ndarray, least: int, most: int, enough: float = FINE) -> tuple[np.ndarray, float]:
        """``ranks``, which it changes, after exchanges within the cap, and the cost of the heaviest."""
        ranks = self.within_cap(ranks, least, most)
        heaviest = self._exchange(self.order, self.costs, self.tokens, self.cap, ranks, least, most, self.goal(enough))
        return ranks, heaviest

    def within_cap(self, ranks: np.ndarray, least: int, most: int) -> np.ndarray:
        """``ranks``, or where they exceed the cap, ranks made of them that do not. Raises ValueError."""
        if self.cap == np.inf or self._peak(ranks) <= self.cap:
            return ranks
        by_tokens = _kernels().descending(self.tokens)
        starts = [ranks, _dealt(by_tokens, self.world_size)]
        if least == 0 and most == self.requests:
            starts.append(np.empty(self.requests, np.int64))
            _kernels().longest_first(by_tokens, self.tokens, np.empty(0), np.inf, self.world_size, starts[-1])
        peaks = []
        for start in starts:
            mended = start.copy()
            self._exchange(by_tokens, self.tokens, np.empty(0), np.inf, mended, least, most, self.cap)
            peaks.append(self._peak(mended))
            if peaks[-1] <= self.cap:
                return mended
        raise ValueError(f"no assignment within token_cap={self.cap:g} was found, with {least} to {most} requests a "
                         f"rank: the fullest rank has {min(peaks):g} tokens at best; raise the cap to that or make "
                         "batches smaller")

    def _peak(self, ranks: np.ndarray) -> float:
        return float(loads(self.tokens, ranks, self.world_size).max())

    def _exchange(self, order: np.ndarray, costs: np.ndarray, tokens: np.ndarray, cap: float, ranks: np.ndarray,
                  least: int, most: int, goal: float) -> float:
        searches = 256 + 4 * self.world_size  # a rank is done with after one or two
        return _kernels().refine(order, costs, tokens, cap, ranks, self.world_size, least, most, goal, searches)

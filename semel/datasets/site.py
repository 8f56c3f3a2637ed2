"""The parts of a simulated short-video site that do not depend on what users click: who, what, when, and what is shown.

Axis names: ``U`` users, ``I`` items (in order of creation), ``R`` requests, ``K`` candidates a request, ``S`` the most
that one surface shows, ``D`` latent factors. All functions are pure: same generator state, same arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semel.batch import offsets_of

if TYPE_CHECKING:
    from semel.datasets.simulate import SimulationConfig

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US


@dataclass(frozen=True)
class Items:
    """``created`` [I] us, sorted; ``topic``, ``author`` [I]; ``factors`` [I, D]; ``quality`` [I] logits; ``popularity``
    [I] weights of being retrieved; ``duration_ms`` [I]."""

    created: np.ndarray
    topic: np.ndarray
    author: np.ndarray
    factors: np.ndarray
    quality: np.ndarray
    popularity: np.ndarray
    duration_ms: np.ndarray


@dataclass(frozen=True)
class Users:
    """``lengths`` [U] events; ``age``, ``country`` [U] codes; ``factors`` [U, D]; ``bias`` [U] logits."""

    lengths: np.ndarray
    age: np.ndarray
    country: np.ndarray
    factors: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Requests:
    """User by user, in order of time: ``user``, ``surface``, ``shown`` [R] (how many are shown); ``as_of`` [R] us;
    ``event_time`` [R, S] us of each view (garbage beyond ``shown``)."""

    user: np.ndarray
    surface: np.ndarray
    shown: np.ndarray
    as_of: np.ndarray
    event_time: np.ndarray

    def __len__(self) -> int:
        return len(self.user)


def draw_lengths(rng: np.random.Generator, users: int, shortest: int, longest: int, tail: float) -> np.ndarray:
    """[U] history lengths of a truncated Pareto law, P(length > x) ~ x^-tail: its quantiles in random order, so that
    the total hardly depends on the seed. The longest is ``longest`` exactly."""
    quantiles = (np.arange(users) + 0.5) / users
    mass = 1.0 - (shortest / longest) ** tail
    lengths = np.floor(shortest * (1.0 - quantiles * mass) ** (-1.0 / tail)).astype(np.int64)
    lengths[-1] = longest
    return rng.permutation(np.clip(lengths, shortest, longest))


def draw_items(rng: np.random.Generator, config: SimulationConfig) -> Items:
    """The first catalogue, up to a month old, and ``new_items_per_hour`` in each hour of the simulation."""
    fresh = config.new_items_per_hour * config.hours
    total = config.first_items + fresh
    age = np.minimum(rng.exponential(10 * DAY_US, config.first_items), 30 * DAY_US).astype(np.int64)
    hour = np.repeat(np.arange(config.hours), config.new_items_per_hour) * HOUR_US
    created = np.sort(np.r_[config.start_us - 1 - age, config.start_us + hour + rng.integers(0, HOUR_US, fresh)])
    topic_share = 1.0 / np.arange(1, config.topics + 1) ** 0.7
    author_topic = rng.choice(config.topics, config.authors, p=topic_share / topic_share.sum())
    author = rng.integers(0, config.authors, total)
    topic = author_topic[author]
    scale = 1.0 / np.sqrt(config.factors)
    topic_factors = rng.normal(0, scale, (config.topics, config.factors))
    author_factors = rng.normal(0, scale, (config.authors, config.factors))
    own = rng.normal(0, scale, (total, config.factors))
    return Items(
        created, topic, author, 0.8 * topic_factors[topic] + 0.3 * author_factors[author] + 0.5 * own,
        rng.normal(0, 0.5, total), rng.pareto(1.2, total) + 0.05,
        (1000 * np.clip(rng.lognormal(2.7, 0.7, total), 3, 300)).astype(np.int32))


def draw_users(rng: np.random.Generator, config: SimulationConfig) -> Users:
    lengths = draw_lengths(rng, config.users, config.shortest, config.longest, config.tail)
    age = rng.integers(0, len(AGES), config.users)
    country = rng.integers(0, len(COUNTRIES), config.users)
    by_age = rng.normal(0, 0.6, (len(AGES), config.factors))
    factors = by_age[age] + rng.normal(0, 0.8, (config.users, config.factors))
    return Users(lengths, age, country, factors, rng.normal(0, 0.4, config.users))


AGES = ("13-17", "18-24", "25-34", "35-44", "45-54", "55+")
COUNTRIES = ("BR", "DE", "ID", "IN", "JP", "MX", "NG", "US")


def draw_requests(rng: np.random.Generator, config: SimulationConfig, lengths: np.ndarray) -> Requests:
    """Each user's requests: surfaces at random until its number of views is reached (the last request shows fewer),
    in sessions, within the simulated time. Times are whole milliseconds and a request is later than all views of the
    one before; a view shares its time with the one before with probability ``tie_share``."""
    sizes = np.array([surface.shown for surface in config.surfaces])
    shares = np.array([surface.share for surface in config.surfaces])
    user = np.repeat(np.arange(len(lengths)), -(-lengths // sizes.min()))
    surface = rng.choice(len(sizes), len(user), p=shares / shares.sum())
    before = _running(sizes[surface], user) - sizes[surface]
    keep = before < lengths[user]
    user, surface, before = user[keep], surface[keep], before[keep]
    shown = np.minimum(sizes[surface], lengths[user] - before)

    slot = np.arange(sizes.max())
    watched = 1 + rng.exponential(6_000, (len(user), len(slot)))  # ms
    watched[(rng.random(watched.shape) < config.tie_share) & (slot > 0)] = 0
    watched[slot >= shown[:, None]] = 0
    pause = np.where(rng.random(len(user)) < 0.75, rng.exponential(20_000, len(user)),
                     rng.exponential(6 * 3_600_000, len(user)))
    horizon = 0.97 * config.hours * 3_600_000
    total_watched = np.bincount(user, watched.sum(1), len(lengths))
    total_pause = np.bincount(user, pause, len(lengths))
    watch_scale = np.minimum(1.0, 0.8 * horizon / total_watched)
    pause_scale = np.minimum(1.0, (horizon - watch_scale * total_watched) / total_pause)
    watched = np.where(watched > 0, np.maximum(1, watched * watch_scale[user][:, None]), 0).astype(np.int64)
    pause = np.maximum(1, pause * pause_scale[user]).astype(np.int64)

    ends = _running(pause + watched.sum(1), user)  # of each request, since the user's start
    span = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(span, user, ends)
    start = (rng.random(len(lengths)) * np.maximum(0, config.hours * 3_600_000 - span)).astype(np.int64)
    as_of = start[user] + ends - watched.sum(1)
    times = as_of[:, None] + np.cumsum(watched, axis=1)
    return Requests(user, surface, shown, config.start_us + 1000 * as_of, config.start_us + 1000 * times)


def draw_candidates(rng: np.random.Generator, config: SimulationConfig, items: Items,
                    as_of: np.ndarray) -> np.ndarray:
    """[R, K] distinct items that existed at ``as_of`` [R]: ``fresh_share`` of them among the newest, the others by
    popularity."""
    available = np.searchsorted(items.created, as_of, side="left")
    weight = np.cumsum(items.popularity)
    newest = max(4 * config.candidates, 24 * config.new_items_per_hour)

    def draw(rows: np.ndarray) -> np.ndarray:
        have = available[rows]
        u = rng.random(len(rows))
        popular = np.searchsorted(weight, u * weight[have - 1], side="right")
        fresh = have - 1 - (u * np.minimum(newest, have)).astype(np.int64)
        picked = np.where(rng.random(len(rows)) < config.fresh_share, fresh, popular)
        return np.clip(picked, 0, have - 1)

    rows = np.arange(len(as_of))
    found = draw(np.repeat(rows, config.candidates)).reshape(len(rows), config.candidates)
    for _ in range(64):  # draw again what a request has twice
        order = np.argsort(found[rows], axis=1, kind="stable")
        ranked = np.take_along_axis(found[rows], order, axis=1)
        again = np.zeros(ranked.shape, dtype=bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], axis=1)
        which, slot = np.nonzero(again)
        if not len(which):
            return found
        found[rows[which], slot] = draw(rows[which])
        rows = rows[np.unique(which)]
    for row in rows:  # a few popular items are all that is drawn: fill with whatever is left
        unused = np.setdiff1d(np.arange(available[row]), found[row])
        _, first = np.unique(found[row], return_index=True)
        repeated = np.setdiff1d(np.arange(config.candidates), first)
        found[row, repeated] = rng.choice(unused, len(repeated), replace=False)
    return found


def _running(values: np.ndarray, user: np.ndarray) -> np.ndarray:
    """Cumulative sum within each user; rows are grouped by user (0, 1, ...)."""
    total = np.cumsum(values)
    ends = offsets_of(np.bincount(user))
    base = np.r_[0, total][ends[:-1]]
    return total - base[user]

"""A short-video site with known truth: what tests and benchmarks use where real data are too small or say too little.

Users with power-law histories ask several surfaces for videos; items are added every hour; clicks are drawn from a
known preference model (``semel.datasets.clicks``), so the best reachable NE is known; some events arrive late, some
share their time. Deterministic by ``seed``. Never a silent substitute for real data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import offsets_of
from semel.datasets.clicks import choose_shown, draw_clicks, static_logits
from semel.datasets.dataset import Dataset
from semel.datasets.impressions import lists
from semel.datasets.site import (
    AGES,
    COUNTRIES,
    HOUR_US,
    Items,
    Requests,
    Users,
    draw_candidates,
    draw_items,
    draw_requests,
    draw_users,
)
from semel.metrics import log_losses, normalized_entropy

FIRST_ITEM = 10_000
FIRST_USER = 1_000_000


@dataclass(frozen=True)
class Surface:
    """A place in the app: how many of the candidates it shows, its share of the requests, its effect on the logit."""

    name: str
    shown: int
    share: float
    bias: float = 0.0


@dataclass(frozen=True)
class SimulationConfig:
    """``users`` have between ``shortest`` and ``longest`` events, P(length > x) ~ x^-tail (about 9 x shortest events a
    user at tail 1); over ``hours`` from ``start_us``. ``candidates`` a request, of which a surface shows some.
    ``tie_share``: views that share their time with the view before; ``late_share``: requests whose events arrive late,
    by ``late_hours`` on average. The other numbers are the preference model's (``semel.datasets.clicks``). Raises
    ValueError for values that describe no site."""

    users: int = 2_000
    shortest: int = 8
    longest: int = 65_536
    tail: float = 1.0
    hours: int = 24 * 28
    start_us: int = 1_704_067_200_000_000
    first_items: int = 2_000
    new_items_per_hour: int = 4
    topics: int = 24
    authors: int = 400
    factors: int = 8
    surfaces: tuple[Surface, ...] = (Surface("feed", 8, 0.6), Surface("discover", 6, 0.25, -0.3),
                                     Surface("following", 4, 0.15, 0.4))
    candidates: int = 16
    fresh_share: float = 0.3
    policy: float = 0.7
    tie_share: float = 0.15
    late_share: float = 0.03
    late_hours: float = 6.0
    intercept: float = -1.2
    taste: float = 1.0
    affinity: float = 0.9
    affinity_half_life: float = 20.0
    position_decay: float = 0.35
    age_decay: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "shortest", "hours", "first_items", "topics", "authors", "factors", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.longest < self.shortest:
            raise ValueError(f"longest ({self.longest}) is below shortest ({self.shortest})")
        if not self.surfaces or not all(0 < s.shown <= self.candidates and s.share > 0 for s in self.surfaces):
            raise ValueError(f"each surface must show 1 to {self.candidates} (candidates) items, share above 0")
        if self.first_items < 2 * self.candidates:
            raise ValueError(f"first_items ({self.first_items}) must be at least twice candidates ({self.candidates})")
        for name in ("tie_share", "late_share", "fresh_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.tail <= 0 or self.affinity_half_life <= 0 or self.new_items_per_hour < 0 or self.seed < 0:
            raise ValueError("tail and affinity_half_life must be positive, new_items_per_hour and seed not negative")
        last_age = self.start_us - 31 * 24 * HOUR_US
        if last_age < 0:
            raise ValueError(f"start_us ({self.start_us}) must leave a month for the first items")


@dataclass(frozen=True)
class SimulatedData:
    """``events``: one row a view, in order of arrival: user_id, item_id, event_time, arrival_time (int64 us),
    ``action`` ("click" or "view"), topic, surface, watch_ms. ``items``: item_id, event_time (creation), title, topic,
    author_id, duration_ms. ``users``: user_id, age, country. ``impressions``: see ``semel.datasets.impressions``, with
    ``click`` and the true ``probability`` (both null where not shown), by ``as_of``.
    """

    config: SimulationConfig
    events: pa.Table
    items: pa.Table
    users: pa.Table
    impressions: pa.Table

    @property
    def best_ne(self) -> float:
        """NE of the true probabilities on the clicks that were drawn: no model's expected NE is lower."""
        return true_ne(self.impressions)

    def batches(self, seconds: float = 3600.0) -> Iterator[pa.Table]:
        """The events in order of arrival, in windows of arrival time; empty windows are left out."""
        arrival = self.events["arrival_time"].to_numpy()
        window = (arrival - arrival[0]) // int(seconds * 1_000_000)
        cuts = np.r_[0, np.flatnonzero(np.diff(window)) + 1, len(window)]
        for low, high in pairwise(cuts):
            yield self.events.slice(low, high - low)

    def dataset(self) -> Dataset:
        """The same as a data set for ``ingest``: events in order of arrival, without ``arrival_time``."""
        return Dataset("simulated", self.events.drop_columns("arrival_time"), self.items, self.users,
                       "simulated, no terms", f"semel.datasets.simulate, seed {self.config.seed}", self.impressions)


def true_ne(impressions: pa.Table) -> float:
    """NE of the column ``probability`` on the column ``click`` over what was shown (also of a part of the requests)."""
    click = pc.drop_null(pc.list_flatten(impressions["click"])).to_numpy()
    probability = pc.drop_null(pc.list_flatten(impressions["probability"])).to_numpy()
    return float(normalized_entropy(log_losses(click, probability).sum(), len(click), click.sum(dtype=np.float64)))


def simulate(config: SimulationConfig = SimulationConfig(), items: Items | None = None) -> SimulatedData:
    """Runs the site. One generator a part, so that, say, more items leave the users as they were. ``items``: its
    catalogue, where another than its own is wanted (``semel.datasets.live``); those not created yet are never shown."""
    streams = [np.random.default_rng([config.seed, part]) for part in range(7)]
    items = draw_items(streams[0], config) if items is None else items
    users = draw_users(streams[1], config)
    requests = draw_requests(streams[2], config, users.lengths)
    candidates = draw_candidates(streams[3], config, items, requests.as_of)
    logits = static_logits(config, users, items, requests, candidates)
    ranked = choose_shown(streams[4], config, logits)
    most = requests.event_time.shape[1]
    shown_items = np.take_along_axis(candidates, ranked[:, :most], axis=1)
    shown_logits = np.take_along_axis(logits, ranked[:, :most], axis=1)
    click, probability = draw_clicks(streams[5], config, requests, shown_logits, items.topic[shown_items])
    events = _events(streams[6], config, items, requests, shown_items, click)
    impressions = _impressions(config, requests, candidates, ranked, click, probability)
    return SimulatedData(config, events, item_rows(items), _users(users), impressions)


def _events(rng: np.random.Generator, config: SimulationConfig, items: Items, requests: Requests, shown: np.ndarray,
            click: np.ndarray) -> pa.Table:
    """Views with their arrival: a request's events arrive together, after its last view; late ones hours later."""
    rows, most = requests.event_time.shape
    last = np.take_along_axis(requests.event_time, requests.shown[:, None] - 1, axis=1)[:, 0]
    late = rng.random(rows) < config.late_share
    delay = np.where(late, rng.exponential(config.late_hours * HOUR_US, rows), 20_000 + rng.exponential(200_000, rows))
    arrival = last + delay.astype(np.int64)
    there = np.flatnonzero((np.arange(most) < requests.shown[:, None]).ravel())
    request = there // most
    order = np.argsort(arrival[request], kind="stable")
    there, request = there[order], request[order]
    item, hit = shown.ravel()[there], click.ravel()[there]
    duration = items.duration_ms[item]
    share = np.where(hit, rng.uniform(0.4, 1.0, len(item)), rng.uniform(0.0, 0.3, len(item)))
    surfaces = pa.array([surface.name for surface in config.surfaces])
    return pa.table({
        "user_id": FIRST_USER + requests.user[request],
        "item_id": FIRST_ITEM + item,
        "event_time": requests.event_time.ravel()[there],
        "arrival_time": arrival[request],
        "action": pa.array(["view", "click"]).take(pa.array(hit.astype(np.int8))),
        "topic": topic_names(config.topics).take(pa.array(items.topic[item])),
        "surface": surfaces.take(pa.array(requests.surface[request])),
        "watch_ms": (share * duration).astype(np.int32),
    })


def _impressions(config: SimulationConfig, requests: Requests, candidates: np.ndarray, ranked: np.ndarray,
                 click: np.ndarray, probability: np.ndarray) -> pa.Table:
    """Candidates stay in the order in which they were retrieved; ``position`` says where they were shown."""
    order = np.lexsort((requests.user, requests.as_of))
    rows, wide = candidates.shape
    position = np.empty(candidates.shape, dtype=np.int32)
    np.put_along_axis(position, ranked, np.broadcast_to(np.arange(wide, dtype=np.int32), ranked.shape), axis=1)
    position = position[order]
    shown = position < requests.shown[order, None]
    slot = np.minimum(position, click.shape[1] - 1)
    by_candidate = {"click": np.take_along_axis(click[order], slot, axis=1).astype(np.float32),
                    "probability": np.take_along_axis(probability[order], slot, axis=1)}
    offsets = offsets_of(np.full(rows, wide))
    hidden = ~shown.ravel()
    surfaces = pa.array([surface.name for surface in config.surfaces])
    numbers = pa.array(np.arange(rows)).cast(pa.string())
    return pa.table({
        "request_id": pc.binary_join_element_wise(pa.scalar("simulated"), numbers, "-"),
        "user_id": FIRST_USER + requests.user[order],
        "as_of": requests.as_of[order],
        "surface": surfaces.take(pa.array(requests.surface[order])),
        "candidates": lists(offsets, pa.array(FIRST_ITEM + candidates[order].ravel())),
        "shown": lists(offsets, pa.array(shown.ravel())),
        "position": lists(offsets, pa.array(position.ravel(), mask=hidden)),
        **{name: lists(offsets, pa.array(value.ravel(), mask=hidden)) for name, value in by_candidate.items()},
    })


def item_rows(items: Items) -> pa.Table:
    """The catalogue: item_id, event_time (creation), title, topic, author_id, duration_ms."""
    count = len(items.created)
    titles = pc.binary_join_element_wise(pa.scalar("video"), pa.array(np.arange(count)).cast(pa.string()), " ")
    return pa.table({
        "item_id": np.arange(count) + FIRST_ITEM, "event_time": items.created, "title": titles,
        "topic": topic_names(int(items.topic.max()) + 1).take(pa.array(items.topic)),
        "author_id": items.author.astype(np.int64), "duration_ms": items.duration_ms})


def _users(users: Users) -> pa.Table:
    return pa.table({
        "user_id": np.arange(len(users.lengths)) + FIRST_USER,
        "age": pa.array(AGES).take(pa.array(users.age)), "country": pa.array(COUNTRIES).take(pa.array(users.country))})


def topic_names(count: int) -> pa.Array:
    return pa.array([f"topic-{number:02d}" for number in range(count)])

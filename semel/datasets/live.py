"""The simulated site goes on: requests one after the other, for as long as somebody ranks their candidates.

``simulate`` has the site's own policy decide what is shown. Here whoever serves decides, and the user's answer is drawn
from the same preference model, so the probability of every click is known whatever was shown. Request ``n`` and the
random numbers of its answer depend on the configuration and ``n`` alone: a driver that was stopped asks them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.batch import offsets_of
from semel.datasets.simulate import (
    FIRST_ITEM,
    FIRST_USER,
    SimulatedData,
    SimulationConfig,
    item_rows,
    simulate,
    topic_names,
)
from semel.datasets.site import AGES, COUNTRIES, DAY_US, HOUR_US, Requests, draw_candidates, draw_items, draw_users

LIVE_DAYS = 365
"""So long new items come in; the requests go on."""
BLOCK = 512


@dataclass(frozen=True)
class LiveRequest:
    """Request ``number``: ``shown`` of the ``candidates`` (item ids) will be seen. ``context``: surface, age, country.
    ``as_of``: microseconds of the site's time; later than every view of the requests before it."""

    number: int
    user_id: int
    as_of: int
    shown: int
    candidates: tuple[int, ...]
    context: dict[str, str]


@dataclass(frozen=True)
class Views:
    """What a user did with the items it was shown, in that order: ``clicks`` [S] bool, their true ``probability`` [S],
    ``event_time`` [S] us, ``watch_ms`` [S], ``topics`` [S]."""

    clicks: list[bool]
    probability: list[float]
    event_time: list[int]
    watch_ms: list[int]
    topics: list[str]


class LiveSite:
    """A site whose first ``config.hours`` have passed (``past``) and which asks a request every ``gap_us`` of its time
    from then on. ``views`` is to be called once for each request that was answered, in the order of the answers: what
    a user clicked decides what it clicks next."""

    def __init__(self, config: SimulationConfig, gap_us: int) -> None:
        if gap_us < 10_000:
            raise ValueError(f"gap_us ({gap_us}) must be at least 10,000: times are whole milliseconds, and the views "
                             "of a request lie before the next one")
        self.config, self.gap_us = config, gap_us
        self.begin = config.start_us + config.hours * HOUR_US
        longer = replace(config, hours=config.hours + 24 * LIVE_DAYS)
        self._items = draw_items(np.random.default_rng([config.seed, 0]), longer)
        self._users = draw_users(np.random.default_rng([config.seed, 1]), config)
        # Of how often a user comes: as much as in the past, but nobody is on the site all the time.
        weight = np.minimum(self._users.lengths, 40 * config.shortest).astype(np.float64)
        self._weight = weight / weight.sum()
        self._topics = topic_names(config.topics).to_pylist()
        self._counts = np.zeros((config.users, config.topics))
        self._past: SimulatedData | None = None
        self._all_rows: pa.Table | None = None
        self._block = lru_cache(maxsize=8)(self._draw)

    @property
    def past(self) -> SimulatedData:
        """What happened before: its events, and the items that were there at its end."""
        if self._past is None:
            data = simulate(self.config, self._items)
            there = pc.less(data.items["event_time"], self.begin)
            self._past = replace(data, items=data.items.filter(there))
        return self._past

    def remember_past(self) -> None:
        """Begin with what users clicked lately in the ``past``."""
        seen, config = self.past.impressions, self.config
        user = seen["user_id"].to_numpy() - FIRST_USER
        item = np.asarray(seen["candidates"].combine_chunks().flatten()) - FIRST_ITEM
        click = np.asarray(seen["click"].combine_chunks().flatten().fill_null(0.0)) > 0
        shown = np.asarray(seen["shown"].combine_chunks().flatten()).reshape(len(user), -1).sum(1)
        order = np.argsort(user, kind="stable")  # they lie in the order of time
        total = np.bincount(user, shown, config.users)
        so_far = np.empty(len(user))
        running = np.cumsum(shown[order])
        starts = offsets_of(np.bincount(user, minlength=config.users))[:-1]
        so_far[order] = running - np.r_[0, running][starts][user[order]]
        weight = 0.5 ** ((total[user] - so_far) / config.affinity_half_life)
        self._counts[:] = 0
        wide = len(item) // max(1, len(user))
        hit = np.flatnonzero(click)
        np.add.at(self._counts, (user[hit // wide], self._items.topic[item[hit]]), weight[hit // wide])

    def request(self, number: int) -> LiveRequest:
        block, place = divmod(number, BLOCK)
        drawn = self._block(block)
        user = int(drawn.requests.user[place])
        surface = self.config.surfaces[int(drawn.requests.surface[place])]
        context = {"surface": surface.name, "age": AGES[self._users.age[user]],
                   "country": COUNTRIES[self._users.country[user]]}
        return LiveRequest(number, FIRST_USER + user, int(drawn.requests.as_of[place]), surface.shown,
                           tuple((FIRST_ITEM + drawn.candidates[place]).tolist()), context)

    def views(self, request: LiveRequest, shown: Sequence[int]) -> Views:
        """The user's answer to being shown these items (ids, by position); remembered for its next requests."""
        block, place = divmod(request.number, BLOCK)
        drawn, slots = self._block(block).draws[place], len(shown)
        if slots > len(drawn):
            raise ValueError(f"{slots} items shown, the widest surface shows {len(drawn)}")
        user = request.user_id - FIRST_USER
        items = np.asarray(shown, np.int64) - FIRST_ITEM
        surface = next(s for s in self.config.surfaces if s.name == request.context["surface"])
        chance = 1.0 / (1.0 + np.exp(-self._logits(user, items, request.as_of, surface.bias)))
        clicks = drawn[:slots, 0] < chance
        share = np.where(clicks, 0.4 + 0.6 * drawn[:slots, 1], 0.3 * drawn[:slots, 1])
        topics = self._items.topic[items]
        self._remember(user, topics, clicks)
        step = max(1, self.gap_us // 2000 // (slots + 1))  # ms
        return Views(clicks.tolist(), chance.tolist(),
                     [request.as_of + 1000 * step * (slot + 1) for slot in range(slots)],
                     (share * self._items.duration_ms[items]).astype(int).tolist(),
                     [self._topics[topic] for topic in topics.tolist()])

    def remember(self, user_id: int, shown: Sequence[int], clicks: Sequence[bool]) -> None:
        """An answer of before a restart, as ``views`` remembered it then."""
        self._remember(user_id - FIRST_USER, self._items.topic[np.asarray(shown, np.int64) - FIRST_ITEM],
                       np.asarray(clicks, bool))

    def new_items(self, after: int, until: int) -> pa.Table:
        """The items created in (after, until] us, as catalogue rows."""
        low, high = np.searchsorted(self._items.created, [after, until], side="right").tolist()
        return self._rows.slice(low, max(0, high - low))

    @property
    def _rows(self) -> pa.Table:
        if self._all_rows is None:
            self._all_rows = item_rows(self._items)
        return self._all_rows

    def _logits(self, user: int, items: np.ndarray, as_of: int, surface: float) -> np.ndarray:
        config, there = self.config, self._items
        age = np.maximum(0, as_of - there.created[items]) / DAY_US
        affinity = np.log1p(self._counts[user, there.topic[items]])
        return (config.intercept + surface + self._users.bias[user] + there.quality[items]
                + config.taste * (there.factors[items] @ self._users.factors[user])
                - config.age_decay * np.log1p(age) - config.position_decay * np.log1p(np.arange(len(items)))
                + config.affinity * affinity)

    def _remember(self, user: int, topics: np.ndarray, clicks: np.ndarray) -> None:
        self._counts[user] *= 0.5 ** (len(topics) / self.config.affinity_half_life)
        np.add.at(self._counts[user], topics[clicks], 1.0)

    def _draw(self, number: int) -> _Block:
        config = self.config
        random = np.random.default_rng([config.seed, 7, number])
        user = random.choice(config.users, BLOCK, p=self._weight)
        share = np.array([surface.share for surface in config.surfaces])
        surface = random.choice(len(share), BLOCK, p=share / share.sum())
        widest = max(surface.shown for surface in config.surfaces)
        jitter = (random.random(BLOCK) * 0.3 * self.gap_us).astype(np.int64)
        as_of = self.begin + (number * BLOCK + np.arange(BLOCK)) * self.gap_us + jitter
        as_of -= as_of % 1000
        candidates = draw_candidates(random, config, self._items, as_of)
        shown = np.array([surface.shown for surface in config.surfaces])[surface]
        return _Block(Requests(user, surface, shown, as_of, as_of[:, None]), candidates,
                      random.random((BLOCK, widest, 2)))


@dataclass(frozen=True)
class _Block:
    requests: Requests
    candidates: np.ndarray  # [BLOCK, K]
    draws: np.ndarray       # [BLOCK, S, 2]: of the click, of how long it is watched

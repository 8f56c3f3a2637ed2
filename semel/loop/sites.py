"""Whose requests the driver sends: the simulated site, or the users of a data set, once more by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from semel.datasets import Dataset
    from semel.features import FeatureSpec
    from semel.loop.config import LoopConfig, Served
    from semel.loop.ledger import Answer

Id = Any
PAGE = 10
"""Items on a page of a replayed data set."""
NEW_PLACES = 2
"""Candidates of a request that are items nobody has seen yet, while there are such: how a site gets to know them."""


@dataclass(frozen=True)
class Ask:
    """Request ``number``, to be sent at ``as_of`` (microseconds of the site's time): the user and its candidates. None:
    the whole catalogue, of which items are recommended."""

    number: int
    as_of: int
    user_id: Id
    candidates: list[Id] | None
    context: dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the user did. ``page``: what it was recommended. ``shown``: the items that it is known to have seen;
    ``labels`` of each: number by task, what was not labelled is left out; ``probability``: the true one of the first
    task, where it is known. ``events``: rows for the store, without keys."""

    shown: list[Id]
    labels: list[dict[str, float]]
    probability: list[float | None]
    page: list[Id]
    events: list[dict[str, Any]] = field(default_factory=list)


class Site(Protocol):
    """Request after request, the same ones after a restart."""

    begin: int
    """Microseconds of the site's time at which the live part begins."""

    def ask(self, number: int) -> Ask | None:
        """None behind the last one."""
        ...

    def seen(self, ask: Ask, best_first: Sequence[Id], new: Sequence[Id] = ()) -> Seen:
        """What the user does with a ranking; once for each request, in the order of the answers. ``new``: items in it
        that nobody has seen yet; a page keeps its last place for the best of them."""
        ...

    def remember(self, answer: Answer) -> None:
        """An answer of before a restart, in that order."""
        ...

    def new_items(self, after: int, until: int) -> pa.Table:
        """Catalogue rows of items that appear in (after, until] us."""
        ...


class SimulatedSite:
    """``semel.datasets.live``, which knows the true probability of every click. The first half of a page are the best
    items that were recommended, the other half are drawn from the rest of them: a site that shows only what it thinks
    best learns nothing of what it thinks of the others."""

    def __init__(self, config: LoopConfig) -> None:
        from semel.datasets.live import LiveSite
        from semel.datasets.simulate import SimulationConfig, Surface

        # Positions and surfaces shift no click here: a model that is not told of them could not reach the best NE.
        simulation = SimulationConfig(
            users=config.users, longest=2048, hours=config.past_hours, first_items=1000, new_items_per_hour=4,
            topics=16, authors=120, position_decay=0.0, seed=config.seed,
            surfaces=(Surface("feed", 8, 0.6), Surface("discover", 6, 0.25), Surface("following", 4, 0.15)))
        self.live = LiveSite(simulation, round(1e6 * config.speedup / config.rate))
        self.begin = self.live.begin
        self._seed = config.seed

    def past(self) -> Dataset:
        """What a store begins with."""
        import dataclasses

        import pyarrow as pa
        import pyarrow.compute as pc

        data = self.live.past.dataset()
        click = pc.equal(data.events["action"], "click").cast(pa.int64())
        return dataclasses.replace(data, events=data.events.append_column("click", click), impressions=None)

    def begin_with_past(self) -> None:
        self.live.remember_past()

    def ask(self, number: int) -> Ask | None:
        request = self.live.request(number)
        return Ask(number, request.as_of, request.user_id, None, dict(request.context))

    def seen(self, ask: Ask, best_first: Sequence[Id], new: Sequence[Id] = ()) -> Seen:
        import numpy as np

        request = self.live.request(ask.number)
        best = request.shown - request.shown // 2
        random = np.random.default_rng([self._seed, 11, ask.number])
        others = random.permutation(len(best_first[best:]))[: request.shown - best] + best
        unseen = set(new)
        order = [*best_first[:best], *(best_first[place] for place in sorted(others.tolist())),
                 *(item for item in best_first if item in unseen)]
        shown = page_of(list(dict.fromkeys(order)), request.shown, new)
        views = self.live.views(request, shown)
        events = [{"user_id": ask.user_id, "item_id": item, "event_time": time, "action": "click" if click else "view",
                   "click": int(click), "topic": topic, "surface": ask.context["surface"], "watch_ms": watched}
                  for item, time, click, topic, watched in zip(
                      shown, views.event_time, views.clicks, views.topics, views.watch_ms, strict=True)]
        return Seen(shown, [{"click": float(click)} for click in views.clicks], list(views.probability), shown, events)

    def remember(self, answer: Answer) -> None:
        self.live.remember(answer.user_id, [item for item, *_ in answer.shown],
                           [bool(label) for _, _, label, _ in answer.shown])

    def new_items(self, after: int, until: int) -> pa.Table:
        return self.live.new_items(after, until)


class ReplayedSite:
    """The events of a data set from ``begin_share`` on: a sitting asks for a ranking of the items that the user then
    rated and as many others, and its events follow. Items appear when they are first used."""

    def __init__(self, config: LoopConfig, served: Served, dataset: Dataset) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        from semel.datasets.ingestion import events_of

        events = events_of(dataset)
        events = events.take(pa.array(np.argsort(events["event_time"].to_numpy(), kind="stable")))
        times = events["event_time"].to_numpy()
        cut = int(len(events) * config.begin_share)
        if cut < 1:
            raise ValueError(f"{config.data} has {len(events)} events, too few to begin a loop with")
        self.begin = int(times[cut])
        cut = int(np.searchsorted(times, self.begin))  # what shares that time is live
        if cut < 1:
            raise ValueError(f"{config.data}: all events up to the {config.begin_share:.0%} have one time; nothing is "
                             "left to begin with")
        self._before, self._after = events.slice(0, cut), events.slice(cut)
        self._dataset = dataset
        known = pc.unique(self._before["item_id"])
        appear = self._after.filter(pc.invert(pc.is_in(self._after["item_id"], value_set=known)))
        ids, first = np.unique(np.asarray(appear["item_id"].to_pylist()), return_index=True)
        self._new_times = appear["event_time"].to_numpy()[first]
        self._new_ids = ids
        self._known = known.to_pylist()
        self._requests = _sittings(self._after, served)
        self._context = _contexts(dataset.users, served.features)
        self._rows = {key: row for row, key in enumerate(zip(
            self._after["user_id"].to_pylist(), self._after["event_time"].to_pylist(),
            self._after["item_id"].to_pylist(), strict=True))}
        self._columns = [name for name in self._after.column_names if name not in ("user_id", "item_id", "event_time")]
        self._random_seed = config.seed

    def past(self) -> Dataset:
        import dataclasses

        import pyarrow as pa
        import pyarrow.compute as pc

        items = self._dataset.items
        if items is not None:
            there = pc.is_in(items["item_id"], value_set=pa.array(self._known, items.schema.field("item_id").type))
            items = items.filter(there)
        return dataclasses.replace(self._dataset, events=self._before, items=items, action=None, impressions=None)

    def begin_with_past(self) -> None:
        """Its users need no state: what they do is known."""

    def ask(self, number: int) -> Ask | None:
        import numpy as np

        if number >= len(self._requests.user):
            return None
        rated = self._requests.items(number)
        random = np.random.default_rng([self._random_seed, number])
        others = [self._known[i] for i in random.integers(0, len(self._known), len(rated)).tolist()]
        candidates = list(dict.fromkeys([*rated, *others]))
        order = random.permutation(len(candidates)).tolist()
        user = self._requests.user[number]
        return Ask(number, int(self._requests.as_of[number]), user, [candidates[i] for i in order],
                   self._context.get(user, {}))

    def seen(self, ask: Ask, best_first: Sequence[Id], new: Sequence[Id] = ()) -> Seen:
        labels = self._requests.labels(ask.number)
        shown = [item for item in best_first if item in labels]
        events = [{"user_id": ask.user_id, "item_id": item, "event_time": time,
                   **{name: value for name in self._columns
                      if (value := self._after[name][self._rows[ask.user_id, time, item]].as_py()) is not None}}
                  for item, time in self._requests.events(ask.number)]
        page = page_of(best_first, PAGE, new)
        return Seen(shown, [labels[item] for item in shown], [None] * len(shown), page, events)

    def remember(self, answer: Answer) -> None:
        """Nothing depends on earlier answers."""

    def new_items(self, after: int, until: int) -> pa.Table:
        import pyarrow as pa
        import pyarrow.compute as pc

        from semel.datasets.ingestion import catalogue_rows

        now = (self._new_times > after) & (self._new_times <= until)
        ids = pa.array(self._new_ids[now].tolist(), self._after.schema.field("item_id").type)
        items = self._dataset.items
        if items is not None:
            items = items.filter(pc.is_in(items["item_id"], value_set=ids))
        return catalogue_rows(items, ids)


def page_of(best_first: Sequence[Id], places: int, new: Sequence[Id]) -> list[Id]:
    """The best ones; the last place is for the best of the ``new`` ones where none of them is on it."""
    page = list(best_first[:places])
    if new and not set(new) & set(page):
        page[-1] = next(item for item in best_first if item in new)
    return page


@dataclass(frozen=True)
class _Sittings:
    """Requests by time. ``begin`` [R + 1]: where the events of each lie in ``order`` (of the live events)."""

    user: list[Id]
    as_of: np.ndarray
    offsets: np.ndarray
    item: list[Id]
    time: np.ndarray
    values: dict[str, np.ndarray]

    def items(self, number: int) -> list[Id]:
        return list(dict.fromkeys(self.item[self.offsets[number] : self.offsets[number + 1]]))

    def labels(self, number: int) -> dict[Id, dict[str, float]]:
        span = range(self.offsets[number], self.offsets[number + 1])
        return {self.item[row]: {task: float(value[row]) for task, value in self.values.items()
                                 if value[row] == value[row]} for row in span}

    def events(self, number: int) -> list[tuple[Id, int]]:
        span = range(self.offsets[number], self.offsets[number + 1])
        return [(self.item[row], int(self.time[row])) for row in span]


def _sittings(events: pa.Table, served: Served) -> _Sittings:
    """Sittings as the recipe's examples cut them: a pause of ``gap_minutes``, ``max_candidates`` events at most."""
    import numpy as np

    from semel.examples.build import labels_of
    from semel.examples.rows import column_to_numpy
    from semel.examples.sessionize import label_values

    labels = labels_of(served.features, served.like_threshold)
    missing = [label.column for label in labels if label.column and label.column not in events.column_names]
    if missing:
        raise ValueError(f"the data set has no column {missing[0]!r} to make labels of for recipe {served.recipe!r}; "
                         f"it has {', '.join(events.column_names)}")
    columns = {name: column_to_numpy(events[name]) for name in events.column_names}
    users, codes = np.unique(columns["user_id"], return_inverse=True)
    times = columns["event_time"].astype(np.int64)
    order = np.lexsort((times, codes))
    codes, times = codes[order], times[order]
    new = np.ones(len(order), bool)
    new[1:] = (codes[1:] != codes[:-1]) | (times[1:] - times[:-1] > round(served.gap_minutes * 60e6))
    if served.max_candidates is not None:
        start = np.flatnonzero(new)
        place = np.arange(len(new)) - np.repeat(start, np.diff(np.append(start, len(new))))
        new |= (place % served.max_candidates == 0)
    begin = np.flatnonzero(new)
    values = {label.task: label_values(label, columns, len(order))[order] for label in labels}
    by_time = np.lexsort((codes[begin], times[begin]))
    counts = np.diff(np.append(begin, len(order)))[by_time]
    offsets = np.r_[0, np.cumsum(counts)]
    rows = np.repeat(begin[by_time] - offsets[:-1], counts) + np.arange(offsets[-1])
    return _Sittings(users[codes[begin[by_time]]].tolist(), times[begin[by_time]], offsets,
                     columns["item_id"][order][rows].tolist(), times[rows], {t: v[rows] for t, v in values.items()})


def _contexts(users: pa.Table | None, features: FeatureSpec) -> dict[Id, dict[str, Any]]:
    names = [feature.name for feature in features.request]
    if not names:
        return {}
    if users is None or set(names) - set(users.column_names):
        raise ValueError(f"the recipe reads request features {', '.join(names)}, which this data set's users do not "
                         "have")
    return {row["user_id"]: {name: row[name] for name in names if row[name] is not None}
            for row in users.select(["user_id", *names]).to_pylist()}


def make_site(config: LoopConfig, served: Served) -> SimulatedSite | ReplayedSite:
    """The site of a loop. Raises what reading its data set raises, ValueError where the recipe does not fit it."""
    if config.data is None:
        features = served.features
        wanted = {one.name for one in (*features.history, *features.candidate, *features.request)}
        wanted |= {task.name for task in features.tasks}
        there = {"item_id", "click", "topic", "surface", "watch_ms", "action", "author_id", "duration_ms", "title",
                 "age", "country", "event_time"}
        if wanted - there:
            raise ValueError(f"recipe {served.recipe!r} reads {sorted(wanted - there)[0]!r}, which the simulated site "
                             "does not have; use site_rank, or --data")
        return SimulatedSite(config)
    from semel import datasets

    try:
        dataset = datasets.fetch(config.data) if config.data in datasets.PUBLISHED else datasets.read(Path(config.data))
    except KeyError as error:
        raise ValueError(str(error)) from None
    return ReplayedSite(config, served, dataset)

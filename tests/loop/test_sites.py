"""Whose requests are driven: a data set's later events once each, at their time; the simulated site."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from semel import recipes
from semel.datasets.dataset import Dataset
from semel.loop.config import LoopConfig, Served
from semel.loop.sites import ReplayedSite, SimulatedSite, make_site


def dataset(events=400, seed=0):
    random = np.random.default_rng(seed)
    items = 30
    time = np.sort(random.integers(1, 10**6, events)) * 1_000_000
    item = np.minimum(random.integers(0, items, events), 10 + np.arange(events) * items // events)  # some appear late
    return Dataset("made", pa.table({
        "user_id": random.integers(0, 12, events), "item_id": item, "event_time": time,
        "rating": pa.array(random.integers(1, 6, events), pa.float32())}),
        pa.table({"item_id": np.arange(items), "genres": [f"g{n % 3}" for n in range(items)]}), None, "none",
        "made here")


def of(recipe):
    return Served.of(recipes.get(recipe))


@pytest.fixture(scope="module")
def site():
    return ReplayedSite(LoopConfig(recipe="movies_rank", data="made"), of("movies_rank"), dataset())


def asks(site):
    number = 0
    while (ask := site.ask(number)) is not None:
        yield ask
        number += 1


def events_of(rows):
    return Counter((row["user_id"], row["item_id"], row["event_time"]) for row in rows)


def test_past_and_live_are_all_events_once(site):
    live = events_of(event for ask in asks(site) for event in site.seen(ask, ask.candidates).events)
    past = events_of(site.past().events.to_pylist())
    assert past + live == events_of(dataset().events.to_pylist())
    assert max(time for *_, time in past) < site.begin <= min(time for *_, time in live)


def test_requests_come_by_time_and_see_their_own_events_behind_them(site):
    times = [ask.as_of for ask in asks(site)]
    assert times == sorted(times)
    for ask in asks(site):
        seen = site.seen(ask, ask.candidates)
        assert min(event["event_time"] for event in seen.events) == ask.as_of
        assert {event["item_id"] for event in seen.events} == set(seen.shown) <= set(ask.candidates)
        assert len(set(ask.candidates)) == len(ask.candidates)
        assert set(seen.page) <= set(ask.candidates) and len(seen.page) == min(10, len(ask.candidates))
        rating = {event["item_id"]: event["rating"] for event in seen.events}
        assert all(label["like"] == float(rating[item] >= 4) for item, label in zip(
            seen.shown, seen.labels, strict=True))
    assert site.ask(3) == site.ask(3)


def test_items_appear_before_they_are_asked_for(site):
    known = set(site.past().items["item_id"].to_pylist()) | set(site.past().events["item_id"].to_pylist())
    position = site.begin - 1
    for ask in asks(site):
        last = max(event["event_time"] for event in site.seen(ask, ask.candidates).events)
        known |= set(site.new_items(position, last)["item_id"].to_pylist())
        position = max(position, last)
        assert {event["item_id"] for event in site.seen(ask, ask.candidates).events} <= known


def test_a_page_keeps_a_place_for_what_nobody_has_seen():
    site = SimulatedSite(LoopConfig(users=30, past_hours=24))
    ask = site.ask(0)
    recommended = [row["item_id"] for row in site.new_items(0, ask.as_of).to_pylist()][:100]
    assert ask.candidates is None and len(recommended) == 100
    new = recommended[-1]
    seen = site.seen(ask, recommended, [new])
    shown = seen.shown
    assert shown[-1] == new and seen.page == shown and len(shown) == site.live.request(0).shown
    first = site.seen(site.ask(1), recommended, recommended[:1]).shown
    assert first[0] == recommended[0]  # it is on the page already, which keeps no place


def test_a_page_is_half_the_best_and_half_others_that_were_recommended():
    site = SimulatedSite(LoopConfig(users=30, past_hours=24))
    recommended = [row["item_id"] for row in site.new_items(0, site.ask(0).as_of).to_pylist()][:100]
    later = []
    for number in range(30):
        shown = site.seen(site.ask(number), recommended).shown
        best = len(shown) - len(shown) // 2
        assert shown[:best] == recommended[:best] and len(set(shown)) == len(shown)
        later += shown[best:]
        again = SimulatedSite(LoopConfig(users=30, past_hours=24))
        assert number % 10 or again.seen(again.ask(number), recommended).shown == shown
    assert len(set(later)) > 30
    assert len(site.seen(site.ask(30), recommended[:3], recommended[:1]).shown) == 3


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="simulated site does not have"):
        make_site(LoopConfig(recipe="movies_rank"), of("movies_rank"))
    with pytest.raises(ValueError, match="request features"):
        ReplayedSite(LoopConfig(data="made"), of("ml1m_rank"), dataset())
    few = dataset(1)
    with pytest.raises(ValueError, match="too few"):
        ReplayedSite(LoopConfig(data="made"), of("movies_rank"), few)
    with pytest.raises(ValueError, match="no column 'click'"):
        ReplayedSite(LoopConfig(data="made"), of("site_rank"), dataset())

"""The simulated site that goes on: the same requests after a restart, and clicks as probable as it says."""

from itertools import pairwise

import numpy as np
import pytest

from semel.datasets.live import LiveSite
from semel.datasets.simulate import SimulationConfig
from semel.metrics import log_losses, normalized_entropy

CONFIG = SimulationConfig(users=60, shortest=8, longest=200, hours=48, first_items=200, position_decay=0.0, seed=5)
GAP_US = 20_000_000


@pytest.fixture(scope="module")
def site():
    return LiveSite(CONFIG, GAP_US)


def test_requests_depend_on_their_number_alone(site):
    again = LiveSite(CONFIG, GAP_US)
    for number in (1500, 3, 0, 700):
        assert again.request(number) == site.request(number)
    assert site.request(0) != site.request(1)


def test_time_goes_on_from_where_the_past_ended(site):
    assert site.past.events["event_time"].to_numpy().max() < site.begin
    assert site.past.items["event_time"].to_numpy().max() < site.begin
    requests = [site.request(number) for number in range(505, 520)]  # over the end of a block
    for one, following in pairwise(requests):
        views = LiveSite(CONFIG, GAP_US).views(one, one.candidates[: one.shown])
        assert site.begin <= one.as_of < views.event_time[0] and views.event_time[-1] < following.as_of
        assert sorted(set(views.event_time)) == views.event_time


def test_candidates_exist_and_new_items_are_told_once(site):
    first, last = site.request(0), site.request(3000)
    created = dict(zip(*(site._rows[name].to_pylist() for name in ("item_id", "event_time")), strict=True))
    assert all(created[item] < last.as_of for item in last.candidates)
    assert len(set(last.candidates)) == len(last.candidates)
    cut = (first.as_of + last.as_of) // 2
    whole = site.new_items(first.as_of, last.as_of)["item_id"].to_pylist()
    parts = [site.new_items(*span)["item_id"].to_pylist() for span in ((first.as_of, cut), (cut, last.as_of))]
    assert parts[0] + parts[1] == whole and len(whole) > 20


def play(site, requests):
    clicks, chances = [], []
    for number in range(requests):
        request = site.request(number)
        views = site.views(request, request.candidates[: request.shown])
        clicks += views.clicks
        chances += views.probability
    return np.array(clicks, float), np.array(chances)


def test_clicks_are_as_probable_as_told():
    click, chance = play(LiveSite(CONFIG, GAP_US), 2000)
    for low, high in ((0.0, 0.2), (0.2, 0.4), (0.4, 1.0)):
        there = (chance >= low) & (chance < high)
        error = np.sqrt((chance[there] * (1 - chance[there])).sum()) / there.sum()
        assert abs(click[there].mean() - chance[there].mean()) < 4 * error
    wrong = np.clip(chance + 0.1, 0, 1)

    def ne(prediction):
        return normalized_entropy(log_losses(click, prediction).sum(), len(click), click.sum())

    assert ne(chance) < ne(wrong) and ne(chance) < 0.95


def test_a_restart_remembers_what_was_clicked():
    one, other = LiveSite(CONFIG, GAP_US), LiveSite(CONFIG, GAP_US)
    one.remember_past()
    assert one._counts.sum() > 0
    other.remember_past()
    for number in range(40):
        request = one.request(number)
        shown = request.candidates[: request.shown]
        other.remember(request.user_id, shown, one.views(request, shown).clicks)
    assert np.array_equal(one._counts, other._counts)


def test_the_past_ends_with_the_affinities_that_its_clicks_were_drawn_with():
    """The state that a walk over the past's requests, one by one, ends with."""
    site = LiveSite(CONFIG, GAP_US)
    site.remember_past()
    walked = np.zeros_like(site._counts)
    decay = 0.5 ** (1 / CONFIG.affinity_half_life)
    topic = dict(zip(*(site._rows[name].to_pylist() for name in ("item_id", "topic")), strict=True))
    for row in site.past.impressions.to_pylist():
        user = row["user_id"] - 1_000_000
        walked[user] *= decay ** sum(row["shown"])
        for item, click in zip(row["candidates"], row["click"], strict=True):
            if click:
                walked[user, int(topic[item].removeprefix("topic-"))] += 1
    assert np.allclose(site._counts, walked, atol=1e-9)


def test_refusals(site):
    with pytest.raises(ValueError, match="gap_us"):
        LiveSite(CONFIG, 10)
    with pytest.raises(ValueError, match="widest surface"):
        site.views(site.request(0), list(range(10_000, 10_016)))

"""The simulated site: deterministic, as long-tailed, late and tied as asked, and true to its probabilities."""

import dataclasses
import time

import numpy as np
import pyarrow.compute as pc
import pytest

from semel.datasets import ingest
from semel.datasets.simulate import SimulationConfig, simulate, true_ne
from semel.history import HistoryStore, Projection
from semel.metrics import log_losses, normalized_entropy

CONFIG = SimulationConfig(users=400, longest=8_192, hours=24 * 14, seed=3)


@pytest.fixture(scope="module")
def site():
    return simulate(CONFIG)


def shown(site, name):
    return pc.drop_null(pc.list_flatten(site.impressions[name])).to_numpy()


def ne(click, probability):
    return float(normalized_entropy(log_losses(click, probability).sum(), len(click), click.sum()))


def test_same_seed_same_site(site):
    again = simulate(CONFIG)
    for name in ("events", "items", "users", "impressions"):
        assert getattr(site, name).equals(getattr(again, name)), name
    other = simulate(dataclasses.replace(CONFIG, seed=4))
    assert not site.events.equals(other.events)
    assert abs(other.events.num_rows / site.events.num_rows - 1) < 0.01, "the size hardly depends on the seed"


def test_history_lengths_have_a_power_law_tail(site):
    lengths = np.sort(np.bincount(site.events["user_id"].to_numpy() - site.events["user_id"].to_numpy().min()))
    lengths = lengths[lengths > 0]
    assert len(lengths) == 400 and lengths.min() == 8 and lengths.max() == 8_192
    for factor in (4, 16):  # P(length > x) = 8 / x, but for the truncation
        assert np.mean(lengths > 8 * factor) == pytest.approx(1 / factor, abs=0.04)


def test_one_event_per_shown_candidate(site):
    assert len(shown(site, "click")) == site.events.num_rows
    assert pc.sum(pc.list_flatten(site.impressions["shown"])).as_py() == site.events.num_rows
    assert shown(site, "click").sum() == pc.sum(pc.equal(site.events["action"], "click")).as_py()
    candidates = pc.list_flatten(site.impressions["candidates"]).to_numpy().reshape(-1, CONFIG.candidates)
    assert (np.diff(np.sort(candidates, axis=1), axis=1) > 0).all(), "no candidate twice in a request"


def test_candidates_exist_and_new_ones_are_shown(site):
    created = dict(zip(site.items["item_id"].to_pylist(), site.items["event_time"].to_pylist(), strict=True))
    parents = pc.list_parent_indices(site.impressions["candidates"]).to_numpy()
    as_of = site.impressions["as_of"].to_numpy()[parents]
    born = np.array([created[item] for item in pc.list_flatten(site.impressions["candidates"]).to_pylist()])
    assert (born < as_of).all(), "the catalogue as of the request knows every candidate"
    assert (born >= CONFIG.start_us).mean() > 0.1
    hours = (site.items["event_time"].to_numpy() - CONFIG.start_us) // 3_600_000_000
    assert (np.bincount(hours[hours >= 0]) == CONFIG.new_items_per_hour).all()


def test_requests_see_what_is_strictly_before_them(site):
    """A user's request comes after all views of the one before, and its own views are not before it."""
    events = site.events.sort_by([("user_id", "ascending"), ("event_time", "ascending")])
    requests = site.impressions.sort_by([("user_id", "ascending"), ("as_of", "ascending")])
    counts = pc.list_value_length(requests["candidates"]).to_numpy() * 0 + np.array(
        [sum(row) for row in requests["shown"].to_pylist()])
    ends = np.cumsum(counts)
    times, as_of, user = events["event_time"].to_numpy(), requests["as_of"].to_numpy(), requests["user_id"].to_numpy()
    assert (times[ends - counts] >= as_of).all(), "first view"
    same = user[1:] == user[:-1]
    assert (times[ends - 1][:-1][same] < as_of[1:][same]).all(), "last view of the request before"
    assert times.min() > CONFIG.start_us and times.max() < CONFIG.start_us + CONFIG.hours * 3_600_000_000


def test_ties_and_lateness(site):
    events = site.events
    arrival = events["arrival_time"].to_numpy()
    delay = arrival - events["event_time"].to_numpy()
    assert (np.diff(arrival) >= 0).all() and (delay > 0).all()
    by_user = events.sort_by([("user_id", "ascending"), ("event_time", "ascending")])
    user, when = by_user["user_id"].to_numpy(), by_user["event_time"].to_numpy()
    ties = np.mean((user[1:] == user[:-1]) & (when[1:] == when[:-1]))
    assert ties == pytest.approx(CONFIG.tie_share * 6 / 7, abs=0.03)  # a request's first view has no view before it
    late = 0
    for one in np.unique(user):
        times = events["event_time"].to_numpy()[events["user_id"].to_numpy() == one]
        late += np.sum(times < np.maximum.accumulate(times))
    assert 0.005 < late / len(arrival) < 0.06
    assert np.mean(delay > 3_600_000_000) == pytest.approx(CONFIG.late_share * np.exp(-1 / 6), abs=0.015)


def test_clicks_keep_their_probabilities(site):
    click, probability = shown(site, "click"), shown(site, "probability")
    assert click.mean() == pytest.approx(probability.mean(), abs=0.01)
    for low in (0.1, 0.3, 0.5, 0.7):
        part = (probability >= low) & (probability < low + 0.2)
        error = 4 * np.sqrt(0.25 / part.sum())
        assert click[part].mean() == pytest.approx(probability[part].mean(), abs=error)


def test_best_ne_is_a_lower_bound(site):
    click, probability = shown(site, "click"), shown(site, "probability")
    position = shown(site, "position")
    by_position = (np.bincount(position, click) / np.bincount(position))[position]
    assert site.best_ne == pytest.approx(ne(click, probability)) and 0.5 < site.best_ne < 0.9
    assert site.best_ne < ne(click, by_position) < 1
    logit = np.log(probability / (1 - probability))
    for wrong in (0.7 * logit, logit + 0.3, logit + np.random.default_rng(0).normal(0, 0.5, len(logit))):
        assert site.best_ne < ne(click, 1 / (1 + np.exp(-wrong)))
    half = site.impressions.slice(site.impressions.num_rows // 2)
    assert true_ne(half) == pytest.approx(site.best_ne, abs=0.05)


def test_what_a_user_clicked_lately_matters(site):
    """Without histories the best is worse: the same site whose affinity is not known loses NE."""
    flat = simulate(dataclasses.replace(CONFIG, affinity=0.0))
    assert shown(flat, "probability").mean() < shown(site, "probability").mean()
    clicked = pc.equal(site.events["action"], "click").to_numpy(zero_copy_only=False)
    topic = pc.dictionary_encode(site.events["topic"]).combine_chunks().indices.to_numpy()
    order = np.lexsort((site.events["event_time"].to_numpy(), site.events["user_id"].to_numpy()))
    user, hit, kind = site.events["user_id"].to_numpy()[order], clicked[order], topic[order]
    back = 8
    again = (kind[back:] == kind[:-back]) & hit[:-back] & (user[back:] == user[:-back])
    assert hit[back:][again].mean() > hit[back:].mean() + 0.05


def test_surfaces_and_features(site):
    share = {row["values"]: row["counts"] for row in site.impressions["surface"].value_counts().to_pylist()}
    assert share["feed"] > share["discover"] > share["following"] > 0
    assert site.events.column_names[:4] == ["user_id", "item_id", "event_time", "arrival_time"]
    assert site.items.num_rows == CONFIG.first_items + CONFIG.hours * CONFIG.new_items_per_hour
    assert site.users.num_rows == 400


def test_batches_are_the_events_in_order_of_arrival(site):
    batches = list(site.batches(seconds=6 * 3600))
    assert sum(batch.num_rows for batch in batches) == site.events.num_rows and len(batches) > 20
    for batch in batches:
        arrival = batch["arrival_time"].to_numpy()
        assert arrival[-1] - arrival[0] < 6 * 3600 * 1_000_000
    assert batches[0].slice(0, 1).equals(site.events.slice(0, 1))


def test_a_store_takes_it(tmp_path):
    site = simulate(SimulationConfig(users=20, longest=200, hours=48, first_items=100))
    report = ingest(site.dataset(), tmp_path / "store")
    assert (report.events, report.users) == (site.events.num_rows, 20)
    with HistoryStore.open(tmp_path / "store") as store:
        history = store.read(store.point(store.keys(), as_of=2**62), Projection(("item_id", "action", "event_time")))
        assert int(history.lengths.max()) == 200
        assert (np.diff(history["event_time"][0]) >= 0).all(), "late events are where they belong"


def test_the_longest_history(tmp_path):
    site = simulate(SimulationConfig(users=2, longest=65_536, hours=24 * 7))
    assert site.events["user_id"].value_counts().field("counts").to_pylist().count(65_536) == 1


def test_a_tiny_catalogue_still_gives_distinct_candidates():
    site = simulate(SimulationConfig(users=3, longest=300, hours=2, first_items=32, new_items_per_hour=0))
    candidates = pc.list_flatten(site.impressions["candidates"]).to_numpy().reshape(-1, 16)
    assert (np.diff(np.sort(candidates, axis=1), axis=1) > 0).all()


@pytest.mark.parametrize(("wrong", "message"), [
    ({"users": 0}, "users must be at least 1"), ({"longest": 3}, r"longest \(3\) is below shortest"),
    ({"candidates": 4}, r"show 1 to 4 \(candidates\) items"), ({"first_items": 20}, "twice candidates"),
    ({"late_share": 1.5}, "late_share must lie between 0 and 1"), ({"tail": 0.0}, "must be positive"),
    ({"start_us": 5}, "a month for the first items"),
])
def test_what_describes_no_site_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SimulationConfig(**wrong)


@pytest.mark.slow
def test_a_million_events_in_seconds():
    began = time.perf_counter()
    site = simulate(SimulationConfig(users=13_800))
    assert site.events.num_rows > 950_000 and time.perf_counter() - began < 15

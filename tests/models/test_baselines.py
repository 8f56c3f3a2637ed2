"""Baselines against plain loops, and against peeking."""

import numpy as np
import pyarrow.csv as csv
import pytest
import torch

from semel import metrics
from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows
from semel.features import stable_id
from semel.models.baselines import BiasModel, ItemKNN, LikedHistory, LikeKNN, Popularity, TrainingEvents

ALL = [Popularity, BiasModel, ItemKNN, LikeKNN]


def some_events(seed=0, users=30, items=12, rows=400) -> TrainingEvents:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
    taste = rng.normal(size=users)[user] + rng.normal(size=items)[item]
    return TrainingEvents(user, item * 10, rng.integers(0, 60, rows), (taste + rng.normal(size=rows) > 0) * 1.0)


def batch_of(histories, candidates, ratings=None) -> RequestBatch:
    history = Jagged.from_rows(histories, np.int64)
    columns = {"item_id": torch.from_numpy(history.values)}
    if ratings is not None:
        columns["rating"] = torch.from_numpy(Jagged.from_rows(ratings, np.float32).values)
    item = Jagged.from_rows(candidates, np.int64)
    return RequestBatch(
        np.arange(len(histories)).astype(str), {"history": JaggedTable(columns, torch.from_numpy(history.offsets))},
        {"item_id": torch.from_numpy(item.values)}, torch.from_numpy(item.offsets))


@pytest.mark.parametrize("baseline", ALL)
def test_scores_candidates_and_catalogue_alike(baseline):
    model = baseline.fit(some_events())
    batch = batch_of([[10, 20], [], [999]], [[0, 30], [50], [999, 0]], [[5, 1], [], [4]])
    logits = model(batch)
    assert logits.shape == (5, 1) and logits.dtype == torch.float32 and torch.isfinite(logits).all()
    catalogue = np.array([0, 30, 50, 999])
    grid = model.score_items(batch, catalogue)
    assert grid.shape == (3, 4)
    column = np.searchsorted(catalogue, batch.candidate["item_id"].numpy())
    picked = grid[batch.candidate_to_request(), column]
    order = np.argsort(picked.numpy(), kind="stable")
    if baseline is Popularity:  # ranks by its counts, predicts by their calibration
        step = np.diff(logits[order, 0].numpy()) * np.sign(model.weights[1])
        assert (step >= 0).all()
    else:
        torch.testing.assert_close(logits[:, 0], picked)


@pytest.mark.parametrize("baseline", [BiasModel, LikeKNN])
def test_a_history_without_labels_says_nothing_of_taste(baseline):
    model = baseline.fit(some_events())
    silent = model(batch_of([[10, 20]], [[0, 30]]))
    torch.testing.assert_close(silent, model(batch_of([[]], [[0, 30]])))
    torch.testing.assert_close(silent, model(batch_of([[10, 20]], [[0, 30]], [[np.nan, np.nan]])))


@pytest.mark.parametrize("baseline", [BiasModel, LikeKNN])
def test_a_user_who_liked_scores_higher_than_one_who_did_not(baseline):
    model = baseline.fit(some_events())
    happy, sad = model(batch_of([[10, 20]] * 2, [[30], [30]], [[5, 5], [1, 1]]))[:, 0]
    assert happy > sad


def test_popularity_counts():
    events = TrainingEvents(np.zeros(5, int), np.array([3, 3, 5, 3, 5]), np.arange(5), np.array([1, 0, 1, 0, 1.0]))
    np.testing.assert_allclose(Popularity.fit(events).score([3, 5, 9]), np.log1p([3, 2, 0]))


def test_bias_model_is_its_formula():
    events = some_events()
    model = BiasModel.fit(events, item_shrinkage=4.0, user_shrinkage=3.0, history_last=7)
    base = events.label.mean()

    def rate(rows):
        return (events.label[rows].sum() + 4 * base) / (rows.sum() + 4)

    final = {item: rate(events.item == item) for item in np.unique(events.item)}
    features = []
    for row in range(len(events.user)):
        earlier = events.as_of < events.as_of[row]
        past = np.flatnonzero(earlier & (events.user == events.user[row]))[-7:]
        residual = sum(events.label[p] - final[events.item[p]] for p in past) / (len(past) + 3)
        mean = rate(earlier & (events.item == events.item[row]))
        features.append([1.0, np.log(mean / (1 - mean)), residual])
    design = np.array(features)
    gradient = design.T @ (metrics.sigmoid(design @ model.weights) - events.label) + model.weights  # ridge 1
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    mean, residual = final[30], ((1 - final[10]) + (0 - final[20])) / 5
    expected = model.weights @ [1.0, np.log(mean / (1 - mean)), residual]
    assert model(batch_of([[10, 20]], [[30]], [[4, 3]])).item() == pytest.approx(expected, rel=1e-5)


def test_item_knn_is_its_formula():
    events = some_events(rows=200)
    model = ItemKNN.fit(events, window=4, shrinkage=2.0, neighbours=100, last=3, decay=0.5)
    count = {item: (events.item == item).sum() for item in np.unique(events.item)}

    def near(i, j):
        total = 0.0
        for a in range(len(events.user)):
            for b in range(a + 1, min(a + 5, len(events.user))):
                if events.user[a] == events.user[b] and (events.item[a], events.item[b]) == (i, j):
                    total += 1 / (b - a)
        return 0.0 if i == j else total / (np.sqrt(count[i] * count[j]) + 2)

    got = model.score(Jagged.from_rows([[40, 10, 20, 30], [777]]), np.array([50, 0, 777]))
    expected = [near(10, j) / 4 + near(20, j) / 2 + near(30, j) for j in (50, 0)]
    np.testing.assert_allclose(got, [[*expected, 0.0], [0.0, 0.0, 0.0]], rtol=1e-5)


def test_few_neighbours_keep_the_nearest():
    events = some_events()
    full, few = (ItemKNN.fit(events, neighbours=k, last=1).score(Jagged.from_rows([[0]]), np.arange(12) * 10)[0]
                 for k in (100, 3))
    best = np.argsort(full)[-3:]
    np.testing.assert_allclose(few[best], full[best])
    assert np.count_nonzero(few) == 3


def test_like_knn_weights_come_from_events_it_was_not_fitted_on():
    events = some_events(rows=600)
    late = events.as_of > np.quantile(events.as_of, 0.8)
    early = events.select(~late)
    bias = BiasModel.fit(early)
    items = np.unique(early.item)
    grid = np.zeros((30, len(items)))
    residual = early.label - np.array([bias.rate[np.searchsorted(items, i)] for i in early.item])
    for user in np.unique(early.user):
        own = early.user == user
        np.add.at(grid, (user, np.searchsorted(items, early.item[own])),
                  residual[own] - residual[own].sum() / (own.sum() + 10))
    square = np.zeros(len(items))
    for user in np.unique(early.user):
        own = early.user == user
        np.add.at(square, np.searchsorted(items, early.item[own]),
                  (residual[own] - residual[own].sum() / (own.sum() + 10)) ** 2)
    similarity = np.maximum(grid.T @ grid / (np.sqrt(np.outer(square, square)) + 20), 0)
    np.fill_diagonal(similarity, 0)
    design = []
    for row in np.flatnonzero(late):
        past = np.flatnonzero((events.user == events.user[row]) & (events.as_of < events.as_of[row]))[-200:]
        code = np.searchsorted(items, events.item[past])
        left = events.label[past] - bias.rate[code]
        user = left.sum() / (len(past) + 10)
        near = similarity[code, np.searchsorted(items, events.item[row])]
        mean = bias.rate[np.searchsorted(items, events.item[row])]
        design.append([1.0, np.log(mean / (1 - mean)), user, near @ (left - user) / (near.sum() + 0.5)])
    weights = LikeKNN.fit(events).weights
    gradient = np.array(design).T @ (metrics.sigmoid(np.array(design) @ weights) - events.label[late]) + weights
    np.testing.assert_allclose(gradient, 0, atol=1e-3)


def test_training_events_from_rows_take_labelled_candidates_in_time_order():
    rows = RequestRows(
        np.array(["a", "b"], object), Pointers(np.array(["u", "u"], object), np.array([9, 4]), 0), np.zeros(2, int), {},
        Jagged.from_rows([["x", "y"], ["z"]], object), {"like": np.array([1, 0, 1], np.float32)},
        {"like": np.array([True, False, True])})
    events = TrainingEvents.from_rows(rows)
    np.testing.assert_array_equal(events.item, stable_id(np.array(["z", "x"], object)))
    np.testing.assert_array_equal(events.as_of, [4, 9])
    with pytest.raises(KeyError, match="no task 'click'"):
        TrainingEvents.from_rows(rows, "click")


def test_bad_training_events():
    with pytest.raises(ValueError, match="no training events"):
        TrainingEvents(np.empty(0, int), np.empty(0, int), np.empty(0, int), np.empty(0))
    with pytest.raises(ValueError, match="0 or 1"):
        TrainingEvents(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), np.array([3.0]))
    with pytest.raises(ValueError, match="item has shape"):
        TrainingEvents(np.zeros(1, int), np.zeros(2, int), np.zeros(1, int), np.zeros(1))


@pytest.mark.parametrize("baseline", ALL)
def test_one_class_and_one_event_still_score(baseline):
    one = TrainingEvents(np.zeros(1, int), np.array([10]), np.zeros(1, int), np.ones(1))
    assert torch.isfinite(baseline.fit(one)(batch_of([[10]], [[10, 11]], [[5]]))).all()


def test_each_step_pays_on_real_ratings(shared_data):
    table = csv.read_csv(shared_data / "ml-latest-small" / "ratings.csv")
    user, item, time, rating = (table[n].to_numpy() for n in ("userId", "movieId", "timestamp", "rating"))
    popular = np.unique(item, return_inverse=True, return_counts=True)
    keep = popular[2][popular[1]] >= 20  # fewer items, a faster test
    user, item, time, rating = user[keep], item[keep], time[keep], rating[keep]
    order = np.lexsort((time, user))
    user, item, time, rating = user[order], item[order], time[order], rating[order]
    new = np.concatenate([[True], (user[1:] != user[:-1]) | (np.diff(time) > 600)])
    first = np.flatnonzero(new)
    as_of = time[first][np.cumsum(new) - 1]
    split = np.quantile(as_of, 0.8)
    train, label = as_of < split, (rating >= 4) * 1.0
    events = TrainingEvents(user[train], item[train], as_of[train], label[train])
    test = [r for r in range(len(first)) if time[first[r]] >= split][:400]
    spans = [(first[r], first[r + 1] if r + 1 < len(first) else len(user)) for r in test]
    starts = [max(np.searchsorted(user, user[a]), a - 200) for a, _ in spans]
    batch = batch_of([item[s:a] for s, (a, _) in zip(starts, spans, strict=True)], [item[a:b] for a, b in spans],
                     [rating[s:a] for s, (a, _) in zip(starts, spans, strict=True)])
    truth = np.concatenate([label[a:b] for a, b in spans])
    ne = [metrics.NormalizedEntropy().update_logits(truth, baseline.fit(events)(batch)[:, 0].numpy()).ne
          for baseline in (Popularity, BiasModel, LikeKNN)]
    assert ne[0] < 1.02 and ne[1] < ne[0] - 0.03 and ne[2] < ne[1] + 0.005, ne


def test_liked_history_reads_its_column():
    history = JaggedTable({"stars": np.array([1.0, 5.0, np.nan])}, np.array([0, 3]))
    np.testing.assert_array_equal(LikedHistory("stars", 3.0)(history), [0.0, 1.0, np.nan])
    assert LikedHistory()(history) is None


def test_liked_history_reads_numbers_that_were_encoded_as_categories():
    for numbers in ([0.0, 3.5, 4.0, 5.0, None], [0, 3, 4, 5, None]):
        ids = stable_id(np.array([np.nan if n is None else n for n in numbers])) if isinstance(numbers[0], float) \
            else np.array([np.iinfo(np.int64).min if n is None else n for n in numbers])
        history = JaggedTable({"rating": ids}, np.array([0, 5]))
        np.testing.assert_array_equal(LikedHistory()(history), [0.0, 0.0, 1.0, 1.0, np.nan])

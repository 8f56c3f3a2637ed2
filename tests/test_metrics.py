"""Metrics against formulas written out plainly, and the sums against the whole."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from semel import metrics as m

rows = st.integers(0, 2**32 - 1)


def draw(seed: int, size: int, levels: int | None = None):
    """Labels, probabilities (of few levels, hence with ties, when asked) and weights."""
    rng = np.random.default_rng(seed)
    prediction = rng.random(size)
    if levels:
        prediction = np.floor(prediction * levels) / levels + 0.5 / levels
    return (rng.random(size) < prediction).astype(float), prediction, rng.random(size) * 3


def naive_auc(label, score, weight):
    wins = pairs = 0.0
    for i in np.flatnonzero(label == 1):
        for j in np.flatnonzero(label == 0):
            pairs += weight[i] * weight[j]
            wins += weight[i] * weight[j] * (1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
    return wins / pairs if pairs else math.nan


def naive_rank(scores, target):
    order = sorted(range(len(scores)), key=lambda item: (-scores[item], item))
    return order.index(target)


# Normalized entropy


@given(rows, st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_ne_is_mean_log_loss_over_base_entropy(seed, size):
    label, prediction, weight = draw(seed, size)
    metric = m.NormalizedEntropy().update(label, prediction, weight)
    loss = sum(-w * math.log(p if y else 1 - p) for y, p, w in zip(label, prediction, weight, strict=True))
    assert metric.log_loss == pytest.approx(loss / weight.sum())
    rate = (label * weight).sum() / weight.sum()
    assert metric.base_rate == pytest.approx(rate)
    if 0 < label.sum() < size:
        base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        assert metric.ne == pytest.approx(loss / weight.sum() / base)
    else:
        assert math.isnan(metric.ne)


def test_predicting_the_base_rate_has_ne_one():
    label = np.array([1, 0, 0, 1, 0])
    assert m.NormalizedEntropy().update(label, np.full(5, 0.4)).ne == pytest.approx(1.0)


def test_logits_and_probabilities_agree_and_logits_do_not_saturate():
    label, prediction, weight = draw(1, 200)
    logit = np.log(prediction / (1 - prediction))
    by_logit = m.NormalizedEntropy().update_logits(label, logit, weight)
    assert by_logit.log_loss == pytest.approx(m.NormalizedEntropy().update(label, prediction, weight).log_loss)
    assert m.NormalizedEntropy().update_logits([0], [1000.0]).log_loss == 1000.0
    assert m.NormalizedEntropy().update([0], [1.0]).log_loss == pytest.approx(-math.log(m.EPSILON))
    np.testing.assert_allclose(m.sigmoid([-1000, 0, 1000]), [0, 0.5, 1])


# AUC


@given(rows, st.integers(2, 30), st.sampled_from([None, 3]))
@settings(max_examples=60, deadline=None)
def test_auc_counts_pairs_and_half_of_ties(seed, size, levels):
    label, score, weight = draw(seed, size, levels)
    np.testing.assert_allclose(m.auc(label, score, weight), naive_auc(label, score, weight))
    np.testing.assert_allclose(m.auc(label, score), naive_auc(label, score, np.ones(size)))


@given(rows, st.integers(2, 2000), st.sampled_from([None, 5]), st.sampled_from([64, 16_384]))
@settings(max_examples=40, deadline=None)
def test_streaming_auc_lies_within_its_stated_error(seed, size, levels, bins):
    label, score, weight = draw(seed, size, levels)
    metric = m.AUC(bins).update(label, score, weight)
    exact = m.auc(label, score, weight)
    if math.isnan(exact):
        assert math.isnan(metric.value)
    else:
        assert abs(metric.value - exact) <= metric.error + 1e-9
        assert m.AUC(bins).update_logits(label, np.log(score / (1 - score)), weight).value == pytest.approx(
            metric.value, abs=2 * metric.error + 1e-9)


def test_streaming_auc_on_many_rows_is_close():
    label, score, _ = draw(0, 100_000)
    metric = m.AUC().update(label, score)
    assert metric.error < 1e-3
    assert metric.value == pytest.approx(m.auc(label, score), abs=1e-4)


@given(rows, st.integers(1, 60), st.sampled_from([None, 3]))
@settings(max_examples=60, deadline=None)
def test_auc_by_group_is_auc_of_each_group(seed, size, levels):
    label, score, _ = draw(seed, size, levels)
    group = np.random.default_rng(seed + 1).integers(0, 6, size) * 7 - 3
    groups, value, impressions = m.auc_by_group(group, label, score)
    expected = {g: (m.auc(label[group == g], score[group == g]), (group == g).sum()) for g in np.unique(group)}
    expected = {g: pair for g, pair in expected.items() if not math.isnan(pair[0])}
    assert list(groups) == list(expected)
    np.testing.assert_allclose(value, [pair[0] for pair in expected.values()])
    np.testing.assert_array_equal(impressions, [pair[1] for pair in expected.values()])
    if len(groups):
        assert m.grouped_auc(group, label, score) == pytest.approx(np.average(value, weights=impressions))
    else:
        assert math.isnan(m.grouped_auc(group, label, score))


def test_auc_by_group_takes_string_users():
    users = np.array(["é", "b", "é", "b", "c"], dtype=object)
    groups, value, _ = m.auc_by_group(users, [1, 0, 0, 1, 1], [0.9, 0.8, 0.1, 0.2, 0.5])
    assert list(groups) == ["b", "é"] and list(value) == [0.0, 1.0]


# Calibration and regression


def test_calibration_ratio_and_reliability_table():
    label, prediction = np.array([0, 1, 1, 0]), np.array([0.1, 0.15, 1.0, 0.6])
    metric = m.Calibration(bins=10).update(label, prediction)
    assert metric.ratio == pytest.approx(1.85 / 2)
    table = metric.table()
    assert [row["low"] for row in table] == [0.1, 0.6, 0.9]
    assert table[0]["prediction"] == pytest.approx(0.125) and table[0]["label"] == 0.5
    assert metric.expected_error == pytest.approx((abs(0.25 - 1) + 0.6 + 0.0) / 4)
    logits = np.log(prediction[:2] / (1 - prediction[:2]))
    assert m.Calibration().update_logits(label[:2], logits).ratio == pytest.approx(0.25)


def test_regression_errors():
    metric = m.RegressionError().update([1, 2, 4], [1, 4, 1], [1, 1, 2])
    assert metric.rmse == pytest.approx(math.sqrt((4 + 18) / 4)) and metric.mae == pytest.approx((2 + 6) / 4)


# Ranking


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 12)),
                  elements=st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0])), rows)
@settings(max_examples=80, deadline=None)
def test_rank_is_the_place_in_a_stable_sort(scores, seed):
    target = np.random.default_rng(seed).integers(0, scores.shape[1], len(scores))
    expected = [naive_rank(row, t) for row, t in zip(scores, target, strict=True)]
    np.testing.assert_array_equal(m.ranks_of_targets(scores, target), expected)


@given(rows, st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_ranking_values_follow_their_formulas(seed, size):
    rng = np.random.default_rng(seed)
    request = rng.integers(0, 5, size)
    ranks = np.concatenate([rng.permutation(40)[: (request == r).sum()] for r in range(5)])
    request = np.sort(request)
    values = m.ranking_values(ranks, request, (3, 10))
    for index, r in enumerate(np.unique(request)):
        own = ranks[request == r]
        for k in (3, 10):
            gain = sum(1 / math.log2(rank + 2) for rank in own if rank < k)
            best = sum(1 / math.log2(i + 2) for i in range(min(k, len(own))))
            assert values[f"ndcg@{k}"][index] == pytest.approx(gain / best)
            assert values[f"hr@{k}"][index] == float(min(own) < k)
        assert values["mrr"][index] == pytest.approx(1 / (min(own) + 1))


def test_one_target_each():
    metric = m.Ranking((1, 10)).update([0, 9, 10])
    assert metric["hr@1"] == pytest.approx(1 / 3) and metric["hr@10"] == pytest.approx(2 / 3)
    assert metric["ndcg@10"] == pytest.approx((1 + 1 / math.log2(11)) / 3)
    assert metric["mrr"] == pytest.approx((1 + 0.1 + 1 / 11) / 3) and metric.requests == 3


# Sums


def filled(metric, seed, size=50):
    if isinstance(metric, m.Ranking):
        return metric.update(np.random.default_rng(seed).integers(0, 300, size))
    return metric.update(*draw(seed, size))


@pytest.mark.parametrize("make", [
    m.NormalizedEntropy, lambda: m.AUC(100), lambda: m.Calibration(7), m.RegressionError, lambda: m.Ranking((5, 20)),
], ids=["ne", "auc", "calibration", "regression", "ranking"])
def test_parts_add_up_to_the_whole(make):
    whole, parts = make(), [make(), make(), make()]
    for seed, part in enumerate(parts):
        filled(part, seed)
        filled(whole, seed)
    summed = parts[0] + parts[1] + parts[2]
    for name, value in summed.state().items():
        np.testing.assert_allclose(value, whole.state()[name])
    reduced = {name: sum(part.state()[name] for part in parts) for name in whole.state()}  # what an all-reduce does
    again = type(whole).from_state(reduced)
    assert json.dumps(again.to_json(), allow_nan=False) == json.dumps(summed.to_json())
    assert json.dumps(make().to_json(), allow_nan=False)
    before = parts[0].state()
    filled(summed, 9)
    for name, value in parts[0].state().items():
        np.testing.assert_array_equal(value, before[name])


def test_unlike_sums_do_not_add():
    with pytest.raises(ValueError, match="different things"):
        m.AUC(10) + m.AUC(20)
    with pytest.raises(ValueError, match="different things"):
        m.Ranking((5,)) + m.Ranking((10,))
    with pytest.raises(TypeError):
        m.AUC() + m.Calibration()
    with pytest.raises(ValueError, match="not a state of AUC"):
        m.AUC.from_state(m.Calibration().state())
    with pytest.raises(ValueError, match="not a state of RegressionError"):
        m.RegressionError.from_state({})


# Input


@pytest.mark.parametrize(("label", "prediction", "message"), [
    ([0, 1], [0.5, np.nan], r"prediction\[1\] is nan"),
    ([0, 2], [0.5, 0.5], r"label\[1\] is 2"),
    ([0, np.nan], [0.5, 0.5], r"label\[1\] is nan"),
    ([0, 1], [0.5], "prediction has 1 values, label has 2"),
    ([0, 1], [0.5, 1.5], r"prediction\[1\] is 1.5, outside"),
    ([[0, 1]], [[0.5, 0.5]], "one-dimensional"),
    (["a"], [0.5], "must be numbers"),
])
def test_bad_rows_are_one_clear_error(label, prediction, message):
    for metric in (m.NormalizedEntropy(), m.AUC(), m.Calibration()):
        with pytest.raises(ValueError, match=message):
            metric.update(np.array(label), np.array(prediction))


def test_bad_weights_ranks_and_scores():
    with pytest.raises(ValueError, match="cannot be negative"):
        m.auc([0, 1], [0.1, 0.2], [1, -1])
    with pytest.raises(ValueError, match="weight has 1 values"):
        m.auc([0, 1], [0.1, 0.2], [1])
    with pytest.raises(ValueError, match=r"scores\[0, 1\] is NaN"):
        m.ranks_of_targets(np.array([[0.0, np.nan]]), np.array([0]))
    with pytest.raises(ValueError, match="with 2 items"):
        m.ranks_of_targets(np.zeros((1, 2)), np.array([2]))
    with pytest.raises(ValueError, match="whole numbers"):
        m.ranking_values([0.5])
    with pytest.raises(ValueError, match="cut-off"):
        m.Ranking((0,))
    with pytest.raises(KeyError, match="hr@10"):
        m.Ranking((10,))["hr@3"]
    with pytest.raises(ValueError, match="group has 1"):
        m.grouped_auc([0], [0, 1], [0.1, 0.2])


# Intervals


def ratio(sums):
    return sums[..., 0] / sums[..., 1]


def test_interval_of_a_mean_matches_theory():
    rng = np.random.default_rng(0)
    value = rng.normal(size=2000)
    interval = m.bootstrap(m.cluster_sums(np.arange(2000), value, np.ones(2000)), ratio)
    error = value.std() / math.sqrt(2000)
    assert interval.value == pytest.approx(value.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_clusters_widen_the_interval():
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(100), 20)
    value = np.repeat(rng.normal(size=100), 20)
    by_user = m.bootstrap(m.cluster_sums(user, value, np.ones(2000)), ratio)
    by_row = m.bootstrap(m.cluster_sums(np.arange(2000), value, np.ones(2000)), ratio)
    assert (by_user.high - by_user.low) > 3 * (by_row.high - by_row.low)


def test_a_paired_difference_is_tighter_than_two_intervals():
    rng = np.random.default_rng(2)
    hard = rng.normal(size=500)
    a = np.stack([hard + 0.1 + 0.01 * rng.normal(size=500), np.ones(500)], axis=1)
    b = np.stack([hard, np.ones(500)], axis=1)
    difference = m.bootstrap_difference(a, b, ratio)
    assert 0.09 < difference.low < difference.value < difference.high < 0.11
    alone = m.bootstrap(b, ratio)
    assert alone.high - alone.low > 10 * (difference.high - difference.low)
    with pytest.raises(ValueError, match="same clusters"):
        m.bootstrap_difference(a, b[:-1], ratio)


def test_bootstrap_auc_draws_whole_users():
    label, score, _ = draw(3, 400, levels=20)
    user = np.arange(400) // 4
    interval = m.bootstrap_auc(user, label, score, samples=100)
    assert interval.value == pytest.approx(m.auc(label, score))
    assert interval.low < interval.value < interval.high
    counts = np.bincount(np.random.default_rng(0).integers(0, 100, (100, 100))[0], minlength=100)
    one = m.bootstrap_auc(user, label, score, samples=1)
    assert one.low == pytest.approx(m.auc(label, score, counts[user]))
    assert m.bootstrap_auc(user, label, score, samples=100) == interval  # same seed, same interval


def test_intervals_without_data_are_null():
    empty = m.bootstrap(np.empty((0, 2)), lambda s: np.asarray(np.nan))
    assert empty.to_json() == {"value": None, "low": None, "high": None, "level": 0.95}
    assert math.isnan(m.bootstrap_auc([], [], []).value)


def test_many_clusters_stay_within_memory_and_repeat():
    sums = np.stack([np.random.default_rng(0).random(50_000), np.ones(50_000)], axis=1)
    assert m.bootstrap(sums, ratio, samples=100) == m.bootstrap(sums, ratio, samples=100)

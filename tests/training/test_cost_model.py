import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.training import balance
from semel.training.cost import CostModel, IdleReport, Shares, non_negative

TRUE = CostModel(linear=5e-9, quadratic=1e-12, candidate=2e-7, constant=3e-6, step=2e-3)


def step(random, requests):
    """Lengths and candidates of one rank's step."""
    lengths = np.clip(random.lognormal(np.log(3000), 1.2, requests), 1, 21_000).astype(np.int64)
    return lengths, random.integers(1, 200, requests)


def observed(noise, steps=60, ranks=4, outliers=0.0, seed=0, requests=(8, 128)):
    """A model without a clue that saw noisy steps of the true one."""
    random = np.random.default_rng(seed)
    model = CostModel()
    for _ in range(steps):
        shares = [step(random, random.integers(*requests)) for _ in range(ranks)]
        seconds = np.array([TRUE.predict(*share).sum() + TRUE.step for share in shares])
        seconds *= 1 + noise * random.standard_normal(ranks)
        seconds *= np.where(random.random(ranks) < outliers, random.uniform(3, 30, ranks), 1)
        model.observe(np.stack([CostModel.features(*share) for share in shares]), seconds)
    return model


def test_predicts_what_its_formula_says():
    costs = TRUE.predict([0, 1000], [7, 50])
    assert costs == pytest.approx([7 * 2e-7 + 3e-6, 5e-6 + 1e-6 + 1e-5 + 3e-6])
    assert CostModel().predict([3, 4]).tolist() == [3, 4]
    assert TRUE.features([2, 3], [4, 5]).tolist() == [5, 13, 9, 2, 1]
    assert TRUE.features([2, 3], 4).tolist() == [5, 13, 8, 2, 1]
    assert TRUE.features([]).tolist() == [0, 0, 0, 0, 1]


def test_exact_times_give_the_terms_back():
    model = observed(0.0).fit()
    for name in ("linear", "quadratic", "candidate", "constant", "step"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=1e-4), name
    assert model.error < 1e-6


def test_noise_and_outliers_leave_the_prediction_right():
    random = np.random.default_rng(9)
    lengths, candidates = step(random, 64 * 128)
    wanted = TRUE.predict(lengths, candidates)
    model = observed(0.05, outliers=0.1).fit()
    got = model.predict(lengths, candidates)
    assert np.abs(got.sum() / wanted.sum() - 1) < 0.03
    ranks = balance.equal_count(got, 64)
    assert balance.idle(wanted, ranks, 64) < 0.01 < balance.idle(wanted, np.arange(len(lengths)) % 64, 64)
    rows, times = zip(*model._seen, strict=True)
    plain = non_negative(np.array(rows), np.array(times))
    pulled = abs((np.array([lengths.sum(), (lengths**2.0).sum(), candidates.sum(), len(lengths), 0]) @ plain)
                 / wanted.sum() - 1)
    assert pulled > 3 * abs(got.sum() / wanted.sum() - 1)  # least squares without weights falls for the outliers


def test_fit_follows_a_change():
    model = observed(0.0, steps=1100)  # more than it keeps
    assert model.observations == 4096
    random = np.random.default_rng(3)
    for _ in range(4096):
        share = step(random, 16)
        model.observe(CostModel.features(*share), 2 * TRUE.predict(*share).sum())
    assert model.fit().quadratic == pytest.approx(2e-12, rel=1e-3)


def test_few_or_useless_observations_change_nothing():
    model = CostModel(linear=2.0, quadratic=0.5)
    model.observe(np.ones((7, 5)), np.ones(7))
    model.observe(np.ones((3, 5)), [0.0, np.nan, np.inf])
    assert model.observations == 7
    assert (model.fit().linear, model.quadratic, model.error) == (2.0, 0.5, None)
    assert "given" in model.describe()


def test_equal_counts_leave_no_term_negative_and_predict_steps():
    model = observed(0.02, requests=(128, 129)).fit()  # requests a step and the step itself are one to the data
    terms = [model.linear, model.quadratic, model.candidate, model.constant, model.step]
    assert min(terms) >= 0
    share = step(np.random.default_rng(5), 128)
    assert model.predict(*share).sum() + model.step == pytest.approx(TRUE.predict(*share).sum() + TRUE.step, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), terms=st.integers(1, 4))
def test_non_negative_least_squares_is_the_best_on_a_grid(seed, terms):
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(8, terms)), random.normal(size=8)
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    left = np.sum((matrix @ found - target) ** 2)
    for move in product((-1e-3, 0, 1e-3), repeat=terms):  # the problem is convex: nothing near is nothing anywhere
        other = np.maximum(found + move, 0)
        assert np.sum((matrix @ other - target) ** 2) >= left - 1e-9


def test_describe_is_one_line_of_what_matters():
    line = observed(0.0).fit().describe()
    assert "\n" not in line and "fitted to 240 step times" in line and "a token squared" in line
    assert "from 5,000 tokens" in line  # linear / quadratic
    assert CostModel(linear=0).describe().endswith(": 0")


def test_json():
    model = observed(0.01).fit()
    again = CostModel.from_json(model.to_json())
    assert again == model and again.observations == 0
    assert json.loads(model.to_json())["format"] == 1
    with pytest.raises(ValueError, match="not a cost model of format 1"):
        CostModel.from_json('{"format": 2}')
    with pytest.raises(ValueError, match="no field cubic"):
        CostModel.from_json('{"format": 1, "cubic": 3}')


def test_errors():
    with pytest.raises(ValueError, match="quadratic is -1"):
        CostModel(quadratic=-1)
    with pytest.raises(ValueError, match=r"shape \(2, 5\) for 3 times"):
        CostModel().observe(np.ones((2, 5)), [1, 2, 3])
    with pytest.raises(ValueError, match="2 positive numbers"):
        Shares.equal(2).update([1, 0])


@pytest.mark.parametrize(("linear", "quadratic", "least", "most"), [(1.0, 0.0, 0.9, 1.1), (0.0, 1.0, 1.9, 2.1),
                                                                    (5000.0, 1.0, 1.1, 1.9)])
def test_alpha_fits_the_model(linear, quadratic, least, most):
    lengths, _ = step(np.random.default_rng(0), 8 * 128)
    model = CostModel(linear=linear, quadratic=quadratic)
    alpha = model.alpha(lengths, 8)
    assert least <= alpha <= most
    costs = model.predict(lengths)
    tuned = balance.idle(costs, balance.segments(lengths**alpha, 8), 8)
    assert tuned <= balance.idle(costs, balance.segments(lengths**1.0, 8), 8)
    assert tuned <= balance.idle(costs, balance.segments(lengths**2.0, 8), 8)


def test_shares_settle_where_ranks_take_equally_long():
    speed = np.array([1.0, 1.0, 0.7, 1.3])
    shares = Shares.equal(4)
    for _ in range(30):
        sizes = shares.sizes(1000)
        assert sizes.sum() == 1000
        shares.update(sizes / speed)
    times = shares.sizes(1000) / speed
    assert 1 - times.mean() / times.max() < 0.01
    for _ in range(100):
        shares.update([1, 1, 1, 100.0])  # a rank that is always late keeps work all the same
    assert shares.values.min() > 0.5 * 0.25 * 0.8
    assert shares.sizes(0).tolist() == [0, 0, 0, 0] and shares.sizes(3).sum() == 3


def test_idle_report():
    report = IdleReport.of([1, 3], [1, 9], [0, 1], 2, seconds=[2, 2])
    assert (report.tokens, report.cost, report.time) == pytest.approx((1 - 2 / 3, 1 - 5 / 9, 0))
    assert str(report) == "idle by tokens 33.33 %, by cost 44.44 %, by time 0.00 %"
    assert "time" not in str(IdleReport.of([1, 3], [1, 9], [0, 1], 2))

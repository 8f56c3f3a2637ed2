"""The forecast of a batch's time: exact where times are linear, sensible where they are not."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.serving.forecast import Forecast, Margin


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fixed=st.floats(0.001, 0.1), each=st.floats(1e-6, 1e-3),
       batches=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 500)), min_size=2, max_size=40))
def test_what_is_linear_is_foreseen(fixed, each, batches):
    forecast = Forecast()
    for requests, size in batches:
        forecast.observe(requests, requests * size, fixed * requests + each * requests * size)
    for requests, size in batches:
        assert forecast.seconds(requests, requests * size) == pytest.approx(
            fixed * requests + each * requests * size, rel=0.02 if len(set(s for _, s in batches)) > 1 else 2)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4000), st.floats(0, 1)), min_size=1, max_size=60))
def test_no_forecast_is_negative(batches):
    forecast = Forecast()
    for requests, size, seconds in batches:
        forecast.observe(requests, size, seconds)
        assert forecast.fixed >= 0 and forecast.each >= 0


def test_it_follows_a_change():
    forecast = Forecast()
    for seconds in [0.01] * 100 + [0.05] * 100:
        forecast.observe(1, 500, seconds)
    assert forecast.seconds(1, 500) == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
def test_the_margin_comes_to_rest_where_two_of_a_hundred_exceed_it(spread):
    margin, numbers = Margin(), random.Random(1)
    beyond = 0
    for count in range(6000):
        seconds = 0.02 * numbers.lognormvariate(0, spread)
        beyond += count >= 1000 and seconds > 0.02 * margin.factor
        margin.observe(0.02, seconds)
        assert 1 <= margin.factor <= 10
    assert beyond / 5000 <= 0.03
    assert margin.factor == pytest.approx(2.718 ** (2.05 * spread), rel=0.5)

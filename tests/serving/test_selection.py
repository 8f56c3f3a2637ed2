"""The best, the capped, the excluded: the fast forms against one sort and one loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.serving import reference
from semel.serving.pace import Pace
from semel.serving.selection import best, capped, without

SCORES = st.lists(st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 1.0000001, 7.0]), min_size=0, max_size=40)


@settings(max_examples=100, deadline=None)
@given(SCORES, st.integers(0, 50), st.booleans(), st.randoms(use_true_random=False))
def test_the_best_are_those_of_a_full_sort_and_ties_go_by_id(scores, count, strings, random):
    scores = np.array(scores, np.float32)
    numbers = random.sample(range(-50, 200), len(scores))
    ids = np.array([f"i{n}" for n in numbers], object) if strings else np.array(numbers, np.int64)
    asked = []

    def ids_at(places):
        asked.append(len(places))
        return ids[places]

    found = best(scores, count, ids_at)
    assert found.tolist() == reference.best(scores, count, ids).tolist()
    if len(found) and len(set(scores[scores > -np.inf].tolist())) == np.count_nonzero(scores > -np.inf):
        assert asked == [len(found)]  # nothing but the best is looked at where nothing ties


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 4), max_size=40), st.integers(1, 5))
def test_the_first_of_each_value_are_kept(values, most):
    kept = capped(np.array(values, np.int64), most)
    assert kept.tolist() == reference.capped(values, most).tolist()


def test_what_is_excluded_is_found_in_numbers_and_strings():
    assert without(np.array([3, 1, 2]), np.array([1, 9])).tolist() == [True, False, True]
    strings = np.array(["b", "ä", ""], object)
    assert without(strings, np.array(["ä"], object)).tolist() == [True, False, True]
    assert without(strings, np.array([], object)).all() and not len(without(strings[:0], strings))


def test_a_pace_is_a_fixed_part_and_a_part_for_each():
    pace = Pace()
    assert pace.most(1.0) is None
    rng = np.random.default_rng(0)
    for candidates in rng.integers(50, 2000, 100).tolist():
        pace.observe(candidates, 0.003 + 1e-5 * candidates)
    assert pace.most(0.013) == pytest.approx(1000, abs=2)
    assert pace.most(0.001) == 1  # never nothing
    even = Pace()
    for _ in range(10):
        even.observe(100, 0.01)
    assert even.most(0.005) == pytest.approx(50, abs=1)

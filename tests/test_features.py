"""Stable ids: one int64 for one value, in every process and however a number is written."""

import subprocess
import sys

import numpy as np
import pytest

from semel.features import MISSING, Feature, FeatureSpec, Task, stable_id


def test_numbers_are_themselves_however_they_are_written():
    same = [4, 4.0, "4", "4.0", np.int8(4), np.float32(4), True + 3]
    assert {int(stable_id([value])[0]) for value in same} == {4}
    assert stable_id(np.array([-0.0]))[0] == 0
    assert stable_id([3.5])[0] == stable_id(["3.5"])[0] == stable_id(np.float32([3.5]))[0] != 3
    assert len({int(stable_id([text])[0]) for text in ("7", "07", "7 ", "+7", "7.00", "seven", "7e0")}) == 7


def test_missing_is_none_or_nan_and_nothing_else():
    assert (stable_id([None, "x"])[0], stable_id([float("nan")])[0]) == (MISSING, MISSING)
    assert (stable_id([float("inf"), -float("inf"), 1e300]) != MISSING).all()
    assert (stable_id(["", "nan", "None"]) != MISSING).all()


def test_strings_mean_the_same_in_another_process():
    code = "from semel.features import stable_id; print(*stable_id(['Amélie', '映画', 'a|b']))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert [int(x) for x in out.split()] == stable_id(["Amélie", "映画", "a|b"]).tolist()


def test_shape_is_kept():
    assert stable_id(np.array([["a", "b"], ["c", None]], dtype=object)).shape == (2, 2)
    assert stable_id([]).shape == (0,)


def test_a_spec_survives_json_and_checks_itself():
    spec = FeatureSpec((Feature("item_id"), Feature("rating", "numeric")), tasks=(Task("like", unobserved=0.0),))
    assert FeatureSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match="none of categorical"):
        Feature("x", "text")
    with pytest.raises(ValueError, match="item column"):
        FeatureSpec((Feature("x"),))
